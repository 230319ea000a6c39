"""The first decision in which two logs differ, the expansion of a log, and its Perfetto trace."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from steplog_driver import config, drive, workload

from engine.cli import main as lockstep
from engine.core import Prompt, Request, Scheduler
from engine.steplog.api import (
    AddRecord,
    DecodeStretch,
    LogHeader,
    StepEvent,
    StepLogReader,
    StepLogWriter,
    StepRecord,
)
from engine.steplog.diff import first_difference


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    drive(path, config(num_blocks=16), workload(11), runs=True)
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def altered(path, change, name="altered.jsonl"):
    lines = lines_of(path)
    change(lines)
    lines[-1]["records"] = len(lines) - 2
    other = path.with_name(name)
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return other


def difference(left, right, with_times=False):
    return first_difference(StepLogReader(left), StepLogReader(right), with_times)


def longest_stretch(lines):
    stretches = [i for i, line in enumerate(lines) if line["type"] == "decode"]
    return max(stretches, key=lambda i: len(lines[i]["durations"]))


def test_a_log_equals_itself_and_its_expansion(log, tmp_path):
    expanded = tmp_path / "expanded.jsonl.gz"
    assert lockstep(["log", "expand", str(log), "--out", str(expanded)]) == 0
    assert difference(log, log, with_times=True) is None
    assert difference(log, expanded, with_times=True) is None
    assert not any(isinstance(record, DecodeStretch) for record in StepLogReader(expanded))
    assert list(StepLogReader(expanded)) == list(StepLogReader(log).expanded())


def test_expand_prints_the_log_when_no_file_is_named(log, capsys):
    assert lockstep(["log", "expand", str(log)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed[0]["type"] == "header"
    steps = [line["step"] for line in printed if line["type"] == "step"]
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize(
    ("field", "change", "named", "offset"),
    [
        ("blocks", lambda v: [[*v[0][:2], v[0][2] + 1], *v[1:]], "new_blocks", None),
        ("tokens", lambda v: [[0, *v[0][1:]], *v[1:]], "token_ids", 0),
        ("positions", lambda v: [v[0] + 1, *v[1:]], "entries", 0),
        ("free", lambda v: v + 1, "num_free_blocks", 0),
        ("finished", lambda v: [[v[0][0], "abort"]], "finished", -1),
    ],
)
def test_the_step_inside_a_stretch_is_named(log, field, change, named, offset):
    at = []

    def in_stretch(lines):
        place = next(
            i
            for i, line in enumerate(lines)
            if line["type"] == "decode" and field in line and len(line["durations"]) > 2
        )
        line = lines[place]
        steps = len(line["durations"])
        at.append(line["step"] + (line["blocks"][0][0] if offset is None else offset % steps))
        line[field] = change(line[field])

    found = difference(log, altered(log, in_stretch))
    assert (found.field, found.left.step) == (named, at[0])
    assert found.left.step == found.right.step
    assert f"step {at[0]}" in str(found) and "left" in str(found) and "right" in str(found)


def test_times_count_only_when_asked_for(log):
    def slower(lines):
        lines[longest_stretch(lines)]["durations"][2] += 1

    other = altered(log, slower)
    assert difference(log, other) is None
    found = difference(log, other, with_times=True)
    assert found.field == "duration_ns"
    assert found.left.step == (lines := lines_of(log))[longest_stretch(lines)]["step"] + 2

    def later(lines):
        next(line for line in lines if line["type"] == "add")["arrival"] += 1

    assert difference(log, altered(log, later)) is None
    assert difference(log, altered(log, later), with_times=True).field == "arrival_ns"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("id", 99, "request_id"),
        ("prompt", [[5, 9]], "prompt"),
        ("max_tokens", 1, "max_tokens"),
        ("stop", [1], "stop_token_ids"),
        ("min_tokens", 1, "min_tokens"),
        ("extra_keys", [["salt", "x"]], "extra_keys"),
    ],
)
def test_other_requests_are_differences(log, field, value, named):
    found = difference(log, altered(log, lambda lines: lines[1].update({field: value})))
    assert found.field == named
    assert "add of request" in str(found)


def test_a_log_that_ends_early_or_has_another_event_differs(log):
    shorter = altered(log, lambda lines: lines.pop(-2))
    found = difference(log, shorter)
    assert found.right is None and "end of the log" in str(found)
    assert difference(shorter, log).left is None

    def one_abort_more(lines):
        lines.insert(2, {"type": "abort", "id": lines[1]["id"], "time": 0})

    found = difference(log, altered(log, one_abort_more))
    assert found.field == "record" and "abort of request" in str(found)


def test_what_a_header_omits_is_passed_over(log):
    def without_blocks(lines):
        for line in lines:
            if line["type"] in ("step", "decode"):
                line.pop("blocks", None)

    def declared(lines):
        without_blocks(lines)
        # Within a stretch the count of free blocks follows from the blocks that are taken.
        lines[0]["omits"] = ["blocks", "free_blocks"]

    assert difference(log, altered(log, without_blocks)).field == "new_blocks"
    assert difference(log, altered(log, declared)) is None


def test_replicas_are_compared_each_for_itself(tmp_path):
    def two_replicas(name, order, late_token=1):
        path = tmp_path / name
        schedulers = [Scheduler(config()) for _ in range(2)]
        with StepLogWriter(path, LogHeader("sim", config(), num_replicas=2)) as log:
            for replica in order:
                request = Request(replica, Prompt([replica, 2]), 4)
                schedulers[replica].add(request)
                log.add(AddRecord(request, 0, 0, replica=replica))
                for step in range(4):
                    plan = schedulers[replica].schedule()
                    token = late_token if (replica, step) == (1, 3) else 1
                    outcome = schedulers[replica].commit(plan, [token])
                    log.step(StepEvent(plan, outcome, step, 1, replica=replica))
        return path

    left, right = two_replicas("a.jsonl", (0, 1)), two_replicas("b.jsonl", (1, 0))
    assert left.read_bytes() != right.read_bytes()
    assert difference(left, right) is None
    found = difference(left, two_replicas("c.jsonl", (1, 0), late_token=2))
    assert (found.replica, found.left.step, found.field) == (1, 3, "token_ids")


def test_diff_command_exits_by_its_finding(log, tmp_path, capsys):
    assert lockstep(["log", "diff", str(log), str(log)]) == 0
    assert "no decision differs" in capsys.readouterr().out
    wider = tmp_path / "wider.jsonl"
    drive(wider, config(num_blocks=17), workload(11), runs=False)
    assert lockstep(["log", "diff", str(log), str(wider)]) == 1
    printed = capsys.readouterr().out
    assert "kernel option num_blocks: 16 against 17" in printed
    assert "first difference: replica 0, step 0, field 'num_free_blocks'" in printed
    assert lockstep(["log", "diff", str(log), str(tmp_path / "none.jsonl")]) == 2


def test_trace_has_each_step_and_closes_every_phase(log, tmp_path, capsys):
    out = tmp_path / "trace.json"
    assert lockstep(["log", "trace", str(log), "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    records = list(StepLogReader(log))
    steps = [r for r in records if isinstance(r, (StepRecord, DecodeStretch))]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(steps)
    assert slices[0]["ts"] == 0
    ends = [round(event["ts"] + event["dur"], 3) for event in slices]
    starts = [round(event["ts"], 3) for event in slices]
    assert all(start >= end for end, start in zip(ends, starts[1:], strict=False))
    # Asynchronous events of one id nest: every begin has its end, in this order.
    open_phases = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            open_phases[event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert open_phases[event["id"]].pop() == event["name"]
    assert len(open_phases) == 12 and not any(open_phases.values())
    phases = Counter(event["name"] for event in events if event["ph"] == "b")
    preemptions = sum(len(r.preempted) for r in records if isinstance(r, StepRecord))
    assert preemptions > 0
    assert phases["waiting"] == 12 + preemptions
    assert phases["recompute"] == preemptions
    assert lockstep(["log", "trace", str(log), "--out", str(out), "--every-step"]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(
        [r for r in StepLogReader(log).expanded() if isinstance(r, StepRecord)]
    )


def test_a_trace_of_a_damaged_log_leaves_no_file(log, tmp_path, capsys):
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(log.read_text().splitlines()[:-3]))
    out = tmp_path / "trace.json"
    assert lockstep(["log", "trace", str(cut), "--out", str(out)]) == 2
    assert "without its end record" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.jsonl", "log.jsonl"]
    assert lockstep(["log", "trace", str(log), "--out", str(tmp_path / "no" / "x.json")]) == 2
    assert f"out='{tmp_path}/no/x.json': its directory does not exist" in capsys.readouterr().err
