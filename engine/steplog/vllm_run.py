"""A recorded vLLM run in memory: its requests, steps and updates, and how far each request is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from engine.core.config import KernelConfig
from engine.core.plan import Admission
from engine.core.tokens import Prompt
from engine.steplog.api import ChunkRecord, FinishRecord, StepRecord

NS_PER_US = 1000
# Forms that both kinds of recording have.
Positive = Annotated[int, Meta(ge=1)]
Pairs = list[Annotated[list[int], Meta(min_length=2, max_length=2)]]
_SCHEDULING = (
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_active_seqs",
    "prefill_schedule_interval",
)
# Prompts and outputs are ranges of distinct ids; no prompt comes near this length.
ID_SPAN = 1 << 24


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request; `added_us` is when the scheduler got it, `finish_us` when its last token left.

    Recordings with a client of its own also have `sent_us`, when it called the engine, and
    `token_gaps_us`; their `first_token_us` and `finish_us` are the client's.
    """

    id: int
    arrival_us: int
    added_us: int
    first_token_us: int
    finish_us: int
    prompt_tokens: int
    output_tokens: int
    prefix_group: int | None
    sent_us: int | None = None
    token_gaps_us: tuple[int, ...] | None = None
    # Of a log that a recording vLLM wrote: what was asked for, why it ended ("" = it had not by the
    # end of the log), and the numbers of its full blocks' hashes, outputs included.
    max_tokens: int | None = None
    reason: str = "length"
    blocks: tuple[int, ...] | None = None
    priority: int = 0


