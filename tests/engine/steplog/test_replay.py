"""A replayed log makes every recorded decision again, and an altered one is caught where it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import SHARED
from steplog_driver import config, drive, workload

from engine.cli import main as lockstep
from engine.core import InputError, KernelConfig, Prompt, Request, Scheduler
from engine.steplog.api import AddRecord, LogHeader, StepEvent, StepLogReader, StepLogWriter
from engine.steplog.replay import replay
from engine.steplog.vllm_recording import open_log

MEASURED = SHARED / "traces" / "measured_h200"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["mixed", "prefill_first"]),
    num_blocks=st.integers(16, 60),
    runs=st.booleans(),
    ranges=st.booleans(),
    outputs_in_adds=st.booleans(),
)
def test_a_log_replays_without_difference(
    tmp_path_factory, seed, policy, num_blocks, runs, ranges, outputs_in_adds
):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    limits = config(policy, num_blocks)
    header = LogHeader("sim", limits, outputs_in_adds=outputs_in_adds)
    aborts = [(seed % 40, seed % 12)] if seed % 3 == 0 else []
    drive(path, limits, workload(seed), runs=runs, header=header, ranges=ranges, aborts=aborts)
    result = replay(StepLogReader(path))
    assert result.difference is None
    assert (result.num_requests, result.num_live) == (12, 0)
    records = StepLogReader(path).expanded()
    assert result.num_steps == sum(hasattr(record, "decode_ids") for record in records)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewritten(path, lines):
    lines[-1]["records"] = len(lines) - 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replay(StepLogReader(path)).difference


@pytest.fixture
def log(tmp_path):
    """A log with preemptions, hits, chunks and stretches."""
    path = tmp_path / "log.jsonl"
    drive(path, config(num_blocks=16), workload(11), runs=True)
    kinds = path.read_text()
    assert '"preempted"' in kinds and '"chunks"' in kinds and '"decode"' in kinds
    return path


def first(lines, kind, field):
    return next(i for i, line in enumerate(lines) if line["type"] == kind and field in line)


@pytest.mark.parametrize(
    ("kind", "field", "change", "named"),
    [
        ("step", "chunks", lambda v: [[*v[0][:3], v[0][3] + 1, v[0][4]], *v[1:]], "entries"),
        ("step", "preempted", lambda v: [*v, 99], "preempted"),
        ("step", "admitted", lambda v: [[*v[0][:2], v[0][2] + 1, *v[0][3:]], *v[1:]], "admitted"),
        ("step", "blocks", lambda v: [[*v[0][:2], [3, 1]], *v[1:]], "new_blocks"),
        ("step", "free", lambda v: v + 1, "num_free_blocks"),
        ("step", "waiting", lambda v: v + 1, "num_waiting"),
        ("step", "running", lambda v: v + 1, "num_running"),
        ("decode", "free", lambda v: v - 1, "num_free_blocks"),
        ("decode", "blocks", lambda v: [[*v[0][:2], v[0][2] + 1], *v[1:]], "new_blocks"),
        ("decode", "blocks", lambda v: v[:-1], "new_blocks"),
        ("decode", "positions", lambda v: [v[0] + 1, *v[1:]], "entries"),
        ("decode", "finished", lambda v: [[v[0][0], "stop"], *v[1:]], "finished"),
        ("decode", "waiting", lambda v: v + 1, "num_waiting"),
    ],
)
def test_an_altered_decision_is_the_first_difference(log, kind, field, change, named):
    lines = lines_of(log)
    at = first(lines, kind, field)
    lines[at][field] = change(lines[at][field])
    difference = rewritten(log, lines)
    assert difference is not None
    last = lines[at]["step"] + len(lines[at].get("durations", [1])) - 1
    assert lines[at]["step"] <= difference.left.step <= last
    assert difference.field == named
    assert f"step {difference.left.step}" in str(difference)


def test_a_finish_that_never_happened_is_found(log):
    lines = lines_of(log)
    at = first(lines, "decode", "finished")
    ended = lines[at].pop("finished")
    difference = rewritten(log, lines)
    assert difference.field == "finished"
    assert str(ended[0][0]) in str(difference)


def test_a_missing_arrival_and_a_doubled_one_are_found(log):
    lines = lines_of(log)
    arrivals = [i for i, line in enumerate(lines) if line["type"] == "add"]
    doubled = [*lines[: arrivals[0]], lines[arrivals[0]], *lines[arrivals[0] :]]
    assert "duplicate_id" in str(rewritten(log, doubled))
    missing = [line for i, line in enumerate(lines) if i != arrivals[-1]]
    assert rewritten(log, missing) is not None


def test_an_abort_takes_effect_between_the_recorded_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    drive(path, config(), workload(6, most_tokens=60), runs=False, aborts=[(25, 1), (30, 2)])
    lines = lines_of(path)
    aborts = [i for i, line in enumerate(lines) if line["type"] == "abort"]
    assert aborts and replay(StepLogReader(path)).difference is None
    lines.append(lines.pop(aborts[0]))  # after the end of everything
    lines.insert(len(lines), lines.pop(-2))
    assert rewritten(path, lines) is not None


def test_events_during_an_open_plan_are_replayed_there(tmp_path):
    path = tmp_path / "log.jsonl"
    scheduler = Scheduler(config())
    requests = [Request(n, Prompt([n, n, 7]), 6) for n in range(3)]
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        for request in requests[:2]:
            scheduler.add(request)
            log.add(AddRecord(request, 0, 0))
        step = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            if step == 2:
                scheduler.add(requests[2])
                log.add(AddRecord(requests[2], 5, 5, open_plans=1))
            if step == 3:
                scheduler.abort(0)
                log.abort(0, 6, open_plans=1)
            outcome = scheduler.commit(plan, [9] * len(plan.sampled_ids))
            log.step(StepEvent(plan, outcome, step, 1))
            step += 1
    assert replay(StepLogReader(path)).difference is None
    lines = lines_of(path)
    at = next(i for i, line in enumerate(lines) if line.get("open"))
    lines[at - 1 : at + 1] = [lines[at], lines[at - 1]]
    lines[at - 1]["open"] = 0
    assert rewritten(path, lines) is not None


@pytest.mark.parametrize("at", [3, 5])
def test_the_abort_of_a_waiting_request_is_replayed_amid_a_stretch_of_decodes(tmp_path, at):
    path = tmp_path / "log.jsonl"
    limits = config(max_num_seqs=1)
    scheduler = Scheduler(limits)
    with StepLogWriter(path, LogHeader("engine", limits)) as log:
        for name in range(2):
            request = Request(name, Prompt([name, 5, 6]), 9)
            scheduler.add(request)
            log.add(AddRecord(request, 0, 0))
        step = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            if step == at:
                scheduler.abort(1)
                log.abort(1, step, open_plans=1)
            outcome = scheduler.commit(plan, [9] * len(plan.sampled_ids))
            log.step(StepEvent(plan, outcome, step, 1))
            step += 1
    result = replay(StepLogReader(path))
    assert result.difference is None and result.num_steps == step == 9


def test_asynchronous_scheduling_is_replayed_with_its_open_plans(tmp_path):
    path = tmp_path / "log.jsonl"
    limits = config(num_blocks=20, async_scheduling=True)
    scheduler = Scheduler(limits)
    with StepLogWriter(path, LogHeader("engine", limits)) as log:
        for _, request in workload(2):
            request = Request(
                request.request_id, request.prompt, request.max_tokens, frozenset({3})
            )
            scheduler.add(request)
            log.add(AddRecord(request, 0, 0))
        waiting = []
        count = 0
        while scheduler.has_work or waiting:
            if scheduler.has_work:
                waiting.append((scheduler.schedule(), len(waiting)))
            if len(waiting) == 2 or not scheduler.has_work:
                plan, before = waiting.pop(0)
                tokens = [(count + 5 * row) % 7 for row in range(len(plan.sampled_ids))]
                outcome = scheduler.commit(plan, tokens)
                log.step(StepEvent(plan, outcome, count, 1, open_plans=before))
                count += 1
    assert '"open":1' in path.read_text()
    result = replay(StepLogReader(path))
    assert result.difference is None and result.num_steps == count


def test_a_stop_string_is_replayed_as_one(tmp_path):
    path = tmp_path / "log.jsonl"
    scheduler = Scheduler(config())
    request = Request(0, Prompt([1, 2]), 9, frozenset({4}), min_tokens=1)
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        scheduler.add(request)
        log.add(AddRecord(request, 0, 0))
        for step, stopped in enumerate([(), (), (0,)]):
            plan = scheduler.schedule()
            log.step(
                StepEvent(plan, scheduler.commit(plan, [4 if not step else 6], stopped), step, 1)
            )
    assert not scheduler.has_work
    assert replay(StepLogReader(path)).difference is None


def test_a_failed_step_is_replayed_as_one(tmp_path):
    path = tmp_path / "log.jsonl"
    scheduler = Scheduler(config())
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        for number in range(2):
            scheduler.add(Request(number, Prompt(range(6)), 3))
            log.add(AddRecord(Request(number, Prompt(range(6)), 3), 0, 0))
            plan = scheduler.schedule()
            if number:
                log.step(StepEvent(plan, scheduler.commit(plan, [1]), 1, 1))
            else:
                log.discarded(plan, scheduler.discard(plan), 0, 1)
    result = replay(StepLogReader(path))
    assert result.difference is None
    assert result.num_live == 1


def test_plans_that_are_discarded_together_are_replayed_together(tmp_path):
    path = tmp_path / "log.jsonl"
    limits = config(async_scheduling=True)
    scheduler = Scheduler(limits)
    with StepLogWriter(path, LogHeader("engine", limits)) as log:
        for number in range(3):
            request = Request(number, Prompt([number, 1]), 9 if number else 2)
            scheduler.add(request)
            log.add(AddRecord(request, 0, 0))
        plans = [scheduler.schedule(), scheduler.schedule()]
        failed = scheduler.discard(plans[0])
        log.discarded(plans[0], failed, 0, 1)
        log.discarded(plans[1], (), 1, 1, open_plans=1)
        scheduler.add(Request(7, Prompt([7]), 1))
        log.add(AddRecord(Request(7, Prompt([7]), 1), 2, 2))
        plan = scheduler.schedule()
        log.step(StepEvent(plan, scheduler.commit(plan, [5]), 2, 1))
    assert len(failed) == 3
    result = replay(StepLogReader(path))
    assert result.difference is None and result.num_live == 0
    lines = lines_of(path)
    lines[first(lines, "step", "discarded")]["finished"].pop()
    assert rewritten(path, lines).field == "finished"


def test_what_an_imported_log_omits_is_not_compared(log):
    lines = lines_of(log)
    omits = ["blocks", "hit_kinds", "preempted_order", "running", "waiting", "free_blocks"]
    for line in lines:
        if line["type"] in ("step", "decode"):
            line.pop("blocks", None)
            line.update(free=0, running=0, waiting=0)
            if "preempted" in line:
                line["preempted"].reverse()
            if "admitted" in line:
                line["admitted"] = [[a[0], a[1], 0, 0, 0, a[5]] for a in line["admitted"]]
    for count in range(len(omits)):
        lines[0]["omits"] = omits[:count]
        assert rewritten(log, lines) is not None
    lines[0]["omits"] = omits
    assert rewritten(log, lines) is None
    at = first(lines, "step", "admitted")
    lines[at]["admitted"][0][1] += 4
    assert rewritten(log, lines).field == "admitted"


def test_another_scheduler_is_found_out(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    drive(path, config(num_blocks=16), workload(11), runs=False)

    class Hasty(Scheduler):
        def __init__(self, kernel_config):
            wider = {"num_blocks": 17, "max_model_len": 100, "block_size": 4}
            wider |= {"max_num_seqs": 6, "max_num_batched_tokens": 24}
            super().__init__(KernelConfig(**wider))

    monkeypatch.setattr("engine.steplog.replay.Scheduler", Hasty)
    assert replay(StepLogReader(path)).difference.field == "num_free_blocks"


def test_command_prints_counts_or_the_first_difference(log, capsys):
    assert lockstep(["sim", "replay", str(log)]) == 0
    assert "12 requests" in capsys.readouterr().out
    lines = lines_of(log)
    lines[first(lines, "decode", "free")]["free"] += 1
    rewritten(log, lines)
    assert lockstep(["sim", "replay", str(log)]) == 1
    printed = capsys.readouterr().out
    assert "first difference: replica 0, step" in printed
    assert "recorded" in printed and "replayed" in printed


def test_command_refuses_logs_that_cannot_be_replayed(log, tmp_path, capsys):
    assert lockstep(["sim", "replay", str(tmp_path / "none.jsonl")]) == 2
    lines = lines_of(log)
    for line in lines:
        if line["type"] in ("step", "decode"):
            line.pop("tokens", None)
    with pytest.raises(InputError, match="neither tokens nor outputs"):
        rewritten(log, lines)
    assert lockstep(["sim", "replay", str(log)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.shared
@pytest.mark.skipif(not MEASURED.is_dir(), reason="the recordings are not here")
@pytest.mark.parametrize(
    ("name", "num_requests", "num_steps"),
    [
        ("conv_40", 650, 12_483),
        ("conv_70", 1_000, 7_060),
        ("conv_90", 1_250, 4_775),
        ("code_60", 600, 1_494),
        ("prefix_60", 1_200, 6_134),
    ],
)
def test_runs_of_vllm_on_a_gpu_are_decided_alike_in_every_step(name, num_requests, num_steps):
    result = replay(open_log(MEASURED / f"{name}.json.gz"))
    assert result.difference is None
    assert (result.num_requests, result.num_steps) == (num_requests, num_steps)
    assert result.num_live == 0
