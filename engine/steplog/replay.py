"""`lockstep sim replay`: a log's arrivals and tokens through a fresh kernel, decision by decision.

Parity of engine and simulator (LAW-M6) is this command's exit code. Logs of both and imported
recordings are accepted; what a log's header declares as omitted is not compared.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.core import (
    Finished,
    InputError,
    RequestRejected,
    Scheduler,
    StepOutcome,
    StepPlan,
    UnknownRequest,
)
from engine.core.request import RequestId
from engine.steplog.api import (
    AbortRecord,
    AddRecord,
    DecodeStretch,
    ExpandedRecord,
    FinishRecord,
    LogHeader,
    Record,
    StepRecord,
)
from engine.steplog.diff import OUTCOME_FIELDS, PLAN_FIELDS, LogDifference, other_of
from engine.steplog.records import step_of_plan
from engine.steplog.vllm_recording import ReadableLog, open_log

_SIDES = ("recorded", "replayed")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to; `num_live` requests had not ended when the log did."""

    num_requests: int
    num_steps: int
    num_live: int
    difference: LogDifference | None


class _Different(Exception):
    """Carries the first difference out of the replay."""

    def __init__(self, difference: LogDifference) -> None:
        super().__init__(str(difference))
        self.difference = difference


def replay(log: ReadableLog) -> ReplayResult:
    """Replays a whole log; stops at the first difference.

    Raises:
        InputError: the log is damaged, or lacks tokens that the replay needs.
    """
    if log.header.options.get("prefill_replicas"):
        raise InputError(
            "a log of prefill and decode servers: these take in what they did not compute, which a"
            " kernel alone does not do again"
        )
    kernels = [_Replay(log.header, replica) for replica in range(log.header.num_replicas)]
    found: _Different | None = None
    try:
        for record in log:
            kernels[record.replica].take(record)
        for kernel in kernels:
            kernel.commit_down_to(0)
    except _Different as error:
        found = error
    return ReplayResult(
        num_requests=sum(kernel.num_requests for kernel in kernels),
        num_steps=sum(kernel.num_steps for kernel in kernels),
        num_live=sum(len(kernel.live) for kernel in kernels),
        difference=found.difference if found else None,
    )


class _Live:
    """A request of the log that has not ended."""

    __slots__ = ("num_outputs", "record")

    def __init__(self, record: AddRecord) -> None:
        self.record = record
        self.num_outputs = 0


