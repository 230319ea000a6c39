"""The summary of a run: a frozen value, complete when made, with the keys of its public format."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest
from sim_testing import constant, rows_workload, run

from sim.metrics.run_summary import SCHEMA

LATENCIES = [f"{s}_{m}_ms" for m in ("ttft", "tpot", "e2el", "itl")
             for s in ("mean", "median", "std", "p50", "p90", "p95", "p99")]  # fmt: skip
TOP = ["schema", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
       "request_throughput", "output_throughput", "total_token_throughput",
       "max_output_tokens_per_s", "max_concurrent_requests"]  # fmt: skip
OURS = [f"{s}_queue_ms" for s in ("mean", "median", "std", "p50", "p90", "p95", "p99")] + [
    "requests", "rejections", "num_preemptions", "num_preempted_requests", "prefix_hit_tokens",
    "prefix_queried_tokens", "prefix_hit_rate", "first_admission_hit_tokens",
    "first_admission_queried_tokens", "first_admission_hit_rate", "mean_kv_utilisation",
    "peak_kv_utilisation", "mean_requests_in_system", "mean_requests_waiting",
    "mean_requests_running", "num_steps", "batch_size_steps", "peak_flops_per_s",
    "peak_memory_bytes_per_s", "mfu", "mbu", "decode_mfu", "decode_mbu", "prefill_mfu",
    "prefill_mbu", "slo_ms", "physical_floor", "replicas", "num_extrapolated_steps", "stable",
    "provenance"]  # fmt: skip


def test_the_keys_of_the_format_stand_in_their_order():
    finished = run(rows_workload((0, 10, 3), (1, 10, 3)), costs=constant(2))
    document = json.loads(json.dumps(finished.summary.to_json()))
    assert list(document) == [*TOP, *LATENCIES, "sim"]
    assert document["schema"] == SCHEMA
    assert list(document["sim"]) == [*OURS, "trust"]


def test_a_run_with_an_slo_has_a_goodput_and_one_without_has_no_such_key():
    workload = rows_workload((0, 10, 3))
    judged = run(workload, costs=constant(2), slos_ms={"ttft": 500.0}).summary.to_json()
    assert "request_goodput" in judged
    assert "request_goodput" not in run(workload, costs=constant(2)).summary.to_json()


def test_nobody_can_patch_a_summary():
    summary = run(rows_workload((0, 10, 3)), costs=constant(2)).summary
    with pytest.raises(FrozenInstanceError):
        summary.completed = 5
    with pytest.raises(FrozenInstanceError):
        summary.sim.stable = False
