"""How many copies of a configuration serve a given rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from sim.planning.entries import Entry
from sim.planning.space import Candidate
from sim.planning.study import Objective, Study
from sim.planning.trial import Trial, TrialResult

Make = Callable[[float | None, int], Trial]
RateCheck = Generator[Sequence[Trial], Sequence[TrialResult], list[TrialResult]]
# Larger loads per copy than this multiple of one copy's own capacity are not tried: sharing
# evens out bursts, but cannot make a server faster.
_SHARING = 1.15
_MOST_MORE = 6


def rate_check(make: Make, rate: float, seeds: Sequence[int]) -> RateCheck:
    """Runs a rate with the first seed, and with the others if that one met the SLO."""
    (first,) = yield [make(rate, seeds[0])]
    if not first.met:
        return [first]
    others = yield [make(rate, seed) for seed in seeds[1:]]
    return [first, *others]


def size_search(
    maker: Callable[[Candidate], Make],
    candidate: Candidate,
    rate: float,
    capacity: float,
    seeds: Sequence[int],
    objective: Objective,
) -> Generator[Sequence[Trial], Sequence[TrialResult], list[Entry]]:
    """Entries of all sizes that were tried; the smallest that serves the rate is among them.

    `capacity` is that of one copy.
    """
    tried: dict[int, Entry] = {}
    size = max(1, math.ceil(0.98 * rate / capacity))
    most = size + _MOST_MORE
    while size not in tried and size <= most:
        larger = candidate.scaled(size)
        if objective.max_gpus is not None and larger.num_gpus() > objective.max_gpus:
            break
        results = yield from rate_check(maker(larger), rate, seeds)
        tried[size] = Entry(larger, at_rate=results, hint=size * capacity)
        if not tried[size].serves:
            size += 1
        elif size > 1 and rate / (size - 1) <= _SHARING * capacity:
            size -= 1
        else:
            break
    return [tried[size] for size in sorted(tried)]


def variants(study: Study, candidate: Candidate) -> list[Candidate]:
    """The same configuration with each router of the study."""
    routers = [str(name) for name in study.axes.get("router", (candidate.router,))]
    if len(routers) == 1:
        return [candidate]
    label = tuple(pair for pair in candidate.label if pair[0] != "router")
    return [replace(candidate, router=name, label=(*label, ("router", name))) for name in routers]