class RecordedStep(NamedTuple):
    """One engine step; the last three are counts after scheduling.

    `forward_done_us` is when its result had come. Of an asynchronous run that is after the next
    step was scheduled.
    """

    schedule_start_us: int
    schedule_end_us: int
    forward_done_us: int
    entries: list[list[int]]
    admitted: list[list[int]]
    resumed: list[int]
    preempted: list[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int


class RecordedUpdate(NamedTuple):
    """When an asynchronous scheduler booked the result of a step, and who ended by it."""

    step: int
    start_us: int
    end_us: int
    finished: list[int]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run; requests are in the order in which the scheduler got them.

    `updates` are there, one per step, if and only if the run was scheduled asynchronously.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    requests: tuple[RecordedRequest, ...]
    steps: tuple[RecordedStep, ...]
    updates: tuple[RecordedUpdate, ...] = ()
    # When a request was given up by its client, and which.
    aborts: tuple[tuple[int, int], ...] = ()

    @property
    def kernel(self) -> KernelConfig:
        """The kernel's configuration; vLLM keeps one block of its pool as a placeholder."""
        config = self.config
        return KernelConfig(
            num_blocks=config["num_gpu_blocks"] - 1,
            max_model_len=config["max_model_len"],
            block_size=config["block_size"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            enable_prefix_caching=config.get("enable_prefix_caching", True),
            async_scheduling=bool(config.get("async_scheduling", self.updates)),
            policy="priority" if config.get("policy") == "priority" else "mixed",
            watermark_blocks=int(config.get("watermark", 0.0) * config["num_gpu_blocks"]),
            threshold_when_alone=_is_older(config),
            **{name: config[name] for name in _SCHEDULING if name in config},
        )

    def prompts(self) -> dict[int, Prompt]:
        """A prompt for each request: distinct ids, shared ones inside a prefix group.

        A recording does not say how long a group's common prefix is: the most that a first
        admission of the group hit is as good, since hits come in whole blocks.
        """
        shared = self._shared_prefixes()
        prompts = {}
        for serial, request in enumerate(self.requests):
            if request.blocks is not None:
                tokens = self._tokens(serial)
                prompts[request.id] = Prompt.from_spans(_cut(tokens, 0, request.prompt_tokens))
                continue
            common = 0
            group = request.prefix_group
            spans: list[range | array[int]] = []
            if group is not None:
                common = min(shared.get(group, 0), request.prompt_tokens)
                first = -(group + 1) * ID_SPAN
                spans.append(range(first, first + common))
            first = serial * ID_SPAN
            spans.append(range(first, first + request.prompt_tokens - common))
            prompts[request.id] = Prompt.from_spans(spans)
        return prompts

    def outputs(self, serial: int) -> Prompt:
        """Stand-in output ids of the request at this place."""
        request = self.requests[serial]
        if request.blocks is not None:
            end = request.prompt_tokens + request.output_tokens
            tokens = self._tokens(serial)
            return Prompt.from_spans(_cut(tokens, request.prompt_tokens, end))
        first = serial * ID_SPAN + ID_SPAN // 2
        return Prompt(range(first, first + self.requests[serial].output_tokens))

    def _tokens(self, serial: int) -> list[range]:
        """Stand-in ids of prompt and outputs: equal hashes of blocks give equal ids."""
        request = self.requests[serial]
        size, blocks = self.config["block_size"], request.blocks or ()
        total = request.prompt_tokens + request.output_tokens
        spans = [range(-(block + 1) * size, -block * size) for block in blocks[: total // size]]
        own = serial * ID_SPAN
        return [*spans, range(own, own + total - len(spans) * size)]

    def _shared_prefixes(self) -> dict[int, int]:
        group_of = {request.id: request.prefix_group for request in self.requests}
        shared: dict[int, int] = {}
        seen: set[int] = set()
        for step in self.steps:
            for request_id, hit_tokens in step.admitted:
                group = group_of[request_id]
                if request_id not in seen and group is not None:
                    shared[group] = max(shared.get(group, 0), hit_tokens)
                seen.add(request_id)
        return shared


class Progress:
    """How far each request has got, which turns entries into decodes and chunks."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._prompt_tokens = {request.id: request.prompt_tokens for request in recording.requests}
        self._total = {
            request.id: request.prompt_tokens + request.output_tokens
            for request in recording.requests
        }
        self._computed: dict[int, int] = {}
        # Known tokens: prompt and outputs so far, those in flight included.
        self._known = dict(self._prompt_tokens)
        self._admitted: set[int] = set()
        self._result_us = 0
        self._reason = {request.id: request.reason for request in recording.requests}
        self._end_step = _end_steps(recording)

    def step_record(self, number: int, step: RecordedStep) -> StepRecord:
        """The record of the next step."""
        computed, known = self._computed, self._known
        admitted = self._admissions(step)
        decodes: list[tuple[int, int]] = []
        chunks, finished = [], []
        sampled: list[int] = []
        resumed = {request_id for request_id, _ in step.admitted}
        for row, (request_id, num_tokens) in enumerate(step.entries):
            first = computed[request_id]
            computed[request_id] = end = first + num_tokens
            samples = end == known[request_id]
            outputs_only = first >= self._prompt_tokens[request_id] and request_id not in resumed
            if samples and num_tokens == 1 and outputs_only:
                decodes.append((request_id, first))
            else:
                chunks.append(ChunkRecord(row, request_id, first, num_tokens, samples))
            if samples:
                known[request_id] += 1
                if self._end_step.get(request_id, number) >= number:
                    sampled.append(request_id)
                if known[request_id] == self._total[request_id]:
                    finished.append(FinishRecord(request_id, "length"))
        start_us = step.schedule_start_us
        if self._recording.updates:
            # The step before may have run until then.
            start_us = max(step.schedule_end_us, self._result_us)
            finished = self._ended_by(number, step)
        self._result_us = step.forward_done_us
        return StepRecord(
            step=number,
            start_ns=start_us * NS_PER_US,
            duration_ns=(step.forward_done_us - start_us) * NS_PER_US,
            decode_ids=tuple([request_id for request_id, _ in decodes]),
            decode_positions=tuple([first for _, first in decodes]),
            chunks=tuple(chunks),
            preempted=tuple(step.preempted),
            admitted=admitted,
            num_free_blocks=step.num_free_blocks,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            sampled=tuple(sampled) if self._is_void(number, step) else None,
            finished=tuple(finished),
            # Only the scheduler's own time was recorded.
            host_ns=(step.schedule_end_us - step.schedule_start_us) * NS_PER_US,
        )

    def _admissions(self, step: RecordedStep) -> tuple[Admission, ...]:
        """In batch order, since recorders list new and resumed requests apart.

        Who was admitted before is resumed, whether the recorder said so or not.
        """
        row_of = {request_id: row for row, (request_id, _) in enumerate(step.entries)}
        order = sorted(step.admitted, key=lambda pair: row_of.get(pair[0], len(row_of)))
        found = []
        for request_id, hit_tokens in order:
            self._computed[request_id] = hit_tokens
            again = request_id in self._admitted
            self._admitted.add(request_id)
            found.append(Admission(request_id, hit_tokens, 0, 0, 0, again))
        return tuple(found)

    def _ended_by(self, number: int, step: RecordedStep) -> list[FinishRecord]:
        """Who ended by the update of a step, in batch order; the recording has a set."""
        ended = self._recording.updates[number].finished
        row_of = {request_id: row for row, (request_id, _) in enumerate(step.entries)}
        gone = [request_id for request_id, end in self._end_step.items() if end == number]
        gone = [request_id for request_id in gone if self._reason[request_id] == "abort"]
        order = sorted([*ended, *gone], key=lambda name: row_of.get(name, len(row_of)))
        return [FinishRecord(name, self._reason[name] or "length") for name in order]

    def _is_void(self, number: int, step: RecordedStep) -> bool:
        """Whether an entry's request had ended when this step's result came."""
        return any(self._end_step.get(name, number) < number for name, _ in step.entries)


def _end_steps(recording: Recording) -> dict[int, int]:
    """The step with whose result each request ended.

    A request that its client gave up ends with the oldest step in flight, or else at once.
    """
    ends = {name: update.step for update in recording.updates for name in update.finished}
    for time_us, name in recording.aborts:
        scheduled = sum(step.schedule_start_us <= time_us for step in recording.steps)
        booked = sum(update.start_us <= time_us for update in recording.updates)
        if booked < scheduled:
            ends[name] = booked
    return ends


def _cut(spans: list[range], start: int, stop: int) -> list[range | array[int]]:
    """Positions start..stop-1 of spans that follow each other."""
    parts: list[range | array[int]] = []
    at = 0
    for span in spans:
        parts.append(span[max(0, start - at) : max(0, stop - at)])
        at += len(span)
    return parts


def _is_older(config: Mapping[str, Any]) -> bool:
    """Whether a vLLM before 0.33 recorded it, which only a threshold brings out (P-R1)."""
    if not config.get("long_prefill_token_threshold"):
        return False
    version = str(config.get("engine", "")).removeprefix("vllm ").split(".")
    return len(version) > 1 and version[1].isdigit() and int(version[1]) < 33
