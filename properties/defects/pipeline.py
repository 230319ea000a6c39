"""Defects of the way of a token through open plans: booking, failing, stopping, leaving."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.lifecycle import Ending
from engine.core.plan import Finished, StepPlan
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.step import OpenStep, Step
from properties.defects.planting import Mutant, Planted


class _OptimisticDecodeSet(DecodeSet):
    def num_known(self, sequence: Sequence) -> int:
        return self.num_tokens(sequence)


class KeysTokensInFlight(Planted):
    """A block whose newest token is still in flight gets its key at once."""

    decodes_class = _OptimisticDecodeSet


class _LimitlessDecodeSet(DecodeSet):
    def num_tokens(self, sequence: Sequence) -> int:
        return sequence.base + self.clock


class CountsPastTheLimit(Planted):
    """The clock goes on for a sequence whose last token is in flight."""

    decodes_class = _LimitlessDecodeSet


class _ForgetfulDecodeSet(DecodeSet):
    def leave_batch(self, sequence: Sequence) -> None:
        sequence.decoding = False
        self._gapped = True


class LosesColumnsOnLeaving(Planted):
    """A sequence that leaves its batch loses the tokens that it had not taken over."""

    decodes_class = _ForgetfulDecodeSet


class _StillDecodeSet(DecodeSet):
    def leave_batch(self, sequence: Sequence) -> None:
        super().leave_batch(sequence)
        self._gapped = False


class BooksRowsOfThoseWhoLeft(Planted):
    """A batch with a row that left it takes whole columns, and that token is lost."""

    decodes_class = _StillDecodeSet


class KeepsTheKeysOfAFailedStep(Planted):
    """A failed step's blocks stay findable, though nobody knows what they hold."""

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Forgets what was registered."""
        for record in self._open:
            record.cached.clear()
        return super().discard(plan)


class SparesThePromptsOfAFailedStep(Planted):
    """A request whose prompt was not complete survives the failure of its chunk."""

    def _finish(
        self, reasons: dict[RequestId, str], sampled: Seq[RequestId]
    ) -> tuple[Finished, ...]:
        partial = self.state.partial_prefills
        kept = {n: r for n, r in reasons.items() if r != "error" or n not in partial}
        return super()._finish(kept, sampled)


class FailsThePreemptedToo(Planted):
    """Requests that a failed step had preempted end with it."""

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Ends them by name."""
        ended = super().discard(plan)
        more = [n for n in plan.preempted if n in self.state.sequences]
        return (*ended, *self._finish(dict.fromkeys(more, "error"), ()))


class FailsWithoutAWord(Planted):
    """A failed step ends its requests and tells of the first only."""

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Cuts the list."""
        return super().discard(plan)[:1]


class LeavesTheBlocksOfTheFailed(Planted):
    """What a failed step ends keeps its blocks."""

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        if reason == "error":
            sequence.block_table = []
        return super()._retire(sequence, reason)


class _ForgetfulEnding(Ending):
    def reasons(
        self,
        record: OpenStep,
        sampled: Seq[RequestId],
        token_ids: Seq[int],
        stopped: Collection[RequestId],
        aborted: Collection[RequestId],
    ) -> dict[RequestId, str]:
        found = super().reasons(record, sampled, token_ids, stopped, aborted)
        at_limit = {sequence.request_id for sequence in record.ending}
        return {n: "length" if n in at_limit and r == "stop" else r for n, r in found.items()}


class LengthGoesBeforeStop(Planted):
    """A last token that stops the request is told as the end of its length."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self._ending.__class__ = _ForgetfulEnding


class _EagerEnding(Ending):
    def _stops(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in sequence.request.stop_token_ids


class StopsBeforeMinTokens(Planted):
    """A stop token ends a request that has to go on."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self._ending.__class__ = _EagerEnding


class _BlindOpenStep(OpenStep):
    __slots__ = ()

    def has(self, request_id: RequestId) -> bool:
        return any(chunk.request_id == request_id for chunk in self.plan.chunks)


class VoidsChunksOnly(Planted):
    """The token of an ended request's decode in flight is handed out; that of a chunk is not."""

    def _book(self, step: Step, plan: StepPlan) -> OpenStep:
        record = super()._book(step, plan)
        record.__class__ = _BlindOpenStep
        return record


class _LateLimitDecodeSet(DecodeSet):
    def take_at_limit(self) -> list[Sequence]:
        return super().take_at_limit()[:1]


class OneEndAStep(Planted):
    """Of several that reach their limit in one step only the first ends."""

    decodes_class = _LateLimitDecodeSet


MUTANTS: tuple[Mutant, ...] = (
    Mutant("K4", KeysTokensInFlight, "own", is_async=True),
    Mutant("S5", CountsPastTheLimit, "own", is_async=True),
    Mutant("L7", LosesColumnsOnLeaving, "own"),
    Mutant("A3", BooksRowsOfThoseWhoLeft, "own", is_async=True),
    Mutant("K9", KeepsTheKeysOfAFailedStep, "own"),
    Mutant("L6", SparesThePromptsOfAFailedStep, "own"),
    Mutant("L6", FailsThePreemptedToo, "own", is_async=True),
    Mutant("A4", FailsWithoutAWord, "own", is_async=True),
    Mutant("B4", LeavesTheBlocksOfTheFailed, "own"),
    Mutant("L6", LengthGoesBeforeStop, "own"),
    Mutant("L6", StopsBeforeMinTokens, "own"),
    Mutant("A2", VoidsChunksOnly, "own", is_async=True),
    Mutant("L6", OneEndAStep, "own"),
)
