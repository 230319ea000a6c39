"""Teacher-forced runs of the real engine: plans from the real kernel, steps by the real runner.

Only the sampled tokens are replaced before they are fed back, so prompts, chunks, decode steps,
prefix hits and preemptions go through the same block tables, cache and (on a GPU) CUDA graphs as
in service, and the hidden state of every computed position is seen.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from engine.core import KernelConfig, Prompt, Request, Scheduler, StepPlan, audit
from engine.core.request import RequestId
from engine.distributed.group import TpGroup
from engine.options import EngineOptions
from engine.sampling_params import RequestSampling, SamplingParams
from engine.step.builder import StepBuilder
from engine.step.header import kernel_config
from engine.worker.command import StepCommand
from engine.worker.runner import ModelRunner
from golden.cases import ForcedSequence

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Events:
    """What the kernel did to one request on its way."""

    hit_tokens: int = 0  # at its first admission
    num_chunks: int = 0
    num_decodes: int = 0
    num_preemptions: int = 0
    hits_after_preemption: int = 0


@dataclass(slots=True)
class Observed:
    """Hidden states of one request's computed positions, in the order of computation."""

    sequence: ForcedSequence
    events: Events = field(default_factory=Events)
    positions: list[int] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    drawn: dict[int, int] = field(default_factory=dict)  # position -> token the engine drew

    def hidden(self) -> Tensor:
        """[n, hidden]; a position that was computed twice has two rows."""
        return torch.cat(self.pieces)

    def latest(self) -> dict[int, int]:
        """Position -> row of its last computation."""
        return {position: row for row, position in enumerate(self.positions)}


# Called with every plan before it is committed.
Execute = Callable[[StepPlan], None]


def drive(
    scheduler: Scheduler,
    sequences: Sequence[ForcedSequence],
    execute: Execute,
    arrivals: Sequence[int] = (),
    checked: bool = True,
) -> dict[str, Events]:
    """Runs sequences to their end, feeding back their given tokens.

    `arrivals` holds the step before which each sequence is added (default: all at the start).
    The kernel alone decides everything else, so a run without a model shows what will happen.
    """
    events = {sequence.name: Events() for sequence in sequences}
    by_name = {sequence.name: sequence for sequence in sequences}
    due = list(zip(arrivals or [0] * len(sequences), sequences, strict=True))
    step = 0
    while due or scheduler.has_work:
        for item in [item for item in due if item[0] <= step]:
            scheduler.add(as_request(item[1]))
            due.remove(item)
        step += 1
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule()
        _count(plan, events)
        execute(plan)
        tokens = [
            by_name[str(request_id)].forced[len(scheduler.output_token_ids(request_id))]
            for request_id in plan.sampled_ids
        ]
        scheduler.commit(plan, tokens)
        if checked:
            audit(scheduler)
    return events


def as_request(sequence: ForcedSequence) -> Request:
    """The kernel's request: no stop ids, so that every given token is used."""
    return Request(sequence.name, Prompt(sequence.prompt), max_tokens=len(sequence.forced))


def _count(plan: StepPlan, events: dict[str, Events]) -> None:
    for admission in plan.admitted:
        event = events[str(admission.request_id)]
        if admission.resumed:
            event.hits_after_preemption += admission.hit_tokens
        else:
            event.hit_tokens = admission.hit_tokens
    for request_id in plan.preempted:
        events[str(request_id)].num_preemptions += 1
    for entry in plan.entries:
        event = events[str(entry.request_id)]
        event.num_decodes += entry.is_decode
        event.num_chunks += not entry.is_decode


