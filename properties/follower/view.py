"""What the suites need to see of a scheduler, whoever wrote it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from engine.core.errors import LockstepError
from engine.core.plan import Admission, Entry, Finished, NewBlocks, StepOutcome
from engine.core.request import Request, RequestId


def law_name(law: str) -> str:
    """A law's id as prose quotes it: `LAW-B2`; the alarms `CRASH`, `REF` and `RUN` are no laws."""
    return f"LAW-{law}" if law[-1:].isdigit() else law


class LawBroken(LockstepError):
    """A law does not hold for the scheduler under test."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law_name(law)}: {detail}")
        self.law = law
        self.detail = detail

    def __reduce__(self) -> tuple[type[LawBroken], tuple[str, str]]:
        return type(self), (self.law, self.detail)


class Inconclusive(LawBroken):
    """A run ended for a reason other than the laws that were asked for: it proves nothing."""


class PlanView(Protocol):
    """The decisions of one step."""

    @property
    def entries(self) -> Iterable[Entry]: ...  # noqa: D102
    @property
    def new_blocks(self) -> Sequence[NewBlocks]: ...  # noqa: D102
    @property
    def admitted(self) -> Sequence[Admission]: ...  # noqa: D102
    @property
    def preempted(self) -> Sequence[RequestId]: ...  # noqa: D102
    @property
    def sampled_ids(self) -> Sequence[RequestId]: ...  # noqa: D102


class Target(Protocol):
    """A scheduler under test: the kernel, the reference, or an adapter to a foreign one."""

    @property
    def has_work(self) -> bool: ...  # noqa: D102
    @property
    def num_free_blocks(self) -> int: ...  # noqa: D102
    def add(self, request: Request) -> None: ...  # noqa: D102
    def abort(self, request_id: RequestId) -> Finished | None: ...  # noqa: D102
    def schedule(self) -> PlanView: ...  # noqa: D102
    def commit(  # noqa: D102
        self, plan: PlanView, token_ids: Sequence[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome: ...
    def discard(self, plan: PlanView) -> tuple[Finished, ...]: ...  # noqa: D102
    def waiting_ids(self) -> list[RequestId]: ...  # noqa: D102
    def running_ids(self) -> list[RequestId]: ...  # noqa: D102
    def block_table(self, request_id: RequestId) -> tuple[int, ...]: ...  # noqa: D102
    def num_computed_tokens(self, request_id: RequestId) -> int: ...  # noqa: D102
    def free_order(self) -> list[int] | None: ...  # noqa: D102
