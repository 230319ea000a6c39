"""The host's part of asynchronous runs: deciding, launching, booking, and the client's ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sim.calibration.pipeline_samples import Flags, PipelineSamples
from sim.calibration.regression import huber
from sim.cost.pipeline import HostTerms
from sim.cost.terms import Graphs
from sim.cost.work import Floats

# Device times of all steps of a log, were they pure decode.
DecodeTimes = Callable[[PipelineSamples], Floats]

HUBER = 0.3
# A decode launch behind a small prompt step shows unless the device still runs.
LONGEST_DECODE_LAUNCH_NS = 4.5e6
# The share of a wait that a launch must exceed the predicted rest of the device by.
CLEARLY = 1.15
# Requests that come in within so long of a launch's begin are no consequence of its length.
EARLY_NS, HAND_OVER_NS = 8e6, 1.5e6
MIN_LAUNCHES = 20
# Where graphs may end, and by how much launches beyond must then take longer.
BOUNDARIES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
LEAST_JUMP = 1.25
# Contradictions of so much per request more are no difference.
SAME_NS = 1e3
# The device has done so small a step with prompts by the time that its launch ends.
SMALL_TOKENS = 300


def fit_host(logs: Sequence[PipelineSamples], graphs: Graphs, device: DecodeTimes) -> HostTerms:
    """Non-negative fits of all that the host does, relative errors, runs weighed alike."""
    schedule = _fit_columns(logs, _schedule_terms, lambda log: log.decided - log.begins)
    update = _fit_columns(logs, _update_terms, lambda log: log.booked - log.result)
    decode, rest = _decode_launches(logs, device)
    prepare = [max(0.0, decode[0] - rest), decode[1]]
    up_to = float(graphs.mixed_up_to or launch_boundary(logs))
    launches = _prompt_launches(logs, up_to, prepare)
    hand_over, client, between = _hand_over(logs), _client(logs), _between(logs)
    return HostTerms(
        schedule=schedule[0],
        schedule_seq=schedule[1],
        schedule_admission=schedule[2],
        schedule_kilo_token=schedule[3],
        prepare=prepare[0],
        prepare_seq=prepare[1],
        launch_rest=rest,
        graph_launch=launches.graph,
        eager_launch=launches.eager,
        launch_chunk=launches.chunk,
        launch_arrival=launches.arrival,
        graph_up_to=up_to,
        update=update[0],
        update_seq=update[1],
        update_finish=update[2],
        update_kilo_token=update[3],
        between=between[0],
        intake=between[1],
        hand_over=hand_over[0],
        hand_over_kilo_token=hand_over[1],
        client=client[0],
        client_seq=client[1],
        launch_spread=launches.spread,
        run_spread=launches.run_spread,
    )


def _schedule_terms(log: PipelineSamples) -> Floats:
    return np.column_stack(
        (np.ones(len(log)), log.num_seqs, log.num_admitted, log.chunk_tokens / 1e3)
    )


def _update_terms(log: PipelineSamples) -> Floats:
    return np.column_stack(
        (np.ones(len(log)), log.num_sampled, log.num_finished, log.chunk_tokens / 1e3)
    )


Columns = Callable[[PipelineSamples], Floats]


def _fit_columns(logs: Sequence[PipelineSamples], terms: Columns, times: Columns) -> list[float]:
    """Coefficients of a host time; all runs have one weight."""
    return _solve([terms(log) for log in logs], [times(log) for log in logs])


def _solve(terms: Sequence[Floats], times: Sequence[Floats]) -> list[float]:
    weights = [np.full(len(column), max(1, len(column)) ** -0.5) for column in times]
    target = np.concatenate(times)
    if not len(target):
        return [0.0] * terms[0].shape[1]
    tolerance = np.full(len(target), HUBER)
    beside = np.full(len(target), 1e4)
    found = huber(np.vstack(terms), target, beside, np.concatenate(weights), tolerance)
    return [float(value) for value in found]


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of steps with prompts, behind the preparation of their inputs."""

    graph: float
    eager: float
    chunk: float = 0.0
    arrival: float = 0.0
    spread: float = 0.0
    run_spread: float = 0.0


