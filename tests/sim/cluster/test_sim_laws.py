"""Laws of the simulator (LAW-M1 to LAW-M10) and scenarios on a run's clock and metrics."""

import json
import time
from array import array
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from sim_testing import (
    MS,
    completed_rows,
    constant,
    ours,
    rows_workload,
    run,
    synthetic,
    table,
)

from engine.steplog.api import AddRecord, StepLogReader, StepRecord
from sim.cluster.simulation import RunOptions
from sim.cost.features import StepFeatures
from sim.cost.simple import ConstantCost
from sim.metrics.requests import COMPLETED
from sim.metrics.summary import meets, request_times
from sim.run.outputs import write_requests_csv
from sim.workloads.readers import TraceOptions, read_trace

BUSY = {"rate": 40.0, "prompt": "uniform:10:400", "output": "uniform:1:120"}
SMALL = {"num_kv_blocks": 60, "max_num_seqs": 12}


def busy_run(log_path: Path | None = None, seed: int = 2, **changes):
    """A run with waiting, chunks and preemptions."""
    return run(synthetic(seed=seed, num_requests=80, **BUSY), log_path=log_path, **SMALL, **changes)


def steps_of(log: Path) -> list[StepRecord]:
    return [r for r in StepLogReader(log).expanded() if isinstance(r, StepRecord)]


def test_tokens_are_conserved():
    workload = synthetic(seed=2, num_requests=80, **BUSY)
    finished = run(workload, **SMALL)
    assert finished.summary.completed == 80
    assert finished.summary.total_output_tokens == sum(workload.output_tokens)
    assert finished.summary.total_input_tokens == sum(workload.prompt_tokens)
    assert finished.result.ledger.output_tokens == workload.output_tokens


def test_computed_tokens_follow_the_work_identity(tmp_path):
    """LAW-E5: prompts and outputs, plus what preemptions lost, less what the cache gave."""
    log = tmp_path / "log.jsonl"
    workload = synthetic(
        "sessions", seed=1, num_requests=60, rate=40.0, prompt="uniform:10:100", turns="3",
        think_s=0.1, shared_prefix=32,
    )  # fmt: skip
    finished = run(workload, log_path=log, num_kv_blocks=80, max_num_seqs=16)
    computed: Counter[object] = Counter()
    total = lost = hits = 0
    for step in steps_of(log):
        lost += sum(computed.pop(victim, 0) for victim in step.preempted)
        for admission in step.admitted:
            hits += admission.hit_tokens
            computed[admission.request_id] = admission.hit_tokens
        for entry in step.entries:
            computed[entry.request_id] += entry.num_tokens
            total += entry.num_tokens
    rows = completed_rows(finished)
    needed = sum(workload.prompt_tokens[row] + workload.output_tokens[row] - 1 for row in rows)
    assert lost > 0 and hits > 0
    assert total == needed + lost - hits
    stats = finished.result.servers[0]
    assert total == stats.decode.num_tokens + stats.prefill.num_tokens


def test_steps_follow_one_another_and_never_overlap_m1_m5(tmp_path):
    log = tmp_path / "log.jsonl"
    finished = busy_run(log)
    steps = steps_of(log)
    for before, after in pairwise(steps):
        assert after.start_ns >= before.start_ns + before.duration_ns
    busy = sum(step.duration_ns for step in steps)
    assert busy == finished.result.servers[0].busy_ns <= finished.result.end_ns


def test_the_server_never_idles_while_something_waits_m5_c94(tmp_path):
    log = tmp_path / "log.jsonl"
    busy_run(log, replicas=1)
    pending = 0
    free_since = None
    for record in StepLogReader(log).expanded():
        if isinstance(record, AddRecord):
            if pending == 0:
                free_since = max(free_since or 0, record.added_ns)
            pending += 1
        elif isinstance(record, StepRecord):
            assert free_since is None or record.start_ns == free_since
            pending -= len(record.finished)
            free_since = record.start_ns + record.duration_ns


