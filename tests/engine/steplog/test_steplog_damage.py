"""Damaged, foreign and incomplete step logs are refused with one line that names the place."""

from __future__ import annotations

import json

import pytest
from steplog_driver import small_log

from engine.core import InputError
from engine.steplog.api import StepLogReader


def damaged(path, change):
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def line_set(number, **fields):
    def change(lines):
        line = json.loads(lines[number])
        line.update(fields)
        lines[number] = json.dumps({k: v for k, v in line.items() if v is not None})

    return change


def first_decode(lines):
    return next(i for i, line in enumerate(lines) if '"decode"' in line[:20])


def in_decode(**fields):
    return lambda lines: line_set(first_decode(lines), **fields)(lines)


@pytest.mark.parametrize(
    ("change", "line", "complaint"),
    [
        (lambda lines: lines.clear(), 1, "not JSON"),
        (line_set(0, format="other"), 1, "not a Lockstep step log"),
        (line_set(0, version=2), 1, "version 2"),
        (line_set(0, writer="me"), 1, "writer"),
        (line_set(0, kernel={"num_blocks": 0, "max_model_len": 9}), 1, "num_blocks=0"),
        (line_set(0, kernel={"blocks": 3}), 1, "unknown kernel option"),
        (line_set(0, extra=1), 1, "unknown field 'extra'"),
        (lambda lines: lines.pop(), None, "without its end record"),
        (lambda lines: lines.pop(1), None, "end record counts"),
        (lambda lines: lines.append("{}"), None, "after the end record"),
        (line_set(1, type="other"), 2, "record type 'other'"),
        (line_set(1, prompt=None), 2, "'prompt' is missing"),
        (line_set(1, prompt=["a"]), 2, "'prompt'"),
        (line_set(1, prompt=[[1, 0]]), 2, "'prompt'"),
        (line_set(1, prompt=[2**63]), 2, "64 bits"),
        (line_set(1, max_tokens=-1), 2, "max_tokens"),
        (line_set(1, id=1.5), 2, "request id"),
        (line_set(1, replica=1), 2, "replica 1"),
        (line_set(1, who="me"), 2, "unknown field 'who'"),
        (line_set(1, arrival=True), 2, "arrival"),
        (in_decode(durations=[]), None, "no steps"),
        (in_decode(durations="x"), None, "durations"),
        (in_decode(positions=[1] * 99), None, "positions"),
        (in_decode(gaps=[1] * 99), None, "gaps"),
        (in_decode(tokens=[]), None, "tokens"),
        (in_decode(blocks=[[10**6, 0, 0]]), None, "blocks"),
        (in_decode(blocks=[[0, 999, 0]]), None, "no row"),
        (in_decode(finished=[[0, "bored"]]), None, "finish reason"),
        (in_decode(step=500), None, "step 500 follows"),
        (in_decode(free=None), None, "'free' is missing"),
        (lambda lines: lines.__setitem__(3, lines[3][:-3]), 4, "not JSON"),
        (lambda lines: lines.__setitem__(3, "[]"), 4, "not a JSON object"),
    ],
)
def test_damaged_logs_are_refused_naming_file_and_line(tmp_path, change, line, complaint):
    path = damaged(small_log(tmp_path / "log.jsonl"), change)
    with pytest.raises(InputError) as caught:
        list(StepLogReader(path))
    message = str(caught.value)
    assert f"{path}:{line if line else ''}" in message
    assert complaint in message
    assert "\n" not in message


def test_empty_truncated_and_foreign_files_are_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(InputError, match="empty file"):
        StepLogReader(empty)
    whole = small_log(tmp_path / "log.jsonl.gz").read_bytes()
    for size in (len(whole) // 2, len(whole) - 4, 30):
        cut = tmp_path / "cut.jsonl.gz"
        cut.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"cut.jsonl.gz:\d+: damaged gzip"):
            list(StepLogReader(cut))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(InputError, match=r"binary.jsonl:1: not JSON"):
        StepLogReader(binary)
    with pytest.raises(InputError, match="cannot be read"):
        StepLogReader(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        StepLogReader(tmp_path)
