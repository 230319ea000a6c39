"""From the kernel's StepPlan to the runners' StepCommand: slots, deltas and row order.

Runs beside the scheduler, on the host, without torch. It only ever reads plans; the device state
that it mirrors is whether the decode rows are still those of the step before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace

from engine.core.plan import Chunk, StepPlan
from engine.core.request import RequestId
from engine.sampling_params import RequestSampling
from engine.worker.command import BannedTokens, ChunkCommand, SlotParams, StepCommand


class StepBuilder:
    """Assigns a slot to every request that holds blocks, and turns plans into commands.

    `sampling_of` tells how a request that is admitted is sampled; `width` is the number of
    columns of a block table.
    """

    def __init__(
        self, num_slots: int, width: int, sampling_of: Callable[[RequestId], RequestSampling]
    ) -> None:
        self._width = width
        self._sampling_of = sampling_of
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._slots: dict[RequestId, int] = {}
        self._special: dict[RequestId, RequestSampling] = {}
        self._generation: int | None = None
        self._next_clock = 0

    @property
    def num_free_slots(self) -> int:
        """Slots without a request."""
        return len(self._free_slots)

    def remove(self, request_id: RequestId) -> None:
        """Frees the slot of a request that has ended, for the next plan."""
        self._release(request_id)

    def forget_rows(self) -> None:
        """After a failed step: what the device holds of the decode rows is unknown."""
        self._generation = None

    def build(self, plan: StepPlan) -> StepCommand:
        """The command of a plan; plans must come in the order in which they were scheduled."""
        for request_id in plan.preempted:
            self._release(request_id)
        new_slots = tuple(self._admit(admission.request_id) for admission in plan.admitted)
        slots, positions = self._decode_rows(plan)
        table_index, table_blocks = self._table_changes(plan)
        command = StepCommand(
            step=plan.step,
            num_decodes=len(plan.decode),
            decode_slots=slots,
            decode_positions=positions,
            table_index=table_index,
            table_blocks=table_blocks,
            new_slots=new_slots,
            chunks=tuple(self._chunk(chunk) for chunk in plan.chunks),
        )
        if not self._special:
            return command
        return _with_prompt_logprobs(self._with_special_sampling(plan, command), self._most(plan))

    def _admit(self, request_id: RequestId) -> SlotParams:
        slot = self._slots[request_id] = self._free_slots.pop()
        sampling = self._sampling_of(request_id)
        if sampling.is_special:
            self._special[request_id] = sampling
        params = sampling.params
        return SlotParams(
            slot=slot,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=sampling.seed,
        )

    def _release(self, request_id: RequestId) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)
        self._special.pop(request_id, None)

    def _decode_rows(self, plan: StepPlan) -> tuple[array[int] | None, array[int] | None]:
        decode = plan.decode
        if not decode.request_ids:
            return None, None
        if decode.generation == self._generation and plan.clock == self._next_clock:
            self._next_clock += 1
            return None, None
        self._generation, self._next_clock = decode.generation, plan.clock + 1
        slots, clock = self._slots, plan.clock
        return (
            array("q", [slots[request_id] for request_id in decode.request_ids]),
            array("q", [base + clock for base in decode.base_positions]),
        )

    def _table_changes(self, plan: StepPlan) -> tuple[array[int], array[int]]:
        index, blocks = array("q"), array("q")
        for new in plan.new_blocks:
            start = self._slots[new.request_id] * self._width + new.first_index
            index.extend(range(start, start + len(new.block_ids)))
            blocks.extend(new.block_ids)
        return index, blocks

    def _chunk(self, chunk: Chunk) -> ChunkCommand:
        slot = self._slots[chunk.request_id]
        targets = array("q")
        if chunk.request_id in self._special:
            targets = self._prompt_targets(chunk)
        return ChunkCommand(slot, chunk.first_position, chunk.token_ids, chunk.samples, targets)

    def _prompt_targets(self, chunk: Chunk) -> array[int]:
        """The prompt's tokens behind the chunk's, if somebody asks for their log probabilities."""
        if self._special[chunk.request_id].params.prompt_logprobs is None:
            return array("q")
        start, stop = chunk.first_position + 1, chunk.first_position + chunk.num_tokens + 1
        stop = min(stop, len(chunk.prompt))
        return chunk.prompt.tokens(start, stop) if start < stop else array("q")

    def _most(self, plan: StepPlan) -> int:
        """The most log probabilities per prompt token that a chunk's request asks for."""
        asked = [self._special[c.request_id] for c in plan.chunks if c.request_id in self._special]
        return max([item.params.prompt_logprobs or 0 for item in asked], default=0)

    def _with_special_sampling(self, plan: StepPlan, command: StepCommand) -> StepCommand:
        needs_filters = False
        num_logprobs: int | None = None
        banned: list[BannedTokens] = []
        for row, (request_id, position) in enumerate(_sampled_rows(plan)):
            special = self._special.get(request_id)
            if special is None:
                continue
            params = special.params
            needs_filters |= params.filters_tokens
            if params.logprobs is not None:
                num_logprobs = max(num_logprobs or 0, params.logprobs)
            # The row computes `position`, so it draws output number position - prompt_len + 2.
            if special.bans_tokens and position + 1 - special.prompt_len < params.min_tokens:
                banned.append(BannedTokens(row, array("q", sorted(special.stop_token_ids))))
        return replace(
            command, needs_filters=needs_filters, num_logprobs=num_logprobs, banned=tuple(banned)
        )


def _with_prompt_logprobs(command: StepCommand, most: int) -> StepCommand:
    if not any(chunk.prompt_targets for chunk in command.chunks):
        return command
    return replace(command, num_prompt_logprobs=most)


def _sampled_rows(plan: StepPlan) -> Iterable[tuple[RequestId, int]]:
    """(request, last computed position) of the sampled rows in the runners' order."""
    clock = plan.clock
    for request_id, base in zip(plan.decode.request_ids, plan.decode.base_positions, strict=True):
        yield request_id, base + clock
    for chunk in plan.chunks:
        if chunk.samples:
            yield chunk.request_id, chunk.first_position + chunk.num_tokens - 1


def batch_order(plan: StepPlan) -> list[int] | None:
    """Place among the runners' sampled rows of each of `plan.sampled_ids`; None if equal."""
    num_decodes = len(plan.decode)
    if all(chunk.row >= num_decodes for chunk in plan.chunks):
        return None
    order: list[int] = []
    next_decode, next_chunk = 0, num_decodes
    for entry in plan.entries:
        if entry.is_decode:
            order.append(next_decode)
            next_decode += 1
        elif entry.samples:
            order.append(next_chunk)
            next_chunk += 1
    return order
