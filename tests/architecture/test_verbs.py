"""All verbs: help without optional packages, one-line errors, and options that agree."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine import cli
from engine.arguments.parser import VerbParser
from engine.arguments.table import TABLE
from engine.options import EngineOptions
from sim.planning.axes import DEPLOYMENT_AXES
from sim.run.deployment import Deployment
from sim.run.option_table import SIM_TABLE
from tests.places import REPOSITORY


class Seen(Exception):
    pass


def parser_of(verb):
    """The parser that a verb makes, caught before it parses anything."""
    caught = []

    def parse(self, argv):
        caught.append(self)
        raise Seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerbParser, "parse", parse)
        with pytest.raises(Seen):
            cli.main(verb.split())
    return caught[0]


@pytest.fixture(scope="module")
def parsers():
    return {verb: parser_of(verb) for verb in (*cli.VERBS, "serve --body sim")}


def test_every_option_of_every_verb_comes_from_the_table(parsers):
    for verb, parser in parsers.items():
        assert parser.prog == f"lockstep {verb}".removesuffix(" --body sim")
        flags = {action.dest for action in parser._actions if action.option_strings}
        assert flags - {"help"} == set(parser.options), verb
        for name, option in parser.options.items():
            assert SIM_TABLE[name] is option or TABLE[name] is option


def test_an_option_of_several_verbs_is_the_same_in_all_of_them(parsers):
    """Type, limits, aliases and help, as argparse has them and not only as the table does."""
    seen = {}
    for verb, parser in parsers.items():
        for action in parser._actions:
            if action.dest not in parser.options:
                continue
            option = parser.options[action.dest]
            assert action.help.replace("%%", "%").startswith(option.help), (verb, option.name)
            facts = (type(action), tuple(action.option_strings), action.nargs, action.type, option)
            first = seen.setdefault(action.dest, (verb, facts))
            assert first[1] == facts, f"{action.dest} differs between {first[0]} and {verb}"
    shared = [name for name in seen if sum(name in p.options for p in parsers.values()) > 1]
    assert len(shared) > 20


def test_the_table_has_every_option_of_engine_simulator_and_studies():
    for names in (EngineOptions.__dataclass_fields__, Deployment.__dataclass_fields__):
        assert set(names) - {"roofline", "found_wanting"} <= set(SIM_TABLE)
    assert set(DEPLOYMENT_AXES) <= set(SIM_TABLE)
    # What the engine and the simulator share are the same rows.
    assert all(SIM_TABLE[name] is option for name, option in TABLE.items())


@pytest.mark.parametrize("verb", cli.VERBS)
def test_an_unknown_option_is_one_line_with_a_suggestion(parsers, verb, capsys):
    long = [flag for option in parsers[verb].options.values() for flag in option.flags]
    flag = max((one for one in long if one.startswith("--")), key=len, default=None)
    wrong = "--nothing-like-it" if flag is None else flag[:-2] + flag[-1]
    assert cli.main([*verb.split(), wrong, "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lockstep: unknown option {wrong}") and error.count("\n") == 1
    assert f"lockstep {verb} --help" in error
    assert flag is None or "did you mean '--" in error


@pytest.mark.parametrize("verb", cli.VERBS)
def test_options_are_never_abbreviated_and_take_underscores(parsers, verb, capsys):
    for option in parsers[verb].options.values():
        spelled = "--" + option.name
        if option.switch and "_" in spelled:
            words, given = parsers[verb]._normal_words([spelled])
            assert words == [option.flags[0]] and option.name in given
    assert not parsers[verb].allow_abbrev


BLOCKED = """
import contextlib, io, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

from engine.cli import EXTRAS, VERBS, main
names = {*EXTRAS, "huggingface_hub", "pyarrow"}
sys.meta_path.insert(0, Blocked())
for verb in VERBS:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*verb.split(), "--help"]) == 0, verb
    assert printed.getvalue().startswith(f"usage: lockstep {verb}"), verb
assert not names & {name.split(".")[0] for name in sys.modules}
"""


def test_the_help_of_every_verb_needs_no_optional_package():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
