"""The mutation run's own parts: what is changed, how it is planted, and what is justified."""

from __future__ import annotations

import ast
import os
import sys
import types

import pytest

from properties.mutation.__main__ import SCOPES, mutants_in, summary
from properties.mutation.equivalents import EQUIVALENT
from properties.mutation.forking import SURVIVED, Judgement
from properties.mutation.operators import changes
from properties.mutation.planting import mutants_of, plant

SAMPLE = '''
class Box:
    """Says so."""

    def __init__(self, sides: tuple[int, ...]) -> None:
        self.sides = sides

    def total(self, most: int = 10) -> int:
        """Says so."""
        total = 0
        for side in self.sides:
            if side > 2 and side != 7:
                total += side
            else:
                continue
        assert total >= 0, "never changed"
        if total > most:
            raise ValueError(f"{total} is more than {most - 1}")
        return total

    @property
    def first(self) -> int:
        return self.sides[0:1][0]


class Crate(Box):
    def total(self, most: int = 10) -> int:
        return super().total(most) + 1
'''


def function_changes(source, name="f"):
    return {
        (one.operator, one.before, one.after) for one in changes(ast.parse(source).body[0], name)
    }


def test_statements_conditions_loops_branches_and_numbers_are_changed():
    found = function_changes(
        "def f(items):\n"
        "    for item in items:\n"
        "        if item > 2 and item != 7:\n"
        "            add(item, 1)\n"
        "        else:\n"
        "            break\n"
    )
    loop = "for item in items:"
    condition = "if item > 2 and item != 7:"
    for operator, before, after in (
        ("loop: first only", loop, "for item in [*items][:1]:"),
        ("loop: not the last", loop, "for item in [*items][:-1]:"),
        ("negated", condition, "if not (item > 2 and item != 7):"),
        ("condition: never", condition, "if False:"),
        ("weakened", condition, "if item > 2:"),
        ("and-or", condition, "if item > 2 or item != 7:"),
        ("comparison", condition, "if item >= 2 and item != 7:"),
        ("off by one", condition, "if item > 3 and item != 7:"),
        ("dropped", "add(item, 1)", "pass"),
        ("argument", "add(item, 1)", "add(None, 1)"),
        ("fewer arguments", "add(item, 1)", "add(1)"),
        ("break-continue", "break", "continue"),
    ):
        assert (operator, before, after) in found


def test_what_is_only_said_is_left_alone():
    found = function_changes(
        'def f(x: int = 3) -> "str":\n    """Text."""\n'
        '    assert x > 1, "no"\n    raise E(f"{x + 1}", 5)\n'
    )
    assert found == {("dropped", "raise E(f'{x + 1}', 5)", "pass")}


def test_a_function_is_whole_again_when_all_its_changes_were_told():
    tree = ast.parse(SAMPLE)
    before = ast.unparse(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert list(changes(node, node.name))
    assert ast.unparse(tree) == before


@pytest.fixture
def sample(tmp_path):
    """The sample as a module, and its mutants by (function, after)."""
    path = tmp_path / "sample_of_mutants.py"
    path.write_text(SAMPLE)
    module = types.ModuleType(path.stem)
    sys.modules[path.stem] = module
    exec(compile(SAMPLE, str(path), "exec"), vars(module))
    found = {(m.change.function, m.change.after): m for m in mutants_of(path.stem, path)}
    yield module, found
    del sys.modules[path.stem]


def test_a_planted_mutant_changes_what_everybody_calls(sample):
    module, found = sample
    box, bound = module.Box((1, 3, 4)), module.Box((1, 3, 4)).total
    assert (box.total(), box.first, module.Crate((5,)).total()) == (7, 1, 6)
    plant(found["Box.total", "if side > 2 or side != 7:"])
    assert bound() == 8
    plant(found["Box.first", "return self.sides[0:1][1]"])
    with pytest.raises(IndexError):
        _ = box.first
    plant(found["Crate.total", "return super().total(most) + 2"])
    assert module.Crate((5,)).total() == 7
    plant(found["Crate.total", "pass"])  # it has no use for the cell of super() any more
    assert module.Crate((5,)).total() is None


def test_every_mutant_differs_from_the_original_and_the_others(sample):
    codes = [mutant.code.co_code for mutant in sample[1].values()]
    assert len(codes) > 40


def test_every_justification_names_a_mutant():
    modules = [module for scope in SCOPES.values() for module in scope.modules]
    known = {mutant.change.key for mutant in mutants_in(modules)}
    assert [key for key in EQUIVALENT if key not in known] == []
    assert all(len(why) > 20 for why in EQUIVALENT.values())


def test_a_justified_survivor_is_no_hole_and_another_is(sample):
    key, why = next(iter(EQUIVALENT.items()))
    modules = [module for scope in SCOPES.values() for module in scope.modules]
    justified = next(m for m in mutants_in(modules) if m.change.key == key)
    other = next(iter(sample[1].values()))
    judged = [Judgement(justified, SURVIVED, 1.0), Judgement(other, SURVIVED, 1.0)]
    found = summary("kernel", [*judged, Judgement(other, "a::test_b[1]", 0.1)], 0, 2.0)
    assert (found["judged"], found["killed"], found["equivalent"]) == (3, 1, 1)
    assert found["justified"][0]["why"] == why
    assert [one["function"] for one in found["survivors"]] == [other.change.function]
    assert found["killed_by"] == {"test_b": 1}


SUITE = """
import sample_under_test

def test_double():
    assert sample_under_test.double(3) == 6

def test_calls():
    assert sample_under_test.double(0) == 0
"""


def test_the_loop_forks_per_mutant_and_names_the_killer(tmp_path, pytester_or_none=None):
    """In a process of its own, as it takes the place of pytest's loop."""
    import subprocess

    (tmp_path / "sample_under_test.py").write_text("def double(x):\n    return x * 2 + 0\n")
    (tmp_path / "test_it.py").write_text(SUITE)
    program = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
import pytest
from properties.mutation.forking import ForkingLoop
from properties.mutation.planting import mutants_of
mutants = list(mutants_of("sample_under_test", Path({str(tmp_path)!r}) / "sample_under_test.py"))
told = []
loop = ForkingLoop(mutants, 2, time.monotonic() + 60, told.append)
pytest.main(["-pno:terminal", "-pno:cacheprovider", {str(tmp_path / "test_it.py")!r},
             "--rootdir={tmp_path}", "-c", "/dev/null"], plugins=[loop])
for one in sorted(told, key=lambda one: one.mutant.change.after):
    print(one.mutant.change.after, "|", one.by)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert "return x * 2 - 0 | survived" in lines
    assert any(line.startswith("return x * 3 + 0 | ") and "test_double" in line for line in lines)
    assert any(line.startswith("return x * 2 + 1 | ") and "test_" in line for line in lines)
