"""What anybody may ask of a scheduler between its calls; nothing here changes anything."""

from __future__ import annotations

from array import array
from collections import deque

from engine.core.errors import LockstepError
from engine.core.plan import StepPlan
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import OpenStep


class UnknownRequest(LockstepError, KeyError):
    """No live request has this id."""


class SchedulerViews:
    """The readable side of `Scheduler`."""

    state: KernelState
    _open: deque[OpenStep]

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.state.waiting or self.state.running)

    @property
    def num_waiting(self) -> int:
        """Requests in waiting, half-done prompts of `prefill_first` included."""
        return len(self.state.waiting)

    @property
    def num_running(self) -> int:
        """Requests in running."""
        return len(self.state.running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return self.state.manager.pool.num_free

    @property
    def open_plans(self) -> tuple[StepPlan, ...]:
        """Plans that are neither committed nor discarded, oldest first."""
        return tuple(record.plan for record in self._open)

    def waiting_ids(self) -> list[RequestId]:
        """Waiting requests, front first."""
        return [sequence.request_id for sequence in self.state.waiting]

    def running_ids(self) -> list[RequestId]:
        """Running requests, oldest first."""
        return [*self.state.running]

    def free_order(self) -> list[int]:
        """All free blocks, the next one to be handed out first. O(pool): for tests."""
        return self.state.manager.pool.free_order()

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """The request's blocks in order of position."""
        return tuple(self._sequence(request_id).block_table)

    def num_tokens(self, request_id: RequestId) -> int:
        """Prompt and outputs, tokens of open plans included."""
        sequence = self._sequence(request_id)
        return self.state.decodes.num_tokens(sequence) if sequence.decoding else sequence.num_tokens

    def num_known_tokens(self, request_id: RequestId) -> int:
        """Prompt and committed outputs, which is what an admission looks up in the cache."""
        return self.state.decodes.num_known(self._sequence(request_id))

    def num_computed_tokens(self, request_id: RequestId) -> int:
        """Leading tokens whose KV is valid, or will be once the open plans are computed."""
        return self.state.num_computed_tokens(self._sequence(request_id))

    def output_token_ids(self, request_id: RequestId) -> array[int]:
        """The outputs so far."""
        sequence = self._sequence(request_id)
        self.state.decodes.sync_outputs(sequence)
        return sequence.output_token_ids[:]

    def _sequence(self, request_id: RequestId) -> Sequence:
        sequence = self.state.sequences.get(request_id)
        if sequence is None:
            raise UnknownRequest(f"no live request {request_id!r}")
        return sequence
