"""Skipping stretches of decode steps changes nothing: the same bytes as step by step."""

import json

import pytest
from sim_testing import deployment, run, synthetic

from engine.core import InputError
from engine.core.policy_registry import POLICIES
from engine.steplog.api import DecodeStretch, StepLogReader
from sim.cluster.simulation import RunOptions
from sim.run.outputs import write_requests_csv

# Pools and limits are small, so that preemptions, chunks and waiting all happen.
CASES = {
    "roomy": ("poisson", {"rate": 20.0}, {}),
    "preempting": (
        "poisson",
        {"rate": 50.0, "prompt": "uniform:10:200", "output": "uniform:1:200"},
        {"num_kv_blocks": 40, "max_num_seqs": 16},
    ),
    "single seats": ("gamma", {"rate": 10.0, "output": "uniform:1:60"}, {"max_num_seqs": 2}),
    "tiny budget": (
        "poisson",
        {"rate": 30.0, "prompt": "uniform:1:300", "output": "uniform:1:100"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 64},
    ),
    "block size one": (
        "poisson",
        {"rate": 10.0, "prompt": "uniform:10:100", "output": "uniform:1:100"},
        {"block_size": 1, "num_kv_blocks": 400},
    ),
    "closed loop": ("closed", {"clients": 12, "think_s": 0.1}, {}),
    "sessions": ("sessions", {"rate": 5.0, "think_s": 0.2}, {"num_kv_blocks": 1200}),
    "no cache": ("sessions", {"rate": 5.0}, {"prefix_caching": False}),
    "thresholded": ("poisson", {"rate": 30.0}, {"long_prefill_token_threshold": 100}),
}
ROUTERS = ("round-robin", "least-tokens", "prefix-affine")


CELLS = [
    (case, policy)
    for case in CASES
    for policy in POLICIES
    if (case, policy) != ("thresholded", "prefill_first")  # which has no threshold
]


@pytest.mark.parametrize(("case", "policy"), CELLS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_skipping_gives_the_same_bytes_as_stepping(tmp_path, case, policy, replicas):
    name, changes, engine = CASES[case]
    router = ROUTERS[sorted(CASES).index(case) % 3]
    workload = synthetic(name, seed=1, num_requests=60, **changes)
    outputs = []
    for step_by_step in (False, True):
        log = tmp_path / f"{step_by_step}.jsonl"
        finished = run(
            workload,
            options=RunOptions(step_by_step=step_by_step),
            log_path=log,
            policy=policy,
            replicas=replicas,
            router=router,
            **engine,
        )
        table = tmp_path / f"{step_by_step}.csv"
        write_requests_csv(finished, table)
        outputs.append(
            (json.dumps(finished.summary.to_json()), table.read_bytes(), log.read_bytes())
        )
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("router", ["least-kv", "power-of-two"])
def test_routers_see_the_same_load_whether_steps_are_skipped_or_not(tmp_path, router):
    workload = synthetic("sessions", seed=1, num_requests=60, rate=20.0, think_s=0.2)
    tables = []
    for step_by_step in (False, True):
        options = RunOptions(step_by_step=step_by_step)
        finished = run(workload, options=options, replicas=3, router=router, num_kv_blocks=1200)
        write_requests_csv(finished, tmp_path / "requests.csv")
        tables.append((tmp_path / "requests.csv").read_bytes())
    assert tables[0] == tables[1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_skipping_equals_stepping_with_calibrated_costs(tmp_path, replicas):
    """Their steps depend on recent steps, and taking in requests takes time between steps."""
    workload = synthetic(seed=3, num_requests=60, rate=25.0)
    outputs = []
    for step_by_step in (False, True):
        log = tmp_path / f"{step_by_step}.jsonl"
        finished = run(
            workload,
            options=RunOptions(step_by_step=step_by_step),
            log_path=log,
            replicas=replicas,
            router="least-tokens",
            model="qwen3-8b",
            hardware="h200",
            cost="calibrated",
        )
        outputs.append((json.dumps(finished.summary.to_json()), log.read_bytes()))
    assert outputs[0] == outputs[1]


def test_the_cases_meet_preemptions_chunks_and_long_stretches(tmp_path):
    """The comparison above would be empty without them."""
    name, changes, engine = CASES["preempting"]
    log = tmp_path / "log.jsonl"
    finished = run(synthetic(name, seed=1, num_requests=60, **changes), log_path=log, **engine)
    assert sum(finished.result.ledger.preemptions) > 5
    name, changes, engine = CASES["roomy"]
    run(synthetic(name, seed=1, num_requests=60, **changes), log_path=log, **engine)
    stretches = [record for record in StepLogReader(log) if isinstance(record, DecodeStretch)]
    assert max(record.num_steps for record in stretches) > 20


def test_a_cost_that_cannot_look_ahead_is_asked_once_per_step(tmp_path):
    finished = run(synthetic(num_requests=20, rate=5.0), cost="exponential:5")
    again = run(
        synthetic(num_requests=20, rate=5.0),
        cost="exponential:5",
        options=RunOptions(step_by_step=True),
    )
    assert finished.summary == again.summary


def test_a_run_that_starves_every_request_is_an_error():
    with pytest.raises(InputError, match="no request can run"):
        run(synthetic(num_requests=3), max_model_len=100)
    assert deployment().num_kv_blocks == 4096
