"""The command line: every verb has one line, errors have their exit code, torch stays out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from engine import cli
from engine.cli import VERBS, Verb, main
from engine.core import ConfigError, InputError, KernelBug, LockstepError, RequestRejected

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def verb(monkeypatch, tmp_path):
    """Installs `lockstep try it` with the given body."""

    def install(body):
        module = type(sys)("a_module_for_the_cli_test")
        module.run = body
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(VERBS, "try it", Verb(f"{module.__name__}:run", "tries it"))

    return install


def raising(error):
    def run(argv):
        raise error

    return run


def run_python(*words, stdin=None, code=None):
    command = [sys.executable, *(["-c", code] if code else ["-m", *words])]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_help_lists_every_verb_with_one_line(capsys):
    for words in (["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        for name, verb in VERBS.items():
            assert any(
                line.strip().startswith(name) and line.endswith(verb.summary)
                for line in printed.splitlines()
            )


def test_help_of_a_group_lists_its_verbs_only(capsys):
    assert main(["log", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "log diff" in printed and "sim run" not in printed


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_leads_to_a_function(name):
    module, function = VERBS[name].target.split(":")
    source = (REPOSITORY / module.replace(".", "/")).with_suffix(".py")
    # Read and not imported: some verbs need packages that this test should not load.
    body = ast.parse(source.read_text()).body
    found = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    assert len(found.args.args) == 1


def test_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep ")


def test_no_verb_and_unknown_verbs_are_usage_errors(capsys):
    assert main([]) == 2
    assert "usage: lockstep" in capsys.readouterr().err
    assert main(["sim"]) == 2
    assert "sim run" in capsys.readouterr().err
    for words in (["fly"], ["sim", "fly"], ["--fly"]):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "unknown verb" in message and "sim run" in message


def test_the_rest_of_the_words_and_the_code_go_through(verb):
    seen = []
    verb(lambda argv: seen.append(argv) or 7)
    assert main(["try", "it", "now", "--hard"]) == 7
    assert seen == [["now", "--hard"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("block_size", 0, "must be at least 1"), 2),
        (InputError("trace.csv:3: no number"), 2),
        (RequestRejected(1, "max_tokens", "0, at least 1 is needed"), 2),
        (FileNotFoundError(2, "No such file or directory", "x.csv"), 2),
        (PermissionError(13, "Permission denied", "x.csv"), 2),
        (KernelBug("L1", "no progress"), 1),
        (LockstepError("a worker died"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_their_exit_code_and_one_line(verb, capsys, error, code):
    verb(raising(error))
    assert main(["try", "it"]) == code
    message = capsys.readouterr().err
    if code != 130:
        assert message.startswith("lockstep: ") and message.count("\n") == 1


def test_bugs_keep_their_traceback(verb):
    verb(raising(ZeroDivisionError("planted")))
    with pytest.raises(ZeroDivisionError):
        main(["try", "it"])


@pytest.mark.parametrize(("code", "result"), [(0, 0), (2, 2), (None, 0), ("message", 1)])
def test_an_argument_parser_may_exit(verb, code, result):
    verb(raising(SystemExit(code)))
    assert main(["try", "it"]) == result


def test_a_missing_package_is_named_with_the_extra_that_brings_it(verb, capsys):
    verb(raising(ModuleNotFoundError("No module named 'torch'", name="torch")))
    assert main(["try", "it"]) == 1
    message = capsys.readouterr().err
    assert "'torch'" in message and "lockstep-llm[engine]" in message
    assert message.count("\n") == 1
    verb(raising(ModuleNotFoundError("No module named 'sim.x'", name="sim.x")))
    with pytest.raises(ModuleNotFoundError):
        main(["try", "it"])


def test_every_extra_that_is_named_exists():
    project = (REPOSITORY / "pyproject.toml").read_text()
    for extra in set(cli.EXTRAS.values()):
        assert f"\n{extra} = [" in project


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("engine", ["--help"]),
        ("sim", ["--help"]),
        ("properties", ["--help"]),
        ("sim", ["replay", "--help"]),
        ("engine", ["log", "trace", "--help"]),
        ("properties", ["decisions", "--help"]),
    ],
)
def test_packages_run_as_modules(package, words):
    done = run_python(package, *words)
    assert done.returncode == 0, done.stderr
    assert "usage: lockstep" in done.stdout


def test_a_closed_pipe_is_quiet():
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'engine', '--help'], "
        "stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "p.stdout.close()\n"
        "print(p.stderr.read().decode(), p.wait())\n"
    )
    done = run_python(code=code)
    assert done.stdout.split() == [str(cli.BROKEN_PIPE_CODE)]


def test_the_command_and_its_core_tools_need_no_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from engine.cli import main\n"
        "import properties.recordings.verify, engine.commands.log, engine.steplog.replay\n"
        "main(['--help'])\n"
    )
    done = run_python(code=code)
    assert done.returncode == 0, done.stderr
