"""The scheduler: requests in, step plans out; no clock, no randomness, no tensors.

`schedule()` decides a step, the caller computes it, `commit()` books its tokens. The policy
decides; the block manager keeps the tables; this file keeps the order of events.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.core.block_manager import BlockManager
from engine.core.block_observer import BlockObserver
from engine.core.config import KernelConfig
from engine.core.errors import KernelBug, LockstepError
from engine.core.lifecycle import Ending, check_request, length_limit
from engine.core.plan import DecodeRun, Finished, NewBlocks, StepOutcome, StepPlan
from engine.core.policies.policy import Policy
from engine.core.policy_registry import policy_class
from engine.core.request import Request, RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import OpenStep, Step
from engine.core.views import SchedulerViews


class StepOrderError(LockstepError, RuntimeError):
    """schedule, commit and discard were called in an order that the contract forbids."""


class SchedulerDead(LockstepError, RuntimeError):
    """A call was cut short half-way, by an interrupt or a bug, and the state is lost with it."""


class Scheduler(SchedulerViews):
    """One scheduler with its block pool; copyable with `copy.deepcopy`.

    At most one plan is open between `schedule` and `commit`, two with `async_scheduling`. A call
    that refuses its arguments has changed nothing. One that is cut short, for example by a
    KeyboardInterrupt, leaves the scheduler dead: every later call raises SchedulerDead.
    """

    def __init__(self, config: KernelConfig) -> None:
        self.config = config
        self.policy: Policy = policy_class(config.policy)()
        manager = BlockManager(config, self.policy.unregistered_first, self.policy.serve_newest)
        self.state = KernelState(config, manager, self.policy.make_waiting())
        self._open: deque[OpenStep] = deque()
        self._aborting: dict[RequestId, None] = {}
        self._ending = Ending(self.state)
        self._next_step = 0
        self._unfinished = ""  # the call that is changing the state

    def observe_blocks(self, observer: BlockObserver) -> None:
        """Tells `observer` from now on which blocks the prefix cache gains and loses."""
        self.state.manager.pool.observer = observer

    # Requests -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Puts a request at the back of waiting.

        Raises:
            RequestRejected: it can never run (LAW-C1), or its id is in use; nothing has changed.
        """
        check_request(self.config, request, self._ids_in_use(request.request_id))
        sequence = Sequence(request, length_limit(self.config, request))
        self._begin("add")
        self.state.add(sequence)
        self._ending.watch(sequence)
        self._unfinished = ""

    def abort(self, request_id: RequestId) -> Finished | None:
        """Ends a request; while a plan is open that happens at its commit, and None is returned.

        Raises:
            UnknownRequest: no live request has this id.
        """
        sequence = self._sequence(request_id)
        if self._open:
            self._aborting[request_id] = None
            return None
        self._begin("abort")
        finished = self._retire(sequence, "abort")
        self._unfinished = ""
        return finished

    # Steps --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decides the next step.

        Raises:
            StepOrderError: there is no work, or too many plans are open.
        """
        if not self.has_work:
            raise StepOrderError("schedule() was called without work")
        if len(self._open) > self.config.async_scheduling:
            raise StepOrderError("schedule() was called with an uncommitted plan")
        self._begin("schedule")
        step = self._begin_step(tokens_open=bool(self._open))
        self.policy.fill(self.state, step)
        plan = step.plan(self._next_step, self.state)
        self._check_progress(plan)
        self._open.append(self._book(step, plan))
        self._unfinished = ""
        return plan

    def commit(
        self, plan: StepPlan, token_ids: Seq[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome:
        """Books the tokens of the oldest open plan, one per id of `plan.sampled_ids`.

        `stopped` are ids that a stop string ended with this token.

        Raises:
            StepOrderError: not the oldest open plan, or tokens or stops that do not fit to it;
                nothing has changed.
        """
        record = self._oldest_open(plan)
        tokens = self._check_tokens(record, token_ids)
        for request_id in stopped:
            if request_id not in record.sampled_ids:
                raise StepOrderError(
                    f"commit() of step {plan.step}: {request_id!r} has no token in it to stop at"
                )
            self._sequence(request_id)
        self._begin("commit")
        outcome = self._commit(record, tokens, stopped)
        self._unfinished = ""
        return outcome

    def _check_tokens(self, record: OpenStep, token_ids: Seq[int]) -> array[int]:
        """The tokens as our own copy: the caller may use its buffer again."""
        step, wanted = record.plan.step, len(record.sampled_ids)
        if len(token_ids) != wanted:
            raise StepOrderError(
                f"commit() of step {step}: {len(token_ids)} tokens for {wanted} entries"
            )
        try:
            return array("q", token_ids)
        except (TypeError, OverflowError) as error:
            raise StepOrderError(f"commit() of step {step}: bad token, {error}") from None

    def _commit(
        self, record: OpenStep, token_ids: array[int], stopped: Collection[RequestId]
    ) -> StepOutcome:
        """Books keys, tokens and ends of the oldest open step, in this order (P-P5)."""
        sampled = record.sampled_ids
        kept: Seq[int] = token_ids
        self._open.popleft()
        self._cache_full_blocks(record.uncached)
        self._book_tokens(record, token_ids)
        reasons = self._ending.reasons(record, sampled, token_ids, stopped, self._aborting)
        finished = self._finish(reasons, sampled)
        dropped = record.dropped | {end.request_id for end in finished if end.reason == "abort"}
        if dropped:
            pairs = [p for p in zip(sampled, token_ids, strict=True) if p[0] not in dropped]
            sampled, kept = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return StepOutcome(record.plan.step, sampled, kept, finished)

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Undoes a step that failed: its keys are taken back and its requests end with `error`.

        Plans made after it are discarded with it. Preempted requests stay in waiting.
        """
        self._oldest_open(plan)
        self._begin("discard")
        failed: dict[RequestId, None] = {}
        records, self._open = [*self._open], deque()
        for record in records:
            for block_id in record.cached:
                self.state.manager.pool.unregister(block_id)
            if self.state.manager.tier is not None:
                self.state.manager.tier.undo(record.plan.copies)
            failed.update(dict.fromkeys(entry.request_id for entry in record.plan.entries))
        reasons = {**dict.fromkeys(failed, "error"), **dict.fromkeys(self._aborting, "abort")}
        finished = self._finish(reasons, ())
        self._unfinished = ""
        return finished

    # Runs of equal decode steps ---------------------------------------------------------------

    def decode_horizon(self, plan: StepPlan) -> int:
        """Steps from the open `plan` on that are certain to decode its rows and nothing else.

        Only the last of them may finish requests. At least 1.
        """
        record = self._oldest_open(plan)
        record.horizon = self._find_horizon(record)
        return record.horizon

    def _find_horizon(self, record: OpenStep) -> int:
        state, decodes = self.state, self.state.decodes
        num_rows = len(record.plan.decode)
        if self._is_unsteady(record) or not self.policy.admits_none(state, num_rows):
            return 1
        limit = decodes.next_limit()
        if limit is None:
            return 1  # an empty step: without `reject_impossible` a request may never fit
        horizon = limit - decodes.clock + 1
        free = state.manager.pool.num_free
        for steps in range(1, horizon):
            free -= decodes.num_due(1 % decodes.block_size, decodes.clock + steps - 1)
            if free < 0:
                return steps
        return horizon

    def run_decode(
        self, plan: StepPlan, num_steps: int, tokens: Callable[[int], Seq[int]]
    ) -> DecodeRun:
        """Commits `plan` and the `num_steps - 1` decode steps after it, all in one go.

        Does what schedule() and commit() would do one by one. `tokens(row)` gives the sampled ids
        of a row, one per step; `num_steps` is at most `decode_horizon(plan)`.

        Raises:
            StepOrderError: the plan is not pure decode, or fewer steps are certain.
        """
        record = self._oldest_open(plan)
        rows = range(len(plan.decode))
        if plan.chunks or num_steps < 1 or (num_steps > 1 and num_steps > self._horizon_of(record)):
            raise StepOrderError(f"run_decode() cannot take {num_steps} steps from {plan.step} on")
        self._begin("run_decode")
        blocks: list[tuple[int, NewBlocks]] = [(0, new) for new in plan.new_blocks]
        num_free = self.num_free_blocks
        if num_steps > 1:
            self.state.decodes.begin_run(tokens)
            for offset in range(1, num_steps):
                self._cache_full_blocks(record.uncached)
                self.state.decodes.step_run()
                if offset < num_steps - 1 and self.state.decodes.is_uneventful():
                    record.uncached = []
                    self.state.decodes.advance()
                    self._next_step += 1
                    continue
                step = self._begin_step(tokens_open=False)
                self.policy.serve(self.state, step, len(rows), [])
                blocks.extend((offset, new) for new in step.new_blocks)
                num_free = self.num_free_blocks
                record = self._book(step, plan)
            self.state.decodes.end_run()
            self._open[0] = record
        last_tokens = array("q", [tokens(row)[num_steps - 1] for row in rows])
        outcome = self._commit(record, last_tokens, ())
        self._unfinished = ""
        outcome = replace(outcome, step=plan.step + num_steps - 1)
        return DecodeRun(plan.step, num_steps, plan.decode, tuple(blocks), num_free, outcome)

    def _horizon_of(self, record: OpenStep) -> int:
        """The horizon that `decode_horizon` told for this plan, or now finds."""
        if self._is_unsteady(record):
            return 1
        return record.horizon or self.decode_horizon(record.plan)

    def _is_unsteady(self, record: OpenStep) -> bool:
        """Whether something other than the same decodes may follow, for reasons known right now."""
        plan, state = record.plan, self.state
        return bool(
            plan.chunks
            or plan.preempted
            or record.ending
            or self._aborting
            or len(self._open) > 1
            or state.partial_prefills
            or state.manager.tier is not None  # each step may have copies of its own
            or len(plan.decode) != len(state.decodes)
            or self._ending.may_stop()
        )

    # Parts --------------------------------------------------------------------------------

    def _ids_in_use(self, request_id: RequestId) -> Collection[RequestId]:
        """Live ids, and that of one that ended while an open plan still computes for it."""
        dropped = any(request_id in record.dropped for record in self._open)
        return {request_id} if dropped else self.state.sequences

    def _begin(self, call: str) -> None:
        if self._unfinished:
            raise SchedulerDead(
                f"{call}(): an earlier {self._unfinished}() was cut short, make a new scheduler"
            )
        self._unfinished = call

    def _begin_step(self, tokens_open: bool) -> Step:
        self.state.manager.cached_in_step = {}
        return Step(
            self.config.max_num_batched_tokens, tokens_open, self.policy.registers_when_scheduled
        )

    def _book(self, step: Step, plan: StepPlan) -> OpenStep:
        """Books a decided step: its counts grow, and it is open until its commit."""
        state = self.state
        self._next_step += 1
        sequences = [sequence for sequence, _ in step.chunks]
        ending = step.book(state)
        cached = [*state.manager.cached_in_step]
        return OpenStep(plan, plan.sampled_ids, sequences, ending, step.uncached, cached)

    def _check_progress(self, plan: StepPlan) -> None:
        if self.config.prefill_schedule_interval > 1 and plan.preempted:
            return  # the only decodes gave way while prompts are held back (P-R4)
        if not plan.num_entries and self.config.reject_impossible and not self._open:
            raise KernelBug("L1", f"step {plan.step} schedules nothing although there is work")

    def _oldest_open(self, plan: StepPlan) -> OpenStep:
        if not self._open or self._open[0].plan is not plan:
            raise StepOrderError(f"the plan of step {plan.step} is not the oldest open one")
        return self._open[0]

    def _cache_full_blocks(self, filled: list[tuple[Sequence, int]]) -> None:
        """Registers full blocks, in batch order, of those that still hold them."""
        size = self.config.block_size
        for sequence, num_computed_tokens in filled:
            if sequence.num_cached_blocks * size >= num_computed_tokens:
                continue  # a later step that serves it was first (P-P5)
            if sequence.block_table and sequence.request_id in self.state.sequences:
                self.state.decodes.sync_outputs(sequence)
                self.state.manager.cache_full_blocks(sequence, num_computed_tokens)

    def _book_tokens(self, record: OpenStep, token_ids: Seq[int]) -> None:
        """Hands every live entry its token; the decode part as one column where it can."""
        plan, decodes, sequences = record.plan, self.state.decodes, self.state.sequences
        column = token_ids
        if plan.chunks:
            by_id = dict(zip(record.sampled_ids, token_ids, strict=True))
            for sequence in record.chunk_sequences:
                if sequence.request_id in by_id and sequence.request_id in sequences:
                    sequence.output_token_ids.append(by_id[sequence.request_id])
            column = [by_id[request_id] for request_id in plan.decode.request_ids]
        if decodes.takes_columns_of(plan.decode):
            decodes.add_column(column)
            return
        decodes.sync_all_outputs()
        for request_id, token_id in zip(plan.decode.request_ids, column, strict=True):
            if request_id in sequences:
                sequences[request_id].output_token_ids.append(token_id)

    def _finish(
        self, reasons: dict[RequestId, str], sampled: Seq[RequestId]
    ) -> tuple[Finished, ...]:
        """Ends requests in batch order, each releasing its blocks before the next (P-A8)."""
        if not reasons:
            return ()
        self._aborting = {}
        sequences = self.state.sequences
        ending = [sequences[request_id] for request_id in reasons if request_id in sequences]
        ending.sort(key=lambda sequence: sequence.admission_index)
        finished = []
        for sequence in ending:
            reason = reasons[sequence.request_id]
            ended = self._retire(sequence, reason)
            if reason == "abort" and sequence.request_id in sampled:
                sequence.output_token_ids.pop()  # the abort came before this token
            finished.append(ended)
        return tuple(finished)

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        """Ends a request; its blocks are free at once (P-P4).

        An open plan may still write to one of them. It runs before every later plan, on one
        in-order stream, so whoever is given the block next writes after it.
        """
        self.state.remove(sequence)
        self._ending.unwatch(sequence)
        self.state.manager.release(sequence)
        for record in self._open:
            if record.has(sequence.request_id):
                record.dropped.add(sequence.request_id)
        return Finished(sequence.request_id, reason, sequence.output_token_ids)
