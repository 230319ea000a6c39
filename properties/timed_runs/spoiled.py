"""Defects planted into what the simulator counts; LAW-M11 must notice each of them.

They replace a function of the real simulator while a run is made and summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from engine.core.views import SchedulerViews
from sim.metrics import summary
from sim.metrics.requests import COMPLETED, UNSET, Ledger, Population
from sim.metrics.run_summary import Latency, PriorityClass
from sim.metrics.server_stats import SECOND_NS, FloorBreak, ServerStats
from sim.metrics.summary import RequestTimes
from sim.metrics.token_gaps import GapPool, TokenClock
from sim.run import run


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A wrong figure: what is wrong, and the functions that make it so."""

    name: str
    what: str
    patches: tuple[tuple[object, str, object], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The simulator with the defect."""
        with ExitStack() as stack:
            for place, name, broken in self.patches:
                stack.enter_context(mock.patch.object(place, name, broken))
            yield


# Their names are bound before anything is patched.
_request_times, _latency, _meets = summary.request_times, summary._latency, summary.meets
_add_steps, _admitted = ServerStats.add_steps, Ledger.admitted
_preempted, _distinct = TokenClock.preempted, GapPool.distinct
_change, _rejected, _replica = Population.change, Ledger.rejected, summary._replica
_find_breaks, _classes = ServerStats._find_breaks, summary._priority_classes
_summarize = summary.summarize


def _tpot_of_all_tokens(times: RequestTimes) -> float | None:
    return (times.e2e_ns - times.ttft_ns) / times.output_tokens if times.output_tokens > 1 else None


def _tpot_of_one_token(times: RequestTimes) -> float:
    return (times.e2e_ns - times.ttft_ns) / max(1, times.output_tokens - 1)


def _times_from_service(ledger: Ledger) -> list[RequestTimes]:
    return [replace(t, ttft_ns=t.ttft_ns - t.queue_ns) for t in _request_times(ledger)]


def _times_with_preemptions(ledger: Ledger) -> list[RequestTimes]:
    return [replace(t, queue_ns=t.queue_ns + t.preempted_ns) for t in _request_times(ledger)]


def _meets_some(times: RequestTimes, slos_ms: Mapping[str, float]) -> bool:
    return any(_meets(times, {name: slo}) for name, slo in slos_ms.items())


def _meets_ttft(times: RequestTimes, slos_ms: Mapping[str, float]) -> bool:
    return _meets(times, {name: slo for name, slo in slos_ms.items() if name != "tpot"})


def _sample_std(values: Sequence[float]) -> Latency:
    found = _latency(values)
    if found.std is None or len(values) < 2:
        return found
    return replace(found, std=found.std * (len(values) / (len(values) - 1)) ** 0.5)


def _upper_percentiles(values: Sequence[float]) -> Latency:
    found = _latency(values)
    return replace(found, p99=max(values)) if values else found


def _once_each(pool: GapPool) -> tuple[Any, Any]:
    values, counts = _distinct(pool)
    return values, counts * 0 + 1


def _loses_its_newest(clock: TokenClock, request_id: object) -> None:
    _preempted(clock, request_id)  # type: ignore[arg-type]
    clock._newest_ns.pop(request_id, None)  # type: ignore[call-overload]


def _finished_in_the_queue(ledger: Ledger, row: int, time_ns: int, output_tokens: int) -> None:
    ledger.status[row], ledger.finish_ns[row] = COMPLETED, time_ns
    ledger.output_tokens[row] = output_tokens
    ledger.in_system.change(-1, time_ns)


def _without_new_blocks(stats: ServerStats, *arguments: Any) -> None:  # noqa: ANN401
    _add_steps(stats, *arguments[:5])


def _tokens_at_the_start(stats: ServerStats, num_sampled: int, ends_ns: Sequence[int]) -> None:
    for end in [stats.last_end_ns - (ends_ns[-1] - ends_ns[0]), *ends_ns[:-1]]:
        second = max(0, end - 900_000) // SECOND_NS
        missing = second + 1 - len(stats.tokens_per_second)
        stats.tokens_per_second.extend([0] * max(0, missing))
        stats.tokens_per_second[second] += num_sampled


def _peak_behind(population: Population, by: int, time_ns: int) -> None:
    peak = population.peak
    _change(population, by, time_ns)
    population.peak = max(peak, population.count - 1)


def _rejected_but_waiting(ledger: Ledger, row: int, time_ns: int, *why: str) -> None:
    _rejected(ledger, row, time_ns, *why)
    ledger.in_queue.count += 1


def _queued_until_the_last(ledger: Ledger, row: int, time_ns: int, hit_tokens: int) -> None:
    first = ledger.first_scheduled_ns[row]
    _admitted(ledger, row, time_ns, hit_tokens)
    if first != UNSET:
        ledger.first_scheduled_ns[row] = time_ns


def _counts_the_waiting(stats: ServerStats, *arguments: Any) -> None:  # noqa: ANN401
    features, start, ends, queues, *rest = arguments
    _add_steps(stats, features, start, ends, (sum(queues), queues[1]), *rest)


def _all_are_decodes(stats: ServerStats, *arguments: Any) -> None:  # noqa: ANN401
    stages = stats.decode, stats.prefill
    stats.prefill = stats.decode
    _add_steps(stats, *arguments)
    stats.decode, stats.prefill = stages


def _one_break_a_stretch(stats: ServerStats, *arguments: Any) -> None:  # noqa: ANN401
    before = stats.floor.count
    _find_breaks(stats, *arguments)
    stats.floor = FloorBreak(
        min(stats.floor.count, before + 1), stats.floor.worst_ratio, stats.floor.worst
    )


def _of_all_replicas(server: ServerStats, end_ns: int, ledger: Ledger, index: int) -> object:
    return replace(_replica(server, end_ns, ledger, index), completed=ledger.status.count(1))


def _classes_of_all(result: Any, times: Any, stable: bool) -> tuple[PriorityClass, ...]:  # noqa: ANN401
    classes = _classes(result, times, stable)
    return tuple([replace(one, ttft=classes[0].ttft) for one in classes])


def _failed_are_the_rejected(result: Any, facts: Any) -> object:  # noqa: ANN401
    found = _summarize(result, facts)
    return replace(found, failed=found.sim.requests.rejected)


def _rates_of_all(result: Any, facts: Any) -> object:  # noqa: ANN401
    found = _summarize(result, facts)
    sent = sum(result.workload.output_tokens)
    return replace(found, output_throughput=sent / found.duration)


def _queried_with_new_token(views: SchedulerViews, request_id: object) -> int:
    return views.num_tokens(request_id)  # type: ignore[arg-type]


def _spoiled(name: str, what: str, place: object, attribute: str, broken: object) -> Spoiled:
    return Spoiled(name, what, ((place, attribute, broken),))


TIMES = (
    _spoiled("TpotOfAllTokens", "TPOT divides by all output tokens, the first one too",
             RequestTimes, "tpot_ns", property(_tpot_of_all_tokens)),
    _spoiled("TpotOfOneToken", "a request of one token counts with a TPOT of 0",
             RequestTimes, "tpot_ns", property(_tpot_of_one_token)),
    _spoiled("TtftWithoutQueue", "TTFT begins when a request is scheduled first",
             summary, "request_times", _times_from_service),
    _spoiled("QueueWithPreemptions", "queue time holds the waits after preemptions",
             summary, "request_times", _times_with_preemptions),
    _spoiled("SampleDeviation", "the deviation is that of a sample",
             summary, "_latency", _sample_std),
    _spoiled("UpperPercentiles", "p99 is the greatest value",
             summary, "_latency", _upper_percentiles),
    _spoiled("GapsOnceEach", "equal gaps between tokens count once",
             GapPool, "distinct", _once_each),
    _spoiled("GapOfThePreempted", "the gap over a preemption is left out",
             TokenClock, "preempted", _loses_its_newest),
    _spoiled("PeakTokensAtTheStart", "tokens count in the second in which their step begins",
             ServerStats, "_add_tokens", _tokens_at_the_start),
)  # fmt: skip
COUNTS = (
    _spoiled("GoodputOfSome", "one SLO that is met is enough",
             summary, "meets", _meets_some),
    _spoiled("GoodputWithoutTpot", "the SLO on TPOT is passed over",
             summary, "meets", _meets_ttft),
    _spoiled("QueriesTheNewToken", "an admission asks for the token that it samples (ours)",
             SchedulerViews, "num_known_tokens", _queried_with_new_token),
    _spoiled("QueuedUntilTheLast", "queue time ends at the last admission",
             Ledger, "admitted", _queued_until_the_last),
    _spoiled("PeakBehind", "the greatest number of requests is one too small",
             Population, "change", _peak_behind),
    _spoiled("FailedAreTheRejected", "requests that were never sent have not failed",
             run, "summarize", _failed_are_the_rejected),
    _spoiled("RatesOfAllRequests", "throughput counts tokens of requests that were left out",
             run, "summarize", _rates_of_all),
    _spoiled("CompletedAnywhere", "a replica claims what all have completed",
             summary, "_replica", _of_all_replicas),
    _spoiled("OneClass", "every priority shows the times of the most important one",
             summary, "_priority_classes", _classes_of_all),
)  # fmt: skip
SUMS = (
    _spoiled("StaysQueued", "who ends in the queue after a preemption waits for ever (ours)",
             Ledger, "finished", _finished_in_the_queue),
    _spoiled("RejectedStayQueued", "a rejected request waits for ever",
             Ledger, "rejected", _rejected_but_waiting),
    _spoiled("BlocksOfTheFirstStep", "a stretch of decodes keeps the blocks of its first step",
             ServerStats, "add_steps", _without_new_blocks),
    _spoiled("RunningAndWaiting", "waiting requests count as running",
             ServerStats, "add_steps", _counts_the_waiting),
    _spoiled("AllAreDecodes", "steps with prompts count as decode steps",
             ServerStats, "add_steps", _all_are_decodes),
    _spoiled("OneBreakAStretch", "a stretch that beats physics counts as one step",
             ServerStats, "_find_breaks", _one_break_a_stretch),
)  # fmt: skip
SPOILED: tuple[Spoiled, ...] = TIMES + COUNTS + SUMS


def first_noticed(
    spoiled: Spoiled, judge: Callable[[int], None], seeds: range
) -> tuple[int, Exception] | None:
    """The first run in which somebody notices, and what was said."""
    for seed in seeds:
        try:
            with spoiled.planted():
                judge(seed)
        except Exception as alarm:  # a crash is noticed too
            return seed, alarm
    return None