class _Replay:
    """One replica's kernel, driven by the log."""

    def __init__(self, header: LogHeader, replica: int) -> None:
        self._omitted = (*header.omits, *(("tokens",) if header.outputs_in_adds else ()))
        self._outputs_in_adds = header.outputs_in_adds
        self._has_stop_strings = header.writer != "sim"
        self._block_size = header.kernel.block_size
        self._replica = replica
        self._scheduler = Scheduler(header.kernel)
        self._open: deque[tuple[StepPlan, StepRecord]] = deque()
        self.live: dict[RequestId, _Live] = {}
        self.num_requests = 0
        self.num_steps = 0

    def take(self, record: Record) -> None:
        """Does what a record says, and compares."""
        if isinstance(record, DecodeStretch):
            self._take_stretch(record)
        elif isinstance(record, StepRecord):
            self._take_step(record)
        elif isinstance(record, AddRecord):
            self._take_add(record)
        else:
            self._take_abort(record)

    def _take_add(self, record: AddRecord) -> None:
        self.commit_down_to(record.open_plans)
        try:
            self._scheduler.add(record.request)
        except RequestRejected as error:
            raise self._failed(record, str(error)) from None
        self.live[record.request.request_id] = _Live(record)
        self.num_requests += 1

    def _take_abort(self, record: AbortRecord) -> None:
        self.commit_down_to(record.open_plans)
        try:
            self._forget(self._scheduler.abort(record.request_id))
        except UnknownRequest as error:
            raise self._failed(record, str(error)) from None

    def _take_step(self, record: StepRecord) -> None:
        self.commit_down_to(record.open_plans)
        self._open.append((self._schedule(record), record))
        self.num_steps += 1

    def _take_stretch(self, record: DecodeStretch) -> None:
        offset = 0
        while offset < record.num_steps:
            self.commit_down_to(record.open_plans)
            expected = record.step_at(offset, self._block_size)
            plan = self._schedule(expected)
            count = 1
            if not record.open_plans:
                horizon = self._scheduler.decode_horizon(plan)
                count = min(record.num_steps - offset, horizon)
                if count > 1 and offset + count == record.num_steps and self._ends_alone(record):
                    count -= 1
            if count == 1:
                self._open.append((plan, expected))
            else:
                self._run(record, plan, offset, count)
            self.num_steps += count
            offset += count

    def _schedule(self, expected: StepRecord) -> StepPlan:
        """The kernel's plan, which must be the recorded one."""
        if not self._scheduler.has_work:
            raise self._failed(expected, "the replayed kernel has nothing to schedule")
        plan = self._scheduler.schedule()
        got = replace(step_of_plan(plan), replica=self._replica)
        self._compare(expected, got, PLAN_FIELDS)
        return plan

    def _run(self, record: DecodeStretch, plan: StepPlan, offset: int, count: int) -> None:
        """Commits several steps of a stretch in one go and compares what they did."""
        tokens = [self._row_tokens(record, row, offset, count) for row in range(len(plan.decode))]
        run = self._scheduler.run_decode(plan, count, tokens.__getitem__)
        offsets = {block[0] for block in record.new_blocks if offset <= block[0] < offset + count}
        offsets.update(offset + step for step, _ in run.new_blocks)
        offsets.add(offset + count - 1)
        # Blocks and ends are all that can differ in steps that decode the recorded rows.
        for at in sorted(offsets):
            expected = record.step_at(at, self._block_size)
            blocks = tuple([new for step, new in run.new_blocks if offset + step == at])
            is_last = at == offset + count - 1
            ends = _finishes(run.outcome.finished) if is_last else ()
            got = replace(expected, new_blocks=blocks, finished=ends)
            self._compare(expected, got, ("new_blocks", "finished"))
        for end in run.outcome.finished:
            self._forget(end)

    def _failed(self, record: ExpandedRecord, note: str) -> _Different:
        return _Different(LogDifference(self._replica, "record", record, None, _SIDES, note))

    def commit_down_to(self, open_plans: int) -> None:
        """Commits the oldest plans until only `open_plans` are open; discarded ones go together."""
        while len(self._open) > open_plans:
            if self._open[0][1].discarded:
                # What was scheduled while this step was open was discarded together with it.
                self._discard()
                return
            plan, record = self._open.popleft()
            tokens = self._tokens(record)
            # The token of an entry that the log voided has no effect and need not be known.
            sampled = [tokens.get(request_id, 0) for request_id in plan.sampled_ids]
            stopped = self._stopped(record, tokens)
            try:
                outcome = self._scheduler.commit(plan, sampled, stopped)
            except UnknownRequest as error:
                raise self._failed(record, str(error)) from None
            self._compare(record, self._outcome_record(record, outcome), OUTCOME_FIELDS)
            for end in outcome.finished:
                self._forget(end)

    def _discard(self) -> None:
        """Undoes the oldest plan and those made after it, which the log must say of them too."""
        plan, record = self._open[0]
        recorded = [end for _, later in self._open for end in later.finished]
        self._open.clear()
        failed = self._scheduler.discard(plan)
        record = replace(record, finished=tuple(recorded))
        self._compare(record, replace(record, finished=_finishes(failed)), OUTCOME_FIELDS)
        for end in failed:
            self._forget(end)

    def _outcome_record(self, record: StepRecord, outcome: StepOutcome) -> StepRecord:
        return replace(
            record,
            sampled=tuple(outcome.sampled),
            token_ids=None if self._outputs_in_adds else tuple(outcome.token_ids),
            finished=_finishes(outcome.finished),
        )

    def _compare(self, recorded: StepRecord, replayed: StepRecord, names: Sequence[str]) -> None:
        name = other_of(recorded, replayed, names, self._omitted)
        if name is not None:
            raise _Different(LogDifference(self._replica, name, recorded, replayed, _SIDES))

    def _tokens(self, record: StepRecord) -> dict[RequestId, int]:
        ids = record.sampled_ids
        if record.token_ids is None:
            return {request_id: self._next_outputs(request_id, 1)[0] for request_id in ids}
        for request_id in ids:
            if request_id in self.live:
                self.live[request_id].num_outputs += 1
        return dict(zip(ids, record.token_ids, strict=True))

    def _row_tokens(
        self, record: DecodeStretch, row: int, offset: int, count: int
    ) -> Sequence[int]:
        request_id = record.decode_ids[row]
        if record.token_ids is None:
            return self._next_outputs(request_id, count)
        self.live[request_id].num_outputs += count
        return record.token_ids[row][offset : offset + count]

    def _next_outputs(self, request_id: RequestId, count: int) -> Sequence[int]:
        live = self.live.get(request_id)
        outputs = live.record.outputs if live is not None else None
        if live is None or outputs is None:
            raise InputError(f"request {request_id!r}: the log has neither tokens nor outputs")
        first, live.num_outputs = live.num_outputs, live.num_outputs + count
        if live.num_outputs > len(outputs):
            raise InputError(
                f"request {request_id!r}: output {live.num_outputs} is sampled, "
                f"the log has {len(outputs)}"
            )
        return outputs.tokens(first, live.num_outputs)

    def _ends_alone(self, record: DecodeStretch) -> bool:
        """Whether the last step must be committed by itself.

        A run cannot end by a stop string, nor by an abort that came while its last step ran.
        """
        reasons = {end.reason for end in record.finished}
        return "abort" in reasons or (self._has_stop_strings and "stop" in reasons)

    def _stopped(self, record: StepRecord, tokens: dict[RequestId, int]) -> list[RequestId]:
        """Ids that a stop string ended, since their last token does not explain the reason."""
        stopped: list[RequestId] = []
        if not self._has_stop_strings:
            return stopped
        for request_id, reason in record.finished:
            live = self.live.get(request_id)
            if reason != "stop" or live is None:
                continue
            request = live.record.request
            token_id = tokens.get(request_id)
            if token_id not in request.stop_token_ids or live.num_outputs <= request.min_tokens:
                stopped.append(request_id)
        return stopped

    def _forget(self, end: Finished | None) -> None:
        if end is not None:
            self.live.pop(end.request_id, None)


