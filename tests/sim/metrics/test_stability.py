"""Loads whose answer is known by construction, and what the verdict says of them.

A server with S slots, steps of 10 ms and O outputs a request serves 100 S / O requests a second;
`shape` is the load as a share of that over the run, from 0 to 1.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from sim_testing import constant, run

from sim.workloads.table import Workload

SLOTS, OUTPUTS, STEP_MS = 8, 8, 10.0
CAPACITY = SLOTS * 1000 / STEP_MS / OUTPUTS  # requests per second


def made(shape, count: int, seed: int, spread: str = "poisson") -> Workload:
    """`count` arrivals whose rate at each time is that share of the capacity."""
    grid = np.linspace(0, 1, 20_001)
    load = np.array([shape(x) for x in grid])
    expected = np.concatenate([[0.0], np.cumsum((load[1:] + load[:-1]) / 2)])
    rng = np.random.default_rng(seed)
    if spread == "poisson":
        marks = np.sort(rng.uniform(0, expected[-1], count))
    else:
        marks = np.linspace(0, expected[-1], count)
    seconds = count / (CAPACITY * load.mean())
    times = np.interp(marks, expected, grid) * seconds * 1e9
    arrivals = array("q", (times - times[0]).astype(np.int64).tolist())
    return Workload("made", arrivals, array("q", [4] * count), array("q", [OUTPUTS] * count))


def stable(workload: Workload, slots: int = SLOTS, **more) -> bool:
    finished = run(
        workload, costs=constant(STEP_MS, more.get("replicas", 1)), max_num_seqs=slots,
        num_kv_blocks=20_000, **more,
    )  # fmt: skip
    return finished.summary.sim.stable


def between(x, low, high):
    return low <= x < high


LOADS = {
    # name: (load, answer)
    "steady, far below": (lambda x: 0.5, True),
    "steady, just below": (lambda x: 0.94, True),
    "steady, just above": (lambda x: 1.07, False),
    "steady, far above": (lambda x: 2.0, False),
    "overload with one lull": (lambda x: 0.1 if between(x, 0.6, 0.7) else 1.4, False),
    "overload with many lulls": (lambda x: 0.1 if x * 20 % 2 < 0.5 else 1.6, False),
    "overload that ends in a lull": (lambda x: 0.1 if x > 0.9 else 1.5, False),
    "one burst in the middle": (lambda x: 6.0 if between(x, 0.4, 0.44) else 0.5, True),
    "one burst at the end": (lambda x: 6.0 if x > 0.96 else 0.5, True),
    "many bursts": (lambda x: 3.0 if x * 30 % 3 < 0.5 else 0.3, True),
    "many bursts above": (lambda x: 4.0 if x * 30 % 3 < 0.8 else 0.4, False),
    "ramp below capacity": (lambda x: 0.2 + 0.7 * x, True),
    "ramp through capacity": (lambda x: 0.5 + x, False),
    "ramp above in the mean": (lambda x: 0.6 + x, False),
    "ramp down from overload, drained": (lambda x: 1.5 - 1.3 * x, True),
    "diurnal below": (lambda x: 0.7 + 0.5 * math.sin(6 * math.pi * x), True),
    "diurnal cut at a peak": (lambda x: 0.7 + 0.5 * math.sin(6 * math.pi * 3.4 / 3 * x), True),
    "diurnal above": (lambda x: 1.15 + 0.5 * math.sin(6 * math.pi * x), False),
    "a step that stays": (lambda x: 0.5 if x < 0.6 else 1.5, False),
    "start from a full queue": (lambda x: 8.0 if x < 0.02 else 0.7, True),
    "silence, then overload": (lambda x: 0.05 if x < 0.3 else 1.8, False),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOADS)
def test_a_load_of_known_answer_is_judged_so(name, seed):
    shape, answer = LOADS[name]
    assert stable(made(shape, 4000, seed)) is answer


@pytest.mark.parametrize("name", LOADS)
def test_replicas_and_even_arrivals_change_no_answer(name):
    shape, answer = LOADS[name]
    workload = made(shape, 2000, 2, "even")
    assert stable(workload, SLOTS // 2, replicas=2) is answer


@pytest.mark.parametrize("clients", [4, 100])
def test_a_closed_loop_is_stable_however_many_wait(clients):
    count = 800
    first = array("q", [0] * clients + [-1] * (count - clients))
    following = array("q", [row + clients if row + clients < count else -1 for row in range(count)])
    workload = Workload("closed", first, array("q", [4] * count), array("q", [OUTPUTS] * count),
                        next_row=following, think_ns=array("q", [0] * count))  # fmt: skip
    assert stable(workload)


def test_a_start_in_an_empty_system_is_no_growth():
    # Each request takes 20 s, a sixth of the run, and never waits.
    count = 600
    times = np.cumsum(np.random.default_rng(0).exponential(0.2e9, count)).astype(np.int64)
    workload = Workload("long", array("q", (times - times[0]).tolist()), array("q", [4] * count),
                        array("q", [2000] * count))  # fmt: skip
    assert stable(workload, slots=256)