def test_with_one_seat_the_second_request_starts_when_the_first_ends_c94():
    finished = run(
        rows_workload((0, 16, 5), (0, 16, 5)), costs=constant(10), max_num_seqs=1,
        prefix_caching=False,
    )  # fmt: skip
    ledger = finished.result.ledger
    assert list(ledger.finish_ns) == [50 * MS, 100 * MS]
    assert list(ledger.first_scheduled_ns) == [0, 50 * MS]


def test_littles_law_holds_exactly_for_system_and_queue_m3():
    finished = busy_run()
    ledger = finished.result.ledger
    times = request_times(ledger)
    assert sum(ledger.preemptions) > 0
    assert ledger.in_system.area_ns == sum(request.e2e_ns for request in times)
    waits = sum(request.queue_ns + request.preempted_ns for request in times)
    assert ledger.in_queue.area_ns == waits
    assert ledger.in_system.count == ledger.in_queue.count == 0


def test_latency_is_the_sum_of_its_parts_m4(tmp_path):
    log = tmp_path / "log.jsonl"
    finished = busy_run(log)
    tokens = token_times(log)
    ledger = finished.result.ledger
    for request in request_times(ledger):
        ends = tokens[request.row]
        gaps = [after - before for before, after in pairwise(ends)]
        assert request.e2e_ns == request.ttft_ns + sum(gaps)
        assert len(ends) == request.output_tokens
        service = request.e2e_ns - request.queue_ns - request.preempted_ns
        assert 0 < service <= request.e2e_ns
    duration_s = finished.result.end_ns / 1e9
    throughput = finished.summary.output_throughput
    assert throughput * duration_s == pytest.approx(finished.summary.total_output_tokens)


def test_service_time_is_the_time_between_admissions_and_ends_m4(tmp_path):
    """Queue, service and preempted time, each taken from the log, add up to the latency."""
    log = tmp_path / "log.jsonl"
    finished = busy_run(log)
    since: dict[object, int] = {}
    served: Counter[object] = Counter()
    for step in steps_of(log):
        for victim in step.preempted:
            served[victim] += step.start_ns - since.pop(victim)
        for admission in step.admitted:
            since[admission.request_id] = step.start_ns
        for ended in step.finished:
            name = ended.request_id
            served[name] += step.start_ns + step.duration_ns - since.pop(name)
    for request in request_times(finished.result.ledger):
        parts = request.queue_ns + served[request.row] + request.preempted_ns
        assert parts == request.e2e_ns