def _finishes(finished: Sequence[Finished]) -> tuple[FinishRecord, ...]:
    return tuple([FinishRecord(end.request_id, end.reason) for end in finished])


def main(argv: list[str]) -> int:
    """Command line of `lockstep sim replay`."""
    parser = VerbParser(
        "sim replay",
        "Replay a step log through a fresh kernel; exit 1 at the first other decision.",
    )
    parser.add_argument("log", type=Path, help="step log (.jsonl, .jsonl.gz) or recorded vLLM run")
    parser.option("json")
    options = parser.parse(argv)
    log = open_log(options.log)
    result = replay(log)
    if options.json:
        document = {
            "requests": result.num_requests,
            "steps": result.num_steps,
            "live_requests": result.num_live,
            "omits": list(log.header.omits),
            "first_difference": None if result.difference is None else str(result.difference),
        }
        print(json.dumps(document, indent=1))
    elif result.difference is None:
        live = f", {result.num_live} requests live at its end" if result.num_live else ""
        omits = f"; not in the log: {', '.join(log.header.omits)}" if log.header.omits else ""
        print(
            f"{result.num_requests} requests, {result.num_steps} steps: no difference{live}{omits}"
        )
    else:
        print(f"first difference: {result.difference}")
    return int(result.difference is not None)
