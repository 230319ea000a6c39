"""A recorded vLLM run in memory: its requests, steps and updates, and how far each request is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.config import KernelConfig
from engine.core.plan import Admission
from engine.core.tokens import Prompt
from engine.steplog.api import ChunkRecord, FinishRecord, StepRecord

NS_PER_US = 1000
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
            async_scheduling=bool(self.updates),
        )

    def prompts(self) -> dict[int, Prompt]:
        """A prompt for each request: distinct ids, shared ones inside a prefix group.

        A recording does not say how long a group's common prefix is: the most that a first
        admission of the group hit is as good, since hits come in whole blocks.
        """
        shared = self._shared_prefixes()
        prompts = {}
        for serial, request in enumerate(self.requests):
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
        first = serial * ID_SPAN + ID_SPAN // 2
        return Prompt(range(first, first + self.requests[serial].output_tokens))

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

    def step_record(self, number: int, step: RecordedStep) -> StepRecord:
        """The record of the next step."""
        computed, known = self._computed, self._known
        admitted = self._admissions(step)
        decodes: list[tuple[int, int]] = []
        chunks, finished = [], []
        for row, (request_id, num_tokens) in enumerate(step.entries):
            first = computed[request_id]
            computed[request_id] = end = first + num_tokens
            samples = end == known[request_id]
            if samples and num_tokens == 1 and first >= self._prompt_tokens[request_id]:
                decodes.append((request_id, first))
            else:
                chunks.append(ChunkRecord(row, request_id, first, num_tokens, samples))
            if samples:
                known[request_id] += 1
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
        order = sorted(ended, key=lambda request_id: row_of.get(request_id, len(row_of)))
        return [FinishRecord(request_id, "length") for request_id in order]
