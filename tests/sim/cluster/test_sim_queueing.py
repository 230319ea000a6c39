"""Queueing theory: one seat is an M/D/1 or M/M/1 queue, so its mean wait is known."""

import math
import statistics
from array import array

import numpy as np
import pytest
from scipy import stats
from sim_testing import constant, run

from sim.cost.simple import ExponentialCost
from sim.metrics.summary import request_times
from sim.workloads.arrivals import draw_arrivals
from sim.workloads.table import Workload

SERVICE_NS = 10**9
NUM_REQUESTS = 20_000
NUM_BATCHES = 20
# A true model fails six such tests together about once in 300 seeds; the seed is fixed.
CONFIDENCE = 0.9995


def mean_wait(load: float, costs) -> tuple[float, float]:
    """Mean wait in service times and the half width of its confidence interval (batch means)."""
    rate = load / (SERVICE_NS / 1e9)
    arrivals = draw_arrivals("poisson", rate, NUM_REQUESTS, np.random.default_rng(17))
    ones = array("q", [1]) * NUM_REQUESTS
    workload = Workload("queue", arrivals, ones, ones)
    finished = run(workload, costs=costs, max_num_seqs=1, prefix_caching=False, num_kv_blocks=8)
    waits = [request.queue_ns / SERVICE_NS for request in request_times(finished.result.ledger)]
    size = NUM_REQUESTS // NUM_BATCHES
    batches = [math.fsum(waits[i : i + size]) / size for i in range(0, NUM_REQUESTS, size)]
    half = stats.t.ppf((1 + CONFIDENCE) / 2, NUM_BATCHES - 1)
    return statistics.fmean(waits), half * statistics.stdev(batches) / math.sqrt(NUM_BATCHES)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_constant_service_waits_like_m_d_1(load):
    wait, half_width = mean_wait(load, constant(1000))
    theory = load / (2 * (1 - load))
    assert abs(wait - theory) <= half_width
    assert half_width < 0.35 * theory  # the interval is narrow enough to mean something


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_exponential_service_waits_like_m_m_1(load):
    wait, half_width = mean_wait(load, (ExponentialCost(SERVICE_NS, 23),))
    theory = load / (1 - load)
    assert abs(wait - theory) <= half_width
    assert half_width < 0.35 * theory