class ForcedRunner:
    """One engine rank with its kernel; runs share the prefix cache until `reset`."""

    def __init__(
        self,
        options: EngineOptions,
        group: TpGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.options = options
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", 0)
        self.runner = ModelRunner(options, group or TpGroup(), place)
        self.model = self.runner.model
        self._step_hidden: Tensor | None = None
        self.step_rows: list[tuple[str, int]] = []  # (request, position) of the step under way
        self._tables = hashlib.sha256()
        self._changes: dict[str, Any] = {}
        self._hook = self.model.register_forward_hook(self._keep_hidden)
        self.scheduler = self._new_scheduler()
        self._sampling: dict[RequestId, RequestSampling] = {}
        self._builder = self._new_builder()

    @property
    def config(self) -> KernelConfig:
        """The kernel's configuration, sizes agreed by all ranks."""
        return replace(kernel_config(self.options, self.runner.info), **self._changes)

    def reset(self, **changes: object) -> None:
        """A fresh kernel: no request, nothing cached; `changes` are fields of its configuration.

        Pool and budget may only become smaller than the runner's.
        """
        self._changes = changes
        self.scheduler = self._new_scheduler()
        self._builder = self._new_builder()

    def run(
        self,
        sequences: Sequence[ForcedSequence],
        params: SamplingParams = GREEDY,
        arrivals: Sequence[int] = (),
    ) -> dict[str, Observed]:
        """Runs sequences to their end; `params` decides what the engine would have drawn."""
        observed = {sequence.name: Observed(sequence) for sequence in sequences}
        for number, sequence in enumerate(sequences):
            seed = number if params.seed is None else params.seed
            sampling = RequestSampling(params, seed, len(sequence.prompt), frozenset())
            self._sampling[sequence.name] = sampling
        events = drive(
            self.scheduler, sequences, lambda plan: self._execute(plan, observed), arrivals
        )
        for name, item in observed.items():
            item.events = events[name]
            self._builder.remove(name)
        return observed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] by the model's own head."""
        return self.model.compute_logits(hidden)

    @property
    def tables_digest(self) -> str:
        """Digest of every block table at every step, for comparison between ranks."""
        return self._tables.hexdigest()

    def close(self) -> None:
        """Frees the device memory."""
        self._hook.remove()
        del self.model
        self.runner.close()

    def __enter__(self) -> ForcedRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.config)

    def _new_builder(self) -> StepBuilder:
        return StepBuilder(
            self.options.max_num_seqs, self.runner.state.width, self._sampling.__getitem__
        )

    def _keep_hidden(self, _module: object, _inputs: object, output: Tensor) -> None:
        self._step_hidden = output

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, observed: dict[str, Observed]) -> None:
        for name in self.scheduler.running_ids():
            self._tables.update(repr((name, self.scheduler.block_table(name))).encode())
        command = self._builder.build(plan)
        self._step_hidden = None
        self.step_rows = _computed_rows(plan)
        self.runner.launch(command)
        drawn = self.runner.collect().token_ids
        self._force(plan, observed, drawn)
        self._record(plan, command, observed)
        self._forget_finished(plan, observed)

    def _force(self, plan: StepPlan, observed: dict[str, Observed], drawn: array[int]) -> None:
        """Notes what was drawn and makes the given tokens the next inputs instead."""
        forced: list[int] = []
        for (name, position), token in zip(_sampled_rows(plan), drawn, strict=True):
            item = observed[name]
            item.drawn[position] = token
            forced.append(item.sequence.tokens[position + 1])
        if forced:
            tokens = torch.tensor(forced, dtype=torch.int64, device=self.runner.device)
            self.runner.state.keep_sampled(len(forced), tokens)

    def _record(self, plan: StepPlan, command: StepCommand, observed: dict[str, Observed]) -> None:
        num_decodes = command.num_decodes
        # Under a graph no Python of the model runs; the rows lie in the runner's buffer.
        hidden = self._step_hidden
        if not plan.chunks:
            hidden = self.runner.hidden[:num_decodes]
        elif hidden is None:
            hidden = self.runner.prompt_hidden
        hidden = hidden.clone()
        for row, (name, base) in enumerate(
            zip(plan.decode.request_ids, plan.decode.base_positions, strict=True)
        ):
            _append(observed[str(name)], base + plan.clock, hidden[row : row + 1])
        start = num_decodes
        for chunk in plan.chunks:
            end = start + chunk.num_tokens
            _append(observed[str(chunk.request_id)], chunk.first_position, hidden[start:end])
            start = end

    def _forget_finished(self, plan: StepPlan, observed: dict[str, Observed]) -> None:
        """Frees the slots of sequences that this step ends, as the engine's loop does."""
        for name, position in _sampled_rows(plan):
            if position + 2 == len(observed[name].sequence.tokens):
                self._builder.remove(name)


def _append(item: Observed, first_position: int, hidden: Tensor) -> None:
    item.positions.extend(range(first_position, first_position + hidden.shape[0]))
    item.pieces.append(hidden)


def _computed_rows(plan: StepPlan) -> list[tuple[str, int]]:
    """(request, position) of every row of a step: decodes first, then chunks."""
    decode = plan.decode
    rows = [
        (str(name), base + plan.clock)
        for name, base in zip(decode.request_ids, decode.base_positions, strict=True)
    ]
    for chunk in plan.chunks:
        first = chunk.first_position
        rows += [(str(chunk.request_id), first + k) for k in range(chunk.num_tokens)]
    return rows


def _sampled_rows(plan: StepPlan) -> list[tuple[str, int]]:
    """(request, last computed position) of the sampled rows: decodes first, then chunks."""
    decode = plan.decode
    rows = [
        (str(name), base + plan.clock)
        for name, base in zip(decode.request_ids, decode.base_positions, strict=True)
    ]
    rows += [
        (str(chunk.request_id), chunk.first_position + chunk.num_tokens - 1)
        for chunk in plan.chunks
        if chunk.samples
    ]
    return rows
