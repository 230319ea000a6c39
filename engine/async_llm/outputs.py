"""What a committed step means for those who wait: rows, beginnings and ends, for the wire."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.async_llm.wire import Begin, End, Outputs, Stats, WirePlace
from engine.core.request import RequestId
from engine.core.scheduler import Scheduler
from engine.requests.committed_step import CommittedStep, StepLogprobs
from engine.requests.outputs import RequestOutput
from engine.sampling_params import SamplingParams


@dataclass(slots=True)
class Followed:
    """One request of the front end's, in the engine's process."""

    number: int
    prompt: array[int]
    params: SamplingParams
    scheduled_ns: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    has_begun: bool = False
    prompt_places: list[WirePlace | None] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether only tokens are asked for."""
        return self.params.logprobs is None and self.params.prompt_logprobs is None


class StepOutputs:
    """Gathers the outputs of steps until they are sent."""

    def __init__(self, scheduler: Callable[[], Scheduler], origin_ns: int) -> None:
        # Asked for each time: a failure may have brought in a fresh one.
        self._scheduler = scheduler
        self._origin_ns = origin_ns
        self.followed: dict[RequestId, Followed] = {}
        self._num_special = 0
        self._ready: list[Outputs] = []

    def follow(self, request_id: RequestId, followed: Followed) -> None:
        """Begins to follow a request."""
        self.followed[request_id] = followed
        self._num_special += not followed.is_plain

    def forget(self, request_id: RequestId) -> Followed | None:
        """Stops following one."""
        followed = self.followed.pop(request_id, None)
        if followed is not None:
            self._num_special -= not followed.is_plain
        return followed

    def take_step(self, step: CommittedStep) -> None:
        """Books a committed step."""
        followed, plan = self.followed, step.plan
        stats = self._stats(step)
        for request_id in plan.preempted:
            if request_id in followed:
                followed[request_id].num_preemptions += 1
        for admission in plan.admitted:
            one = followed.get(admission.request_id)
            if one is None or one.scheduled_ns is not None:
                continue
            one.scheduled_ns = step.start_ns + self._origin_ns
            one.num_cached_tokens = admission.hit_tokens
            if one.params.prompt_logprobs is None:
                stats.prefix_cache_queries += len(one.prompt)
                stats.prefix_cache_hits += admission.hit_tokens
        if step.prompt_logprobs is not None:
            self._take_prompt_rows(step, step.prompt_logprobs)
        numbers, token_ids = self._rows(step)
        logprobs = None
        if step.logprobs is not None and self._num_special:
            logprobs = self._places(step, step.logprobs)
        begins = self._begins(step, stats)
        stats.num_generation_tokens = len(token_ids)
        end_ns = step.end_ns + self._origin_ns
        self._ready.append(Outputs(end_ns, numbers, token_ids, logprobs, begins, [], stats))

    def ended(self, outputs: Iterable[RequestOutput], now_ns: int) -> None:
        """Books requests that are over."""
        ends = []
        for output in outputs:
            followed = self.forget(output.request_id)
            if followed is not None:
                ends.append(_end(followed, output))
        if not ends:
            return
        if not self._ready:
            self._ready.append(Outputs(now_ns, [], [], None, [], [], self.state()))
        self._ready[-1].ends = ends

    def drain(self) -> list[Outputs]:
        """What is to be sent now."""
        ready, self._ready = self._ready, []
        return ready

    def state(self) -> Stats:
        """The state alone."""
        scheduler = self._scheduler()
        used = 1 - scheduler.num_free_blocks / scheduler.config.num_blocks
        counts = (scheduler.num_running, scheduler.num_waiting)
        return Stats(*counts, used, 0, 0, 0, 0, 0, 0, 0)

    def _stats(self, step: CommittedStep) -> Stats:
        stats = self.state()
        stats.num_step_tokens = step.plan.num_tokens
        stats.num_preemptions = len(step.plan.preempted)
        return stats

    def _rows(self, step: CommittedStep) -> tuple[list[int], list[int]]:
        numbers, token_ids = [], []
        for request_id, token_id in zip(step.outcome.sampled, step.outcome.token_ids, strict=True):
            one = self.followed.get(request_id)
            if one is not None:
                numbers.append(one.number)
                token_ids.append(token_id)
        return numbers, token_ids

    def _begins(self, step: CommittedStep, stats: Stats) -> list[Begin]:
        begins = []
        for chunk in step.plan.chunks:
            one = self.followed.get(chunk.request_id) if chunk.samples else None
            if one is None or one.has_begun:
                continue
            one.has_begun = True
            stats.num_prompt_tokens += len(one.prompt)
            stats.num_cached_tokens += one.num_cached_tokens
            places = None
            if one.params.prompt_logprobs is not None:
                places, one.prompt_places = [None, *one.prompt_places], []
            begins.append(Begin(one.number, one.scheduled_ns or 0, one.num_cached_tokens, places))
        return begins

    def _places(self, step: CommittedStep, columns: StepLogprobs) -> list[WirePlace | None]:
        """One entry per row of `_rows`."""
        kept = {*step.outcome.sampled}
        places: list[WirePlace | None] = []
        for row, request_id in enumerate(step.plan.sampled_ids):
            one = self.followed.get(request_id)
            if one is None or request_id not in kept:
                continue
            count = one.params.logprobs
            token_id = step.token_ids[row]
            places.append(None if count is None else _place(columns, row, token_id, count))
        return places

    def _take_prompt_rows(self, step: CommittedStep, columns: StepLogprobs) -> None:
        row = 0
        for part in step.prompt_rows:
            one = self.followed.get(part.request_id)
            for at in range(part.first, part.first + part.count):
                if one is not None and len(one.prompt_places) == at - 1:
                    count = one.params.prompt_logprobs or 0
                    one.prompt_places.append(_place(columns, row, one.prompt[at], count))
                row += 1


def _place(columns: StepLogprobs, row: int, token_id: int, count: int) -> WirePlace:
    """The token that stands there, then the likeliest ones."""
    place = [(token_id, columns.sampled[row], columns.ranks[row])]
    best = zip(columns.top_ids[row][:count], columns.top_logprobs[row], strict=False)
    for rank, (name, value) in enumerate(best, 1):
        if name != token_id:
            place.append((name, value, rank))
    return place


def _end(followed: Followed, output: RequestOutput) -> End:
    completion = output.outputs[0]
    stop_reason = completion.stop_reason
    return End(
        followed.number,
        completion.finish_reason or "error",
        stop_reason if isinstance(stop_reason, int) else None,
        followed.num_preemptions,
        completion.error,
    )
