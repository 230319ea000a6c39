"""Every code block of the README and of docs/architecture.md runs and prints what it shows.

`make demo` and `make test` themselves are run by .ci/run.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page, language):
    text = (ROOT / page).read_text()
    return [body for kind, body in FENCE.findall(text) if kind == language]


def transcripts():
    """(command, expected output) of every `$ command` line in console blocks."""
    found = []
    for body in blocks("README.md", "console"):
        for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            if not command.startswith("make "):
                found.append((command, output.rstrip()))
    return found


def run(command, folder):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=280,
        env=environment,
    )  # fmt: skip


def test_console_blocks_print_what_they_show(tmp_path):
    shown = transcripts()
    assert shown
    for name in ("tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command, output in shown:
        result = run(command, tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr[-1000:]}"
        if output:
            assert result.stdout.rstrip() == output, command


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/simulator.md"])
def test_python_blocks_run(page, tmp_path):
    shown = blocks(page, "python")
    assert shown
    for body in shown:
        result = run(f"{sys.executable} -c {shlex.quote(body)}", tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]


def test_no_block_has_a_language_that_is_not_run():
    text = (ROOT / "README.md").read_text()
    assert {kind for kind, _ in FENCE.findall(text)} <= {"console", "python", "text"}


def test_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
