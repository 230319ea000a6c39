"""Synthetic workloads: seeded, unscaled, and with prompts that sessions really share."""

import math
from itertools import pairwise

import numpy as np
import pytest
from sim_testing import constant, run, synthetic

from engine.core import ConfigError
from sim.workloads.arrivals import draw_arrivals
from sim.workloads.generators import WORKLOADS, generate, preset
from sim.workloads.lengths import parse_lengths
from sim.workloads.readers import read_lengths
from sim.workloads.table import output_stripe


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_named_workload_repeats_with_its_seed_and_changes_with_it(name):
    first, again = synthetic(name, 3, num_requests=50), synthetic(name, 3, num_requests=50)
    other = synthetic(name, 4, num_requests=50)
    assert len(first) == 50
    assert first.prompt_tokens == again.prompt_tokens
    assert first.arrival_ns == again.arrival_ns
    assert first.prompt_tokens != other.prompt_tokens
    assert min(first.prompt_tokens) >= 1 and min(first.output_tokens) >= 1


def test_gaps_are_not_rescaled_to_the_exact_rate():
    totals = {draw_arrivals("poisson", 2.0, 100, np.random.default_rng(s))[-1] for s in range(5)}
    assert len(totals) == 5  # rescaled gaps would all end at the same time
    mean = sum(totals) / 5 / 1e9
    assert 99 / 2.0 * 0.7 < mean < 99 / 2.0 * 1.3


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_sets_the_coefficient_of_variation(burstiness):
    times = draw_arrivals("gamma", 5.0, 40_000, np.random.default_rng(1), burstiness)
    gaps = np.array([after - before for before, after in pairwise(times)])
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert gaps.mean() == pytest.approx(0.2e9, rel=0.05)


def test_constant_arrivals_have_equal_gaps():
    times = draw_arrivals("constant", 4.0, 5, np.random.default_rng(0))
    assert list(times) == [0, 250_000_000, 500_000_000, 750_000_000, 1_000_000_000]


def test_lengths_and_arrivals_have_streams_of_their_own():
    first = synthetic(num_requests=40, prompt="uniform:10:20")
    second = synthetic(num_requests=40, prompt="uniform:1000:2000")
    assert first.arrival_ns == second.arrival_ns
    assert first.output_tokens == second.output_tokens


def test_lognormal_lengths_have_the_named_quantiles():
    lengths = parse_lengths("prompt_len", "lognormal:1000:4000")
    drawn = np.array(lengths.draw(np.random.default_rng(0), 50_000))
    assert np.median(drawn) == pytest.approx(1000, rel=0.03)
    assert np.percentile(drawn, 99) == pytest.approx(4000, rel=0.05)


@pytest.mark.parametrize(
    "spec", ["", "0", "-5", "abc", "uniform:5", "uniform:9:3", "normal:1:2", "lognormal:0:5",
             "uniform:1:999999999", "1.5"]
)  # fmt: skip
def test_a_bad_length_spec_is_refused(spec):
    with pytest.raises(ConfigError, match="prompt_len"):
        parse_lengths("prompt_len", spec)


def test_empirical_lengths_are_drawn_from_a_trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n10,1\n20,2\n30,3\n")
    spec = preset("poisson", prompt=f"empirical:{path}", output=f"empirical:{path}")
    workload = generate("poisson", spec, 0, read_lengths)
    assert set(workload.prompt_tokens) == {10, 20, 30}
    assert set(workload.output_tokens) == {1, 2, 3}


def test_closed_loop_clients_wait_for_their_own_answers():
    workload = synthetic("closed", num_requests=10, clients=3)
    assert list(workload.arrival_ns) == [0] * 3 + [-1] * 7
    assert [workload.successor(row) for row in range(10)] == [*range(3, 10), -1, -1, -1]
    ledger = run(workload, costs=constant(10)).result.ledger
    for row in range(7):
        assert ledger.arrival_ns[row + 3] == ledger.finish_ns[row]
    assert ledger.in_system.peak == 3


@pytest.mark.parametrize(
    "changes", [{"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"num_requests": 0},
                {"rate": math.inf}]
)  # fmt: skip
def test_impossible_parameters_are_refused(changes):
    with pytest.raises(ConfigError):
        synthetic(**changes)


def test_the_prompt_of_a_turn_holds_the_whole_conversation_before_it():
    workload = synthetic("sessions", num_requests=40, shared_prefix=32, turns="4")
    assert workload.sessions is not None
    for row in range(40):
        prompt = workload.prompt(row)
        assert len(prompt) == workload.prompt_tokens[row]
        before = workload.sessions.previous[row]
        if before < 0:
            continue
        earlier = workload.prompt(before)
        answer = output_stripe(before, workload.output_tokens[before])
        assert prompt[: len(earlier)] == earlier[:]
        assert list(prompt[len(earlier) : len(earlier) + len(answer)]) == list(answer)


def test_requests_share_no_token_unless_the_workload_says_so():
    workload = synthetic(num_requests=30)
    seen: set[int] = set()
    for row in range(30):
        tokens = set(workload.prompt(row)) | set(output_stripe(row, workload.output_tokens[row]))
        assert len(tokens) == workload.prompt_tokens[row] + workload.output_tokens[row]
        assert not tokens & seen
        seen |= tokens
