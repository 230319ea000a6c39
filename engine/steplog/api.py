"""The step log that engine and simulator both write: JSON lines, one header, then records.

Records stand in the order in which a kernel saw their events: an `add` or `abort` takes effect
after the step records before it and before the step records behind it. Its `open` field, and that
of a step, counts the plans that were scheduled but not yet committed at that moment; it is absent
without asynchronous scheduling. All times are integer nanoseconds of one clock.

    with StepLogWriter("steps.jsonl.gz", LogHeader("engine", scheduler.config)) as log:
        log.add(AddRecord(request, arrival_ns, added_ns))
        log.step(StepEvent(plan, outcome, start_ns, duration_ns))
    for record in StepLogReader("steps.jsonl.gz").expanded():
        ...
"""

from __future__ import annotations

from engine.steplog.events import DecodeRunEvent, StepEvent, StepListener
from engine.steplog.reader import StepLogReader
from engine.steplog.records import (
    AbortRecord,
    AddRecord,
    ChunkRecord,
    DecodeStretch,
    ExpandedRecord,
    FinishRecord,
    LogHeader,
    Record,
    StepRecord,
    expand,
)
from engine.steplog.writer import StepLogWriter

__all__ = [
    "AbortRecord",
    "AddRecord",
    "ChunkRecord",
    "DecodeRunEvent",
    "DecodeStretch",
    "ExpandedRecord",
    "FinishRecord",
    "LogHeader",
    "Record",
    "StepEvent",
    "StepListener",
    "StepLogReader",
    "StepLogWriter",
    "StepRecord",
    "expand",
]
