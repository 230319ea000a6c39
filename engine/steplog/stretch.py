"""A pure decode stretch of the step log while it may still grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from engine.core.plan import DecodeBatch, DecodeRun, NewBlocks, StepOutcome, StepPlan
from engine.core.request import RequestId
from engine.steplog.records import DecodeStretch, FinishRecord

# Graph bucket, open plans, and whether host and device times are missing: equal in a stretch.
StretchKey = tuple[int | None, int, bool, bool]


class StretchBuilder:
    """A pure decode stretch that may still grow."""

    __slots__ = (
        "columns",
        "device_ns",
        "durations_ns",
        "end_ns",
        "finished",
        "first",
        "free_blocks",
        "gaps_ns",
        "host_ns",
        "key",
        "last_clock",
        "last_decode",
        "new_blocks",
        "replica",
        "segments",
        "start_ns",
    )

    def __init__(self, plan: StepPlan, start_ns: int, key: StretchKey, replica: int) -> None:
        self.first = plan
        self.last_decode, self.last_clock = plan.decode, plan.clock
        self.start_ns = self.end_ns = start_ns
        self.key = key
        self.replica = replica
        self.free_blocks = plan.num_free_blocks + len(plan.new_blocks)
        self.durations_ns: list[int] = []
        self.gaps_ns: list[int] = []
        self.host_ns: list[int] = []
        self.device_ns: list[int] = []
        self.new_blocks: list[tuple[int, RequestId, int]] = []
        self.finished: tuple[FinishRecord, ...] = ()
        # Sampled ids: `segments` hold one sequence per row, `columns` one per step behind them.
        self.segments: list[Sequence[Sequence[int]]] = []
        self.columns: list[Sequence[int]] = []

    def extends(self, plan: StepPlan, outcome: StepOutcome, key: StretchKey) -> bool:
        """True if this step continues the stretch and every row got a token."""
        return self.follows(plan, key) and is_plain_decode(plan, outcome)

    def follows(self, plan: StepPlan, key: StretchKey) -> bool:
        """True if `plan`, a plain decode, is the next step of the same rows."""
        first, offset = self.first, len(self.durations_ns)
        if (
            plan.step != first.step + offset
            or plan.num_waiting != first.num_waiting
            or plan.num_running != first.num_running
            or plan.num_free_blocks != self.free_blocks - len(plan.new_blocks)
            or key != self.key
        ):
            return False
        decode, last = plan.decode, self.last_decode
        if decode is last:
            return plan.clock == self.last_clock + 1
        shift = self.last_clock + 1 - plan.clock
        return decode.request_ids == last.request_ids and all(
            base == before + shift
            for base, before in zip(decode.base_positions, last.base_positions, strict=True)
        )

    def append(
        self,
        plan: StepPlan,
        start_ns: int,
        duration_ns: int,
        host_ns: int | None,
        device_ns: int | None,
    ) -> None:
        """Takes one step that `extends` allowed, or the first one."""
        self.last_decode, self.last_clock = plan.decode, plan.clock
        if plan.new_blocks:
            self._take_blocks((len(self.durations_ns), blocks) for blocks in plan.new_blocks)
        self.gaps_ns.append(start_ns - self.end_ns)
        self.durations_ns.append(duration_ns)
        self.end_ns = start_ns + duration_ns
        if host_ns is not None:
            self.host_ns.append(host_ns)
        if device_ns is not None:
            self.device_ns.append(device_ns)

    def append_run(
        self, plan: StepPlan, run: DecodeRun, start_ns: int, durations_ns: Sequence[int]
    ) -> None:
        """Takes a whole run, whose steps follow one another without a gap."""
        if len(durations_ns) != run.num_steps:
            raise ValueError(f"{len(durations_ns)} durations for {run.num_steps} steps")
        self.last_decode, self.last_clock = plan.decode, plan.clock + run.num_steps - 1
        offset = len(self.durations_ns)
        self._take_blocks((offset + step, blocks) for step, blocks in run.new_blocks)
        self.gaps_ns.append(start_ns - self.end_ns)
        self.gaps_ns.extend([0] * (run.num_steps - 1))
        self.durations_ns.extend(durations_ns)
        self.end_ns = start_ns + sum(durations_ns)

    def _take_blocks(self, blocks: Iterable[tuple[int, NewBlocks]]) -> None:
        for offset, (request_id, _, block_ids) in blocks:
            self.free_blocks -= 1
            self.new_blocks.append((offset, request_id, block_ids[0]))

    def end_columns(self) -> None:
        """Turns the tokens of single steps into rows."""
        if self.columns:
            self.segments.append(list(zip(*self.columns, strict=True)))
            self.columns = []

    def record(self, with_tokens: bool) -> DecodeStretch:
        """The finished record."""
        self.end_columns()
        first = self.first
        rows = tuple(_join(parts) for parts in zip(*self.segments, strict=True))
        return DecodeStretch(
            first_step=first.step,
            start_ns=self.start_ns,
            durations_ns=tuple(self.durations_ns),
            gaps_ns=tuple(self.gaps_ns),
            decode_ids=first.decode.request_ids,
            positions=positions_of(first.decode, first.clock),
            new_blocks=tuple(self.new_blocks),
            num_free_blocks=first.num_free_blocks,
            num_running=first.num_running,
            num_waiting=first.num_waiting,
            token_ids=rows if with_tokens else None,
            finished=self.finished,
            host_ns=None if self.key[2] else tuple(self.host_ns),
            device_ns=None if self.key[3] else tuple(self.device_ns),
            graph_bucket=self.key[0],
            open_plans=self.key[1],
            replica=self.replica,
        )


def _join(parts: tuple[Sequence[int], ...]) -> Sequence[int]:
    return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))


def positions_of(decode: DecodeBatch, clock: int) -> tuple[int, ...]:
    """The position that each row of a decode batch computes."""
    return tuple([base + clock for base in decode.base_positions])


def is_plain_decode(plan: StepPlan, outcome: StepOutcome) -> bool:
    """True if the step can be (part of) a stretch record."""
    rows = len(plan.decode.request_ids)
    if not rows or plan.chunks or plan.preempted or plan.admitted:
        return False
    if len(outcome.sampled) != rows:
        return False
    # A request that ends without a row here was aborted while the step ran.
    if any(end.request_id not in plan.decode.request_ids for end in outcome.finished):
        return False
    return all(len(blocks.block_ids) == 1 for blocks in plan.new_blocks)
