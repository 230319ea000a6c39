"""The step log of an engine, which may lose its log but never its requests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from engine.core.plan import Finished, StepPlan
from engine.core.request import Request, RequestId
from engine.requests.committed_step import CommittedStep
from engine.steplog.api import AddRecord, StepEvent, StepLogWriter

_LOGGER = logging.getLogger(__name__)


class EngineLog:
    """Writes records if there is a writer.

    A log is whole or absent: one that misses something, because it `is_behind` when an exception
    comes, is removed; one whose kernel was replaced is completed with what came before. Either is
    said in the program's own log.
    """

    def __init__(self, writer: StepLogWriter | None) -> None:
        self._writer = writer
        self.is_behind = False  # the kernel has done something that is not yet written

    def add(self, request: Request, arrival_ns: int, added_ns: int, open_plans: int) -> None:
        """Logs a request that the kernel accepted."""
        if self._writer is not None:
            self._writer.add(AddRecord(request, arrival_ns, added_ns, open_plans=open_plans))
        self.is_behind = False

    def abort(self, request_id: RequestId, time_ns: int, open_plans: int) -> None:
        """Logs an abort."""
        if self._writer is not None:
            self._writer.abort(request_id, time_ns, open_plans=open_plans)
        self.is_behind = False

    def step(self, step: CommittedStep, open_plans: int) -> None:
        """Logs a committed step."""
        if self._writer is not None:
            self._writer.step(
                StepEvent(
                    step.plan,
                    step.outcome,
                    step.start_ns,
                    step.duration_ns,
                    open_plans,
                    host_ns=step.host_ns,
                    device_ns=step.device_ns,
                    graph_bucket=step.graph_bucket,
                )
            )
        self.is_behind = False

    def discarded(
        self,
        plan: StepPlan,
        failed: Sequence[Finished],
        start_ns: int,
        duration_ns: int,
        open_plans: int,
    ) -> None:
        """Logs a step that was undone."""
        if self._writer is not None:
            self._writer.discarded(plan, failed, start_ns, duration_ns, open_plans=open_plans)
        self.is_behind = False

    def mend(self, cause: str) -> None:
        """Removes the log if it is behind."""
        if self.is_behind:
            writer, self._writer = self._writer, None
            self.is_behind = False
            if writer is not None:
                _LOGGER.warning("the step log was given up: %s", cause)
                with contextlib.suppress(OSError):
                    writer.discard_file()

    def end_early(self, cause: str) -> None:
        """Completes the log before a fresh kernel takes over, whose steps it cannot hold."""
        if self._writer is not None:
            self.is_behind = True
            _LOGGER.warning("the step log ends here, the kernel was replaced: %s", cause)
            with contextlib.suppress(OSError):
                self._writer.drop_held()
                self._writer.close()
            self._writer = None
            self.is_behind = False

    def close(self) -> None:
        """Completes the log."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