def token_times(log: Path) -> dict[object, list[int]]:
    """End of the step that sampled each token, by request."""
    times: dict[object, list[int]] = {}
    for step in steps_of(log):
        for name in step.sampled_ids:
            times.setdefault(name, []).append(step.start_ns + step.duration_ns)
    return times


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_metrics_equal_those_recomputed_from_the_log_m7(tmp_path, policy):
    log = tmp_path / "log.jsonl"
    finished = busy_run(log, policy=policy)
    ledger, stats = finished.result.ledger, finished.result.servers[0]
    tokens, steps = token_times(log), steps_of(log)
    arrivals = {
        record.request.request_id: record.arrival_ns
        for record in StepLogReader(log)
        if isinstance(record, AddRecord)
    }
    for row, ends in tokens.items():
        assert ledger.first_token_ns[row] == ends[0]
        assert ledger.finish_ns[row] == ends[-1]
        assert ledger.arrival_ns[row] == arrivals[row]
    gaps = Counter(after - before for ends in tokens.values() for before, after in pairwise(ends))
    values, counts = stats.gaps.distinct()
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == gaps
    num_blocks = finished.parts.kernel.num_blocks
    used = [num_blocks - step.num_free_blocks for step in steps]
    assert stats.kv_block_ns == sum(u * s.duration_ns for u, s in zip(used, steps, strict=True))
    assert stats.kv_peak_blocks == max(used)
    batches = Counter(len(list(step.entries)) for step in steps)
    assert stats.batch_steps == batches
    preempted = Counter(victim for step in steps for victim in step.preempted)
    assert {row: n for row, n in enumerate(ledger.preemptions) if n} == preempted
    assert stats.hit_tokens == sum(a.hit_tokens for s in steps for a in s.admitted)
    seconds = Counter(end // 10**9 for ends in tokens.values() for end in ends)
    assert finished.summary.max_output_tokens_per_s == max(seconds.values())


def test_an_arrival_changes_nothing_before_it_m8(tmp_path):
    workload = synthetic(seed=2, num_requests=60, **BUSY)
    before_log, after_log = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    run(workload, log_path=before_log, **SMALL)
    cut = 40
    late = synthetic(seed=2, num_requests=60, **BUSY)
    time_ns = workload.arrival_ns[cut]
    for column in (late.prompt_tokens, late.output_tokens):
        column[cut] = 37
    run(late, log_path=after_log, **SMALL)
    first = [s for s in steps_of(before_log) if s.start_ns + s.duration_ns <= time_ns]
    second = [s for s in steps_of(after_log) if s.start_ns + s.duration_ns <= time_ns]
    assert len(first) > 50
    assert first == second
    assert steps_of(before_log) != steps_of(after_log)


def test_no_decision_knows_the_true_output_length_m9(tmp_path):
    """Two workloads that differ in later tokens decide alike until the first difference."""
    short = synthetic(seed=2, num_requests=60, **BUSY)
    longer = synthetic(seed=2, num_requests=60, **BUSY)
    row = 20
    longer.output_tokens[row] = short.output_tokens[row] + 50
    logs = [tmp_path / "short.jsonl", tmp_path / "longer.jsonl"]
    finished = run(short, log_path=logs[0], replicas=2, router="least-tokens", **SMALL)
    run(longer, log_path=logs[1], replicas=2, router="least-tokens", **SMALL)
    end_ns = finished.result.ledger.finish_ns[row]
    first, second = (
        [s for s in steps_of(log) if s.start_ns + s.duration_ns < end_ns] for log in logs
    )
    assert len(first) > 50
    assert first == second


def test_a_run_replayed_from_its_own_outputs_gives_the_same_metrics_m10(tmp_path):
    log, csv_path = tmp_path / "steps.jsonl", tmp_path / "requests.csv"
    finished = busy_run(log)
    write_requests_csv(finished, csv_path)
    again = run(read_trace(csv_path, TraceOptions()), cost=f"replay:{log}", **SMALL)
    assert _without_provenance(again) == _without_provenance(finished)
    assert [row[1:] for row in table(again)] == [row[1:] for row in table(finished)]


def _without_provenance(finished) -> str:
    summary = finished.summary.to_json()
    # What made the figures, and how far it is to be trusted, is not a metric.
    about = ("provenance", "trust")
    summary["sim"] = {k: v for k, v in summary["sim"].items() if k not in about}
    return json.dumps(summary)


def test_a_second_run_in_the_same_process_gives_the_same_bytes_m2(tmp_path):
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    first, second = busy_run(logs[0]), busy_run(logs[1])
    assert json.dumps(first.summary.to_json()) == json.dumps(second.summary.to_json())
    assert logs[0].read_bytes() == logs[1].read_bytes()


class _SlowHost(ConstantCost):
    """The same cost on a host that stalls now and then."""

    def decode_run_ns(self, num_rows, context_sum, steps, kv_shared_tokens=0):
        time.sleep(0.002)
        return super().decode_run_ns(num_rows, context_sum, steps, kv_shared_tokens)


def test_results_do_not_depend_on_the_speed_of_the_host():
    workload = synthetic(seed=2, num_requests=40, **BUSY)
    fast = run(workload, costs=constant(3), **SMALL)
    slow = run(workload, costs=(_SlowHost(3 * MS),), **SMALL)
    assert json.dumps(fast.summary.to_json()) == json.dumps(slow.summary.to_json())


def test_scaling_all_times_scales_all_latencies():
    """Metamorphic: costs and arrivals times three, all times times three."""
    workload = synthetic(seed=5, num_requests=50, **BUSY)
    slow = synthetic(seed=5, num_requests=50, **BUSY)
    slow.arrival_ns = array("q", [time * 3 for time in slow.arrival_ns])
    first = run(workload, costs=constant(2), **SMALL).result.ledger
    second = run(slow, costs=constant(6), **SMALL).result.ledger
    assert [3 * time for time in first.finish_ns] == list(second.finish_ns)
    assert [3 * time for time in first.first_token_ns] == list(second.first_token_ns)


# Scenarios -------------------------------------------------------------------------------------


def test_a_forced_preemption_counts_every_token_once_c88():
    """Pool of 4 blocks of 16: A and B cannot both grow; TTFT stays that of the first token."""
    finished = run(
        rows_workload((0, 16, 40), (0, 32, 10)),
        costs=constant(10),
        num_kv_blocks=4,
        max_model_len=64,
        kernel={"max_num_seqs": 4},
    )
    ledger = finished.result.ledger
    assert sum(ledger.preemptions) >= 1
    assert list(ledger.output_tokens) == [40, 10]
    assert finished.summary.total_output_tokens == 50
    victim = next(row for row, count in enumerate(ledger.preemptions) if count)
    assert ledger.first_token_ns[victim] == 10 * MS  # not moved by the recomputation
    for request in request_times(ledger):
        assert request.e2e_ns == ledger.finish_ns[request.row] - ledger.arrival_ns[request.row]
    values, counts = finished.result.servers[0].gaps.distinct()
    assert int(counts.sum()) == 39 + 9
    assert int((values * counts).sum()) == sum(t.e2e_ns - t.ttft_ns for t in request_times(ledger))
    assert max(values.tolist()) > 10 * MS  # the wait of the victim is one long gap


def test_slo_comparison_is_in_milliseconds_c91():
    finished = run(rows_workload((0, 16, 3)), costs=constant(120), slos_ms={"ttft": 200.0})
    assert finished.summary.ttft.mean == 120.0
    assert finished.summary.request_goodput == finished.summary.request_throughput
    times = request_times(finished.result.ledger)[0]
    assert meets(times, {"ttft": 120.0}) and not meets(times, {"ttft": 119.9})
    assert not meets(times, {"ttft": 200.0, "e2el": 359.0})


def test_ttft_is_queue_plus_prefill_c95():
    """Three chunks of a 40-token prompt at 16 tokens a step, after a wait."""
    finished = run(
        rows_workload((0, 16, 2), (5, 40, 3)),
        costs=constant(10),
        max_num_batched_tokens=16,
        max_num_seqs=1,
    )
    ledger = finished.result.ledger
    queue_ns = ledger.first_scheduled_ns[1] - ledger.arrival_ns[1]
    assert queue_ns == 15 * MS
    assert ledger.first_token_ns[1] - ledger.arrival_ns[1] == queue_ns + 3 * 10 * MS
    assert ledger.finish_ns[1] == ledger.first_token_ns[1] + 2 * 10 * MS


def test_time_in_the_clients_own_queue_counts_c107():
    workload = rows_workload(*[(0, 16, 10)] * 4)
    finished = run(workload, costs=constant(100), options=RunOptions(max_concurrency=1))
    e2e_s = [request.e2e_ns / 1e9 for request in request_times(finished.result.ledger)]
    assert e2e_s == [1.0, 2.0, 3.0, 4.0]


def test_the_client_never_has_more_in_flight_than_it_may(tmp_path):
    """Arrivals at the very time of a finish do not slip past those that wait at the client."""
    log = tmp_path / "log.jsonl"
    workload = rows_workload(*[(10 * index, 16, 3) for index in range(12)])
    limit = RunOptions(max_concurrency=2)
    finished = run(workload, costs=constant(10), options=limit, log_path=log)
    assert max(step.num_running for step in steps_of(log)) == 2
    firsts = finished.result.ledger.first_scheduled_ns
    assert list(firsts) == sorted(firsts)


METRIC_CAUSES = {
    "num_preemptions": ({}, {"num_kv_blocks": 40}),
    "prefix_hit_rate": ({"prefix_caching": False}, {}),
    "first_admission_hit_rate": ({"prefix_caching": False}, {}),
    "mean_kv_utilisation": ({}, {"num_kv_blocks": 2000}),
    "peak_kv_utilisation": ({}, {"num_kv_blocks": 2000}),
    "mean_requests_waiting": ({}, {"max_num_seqs": 2}),
    "mean_requests_running": ({}, {"max_num_seqs": 2}),
    "mfu": ({}, {"hardware": "h100"}),
    "mbu": ({}, {"hardware": "h100"}),
    "num_steps": ({}, {"max_num_batched_tokens": 64}),
    "mean_queue_ms": ({}, {"max_num_seqs": 2}),
}


@pytest.mark.parametrize("metric", METRIC_CAUSES)
def test_each_metric_changes_when_its_cause_is_present_c100(metric):
    base = {"num_kv_blocks": 4096, "max_num_seqs": 64}
    workload = synthetic(
        "sessions", seed=1, num_requests=40, rate=20.0, prompt="uniform:10:100",
        output="uniform:10:100", shared_prefix=64, turns="2",
    )  # fmt: skip
    without, with_cause = (run(workload, **{**base, **each}) for each in METRIC_CAUSES[metric])
    assert ours(without)[metric] != ours(with_cause)[metric]


def test_an_idle_replica_stays_at_zero_c101():
    class Pinned:
        def choose(self, prompt, replicas):
            return 0

    from sim.cluster.simulation import Simulation
    from sim.cost.physics import Physics

    finished = run(rows_workload((0, 16, 5)), replicas=2)
    parts = finished.parts
    physics = Physics(parts.model, parts.hardware)
    workload = rows_workload((0, 100, 20), (5, 100, 20))
    result = Simulation(workload, parts.kernel, parts.costs, physics, Pinned()).run()
    busy, idle = result.servers
    assert busy.busy_ns > 0 and busy.kv_block_ns > 0
    assert idle.busy_ns == idle.kv_block_ns == idle.num_steps == 0
    assert set(result.ledger.replica) == {0}


def test_an_output_beyond_the_context_is_left_out_and_never_clipped_c103():
    finished = run(rows_workload((0, 10, 5000), (1, 10, 50)), max_model_len=4096)
    assert finished.summary.completed == 1 and finished.summary.failed == 1
    assert ours(finished)["rejections"] == {"exceeds_max_model_len": 1}
    ledger = finished.result.ledger
    assert [status == COMPLETED for status in ledger.status] == [False, True]
    assert finished.summary.total_input_tokens == 10
    assert finished.summary.total_output_tokens == 50


def test_one_token_outputs_have_no_tpot_and_meet_any_tpot_slo():
    finished = run(rows_workload((0, 16, 1), (0, 16, 3)), costs=constant(10), slos_ms={"tpot": 5.0})
    assert finished.summary.tpot.mean == 10.0
    assert finished.summary.request_goodput * finished.summary.duration == pytest.approx(1)


def test_simultaneous_arrivals_are_batched_in_row_order(tmp_path):
    log = tmp_path / "log.jsonl"
    run(rows_workload((0, 16, 2), (0, 16, 2), (0, 16, 2)), costs=constant(10), log_path=log)
    first = steps_of(log)[0]
    assert [entry.request_id for entry in first.entries] == [0, 1, 2]


def test_an_arrival_at_the_end_of_a_step_joins_the_very_next_one(tmp_path):
    """Step end, arrivals, then the next schedule."""
    log = tmp_path / "log.jsonl"
    run(rows_workload((0, 16, 5), (20, 16, 2)), costs=constant(10), log_path=log)
    third = steps_of(log)[2]
    assert third.start_ns == 20 * MS
    assert [entry.request_id for entry in third.entries] == [0, 1]


def test_a_follow_up_turn_hits_the_whole_conversation_before_it():
    workload = synthetic(
        "sessions", num_requests=10, turns="10", rate=1.0, prompt="64", output="64",
        shared_prefix=64, think_s=1.0,
    )  # fmt: skip
    hits = run(workload).result.ledger.hit_tokens
    # All but the newest answer's last token and the new tokens are cached, in whole blocks.
    assert list(hits) == [0, *(((64 + 128 * turn - 1) // 16) * 16 for turn in range(1, 10))]


def test_features_are_plain_values():
    assert replace(StepFeatures(1, 2, (), 1), num_decodes=3).num_tokens == 3
