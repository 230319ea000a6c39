"""Recorded vLLM runs become step logs, and what is no recording is refused in one line."""

from __future__ import annotations

import gzip
import json

import pytest
from recording_testing import (
    NAMES,
    make_recording,
    needs_recordings,
    recording_path,
    write_document,
)

from engine.cli import main
from engine.core import InputError
from engine.steplog.api import AddRecord, StepLogReader, StepRecord
from engine.steplog.replay import replay
from engine.steplog.vllm_recording import ImportedLog, is_recording, open_log, read_recording


@pytest.fixture
def document(tmp_path):
    return make_recording(tmp_path / "made.json.gz")


def test_an_imported_recording_replays_without_a_difference(tmp_path, document):
    result = replay(open_log(tmp_path / "made.json.gz"))
    assert result.difference is None
    assert (result.num_requests, result.num_live) == (60, 0)
    assert result.num_steps == len(document["steps"])


def test_a_changed_decision_is_found(tmp_path, document):
    document["steps"][40][9] -= 1
    write_document(tmp_path / "changed.json.gz", document)
    difference = replay(open_log(tmp_path / "changed.json.gz")).difference
    assert difference is not None
    assert "40" in str(difference)


@pytest.mark.shared
@needs_recordings
def test_the_policy_makes_all_recorded_decisions():
    steps = 0
    for name in NAMES:
        result = replay(open_log(recording_path(name)))
        assert result.difference is None, name
        steps += result.num_steps
    assert steps == 31_946


def test_prompts_share_exactly_the_prefix_that_was_hit(tmp_path, document):
    recording = read_recording(tmp_path / "made.json.gz")
    prompts = recording.prompts()
    groups = {}
    for request in recording.requests:
        prompt = prompts[request.id]
        assert len(prompt) == request.prompt_tokens
        if request.prefix_group is not None:
            groups.setdefault(request.prefix_group, []).append(prompt)
    for members in groups.values():
        first, *others = members
        for other in others:
            assert first[:64] == other[:64]
            assert first[64] != other[64]


def test_adds_stand_before_the_first_step_that_saw_them(tmp_path, document):
    added = {request["id"]: 1000 * request["added_us"] for request in document["requests"]}
    last_start = -1
    seen = 0
    for record in open_log(tmp_path / "made.json.gz"):
        if isinstance(record, AddRecord):
            seen += 1
            assert record.added_ns == added[record.request.request_id] > last_start
        else:
            assert isinstance(record, StepRecord)
            assert seen == sum(time <= record.start_ns for time in added.values())
            last_start = record.start_ns


def test_a_file_is_told_from_a_step_log(tmp_path, document):
    assert is_recording(tmp_path / "made.json.gz")
    assert isinstance(open_log(tmp_path / "made.json.gz"), ImportedLog)
    log = tmp_path / "log.jsonl"
    log.write_text('{"type": "header", "format": "lockstep-steplog", "version": 1}\n')
    assert not is_recording(log)


def _broken(document, what):
    document = json.loads(json.dumps(document))
    steps, requests = document["steps"], document["requests"]
    match what:
        case "truncated":
            del steps[-30:]
        case "unadmitted":
            steps[0][4] = []
        case "times":
            steps[5][2] = steps[5][0] - 1
        case "overlap":
            steps[6][0] = steps[5][0]
        case "columns":
            steps[3].pop()
        case "no_steps":
            document["steps"] = []
        case "config":
            del document["config"]["num_gpu_blocks"]
        case "async":
            document["config"]["async_scheduling"] = True
        case "tokens":
            requests[2]["prompt_tokens"] = 0
        case "twice":
            requests[1]["id"] = 0
    return document


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("truncated", "truncated"),
        ("unadmitted", "steps[0]"),
        ("times", "steps[5]"),
        ("overlap", "steps[6]"),
        ("columns", "steps[3]"),
        ("no_steps", "steps"),
        ("config", "config.num_gpu_blocks"),
        ("async", "config.async_scheduling"),
        ("tokens", "prompt_tokens"),
        ("twice", "same id"),
    ],
)
@pytest.mark.parametrize("verb", ["replay", "calibrate", "validate"])
def test_a_wrong_recording_is_one_line_and_exit_2(tmp_path, capsys, document, what, place, verb):
    path = tmp_path / "broken.json.gz"
    write_document(path, _broken(document, what))
    words = ["sim", verb, str(path)]
    if verb == "calibrate":
        words += ["--model", "qwen3-8b", "--hardware", "h200"]
    if verb != "replay":
        words += ["--out", str(tmp_path / "out.json")]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "broken.json.gz" in message
    assert place in message
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b"[1]", b"\x1f\x8b\x08\x00broken"])
def test_foreign_files_are_refused(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"foreign\.json"):
        log = open_log(path)
        list(log)


def test_a_log_of_another_version_is_refused(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text('{"type":"header","format":"lockstep-steplog","version":99}\n')
    with pytest.raises(InputError, match="version 99"):
        open_log(path)


def test_a_cut_gzip_file_is_refused(tmp_path, document):
    whole = (tmp_path / "made.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.json\.gz"):
        open_log(tmp_path / "cut.json.gz")


def test_names_do_not_decide(tmp_path, document):
    path = tmp_path / "plain.log"
    path.write_bytes(gzip.decompress((tmp_path / "made.json.gz").read_bytes()))
    assert isinstance(open_log(path), ImportedLog)
    assert not isinstance(open_log(path), StepLogReader)
