"""The commands of docs/golden.md run, in their order, as they stand there."""

import re
import shlex

from engine.cli import main
from tests.places import REPOSITORY

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs" / "golden.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "lockstep"
        assert main(words) == 0, (line, capsys.readouterr().err)
    assert (tmp_path / "check.html").is_file() and (tmp_path / "ref.safetensors").is_file()
