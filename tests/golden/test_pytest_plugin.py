"""The pytest plugin: a fork's repository as the documentation lays it out, built and run."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

from golden.stored.reference_file import write_reference
from tests.places import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "golden.md"
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)


@pytest.fixture
def repository(tmp_path, model_folder, reference):
    """The example of the documentation, with a tiny model and its reference."""
    files = dict(_FILE.findall(DOCUMENT.read_text(encoding="utf-8")))
    assert {"pytest.ini", "tests/test_numbers.py", "tests/test_scheduler.py"} <= set(files)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(model_folder)
    write_reference(reference, tmp_path / "models" / "mine.safetensors")
    return tmp_path


def run(folder, *words):
    """(exit code, output) of pytest there."""
    settings = ("LOCKSTEP_MODEL", "LOCKSTEP_REFERENCE", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, others)])
    command = [sys.executable, "-m", "pytest", "-q", *_plugin(), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


def _plugin():
    """The plugin by name where this environment was installed before it had one."""
    entries = importlib.metadata.entry_points(group="pytest11")
    known = any(entry.value == "golden.pytest_plugin" for entry in entries)
    return () if known else ("-p", "golden.pytest_plugin")


@pytest.mark.timeout(120)
def test_the_documented_repository_runs_and_fails_where_it_must(repository):
    code, output = run(repository)
    assert code == 0 and "3 passed" in output, output
    # An engine whose outputs belong to other prompts is caught by the very same lines, and so is
    # a scheduler with a bug.
    numbers, scheduler = (repository / "tests" / f"test_{x}.py" for x in ("numbers", "scheduler"))
    text = numbers.read_text()
    assert "assert_golden(outputs, " in text
    swapped = "for output in outputs:\n        output.prompt_logprobs[1:] = "
    swapped += "output.prompt_logprobs[1:][::-1]\n    assert_golden(outputs, "
    numbers.write_text(text.replace("assert_golden(outputs, ", swapped))
    text = scheduler.read_text()
    scheduler.write_text(text.replace("import ToyAdapter", "import BuggyToyAdapter as ToyAdapter"))
    code, output = run(repository, "-k", "laws or engine")
    assert code == 1 and "2 failed" in output, output
    assert "BREAKS LAW-B7" in output and "log-probability off at" in output


def test_a_setting_that_is_missing_is_one_line_that_says_what_to_do(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(lockstep_model): pass\n")
    code, output = run(tmp_path)
    assert code == 1 and "1 error" in output
    assert "lockstep_model: give --lockstep-model PATH, set LOCKSTEP_MODEL" in output


def test_the_plugin_is_announced_and_costs_nothing_to_whoever_does_not_use_it():
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nlockstep = "golden.pytest_plugin"' in project
    code = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import golden.pytest_plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {"golden", "golden.pytest_plugin"}
