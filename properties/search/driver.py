"""Drives a scheduler by a list of operations, with the follower beside it.

Operations are plain lists, so that a failing run can be written as JSON and replayed:
`["add", {...}]`, `["step"]`, `["open"]`, `["close"]`, `["abort", id]`, `["discard"]`, `["run", n]`
(a stretch of decode steps at once), `["drain"]`.
An operation that does not apply (no such id, nothing to do) is skipped, so every sub-list of a
valid list is valid too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from engine.core.errors import RequestRejected
from engine.core.plan import StepOutcome
from engine.core.request import Request
from engine.core.tokens import Prompt
from properties.follower import Follower
from properties.follower.view import PlanView, Target
from properties.reference import ReferencePlan, ReferenceScheduler
from properties.search.fast_forward import run_ahead

Operation = list[Any]


def request_of(spec: dict[str, Any]) -> Request:
    """The request that an add operation describes."""
    return Request(
        spec["id"],
        Prompt(spec["prompt"]),
        spec["max_tokens"],
        frozenset(spec.get("stops", ())),
        spec.get("min_tokens", 0),
        tuple((kind, value) for kind, value in spec.get("keys", ())),
        spec.get("priority", 0),
    )


class Driver:
    """One run: `target` decides, `follower` judges, `twin` (if given) must decide the same."""

    def __init__(
        self,
        target: Target,
        follower: Follower,
        twin: ReferenceScheduler | None = None,
        audit: Callable[[Any], None] | None = None,
    ) -> None:
        self.target = target
        self.follower = follower
        self.twin = twin
        self.audit = audit
        self._open: deque[tuple[PlanView, ReferencePlan | None]] = deque()

    def apply(self, operation: Operation) -> None:
        """Does one operation if it applies."""
        name = operation[0]
        if name == "step":
            self.step()
        elif name == "add":
            self.add(operation[1])
        elif name == "abort":
            self.abort(operation[1])
        elif name == "open":
            self.open()
        elif name == "close":
            self.close()
        elif name == "discard":
            self.discard()
        elif name == "run":
            self.run(operation[1])
        elif name == "drain":
            self.drain()
        else:
            raise ValueError(f"unknown operation {name!r}")

    def add(self, spec: dict[str, Any]) -> None:
        """Adds a request; a rejection is checked against LAW-C1."""
        request = request_of(spec)
        reason = self._expected_rejection(request)
        try:
            self.target.add(request)
        except RequestRejected as error:
            if reason is None:
                self.follower.complain("C1", f"a request that can run was refused: {error}")
            self.follower.ledger.rejected.add(request.request_id)
            self.follower.check_state(self.target)
            return
        if reason is not None:
            self.follower.complain("C1", f"{request.request_id!r} was accepted ({reason})")
        if self.twin is not None:
            self.twin.add(request)
        self.follower.on_add(request, spec.get("seed", 0))

    def _expected_rejection(self, request: Request) -> str | None:
        config, length = self.follower.config, len(request.prompt)
        if request.request_id in self.follower.live or self.follower.is_in_flight(request):
            return "duplicate id"
        if length < 1 or request.max_tokens < 1:
            return "nothing to compute"
        if not config.reject_impossible:
            return None
        if length >= config.max_model_len:
            return "longer than the model allows"
        outputs = request.max_tokens
        if config.policy != "prefill_first" or config.bound_model_len:
            outputs = min(outputs, config.max_model_len - length)
        needed = -(-(length + outputs - 1) // config.block_size)
        return "larger than the pool" if needed > config.num_blocks else None

    def step(self) -> None:
        """Schedules and commits one step; with async scheduling the oldest open one."""
        self.open()
        self.close()

    def run(self, want: int) -> None:
        """Does a stretch of decodes with `run_decode` if the target can and nothing is open."""
        if self.target.has_work and not self._open and hasattr(self.target, "run_decode"):
            run_ahead(self, want)
            self._settled()

    def open(self) -> PlanView | None:
        """Schedules a step that stays open."""
        limit = 2 if self.follower.config.async_scheduling else 1
        if not self.target.has_work or len(self._open) >= limit:
            return None
        plan = self.target.schedule()
        self.follower.on_schedule(plan, self.target)
        twin_plan = None
        if self.twin is not None:
            twin_plan = self.twin.schedule()
            self._compare(plan, twin_plan)
        self._open.append((plan, twin_plan))
        return plan

    def close(self) -> tuple[list[int], StepOutcome | None]:
        """Computes and commits the oldest open step; its tokens and outcome."""
        if not self._open:
            return [], None
        plan, twin_plan = self._open.popleft()
        tokens = self.follower.execute()
        outcome = self.target.commit(plan, tokens)
        self.follower.on_commit(tokens, outcome, self.target)
        if self.twin is not None and twin_plan is not None:
            self.twin.commit(twin_plan, tokens)
        self._settled()
        return tokens, outcome

    def abort(self, request_id: Any) -> None:  # noqa: ANN401
        """Aborts a live request."""
        if request_id not in self.follower.live:
            return
        if self.follower.live[request_id].wants_abort:
            return
        finished = self.target.abort(request_id)
        if self.twin is not None:
            self.twin.abort(request_id)
        self.follower.on_abort(request_id, finished, self.target)
        self._settled()

    def discard(self) -> None:
        """Schedules a step if none is open and lets the oldest fail, and with it the others."""
        if not self._open:
            self.open()
        if not self._open:
            return
        plan, twin_plan = self._open[0]
        self._open.clear()
        finished = self.target.discard(plan)
        self.follower.on_discard(finished, self.target)
        if self.twin is not None and twin_plan is not None:
            self.twin.discard(twin_plan)
        self._settled()

    def drain(self) -> None:
        """Steps until nothing is live, within the bound of LAW-L3; faults end with the arrivals."""
        calm = getattr(self.target, "calm", None)
        if calm is not None:
            calm()
        while self._open:
            self.close()
        is_async = self.follower.config.async_scheduling
        for _ in range(self.liveness_bound() * (1 + is_async)):
            if not self.target.has_work:
                break
            self.step()
            if is_async:
                self.open()  # so that the next step is decided before this one's tokens are known
        while self._open:
            self.close()
        self.follower.on_drain(self.target)

    def liveness_bound(self) -> int:
        """Steps within which all live requests must end once arrivals stop (LAW-L3).

        `mixed` serves the oldest request in every step, so each request costs at most its own
        steps. `prefill_first` lets prefills go first: every decode step of the oldest may wait
        for one prefill of each of the others.
        """
        config = self.follower.config
        chunk = config.max_num_batched_tokens
        if config.policy != "prefill_first" and config.long_prefill_token_threshold:
            chunk = min(chunk, config.long_prefill_token_threshold)
        prefills = decodes = 0
        for track in self.follower.live.values():
            most = track.tokens + track.request.max_tokens - len(track.outputs)
            prefills += -(-most // chunk)
            decodes += track.request.max_tokens
        if config.policy != "prefill_first":
            return prefills + decodes + 1
        return (decodes + 1) * (prefills + 1)

    def _settled(self) -> None:
        """Checks that need a state without open steps."""
        if self._open:
            return
        if self.audit is not None:
            self.audit(self.target)
        if self.twin is not None and self.twin.free_order() != self.target.free_order():
            self.follower.complain(
                "REF", f"free order {self.target.free_order()}, naive {self.twin.free_order()}"
            )

    def _compare(self, plan: PlanView, naive: ReferencePlan) -> None:
        """The naive reference must have decided the same (every policy rule at once)."""
        ours = (
            tuple(plan.entries),
            {gain.request_id: gain for gain in plan.new_blocks},
            tuple(plan.admitted),
            tuple(plan.preempted),
        )
        theirs = (
            naive.entries,
            {gain.request_id: gain for gain in naive.new_blocks},
            naive.admitted,
            naive.preempted,
        )
        for one, other in zip(ours, theirs, strict=True):
            if one != other:
                self.follower.complain("REF", f"decided {one}, the naive reference {other}")