def _prompt_launches(
    logs: Sequence[PipelineSamples], up_to: float, prepare: Sequence[float]
) -> Launches:
    """They show in the wait for the decode step before, where that ends earlier on the device."""
    run, eager, launch, inputs, chunks, early, arrivals = (
        np.concatenate(columns)
        for columns in zip(
            *(_launch_columns(place, log, up_to, prepare) for place, log in enumerate(logs)),
            strict=True,
        )
    )
    rest = launch - inputs
    kinds = np.column_stack((eager == 0, eager == 1)).astype(np.float64)
    if len(launch) < MIN_LAUNCHES:
        mean = float(rest.mean()) if len(rest) else 0.0
        return Launches(max(0.0, mean), max(0.0, mean))
    # Later arrivals are more the longer a launch takes, so only the early ones tell their cost.
    terms = np.column_stack((kinds, chunks, early))
    _, _, chunk, arrival = _solve([terms], [np.maximum(rest, 0.0)])
    rest = rest - chunk * chunks - arrival * arrivals
    means = [_mean_of_runs(rest, run, eager == kind) for kind in (0, 1)]
    # Where one kind never ran, it is taken for the other.
    graph, beyond = means[0] or means[1], means[1] or means[0]
    errors = np.log(launch / (launch - rest + np.where(eager == 1, beyond, graph)))
    levels = np.array([errors[run == each].mean() for each in np.unique(run)])
    within = np.concatenate(
        [errors[run == each] - errors[run == each].mean() for each in np.unique(run)]
    )
    count = len(levels)
    between = float(levels.std(ddof=1) * np.sqrt(1 + 1 / count)) if count > 1 else 0.0
    return Launches(max(0.0, graph), max(0.0, beyond), chunk, arrival, float(within.std()), between)


def _mean_of_runs(values: Floats, run: Floats, rows: Flags) -> float:
    """The mean over runs of their means, since runs differ by more than their launches tell."""
    means = [float(values[rows & (run == each)].mean()) for each in np.unique(run[rows])]
    return float(np.mean(means)) if means else 0.0


def _launch_columns(
    run: int, log: PipelineSamples, up_to: float, prepare: Sequence[float]
) -> tuple[Floats, ...]:
    """Run, kind, launch, inputs, further chunks, and requests that came in early and at all."""
    rows = np.flatnonzero(prompt_launch_rows(log))
    come = np.sort([
        one.added if one.sent is None else one.sent + HAND_OVER_NS for one in log.requests
    ])  # fmt: skip
    decided = log.decided[rows]
    ends = [np.searchsorted(come, decided + wait) for wait in (EARLY_NS, log.waits[rows])]
    before = np.searchsorted(come, decided)
    return (
        np.full(len(rows), run, dtype=np.float64),
        (log.num_tokens[rows] > up_to).astype(np.float64),
        log.waits[rows],
        prepare[0] + prepare[1] * log.num_seqs[rows],
        np.array([len(log.features[row].chunks) - 1 for row in rows], dtype=np.float64),
        (ends[0] - before).astype(np.float64),
        (ends[1] - before).astype(np.float64),
    )


def launch_boundary(logs: Sequence[PipelineSamples]) -> int:
    """The largest step with prompts that runs in graphs, by a jump of the launches; 0 for none.

    Engine logs do not say it. The boundary leaves the least variance on its two sides.
    """
    rows = [prompt_launch_rows(log) for log in logs]
    tokens = np.concatenate([log.num_tokens[one] for log, one in zip(logs, rows, strict=True)])
    launches = np.concatenate([log.waits[one] for log, one in zip(logs, rows, strict=True)])
    best = (np.inf, 0)
    for boundary in BOUNDARIES:
        below = tokens <= boundary
        if min(below.sum(), (~below).sum()) < MIN_LAUNCHES:
            continue
        parts = (launches[below], launches[~below])
        if parts[1].mean() > LEAST_JUMP * parts[0].mean():
            best = min(best, (sum(float(part.var() * len(part)) for part in parts), boundary))
    return best[1]


def prompt_launch_rows(log: PipelineSamples) -> Flags:
    """Steps with prompts behind decode steps whose wait was longer than the device's."""
    quiet, rows = ~log.has_chunks, np.zeros(len(log), dtype=np.bool_)
    periods, waits = log.periods, log.waits
    rest = log.result[:-3] + periods[1:-2] - log.decided[3:]
    behind = log.steady[3:] & log.steady[2:-1] & quiet[:-3] & quiet[1:-2] & quiet[2:-1]
    rows[3:] = behind & log.has_chunks[3:] & (waits[3:] > CLEARLY * rest)
    return rows


