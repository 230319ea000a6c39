"""The mutation run's bookkeeping: equivalents are matched by their exact change."""

from properties.mutation.changes import change_in, function_of
from properties.mutation.equivalents import EQUIVALENT
from properties.mutation.getters import as_functions

ABORT = "engine.core.scheduler.xǁSchedulerǁabort__mutmut_3"
DIFF = """--- engine/core/scheduler.py
+++ engine/core/scheduler.py
@@ -1,3 +1,3 @@
     sequence = self._sequence(request_id)
     if self._open:
-        self._aborting[request_id] = None
+        self._aborting[request_id] = ""
         return None
"""


def test_a_justified_change_is_found_by_its_lines():
    assert change_in(ABORT, DIFF) in EQUIVALENT


def test_another_change_of_the_same_line_is_not_justified():
    assert change_in(ABORT, DIFF.replace('= ""', "= request_id")) not in EQUIVALENT


def test_every_justification_names_a_line_of_the_kernel():
    from places import REPOSITORY

    sources = "\n".join(
        " ".join(path.read_text().split())
        for path in (REPOSITORY / "engine" / "core").rglob("*.py")
    )
    for (function, before, after), reason in EQUIVALENT.items():
        assert f"def {function.rpartition('.')[2]}(" in sources, function
        assert " ".join(before.split()) in sources, before
        assert before != after
        assert len(reason) > 20


def test_functions_are_read_from_the_names_of_mutants():
    assert function_of(ABORT) == "Scheduler.abort"
    assert function_of("engine.core.policies.x_admit__mutmut_1") == "admit"


MODULE = '''from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    sides: tuple[int, int]

    @property
    def area(self) -> int:
        """Says so."""
        return self.sides[0] * self.sides[1]

    def double(self) -> int:
        return 2 * self.area

    @property
    def pair(self):
        yield from self.sides
'''


def test_properties_become_functions_that_read_the_same():
    changed = as_functions(MODULE)
    assert "@property" not in changed
    assert "@dataclass" in changed
    space: dict[str, type] = {}
    exec(compile(changed, "box", "exec"), space)
    box = space["Box"]((2, 3))
    assert (box.area, box.double(), [*box.pair]) == (6, 12, [2, 3])
    assert function_of("box.xǁBoxǁ_getter_of_area__mutmut_2") == "Box.area"


def test_a_module_without_properties_stays_as_it_is():
    plain = "def f(x: int) -> int:\n    return x\n"
    assert as_functions(plain) == plain
