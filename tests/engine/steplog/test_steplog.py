"""The step log: round trips, one canonical form, strict reading, atomic writing."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steplog_driver import config, drive, duration, small_log, token, workload

from engine.core import InputError, KernelConfig, Prompt, Request, Scheduler
from engine.core.plan import Finished, StepOutcome
from engine.steplog.api import (
    AbortRecord,
    AddRecord,
    DecodeStretch,
    LogHeader,
    StepEvent,
    StepLogReader,
    StepLogWriter,
    StepRecord,
    expand,
)
from engine.steplog.decode import record_from_json
from engine.steplog.encode import record_to_json
from engine.steplog.ids import decode_ids, encode_ids, encode_prompt


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["mixed", "prefill_first"]),
    num_blocks=st.integers(16, 60),
    block_size=st.sampled_from([1, 2, 4, 16]),
    ranges=st.booleans(),
)
def test_steps_and_decode_runs_give_the_same_bytes(
    tmp_path_factory, seed, policy, num_blocks, block_size, ranges
):
    folder = tmp_path_factory.mktemp("logs")
    blocks = num_blocks * 4 // block_size + 1
    limits = config(policy, blocks, block_size=block_size)
    aborts = [(seed % 40, seed % 12)] if seed % 3 == 0 else []
    logs = []
    for runs in (False, True):
        path = folder / f"runs_{runs}.jsonl"
        drive(path, limits, workload(seed), runs=runs, ranges=ranges, aborts=aborts)
        logs.append(path.read_bytes())
    assert logs[0] == logs[1]
    kinds = [json.loads(line)["type"] for line in logs[0].splitlines()]
    assert kinds[0] == "header" and kinds[-1] == "end" and "decode" in kinds


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), policy=st.sampled_from(["mixed", "prefill_first"]))
def test_expanding_gives_the_records_of_the_single_steps(tmp_path_factory, seed, policy):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    limits = config(policy, 20)
    logged: list[StepRecord] = []

    class Watching(Scheduler):
        def commit(self, plan, token_ids, stopped=()):
            batch = tuple(plan.entries)
            outcome = super().commit(plan, token_ids, stopped)
            ends = tuple((end.request_id, end.reason) for end in outcome.finished)
            logged.append((plan, batch, tuple(token_ids), ends))
            return outcome

    gap = seed % 2 * 5
    drive(path, limits, workload(seed), runs=False, gap=gap, scheduler_of=Watching)
    steps = [r for r in StepLogReader(path).expanded() if isinstance(r, StepRecord)]
    assert len(steps) == len(logged)
    start = 0
    for record, (plan, batch, tokens, ends) in zip(steps, logged, strict=True):
        assert record.step == plan.step
        assert tuple(record.entries) == batch
        assert record.preempted == plan.preempted
        assert record.admitted == plan.admitted
        assert record.new_blocks == plan.new_blocks
        assert record.num_free_blocks == plan.num_free_blocks
        assert (record.num_running, record.num_waiting) == (plan.num_running, plan.num_waiting)
        assert record.token_ids == tokens
        assert record.sampled_ids == tuple(plan.sampled_ids)
        assert record.finished == ends
        assert record.num_tokens == plan.num_tokens
        assert (record.start_ns, record.duration_ns) == (start, duration(record.step))
        start += record.duration_ns + gap


def test_a_stretch_is_one_record_that_a_finish_or_an_arrival_ends(tmp_path):
    requests = [
        (0, Request("a", Prompt(range(8)), 30)),
        (0, Request("b", Prompt(range(100, 109)), 12)),
        (20, Request("c", Prompt(range(200, 205)), 3)),
    ]
    path = tmp_path / "log.jsonl"
    drive(path, config(), requests, runs=False, ranges=True)
    records = list(StepLogReader(path))
    shape = [
        (type(r).__name__, len(r.decode_ids), r.num_steps if isinstance(r, DecodeStretch) else 1)
        for r in records
        if not isinstance(r, AddRecord)
    ]
    assert shape == [
        ("StepRecord", 0, 1),  # both prompts
        ("DecodeStretch", 2, 11),  # until b ends
        ("DecodeStretch", 1, 8),  # until c arrives
        ("StepRecord", 1, 1),
        ("DecodeStretch", 2, 2),
        ("DecodeStretch", 1, 7),
    ]
    assert [r.finished for r in records if isinstance(r, DecodeStretch) and r.finished] == [
        (("b", "length"),),
        (("c", "length"),),
        (("a", "length"),),
    ]
    # Ids that count upwards take one pair per row, whatever the length of the stretch.
    line = json.loads(path.read_text().splitlines()[4])
    assert line["tokens"] == [[[token("a", 1, True), 11]], [[token("b", 1, True), 11]]]


def test_records_survive_the_file(tmp_path):
    request = Request(
        "r-1",
        Prompt.from_spans([range(5, 5000), Prompt([7, 7, 1]).tokens(0, 3)]),
        9,
        frozenset({3, 1}),
        2,
        (("salt", "x"), ("adapter", "y")),
    )
    header = LogHeader(
        "import", config(), {"tp": 2}, {"name": "m"}, {"gpu": "h"}, 7, 3, False, ("blocks",), "1.2"
    )
    path = tmp_path / "log.jsonl.gz"
    with StepLogWriter(path, header) as log:
        log.add(AddRecord(request, 5, 9, outputs=Prompt([1, 2]), replica=2))
        log.abort("r-1", 11, replica=2)
    reader = StepLogReader(path)
    assert reader.header == header
    assert list(reader) == [
        AddRecord(request, 5, 9, Prompt([1, 2]), 0, 2),
        AbortRecord("r-1", 11, 0, 2),
    ]
    assert len(path.read_bytes()) < 600  # the lazy prompt was never written out
    assert list(reader) == list(reader)


def test_an_id_that_is_half_a_surrogate_pair_survives_the_file(tmp_path):
    added = AddRecord(Request("half \ud800", Prompt(range(5)), 3), 0, 0)
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("sim", KernelConfig(num_blocks=9, max_model_len=99))) as log:
        log.add(added)
    assert [record.request.request_id for record in StepLogReader(path)] == ["half \ud800"]


def test_host_and_device_times_and_buckets_are_kept_per_step(tmp_path):
    scheduler = Scheduler(config())
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        request = Request(0, Prompt(range(4)), 9)
        scheduler.add(request)
        log.add(AddRecord(request, 0, 0))
        for step in range(9):
            plan = scheduler.schedule()
            outcome = scheduler.commit(plan, [5])
            times = {"host_ns": step, "device_ns": 10 * step} if step != 6 else {}
            log.step(
                StepEvent(plan, outcome, 100 * step, 90, graph_bucket=1 if step else None, **times)
            )
    records = list(StepLogReader(path))
    assert [getattr(r, "num_steps", 1) for r in records[1:]] == [1, 5, 1, 2]
    steps = [r for r in expand(records, 4) if isinstance(r, StepRecord)]
    assert [s.device_ns for s in steps] == [0, 10, 20, 30, 40, 50, None, 70, 80]
    assert [s.host_ns for s in steps] == [0, 1, 2, 3, 4, 5, None, 7, 8]
    assert [s.graph_bucket for s in steps] == [None] + [1] * 8
    assert [s.start_ns for s in steps] == [100 * k for k in range(9)]
    assert records[2].gaps_ns == (0, 10, 10, 10, 10)


def test_events_during_an_open_plan_stand_behind_its_step(tmp_path):
    scheduler = Scheduler(config())
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        for number in range(2):
            scheduler.add(Request(number, Prompt([number, 1, 2]), 5))
            log.add(AddRecord(Request(number, Prompt([number, 1, 2]), 5), 0, 0))
        plan = scheduler.schedule()
        scheduler.add(Request(2, Prompt([9]), 1))
        log.add(AddRecord(Request(2, Prompt([9]), 1), 3, 3, open_plans=1))
        assert scheduler.abort(0) is None
        log.abort(0, 4, open_plans=1)
        log.step(StepEvent(plan, scheduler.commit(plan, [7, 8]), 0, 10))
    kinds = [type(r).__name__ for r in StepLogReader(path)]
    assert kinds == ["AddRecord", "AddRecord", "StepRecord", "AddRecord", "AbortRecord"]
    step = list(StepLogReader(path))[2]
    assert step.sampled == (1,) and step.token_ids == (8,)
    assert step.finished == ((0, "abort"),)


def test_a_discarded_step_names_the_requests_that_failed(tmp_path):
    scheduler = Scheduler(config())
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        scheduler.add(Request(0, Prompt([1, 2]), 5))
        log.add(AddRecord(Request(0, Prompt([1, 2]), 5), 0, 0))
        plan = scheduler.schedule()
        log.discarded(plan, scheduler.discard(plan), 0, 10)
    step = list(StepLogReader(path))[1]
    assert step.discarded and step.finished == ((0, "error"),)
    assert step.token_ids is None


def test_outputs_in_adds_leave_tokens_out_of_steps(tmp_path):
    header = LogHeader("sim", config(), outputs_in_adds=True)
    for runs in (False, True):
        path = tmp_path / f"{runs}.jsonl"
        drive(path, config(), workload(5), runs=runs, header=header, ranges=True)
        assert b'"tokens"' not in path.read_bytes()
    assert (tmp_path / "False.jsonl").read_bytes() == (tmp_path / "True.jsonl").read_bytes()
    with (
        pytest.raises(ValueError, match="wants outputs"),
        StepLogWriter(tmp_path / "x.jsonl", header) as log,
    ):
        log.add(AddRecord(Request(0, Prompt([1]), 1), 0, 0))


def test_replicas_keep_their_own_stretches(tmp_path):
    path = tmp_path / "log.jsonl"
    schedulers = [Scheduler(config()) for _ in range(2)]
    with StepLogWriter(path, LogHeader("sim", config(), num_replicas=2)) as log:
        for replica, scheduler in enumerate(schedulers):
            scheduler.add(Request(replica, Prompt([1, 2]), 6))
            log.add(AddRecord(Request(replica, Prompt([1, 2]), 6), 0, 0, replica=replica))
        for step in range(6):
            for replica, scheduler in enumerate(schedulers):
                plan = scheduler.schedule()
                outcome = scheduler.commit(plan, [step])
                log.step(StepEvent(plan, outcome, step * 10, 10, replica=replica))
    stretches = [r for r in StepLogReader(path) if isinstance(r, DecodeStretch)]
    assert [(r.replica, r.num_steps) for r in stretches] == [(0, 5), (1, 5)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-5, 12) | st.integers(-(2**63), 2**63 - 1)))
def test_ids_survive_their_compact_form(ids):
    items = encode_ids(ids)
    assert list(decode_ids(items)) == ids
    assert encode_ids(list(decode_ids(items))) == items
    assert len(json.dumps(items)) <= len(json.dumps(ids)) + 1


def test_a_long_range_stays_lazy():
    tracemalloc.start()
    prompt = decode_ids(encode_prompt(Prompt(range(10, 10**9))))
    assert len(prompt) == 10**9 - 10 and prompt[5] == 15
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "log.jsonl"
    log = StepLogWriter(path, LogHeader("sim", config()))
    assert not path.exists()
    log.close()
    assert path.exists()
    before = path.read_bytes()
    with pytest.raises(RuntimeError), StepLogWriter(path, LogHeader("engine", config())):
        raise RuntimeError("planted")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_equal_runs_give_equal_gzip_files(tmp_path):
    paths = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz")]
    for path in paths:
        small_log(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert gzip.decompress(paths[0].read_bytes()) == small_log(tmp_path / "c.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["log.json", "log.txt", "log"])
def test_other_file_names_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"\.jsonl"):
        StepLogWriter(tmp_path / name, LogHeader("sim", config()))


def test_unwritable_place_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        StepLogWriter(tmp_path / "none" / "log.jsonl", LogHeader("sim", config()))


def test_every_record_type_survives_its_json_form(tmp_path):
    path = small_log(tmp_path / "log.jsonl")
    kinds = set()
    for record in StepLogReader(path):
        again = record_from_json(json.loads(json.dumps(record_to_json(record))))
        assert record_to_json(again) == record_to_json(record)
        kinds.add(type(record))
    assert kinds == {AddRecord, StepRecord, DecodeStretch}


def test_writing_holds_one_stretch_and_not_the_log(tmp_path):
    scheduler = Scheduler(KernelConfig(num_blocks=64, max_model_len=60_000))
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("sim", scheduler.config)) as log:
        tracemalloc.start()
        peaks = []
        for number in range(40):
            request = Request(number, Prompt(range(number * 1_000, number * 1_000 + 20)), 500)
            scheduler.add(request)
            log.add(AddRecord(request, 0, 0))
            for step in range(500):
                plan = scheduler.schedule()
                outcome = scheduler.commit(plan, [step])
                log.step(StepEvent(plan, outcome, step, 1))
            peaks.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert peaks[-1] < peaks[5] + 200_000
    assert len(list(StepLogReader(path))) == 40 * 3


def test_voided_entries_do_not_join_a_stretch(tmp_path):
    scheduler = Scheduler(config())
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("engine", scheduler.config)) as log:
        for number in range(2):
            scheduler.add(Request(number, Prompt([number]), 9))
            log.add(AddRecord(Request(number, Prompt([number]), 9), 0, 0))
        for step in range(4):
            plan = scheduler.schedule()
            outcome = scheduler.commit(plan, [5, 6])
            if step == 2:  # as if a stop string had ended request 0 one step before
                outcome = StepOutcome(plan.step, (1,), (6,), (Finished(0, "abort", ()),))
            log.step(StepEvent(plan, outcome, step, 1))
    records = list(StepLogReader(path))[2:]
    assert [type(r).__name__ for r in records] == [
        "StepRecord",
        "DecodeStretch",
        "StepRecord",
        "DecodeStretch",
    ]
    assert records[2].sampled == (1,)