def _decode_launches(
    logs: Sequence[PipelineSamples], device: DecodeTimes
) -> tuple[list[float], float]:
    """Launches of decode steps, and the part of them in which the device runs already.

    They show behind small steps with prompts, which the device has done by then; and the step's own
    result comes its time on the device after that has begun.
    """
    terms, times, rests = [], [], []
    for log in logs:
        small = log.has_chunks & (log.num_tokens <= SMALL_TOKENS)
        rows = np.zeros(len(log), dtype=np.bool_)
        rows[1:] = small[:-1] & ~log.has_chunks[1:] & log.steady[1:]
        rows &= np.nan_to_num(log.waits, nan=np.inf) < LONGEST_DECODE_LAUNCH_NS
        terms.append(np.column_stack((np.ones(int(rows.sum())), log.num_seqs[rows])))
        times.append(log.waits[rows])
        quiet = np.zeros(len(log), dtype=np.bool_)
        quiet[:-1] = rows[:-1] & ~log.has_chunks[1:] & log.steady[1:]
        rests.append((device(log) - log.periods)[quiet])
    rest = np.concatenate(rests)
    return _solve(terms, times), max(0.0, float(np.median(rest))) if len(rest) else 0.0


def _between(logs: Sequence[PipelineSamples]) -> list[float]:
    """From the end of a call to the next decision, with the requests taken in."""
    terms, times = [], []
    for log in logs:
        added = np.array([one.added for one in log.requests])
        rows = np.flatnonzero(log.steady[2:] & log.steady[1:-1]) + 2
        ends, begins = log.booked[rows - 2], log.begins[rows]
        counts = np.searchsorted(added, begins, "right") - np.searchsorted(added, ends, "right")
        terms.append(np.column_stack((np.ones(len(rows)), counts)))
        times.append(begins - ends)
    return _solve(terms, times)


def _hand_over(logs: Sequence[PipelineSamples]) -> list[float]:
    """From the client's due time to the scheduler's queue, per request and 1,000 prompt tokens.

    A request is seen at the first end of a call after it has come, so each says between which two
    times it came; taken are the numbers that contradict the requests least.
    """
    low, high, tokens, late = [], [], [], []
    for log in logs:
        ends = np.sort(log.booked)
        for one in log.requests:
            if one.sent is None:
                continue
            place = int(np.searchsorted(ends, one.added, "right")) - 1
            low.append(ends[place - 1] - one.sent if place >= 1 else 0.0)
            high.append(one.added - one.sent)
            tokens.append(one.prompt_tokens / 1e3)
            late.append(one.sent - one.arrival)
    if not high:
        return [0.0, 0.0]
    lows, highs, kilo = np.array(low), np.array(high), np.array(tokens)
    tried = []
    for fixed in np.arange(0, 4e6, 5e4):
        for slope in np.arange(0, 1.01e6, 5e4):
            times = fixed + slope * kilo
            wrong = np.maximum(lows - times, 0) + np.maximum(times - highs, 0)
            tried.append((float(np.minimum(wrong, 1e6).mean()), float(fixed), float(slope)))
    # What contradicts the requests equally little is equally likely.
    least = min(tried)[0]
    likely = np.array([one[1:] for one in tried if one[0] <= least + SAME_NS])
    fixed_ns, slope_ns = likely.mean(axis=0)
    return [float(fixed_ns) + float(np.mean(late)), float(slope_ns)]


def _client(logs: Sequence[PipelineSamples]) -> list[float]:
    """From the end of a booking to the client's sight of its tokens, per step and token."""
    terms, times = [], []
    for log in logs:
        delays = client_delays(log)
        rows = np.isfinite(delays)
        terms.append(np.column_stack((np.ones(int(rows.sum())), log.num_sampled[rows])))
        times.append(delays[rows])
    return _solve(terms, times)


def client_delays(log: PipelineSamples) -> Floats:
    """Mean over the tokens of each step; NaN where the client's times are not known."""
    tokens = {one.id: one.tokens for one in log.requests if one.tokens is not None}
    taken = dict.fromkeys(tokens, 0)
    found = np.full(len(log), np.nan)
    for number, sampled in enumerate(log.sampled):
        seen = []
        for request_id in sampled:
            times, place = tokens.get(request_id), taken.get(request_id, 0)
            if times is not None and place < len(times):
                seen.append(times[place])
                taken[request_id] = place + 1
        if seen:
            found[number] = float(np.mean(seen)) - log.booked[number]
    return found
