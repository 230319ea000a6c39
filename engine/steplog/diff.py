"""Finds the first decision in which two step logs differ.

Works on the expanded form, one replica at a time, so neither the grouping into stretches nor the
interleaving of replicas matters. Times are compared on demand only: two runs that decide alike
may differ in every duration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from engine.core.tokens import Prompt
from engine.steplog.ids import encode_prompt
from engine.steplog.reader import StepLogReader
from engine.steplog.records import (
    AbortRecord,
    AddRecord,
    DecodeStretch,
    ExpandedRecord,
    Record,
    StepRecord,
)

# In the order in which a reader wants to hear of them: what was decided, then what it led to.
PLAN_FIELDS = (
    "step",
    "entries",
    "preempted",
    "admitted",
    "new_blocks",
    "num_free_blocks",
    "num_running",
    "num_waiting",
)
OUTCOME_FIELDS = ("sampled_ids", "token_ids", "finished", "discarded")
FIELDS: dict[type, tuple[str, ...]] = {
    StepRecord: (*PLAN_FIELDS, *OUTCOME_FIELDS, "open_plans"),
    AddRecord: (
        "request_id",
        "prompt",
        "max_tokens",
        "stop_token_ids",
        "min_tokens",
        "priority",
        "extra_keys",
        "open_plans",
    ),
    AbortRecord: ("request_id", "open_plans"),
}
TIME_FIELDS: dict[type, tuple[str, ...]] = {
    StepRecord: ("start_ns", "duration_ns", "host_ns", "device_ns", "graph_bucket"),
    AddRecord: ("arrival_ns", "added_ns"),
    AbortRecord: ("time_ns",),
}
_STRETCH_TIMES = (
    "start_ns",
    "durations_ns",
    "gaps_ns",
    "host_ns",
    "device_ns",
    "graph_bucket",
)
# What a log may not know, and the field that then is not compared.
OMITTED_FIELDS = {
    "blocks": "new_blocks",
    "running": "num_running",
    "waiting": "num_waiting",
    "free_blocks": "num_free_blocks",
    "finished": "finished",
    "tokens": "token_ids",
}


@dataclass(frozen=True, slots=True)
class LogDifference:
    """The first difference of one replica; a side is None if its log had ended."""

    replica: int
    field: str
    left: ExpandedRecord | None
    right: ExpandedRecord | None
    sides: tuple[str, str] = ("left", "right")
    note: str = ""  # what happened where there is no other record to show

    def __str__(self) -> str:
        where = f"replica {self.replica}, {describe(self.left or self.right)}"
        if self.note:
            return f"{where}: {self.note}"
        if self.left is None or self.right is None or type(self.left) is not type(self.right):
            return f"{where}: {describe(self.left)} against {describe(self.right)}"
        left, right = field_value(self.left, self.field), field_value(self.right, self.field)
        width = max(map(len, self.sides))
        lines = (
            f"\n  {s:<{width}} {_shown(v)}" for s, v in zip(self.sides, (left, right), strict=True)
        )
        return f"{where}, field {self.field!r}:{''.join(lines)}"


def describe(record: ExpandedRecord | None) -> str:
    """A record in a few words."""
    if record is None:
        return "end of the log"
    if isinstance(record, AddRecord):
        return f"add of request {record.request.request_id!r}"
    if isinstance(record, AbortRecord):
        return f"abort of request {record.request_id!r}"
    return f"step {record.step}"


def field_value(record: ExpandedRecord, name: str, omitted: Collection[str] = ()) -> object:
    """The value of a compared field, without what a log omits of it."""
    if isinstance(record, AddRecord):
        request = record.request
        return getattr(request, name) if hasattr(request, name) else getattr(record, name)
    if isinstance(record, StepRecord):
        if name == "entries":
            return tuple(record.entries)
        if name == "admitted" and "hit_kinds" in omitted:
            return tuple([admission[:2] for admission in record.admitted])
        if name == "preempted" and "preempted_order" in omitted:
            return tuple(sorted(record.preempted, key=repr))
    return getattr(record, name)


def _shown(value: object) -> str:
    if isinstance(value, Prompt):
        return repr(encode_prompt(value))
    return repr(sorted(value) if isinstance(value, frozenset) else value)


def first_difference(
    left: StepLogReader, right: StepLogReader, with_times: bool = False
) -> LogDifference | None:
    """The first record that differs, or None; fields that a log omits are not compared."""
    omitted = {*left.header.omits, *right.header.omits}
    if left.header.outputs_in_adds != right.header.outputs_in_adds:
        omitted.add("tokens")
    for replica in range(max(left.header.num_replicas, right.header.num_replicas)):
        for one, other in _pairs(left, right, replica, with_times):
            name = other_field(one, other, omitted, with_times)
            if name is not None:
                return LogDifference(replica, name, one, other)
    return None


def _pairs(
    left: StepLogReader, right: StepLogReader, replica: int, with_times: bool
) -> Iterator[tuple[ExpandedRecord | None, ExpandedRecord | None]]:
    """Records to compare, step by step; stretches that are equal as a whole are passed over."""
    cursors = _Cursor(left, replica), _Cursor(right, replica)
    while True:
        one, other = (cursor.stretch() for cursor in cursors)
        if one is not None and other is not None and _equal(one, other, with_times):
            for cursor in cursors:
                cursor.skip()
            continue
        pair = cursors[0].take(), cursors[1].take()
        if pair[0] is None and pair[1] is None:
            return
        yield pair


def _equal(one: DecodeStretch, other: DecodeStretch, with_times: bool) -> bool:
    if not with_times:
        if one.num_steps != other.num_steps:
            return False
        times = {name: getattr(one, name) for name in _STRETCH_TIMES}
        other = replace(other, **times)
    return one == other


class _Cursor:
    """A place in one replica's records, which may be inside a stretch."""

    def __init__(self, log: StepLogReader, replica: int) -> None:
        self._records = (record for record in log if record.replica == replica)
        self._block_size = log.header.kernel.block_size
        self._next: Record | None = next(self._records, None)
        self._steps: Iterator[StepRecord] = iter(())
        self._step: StepRecord | None = None

    def stretch(self) -> DecodeStretch | None:
        """The next record if it is a stretch and none of its steps has been taken."""
        if self._step is None and isinstance(self._next, DecodeStretch):
            return self._next
        return None

    def skip(self) -> None:
        """Passes over the next record."""
        self._next = next(self._records, None)

    def take(self) -> ExpandedRecord | None:
        """The next record, or the next step of a stretch."""
        if self._step is None and isinstance(self._next, DecodeStretch):
            self._steps = self._next.steps(self._block_size)
            self._step = next(self._steps)
            self.skip()
        if self._step is not None:
            step, self._step = self._step, next(self._steps, None)
            return step
        record = self._next
        assert not isinstance(record, DecodeStretch), "stretches were expanded above"
        self.skip()
        return record


def other_field(
    left: ExpandedRecord | None,
    right: ExpandedRecord | None,
    omitted: Collection[str] = (),
    with_times: bool = False,
) -> str | None:
    """The first field in which two records differ, `record` if they are of two kinds, or None."""
    if left is None or right is None or type(left) is not type(right):
        return "record"
    times = TIME_FIELDS[type(left)] if with_times else ()
    return other_of(left, right, (*FIELDS[type(left)], *times), omitted)


def other_of(
    left: ExpandedRecord,
    right: ExpandedRecord,
    names: Iterable[str],
    omitted: Collection[str] = (),
) -> str | None:
    """The first of the named fields in which two records of one kind differ, or None."""
    skipped = {OMITTED_FIELDS.get(word) for word in omitted}
    for name in names:
        if name not in skipped and (
            field_value(left, name, omitted) != field_value(right, name, omitted)
        ):
            return name
    return None
