"""The sequences that decode, kept so that a step costs what changes in it and not what runs.

Every decode step moves all members on by one token, so a member stores `base` and its number of
tokens is `base + clock`. Members whose next block comes due are found through a calendar of
block_size phases, those that reach their length limit through a heap, and sampled tokens are
kept as one column per step until somebody asks for a member's own. The heap has one entry per
membership; that of a member that was passed over is early, and put right when it comes up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter

from engine.core.plan import NO_DECODES, DecodeBatch
from engine.core.request import RequestId
from engine.core.sequence import Sequence

_BY_ADMISSION = attrgetter("admission_index")
_SPARE_LIMITS = 32

LimitEntry = tuple[int, int, RequestId]  # (clock at the limit or before, admission_index, id)


class DecodeSet:
    """Members in running order, their clock, and the batch that consecutive plans share."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.clock = 0
        self.members: dict[RequestId, Sequence] = {}
        self.batch = NO_DECODES
        self._rows: list[Sequence] = []  # of `batch`
        self._stale = False  # whether members have changed since `batch` was made
        self._gapped = False  # whether a row of `batch` left it since then
        self._generation = 0
        self._phases: dict[int, dict[RequestId, Sequence]] = {}
        self._limits: list[LimitEntry] = []
        self._columns: list[Seq[int]] = []  # tokens that rows of `batch` have not all taken over
        self._run: list[Seq[int]] | None = None  # the same, by row, during a run of steps
        self._run_steps = 0

    def __len__(self) -> int:
        return len(self.members)

    # Membership ---------------------------------------------------------------------------

    def join(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds a sequence that has `num_tokens` tokens, the last of them not yet computed."""
        sequence.decoding = True
        sequence.base = num_tokens - self.clock
        last = next(reversed(self.members.values()), None)
        self.members[sequence.request_id] = sequence
        if last is not None and last.admission_index > sequence.admission_index:
            self.members = {
                s.request_id: s for s in sorted(self.members.values(), key=_BY_ADMISSION)
            }
        self._enter_phase(sequence)
        self._watch_limit(sequence)
        self._stale = True

    def leave(self, sequence: Sequence) -> None:
        """Takes a member out; its row of the current batch stays until `leave_batch`."""
        del self.members[sequence.request_id]
        del self._phases[sequence.base % self.block_size][sequence.request_id]
        self._stale = True

    def leave_batch(self, sequence: Sequence) -> None:
        """Gives a sequence all tokens of its row, which nobody fills from now on."""
        if sequence.decoding:
            self._sync_outputs(sequence)
            sequence.decoding = False
            self._gapped = True

    def _enter_phase(self, sequence: Sequence) -> None:
        phase = self._phases.setdefault(sequence.base % self.block_size, {})
        phase[sequence.request_id] = sequence

    def _watch_limit(self, sequence: Sequence) -> None:
        """Enters a member into the heap, which at times forgets those who left early."""
        heapq.heappush(self._limits, _limit_entry(sequence))
        if len(self._limits) > 2 * len(self.members) + _SPARE_LIMITS:
            self._limits = [_limit_entry(member) for member in self.members.values()]
            heapq.heapify(self._limits)

    # Time ---------------------------------------------------------------------------------

    def due(self, remainder: int) -> list[Sequence]:
        """Members whose number of tokens leaves `remainder` modulo the block size, in order."""
        phase = self._phases.get((remainder - self.clock) % self.block_size)
        if not phase:
            return []
        return sorted(phase.values(), key=_BY_ADMISSION)

    def num_due(self, remainder: int, clock: int) -> int:
        """How many members would be due at another clock."""
        return len(self._phases.get((remainder - clock) % self.block_size, ()))

    def is_uneventful(self) -> bool:
        """Whether no member needs a block in the step at hand and none fills one."""
        clock, size = self.clock, self.block_size
        return not (self.num_due(1 % size, clock) or self.num_due(0, clock))

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens of a sequence in the decode part, the one that is being sampled included.

        Members reach their limit and leave; the clock goes on while their last token is in flight.
        """
        return min(sequence.base + self.clock, sequence.limit)

    def num_known(self, sequence: Sequence) -> int:
        """Prompt and committed outputs of any sequence, tokens in flight left out."""
        known = sequence.num_tokens
        row = sequence.row
        if sequence.decoding and row < len(self._rows) and self._rows[row] is sequence:
            booked = len(self._columns) if self._run is None else self._run_steps
            known += booked - sequence.num_synced
        return known

    def advance(self, unscheduled: Seq[Sequence] = ()) -> None:
        """One decode step: every member gains a token, except those unscheduled."""
        self.clock += 1
        for sequence in unscheduled:
            del self._phases[sequence.base % self.block_size][sequence.request_id]
            sequence.base -= 1
            self._enter_phase(sequence)

    def take_at_limit(self) -> list[Sequence]:
        """Takes out the members whose newest token is their last one."""
        ending: list[Sequence] = []
        while (sequence := self._first_at_limit(self.clock)) is not None:
            self.leave(sequence)
            ending.append(sequence)
        return ending

    def next_limit(self) -> int | None:
        """The clock at which the next member reaches its limit."""
        sequence = self._first_at_limit()
        return None if sequence is None else sequence.limit - sequence.base

    def _first_at_limit(self, clock: float = math.inf) -> Sequence | None:
        """The member whose limit comes first, if by that clock; its entry is the heap's first."""
        limits = self._limits
        while limits and limits[0][0] <= clock:
            due, admission_index, request_id = limits[0]
            sequence = self.members.get(request_id)
            if sequence is None or sequence.admission_index != admission_index:
                heapq.heappop(limits)  # it left
            elif sequence.limit - sequence.base > due:
                heapq.heapreplace(limits, _limit_entry(sequence))  # it was passed over since
            else:
                return sequence
        return None

    # The shared batch -----------------------------------------------------------------------

    def make_batch(self, num_rows: int) -> DecodeBatch:
        """The batch of the oldest `num_rows` members; the previous one if nothing changed."""
        if num_rows == 0:
            return NO_DECODES
        if not self._stale and num_rows == len(self._rows):
            return self.batch
        self.sync_all_outputs()
        self._rows = [*self.members.values()][:num_rows]
        for row, sequence in enumerate(self._rows):
            sequence.row = row
            sequence.num_synced = 0
        self._generation += 1
        ids = tuple([sequence.request_id for sequence in self._rows])
        # A plan's clock is that before its tick, and it computes the token before the newest.
        bases = tuple([sequence.base - 1 for sequence in self._rows])
        self.batch = DecodeBatch(self._generation, ids, bases)
        self._stale = self._gapped = False
        return self.batch

    def takes_columns_of(self, batch: DecodeBatch) -> bool:
        """Whether every row of a plan's batch still takes its tokens from columns."""
        return batch is self.batch and not self._gapped

    def add_column(self, tokens: Seq[int]) -> None:
        """Books one sampled token per row of the current batch."""
        self._columns.append(tokens)

    def begin_run(self, tokens: Callable[[int], Seq[int]]) -> None:
        """From here on, row i's sampled tokens are those of `tokens(i)`."""
        self.sync_all_outputs()
        self._run = [tokens(row) for row in range(len(self._rows))]

    def step_run(self) -> None:
        """Books one more step of the run."""
        self._run_steps += 1

    def end_run(self) -> None:
        """Gives every row its tokens of the run."""
        self.sync_all_outputs()

    def sync_outputs(self, sequence: Sequence) -> None:
        """Completes the outputs of a member."""
        if sequence.decoding:
            self._sync_outputs(sequence)

    def _sync_outputs(self, sequence: Sequence) -> None:
        row, num_synced = sequence.row, sequence.num_synced
        if row >= len(self._rows) or self._rows[row] is not sequence:
            return
        if self._run is not None:
            sequence.output_token_ids.extend(self._run[row][num_synced : self._run_steps])
            sequence.num_synced = self._run_steps
        else:
            sequence.output_token_ids.fromlist(
                [column[row] for column in self._columns[num_synced:]]
            )
            sequence.num_synced = len(self._columns)

    def sync_all_outputs(self) -> None:
        """Completes the outputs of all rows and forgets the columns."""
        if self._columns or self._run is not None:
            for sequence in self._rows:
                if sequence.decoding:
                    self._sync_outputs(sequence)
                sequence.num_synced = 0
        self._columns = []
        self._run = None
        self._run_steps = 0


def _limit_entry(sequence: Sequence) -> LimitEntry:
    return (sequence.limit - sequence.base, sequence.admission_index, sequence.request_id)
