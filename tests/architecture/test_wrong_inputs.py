"""Wrong inputs of every verb: exit code 2, one line that names the cause, nothing written."""

from __future__ import annotations

import shlex

import pytest

from engine import cli
from tests.places import REPOSITORY

TABLE = REPOSITORY / "tests/architecture/wrong_inputs.txt"
STUDY = "workload: {generator: poisson}\nslo: {ttft_ms: {p90: 100}}\n"
COST = 'cost: "constant:5"'


def rows():
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return [(command[2:], message[2:]) for command, message in zip(*[iter(lines)] * 2, strict=True)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that the commands of the table name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    texts = {
        "t.csv": "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,50\n2,90,10\n",
        "untimed.csv": "prompt_tokens,output_tokens\n100,10\n200,50\n",
        "plain.csv.gz": "not gzip",
        "empty.csv": "",
        "list.json": "[]",
        "broken.json": "{",
        "deep.json": "[" * 100_000,
        "log.jsonl": '{"format":"another"}\n',
        "r.jsonl": '{"prompt_tokens": 5}\n',
        "empty.yaml": "",
        "bad.yaml": "a: [1\n",
        "study.yaml": STUDY + "space: {tp: 1, tensor_parallel_size: 2}\n",
        "study2.yaml": STUDY.replace("poisson", "poisson, turns: 3") + f"space: {{{COST}}}\n",
        "study3.yaml": STUDY + f"space: {{{COST}}}\n",
        "study5.yaml": STUDY + f"space: {{{COST}}}\nsearch: {{max_seeds: 101}}\n",
        "study6.yaml": STUDY + f"space: {{{COST}}}\nsearch: {{seeds: 8, max_seeds: 4}}\n",
        "study7.yaml": STUDY + f"space: {{{COST}}}\nsearch: {{multiple: -1}}\n",
        "study8.yaml": STUDY + f"space: {{{COST}}}\nsearch: {{longest: 0.5}}\n",
        "study9.yaml": STUDY + f"space: {{{COST}}}\nsearch: {{width: 0}}\n",
        "study4.yaml": STUDY + f"space: {{{COST}, policy: prefill_first, watermark_blocks: 4}}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name in ("garbage.csv.gz", "garbage.jsonl.gz", "t.tar.gz"):
        (tmp_path / name).write_bytes(b"\x1f\x8bnot a gzip at all")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "message"), rows(), ids=[command for command, _ in rows()])
def test_a_wrong_input_is_one_line_and_writes_nothing(folder, capfd, command, message):
    before = content(folder)
    assert cli.main(shlex.split(command)) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"lockstep: {message}"), printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""
    assert len(printed.err) < 1500
    assert content(folder) == before


def test_the_table_holds_wrong_inputs_of_every_verb():
    commands = [command for command, _ in rows()]
    assert len(commands) == len(set(commands))
    for verb in cli.VERBS:
        assert any(command.startswith(verb) for command in commands), verb
