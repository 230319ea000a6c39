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
from engine.core.config import KernelConfig
from engine.core.errors import KernelBug, LockstepError
from engine.core.lifecycle import Ending, check_request, length_limit
from engine.core.plan import DecodeRun, Finished, NewBlocks, StepOutcome, StepPlan
from engine.core.policies import make_policy
from engine.core.request import Request, RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import OpenStep, Step


class UnknownRequest(LockstepError, KeyError):
    """No live request has this id."""


class StepOrderError(LockstepError, RuntimeError):
    """schedule, commit and discard were called in an order that the contract forbids."""


class Scheduler:
    """One scheduler with its block pool; copyable with `copy.deepcopy`.

    At most one plan is open between `schedule` and `commit`, two with `async_scheduling`.
    """

    def __init__(self, config: KernelConfig) -> None:
        self.config = config
        self.policy = make_policy(config)
        manager = BlockManager(config, self.policy.unregistered_first, self.policy.serve_newest)
        self.state = KernelState(config, manager)
        self._open: deque[OpenStep] = deque()
        self._aborting: dict[RequestId, None] = {}
        self._ending = Ending(self.state)
        self._next_step = 0

    # Requests -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Puts a request at the back of waiting.

        Raises:
            RequestRejected: it can never run (LAW-C1), or its id is in use; nothing has changed.
        """
        check_request(self.config, request, self._ids_in_use(request.request_id))
        sequence = Sequence(request, length_limit(self.config, request))
        self.state.sequences[request.request_id] = sequence
        self.state.waiting.append(sequence)
        self._ending.watch(sequence)

    def abort(self, request_id: RequestId) -> Finished | None:
        """Ends a request; while a plan is open that happens at its commit, and None is returned.

        Raises:
            UnknownRequest: no live request has this id.
        """
        sequence = self._sequence(request_id)
        if self._open:
            self._aborting[request_id] = None
            return None
        return self._retire(sequence, "abort")

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
        step = self._begin_step(tokens_open=bool(self._open))
        self.policy.fill(self.state, step)
        plan = step.plan(self._next_step, self.state)
        self._check_progress(plan)
        self._open.append(self._book(step, plan))
        return plan

    def commit(
        self, plan: StepPlan, token_ids: Seq[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome:
        """Books the tokens of the oldest open plan, one per id of `plan.sampled_ids`.

        `stopped` are ids that a stop string ended with this token. A commit that raises has
        changed nothing.
        """
        record = self._oldest_open(plan)
        sampled = plan.sampled_ids
        if len(token_ids) != len(sampled):
            raise StepOrderError(
                f"commit() of step {plan.step}: {len(token_ids)} tokens for {len(sampled)} entries"
            )
        for request_id in stopped:
            self._sequence(request_id)
        self._open.popleft()
        self._cache_full_blocks(record.uncached)
        self._book_tokens(record, token_ids)
        reasons = self._ending.reasons(record, sampled, token_ids, stopped, self._aborting)
        finished = self._finish(reasons, sampled)
        for sequence in record.voided:
            self.state.manager.release(sequence)
        if record.voided or any(ended.reason == "abort" for ended in finished):
            dropped = {sequence.request_id for sequence in record.voided}
            dropped.update(ended.request_id for ended in finished if ended.reason == "abort")
            kept = [pair for pair in zip(sampled, token_ids, strict=True) if pair[0] not in dropped]
            sampled, token_ids = [pair[0] for pair in kept], [pair[1] for pair in kept]
        return StepOutcome(plan.step, sampled, token_ids, finished)

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Undoes a step that failed: its keys are taken back and its requests end with `error`.

        Plans made after it are discarded with it. Preempted requests stay in waiting.
        """
        self._oldest_open(plan)
        failed: dict[RequestId, None] = {}
        records, self._open = [*self._open], deque()
        for record in records:
            for block_id in record.cached:
                self.state.manager.pool.unregister(block_id)
            failed.update(dict.fromkeys(entry.request_id for entry in record.plan.entries))
            for sequence in record.voided:
                self.state.manager.release(sequence)
        reasons = {**dict.fromkeys(failed, "error"), **dict.fromkeys(self._aborting, "abort")}
        return self._finish(reasons, ())

    # Runs of equal decode steps ---------------------------------------------------------------

    def decode_horizon(self, plan: StepPlan) -> int:
        """Steps from the open `plan` on that are certain to decode its rows and nothing else.

        Only the last of them may finish requests. At least 1.
        """
        state, decodes = self.state, self.state.decodes
        record = self._oldest_open(plan)
        if self._is_unsteady(record) or not self.policy.admits_none(state, len(plan.decode)):
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
        if plan.chunks or num_steps < 1 or (num_steps > 1 and self._is_unsteady(record)):
            raise StepOrderError(f"run_decode() cannot take {num_steps} steps from {plan.step} on")
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
        outcome = self.commit(plan, [tokens(row)[num_steps - 1] for row in rows])
        outcome = replace(outcome, step=plan.step + num_steps - 1)
        return DecodeRun(plan.step, num_steps, plan.decode, tuple(blocks), num_free, outcome)

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
            or len(plan.decode) != len(state.decodes)
            or self._ending.may_stop()
        )

    # Views --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.state.waiting or self.state.running)

    @property
    def num_waiting(self) -> int:
        """Requests in waiting, half-done prompts of `prefill_first` included."""
        return len(self.state.waiting)

    @property
    def num_running(self) -> int:
        """Requests in running."""
        return len(self.state.running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return self.state.manager.pool.num_free

    @property
    def open_plans(self) -> tuple[StepPlan, ...]:
        """Plans that are neither committed nor discarded, oldest first."""
        return tuple(record.plan for record in self._open)

    def waiting_ids(self) -> list[RequestId]:
        """Waiting requests, front first."""
        return [sequence.request_id for sequence in self.state.waiting]

    def running_ids(self) -> list[RequestId]:
        """Running requests, oldest first."""
        return [*self.state.running]

    def free_order(self) -> list[int]:
        """All free blocks, the next one to be handed out first. O(pool): for tests."""
        return self.state.manager.pool.free_order()

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """The request's blocks in order of position."""
        return tuple(self._sequence(request_id).block_table)

    def num_tokens(self, request_id: RequestId) -> int:
        """Prompt and outputs, tokens of open plans included."""
        sequence = self._sequence(request_id)
        return self.state.decodes.num_tokens(sequence) if sequence.decoding else sequence.num_tokens

    def num_computed_tokens(self, request_id: RequestId) -> int:
        """Leading tokens whose KV is valid, or will be once the open plans are computed."""
        sequence = self._sequence(request_id)
        if sequence.decoding:
            return self.state.decodes.num_tokens(sequence) - 1  # LAW-S5
        return sequence.num_computed_tokens

    def output_token_ids(self, request_id: RequestId) -> array[int]:
        """The outputs so far."""
        sequence = self._sequence(request_id)
        self.state.decodes.sync_outputs(sequence)
        return sequence.output_token_ids[:]

    # Parts --------------------------------------------------------------------------------

    def _ids_in_use(self, request_id: RequestId) -> Collection[RequestId]:
        """Live ids; one that ended lives on while an open plan still holds its blocks."""
        voided = {s.request_id for record in self._open for s in record.voided}
        return {request_id} if request_id in voided else self.state.sequences

    def _begin_step(self, tokens_open: bool) -> Step:
        self.state.manager.cached_in_step = {}
        return Step(self.config.max_num_batched_tokens, tokens_open)

    def _book(self, step: Step, plan: StepPlan) -> OpenStep:
        """Books a decided step: its counts grow, and it is open until its commit."""
        state = self.state
        self._next_step += 1
        sequences = [sequence for sequence, _ in step.chunks]
        ending = step.book(state)
        cached = [*state.manager.cached_in_step]
        return OpenStep(plan, sequences, ending, step.uncached, cached)

    def _check_progress(self, plan: StepPlan) -> None:
        if not plan.num_entries and self.config.reject_impossible and not self._open:
            raise KernelBug("L1", f"step {plan.step} schedules nothing although there is work")

    def _oldest_open(self, plan: StepPlan) -> OpenStep:
        if not self._open or self._open[0].plan is not plan:
            raise StepOrderError(f"the plan of step {plan.step} is not the oldest open one")
        return self._open[0]

    def _sequence(self, request_id: RequestId) -> Sequence:
        sequence = self.state.sequences.get(request_id)
        if sequence is None:
            raise UnknownRequest(f"no live request {request_id!r}")
        return sequence

    def _cache_full_blocks(self, filled: list[tuple[Sequence, int]]) -> None:
        """Registers full blocks, in batch order, of those that still hold them."""
        for sequence, num_computed_tokens in filled:
            if sequence.block_table and sequence.request_id in self.state.sequences:
                self.state.decodes.sync_outputs(sequence)
                self.state.manager.cache_full_blocks(sequence, num_computed_tokens)

    def _book_tokens(self, record: OpenStep, token_ids: Seq[int]) -> None:
        """Hands every live entry its token; the decode part as one column where it can."""
        plan, decodes, sequences = record.plan, self.state.decodes, self.state.sequences
        column = token_ids
        if plan.chunks:
            by_id = dict(zip(plan.sampled_ids, token_ids, strict=True))
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
        """Ends a request; blocks that an open plan still writes are kept until its commit."""
        self.state.remove(sequence)
        self._ending.unwatch(sequence)
        writer = next((r for r in reversed(self._open) if r.has(sequence.request_id)), None)
        if writer is None:
            self.state.manager.release(sequence)
        else:
            writer.voided.append(sequence)
        return Finished(sequence.request_id, reason, sequence.output_token_ids)
