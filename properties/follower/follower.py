"""The follower: replays a scheduler's decisions on its own picture and checks law by law."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.core.plan import Admission, Finished, StepOutcome
from engine.core.request import Request, RequestId
from properties.follower import endings, fairness, goals, moves, tightness
from properties.follower.picture import OpenStep, Picture
from properties.follower.run_sums import Track
from properties.follower.view import PlanView, Target
from properties.reference.stand_in_model import sample

TIGHTNESS = frozenset({"T1", "T2", "T3", "T4", "T5"})
# Perturbations change decisions on purpose; what concerns safety stays in force.
SUSPENDED_IF_PERTURBED = TIGHTNESS | {"S8", "S9", "S10", "B11", "L2", "K9", "L9", "L10"}
# It serves prompts first by design, however long that lets decodes wait.
SUSPENDED_IF_PREFILL_FIRST = frozenset({"L9"})
# Any request may give way, one that was served in the same step too, and then the plan does not
# tell which blocks it had taken; the naive reference decides the same or complains.
SUSPENDED_IF_PRIORITY = frozenset({"T4", "K9", "B11"})


class Follower(Picture):
    """Checks every law that can be seen from a scheduler's decisions and queues.

    Call `on_add`, `on_schedule`, `execute`, `on_commit`, `on_abort`, `on_discard` and `on_drain`
    beside the scheduler's own calls. `only` limits the complaints to some laws, `suspended`
    leaves some out.
    """

    # ---- requests ----

    def is_in_flight(self, request: Request) -> bool:
        """Whether an open step still computes for a request that had this id."""
        name = request.request_id
        entries = [entry for step in self.open for entry in step.entries]
        return any(track.request.request_id == name for track, *_ in entries)

    def on_add(self, request: Request, seed: int) -> None:
        """A request was accepted."""
        track = Track(request, self.ledger.num_added, seed)
        self.ledger.num_added += 1
        self.ledger.added.add(request.request_id)
        self.ledger.ended.pop(request.request_id, None)  # an id may be used again after its end
        self.live[request.request_id] = track
        moves.enqueue(self, track)
        goals.note_request(self, request)

    def on_abort(self, request_id: RequestId, finished: Finished | None, target: Target) -> None:
        """A request was aborted: at once, or with the commit of the open step."""
        track = self.live[request_id]
        goals.note_abort(self, track, finished)
        if finished is None:
            if not self.open:
                self.complain("L8", f"abort of {request_id!r} waits although no step is open")
            track.wants_abort = True
        else:
            endings.end(self, track, finished, "abort", "L8")
            if target.num_free_blocks != len(self.blocks.free):
                self.complain("L8", f"abort of {request_id!r} frees other blocks than its own")
            self.check_state(target)

    # ---- steps ----

    def on_schedule(self, plan: PlanView, target: Target) -> None:
        """A step was decided."""
        self.ledger.steps += 1
        step = OpenStep(plan, self.ledger.steps)
        before = tightness.before_step(self)
        gains = {gain.request_id: gain for gain in plan.new_blocks}
        admissions = {admission.request_id: admission for admission in plan.admitted}
        victims = [
            self.live[request_id] for request_id in plan.preempted if request_id in self.live
        ]
        if len(victims) < len(plan.preempted):
            self.complain("S4", f"a preempted request is not live: {list(plan.preempted)}")
        if victims and admissions:
            self.complain("S6", f"{list(admissions)} admitted in a step that preempts")
        pending_victims = list(victims)
        while pending_victims and "T4" in self.suspended:
            moves.preempt(self, pending_victims.pop(0))  # who asked for the blocks is not known
        slots: set[int] = set()
        total = 0
        for entry in plan.entries:
            request_id, first, count, samples, is_decode = entry
            track = self.live.get(request_id)
            if track is None:
                self.complain("S4", f"{request_id!r} is scheduled and not live")
                continue
            gain = gains.pop(request_id, None)
            gained = gain.block_ids if gain else ()
            if gain and gain.first_index != (0 if request_id in admissions else len(track.table)):
                self.complain("B6", f"{request_id!r} gains blocks at place {gain.first_index}")
            admission = admissions.pop(request_id, None)
            if admission is not None:
                self._admit(track, admission, gained, count, first, step)
            else:
                self._grow(track, gained, count, pending_victims)
            self._check_entry(track, first, count, samples, is_decode)
            total += count
            self._write(track, first, count, slots, step)
            track.computed = first + count
            track.pending += samples
            step.entries.append((track, first, count, samples, list(track.table)))
            step.preemptions.append(track.preempted)
        if gains:
            self.complain("B6", f"requests outside the batch gain blocks: {list(gains)}")
        if admissions:
            self.complain("S4", f"admitted and not in the batch: {list(admissions)}")
        tightness.leftover_victims(self, pending_victims, total)
        self._check_step(step, victims, total, len(slots))
        tightness.after_step(self, step, before, bool(victims), total)
        fairness.after_step(self, step, victims)
        self.open.append(step)
        self.ledger.scheduled += total
        goals.note_step(self, step, victims)
        self.check_state(target)

    def _admit(
        self,
        track: Track,
        admission: Admission,
        gained: Sequence[int],
        count: int,
        first: int,
        step: OpenStep,
    ) -> None:
        size, known = self.config.block_size, track.tokens
        name = track.request.request_id
        num_hits, rest = divmod(admission.hit_tokens, size)
        if track.table or track not in self.waiting:
            self.complain("S4", f"{name!r} is admitted and holds {track.table}")
        if rest or (num_hits and not self.config.enable_prefix_caching):
            self.complain("K8", f"{name!r} hits {admission.hit_tokens} tokens")
        if num_hits > -(-known // size) - 1:
            self.complain("K7", f"{name!r} hits {num_hits} blocks of {known} tokens")
        if admission.resumed != (track.preempted > 0):
            self.complain("S6", f"{name!r}: resumed={admission.resumed}")
        hits, fresh = gained[:num_hits], gained[num_hits:]
        same_step = sum(1 for block in hits if self.blocks.keyed_step[block] == step.number)
        self._check_hits(track, hits)
        reserve = first + count if self.mixed else known
        tightness.admission(self, track, hits, reserve)
        goals.note_hits(self, track, hits, same_step)
        from_free = self.blocks.take_hits(hits)
        told = (
            admission.hit_blocks_used,
            admission.hit_blocks_free,
            admission.hit_blocks_same_step,
        )
        if told[0] >= 0 and told != (num_hits - from_free - same_step, from_free, same_step):
            self.complain("T1", f"{name!r}: the plan counts hits as {told}")
        self.blocks.take_new(fresh, hits, self.complain)
        track.table = list(gained)
        track.computed = admission.hit_tokens
        track.cached = num_hits
        track.reserved = reserve
        track.sampled = False
        self.ledger.hit_tokens += admission.hit_tokens
        if track in self.waiting and (self.mixed or first + count == known):
            self.waiting.remove(track)
            self.running.append(track)

    def _check_hits(self, track: Track, hits: Sequence[int]) -> None:
        """LAW-K1, LAW-K4, LAW-K6: what a hit block must be, before anything is taken."""
        size, blocks = self.config.block_size, self.blocks
        for index, block in enumerate(hits):
            key = track.hashes[(index + 1) * size - 1]
            if blocks.keys[block] == key:
                continue
            name = track.request.request_id
            if index and blocks.keys[block] in track.hashes[(index + 2) * size - 1 :: size]:
                self.complain("K8", f"{name!r} hits a later block of its chain at {index}")
            if blocks.keys[block] is None and blocks.dropped[block] == key:
                self.complain("K6", f"{name!r} hits block {block}, which was handed out since")
            if blocks.contents[block] != track.hashes[index * size : (index + 1) * size]:
                self.complain("K4", f"{name!r} hits block {block}, which holds other tokens")
            self.complain("K1", f"{name!r} hits block {block}, which has no key")

    def _grow(
        self, track: Track, gained: Sequence[int], count: int, pending_victims: list[Track]
    ) -> None:
        """An entry of a request that holds blocks already."""
        while len(gained) > len(self.blocks.free) and pending_victims:
            moves.preempt(self, pending_victims.pop(0))
        if gained:
            if not self.mixed and track in self.waiting:
                self.complain("B7", f"{track.request.request_id!r} gains blocks in mid-prompt")
            self.blocks.take_new(gained, (), self.complain)
            track.table.extend(gained)
        # A decode of prefill_first and every step of mixed reserve what they compute.
        track.reserved = max(track.reserved, track.computed + count)
        if not self.mixed and track in self.waiting and track.computed + count == track.tokens:
            self.waiting.remove(track)
            self.running.append(track)

    def _check_entry(
        self, track: Track, first: int, count: int, samples: bool, is_decode: bool
    ) -> None:
        name, known = track.request.request_id, track.tokens + track.pending
        if first != track.computed:
            self.complain("W5", f"{name!r} computes from {first}, valid are {track.computed}")
        if count < 1 or first + count > known:
            self.complain("S3", f"{name!r} computes {count} tokens from {first} of {known}")
        if tightness.waits_for_last_token(self, track):
            self.complain("A1", f"{name!r} goes on although its token in flight is its last")
        if is_decode and count != 1:
            self.complain("S3", f"{name!r} decodes {count} tokens")
        if track.stale and samples != (first + count == known):
            self.complain("A3", f"{name!r} goes on without the token that came while it waited")
        if samples != (first + count == known):
            self.complain("S12", f"{name!r}: samples={samples} at {first}+{count} of {known}")
        if is_decode != (track.sampled or track.pending > 0):
            self.complain("S4", f"{name!r}: decode={is_decode}")
        if track.ended:
            self.complain("L6", f"{name!r} is scheduled after its end")

    def _write(self, track: Track, first: int, count: int, slots: set[int], step: OpenStep) -> None:
        """Which slots an entry writes, and which blocks get a key (mixed) by that."""
        size, blocks, table = self.config.block_size, self.blocks, track.table
        name = track.request.request_id
        end = first + count
        needed = -(-track.reserved // size)
        if len(table) != needed:
            law = "B7" if len(table) == needed - 1 or count == 1 else "B6"
            self.complain(law, f"{name!r} has {len(table)} blocks for {track.reserved} positions")
        if len(set(table)) != len(table):
            self.complain("B5", f"{name!r} holds a block twice: {table}")
        if -(-end // size) > len(table):
            self.complain("W4", f"{name!r} writes position {end - 1} with {len(table)} blocks")
            end = len(table) * size
        written = {table[pos // size] * size + pos % size for pos in range(first, end)}
        if not slots.isdisjoint(written):
            self.complain("W1", f"{name!r} writes a slot that another entry writes")
        slots |= written
        for index in range(first // size, -(-end // size)):
            block = table[index]
            if blocks.keys[block] is not None:
                self.complain("W3", f"{name!r} writes to block {block}, which has a key")
            if blocks.refs[block] > 1:
                self.complain("W2", f"{name!r} writes to block {block}, which is shared")
        if self.mixed:
            moves.register(self, track, first + count, step.number)

    def _check_step(self, step: OpenStep, victims: list[Track], total: int, num_slots: int) -> None:
        config = self.config
        gave_way = self.spreads_prefill and victims
        if not step.entries and not self.open and not gave_way:
            self.complain("L1", "the step schedules nothing")
        told = getattr(step.plan, "num_tokens", total)
        if told != total:
            self.complain("S1", f"the plan counts {told} tokens, its entries hold {total}")
        is_decode_step = not self.mixed and bool(step.entries) and step.entries[0][0].sampled
        if total > config.max_num_batched_tokens and (
            config.bound_decode_tokens or not is_decode_step
        ):
            self.complain("S1", f"{total} tokens, the budget is {config.max_num_batched_tokens}")
        holders = sum(1 for track in self.live.values() if track.table)
        if len(step.entries) > config.max_num_seqs or (
            holders > config.max_num_seqs and (self.mixed or config.bound_holders)
        ):
            self.complain("S2", f"{len(step.entries)} entries, {holders} hold blocks")
        members = [entry[0] for entry in step.entries]
        if len({id(track) for track in members}) != len(members):
            self.complain("W5", "a request is twice in the batch")
        if any(track in victims for track in members):
            self.complain("S7", "a request is preempted and scheduled in one step")
        self._check_partials()

    def _check_partials(self) -> None:
        """LAW-S8: who may be in mid-prompt."""
        if not self.mixed:
            partial = [track for track in self.waiting if track.table]
            if len(partial) > 1 or (partial and self.waiting[0] is not partial[0]):
                self.complain("S8", "a partly computed prompt is not the head of waiting")
        elif not (self.config.long_prefill_token_threshold or self.spreads_prefill):
            for track in self.running[:-1]:
                if track.computed < track.tokens and not track.sampled:
                    self.complain("S8", f"{track.request.request_id!r} is overtaken in mid-prompt")

    # ---- execution and results ----

    def execute(self) -> list[int]:
        """Runs the oldest open step on the shadow of the KV cache; the tokens that it samples."""
        step = self.open[0]
        size, contents = self.config.block_size, self.blocks.contents
        for track, first, count, _, table in step.entries:
            for position in range(first, first + count):
                if position < len(track.hashes) and position // size < len(table):
                    contents[table[position // size]][position % size] = track.hashes[position]
        tokens: list[int] = []
        for track, first, count, samples, table in step.entries:
            read: list[int | None] = []
            end = first + count
            for block in table[: -(-end // size)]:
                read += contents[block]
            del read[end:]
            if read != track.hashes[:end] and not track.ended:
                self.complain("V1", self._wrong_read(track, read))
            if samples:
                total = sum(content or 0 for content in read)
                tokens.append(sample(total, end, track.seed, self.vocabulary))
        return tokens

    @staticmethod
    def _wrong_read(track: Track, read: Iterable[Any]) -> str:
        wrong = [i for i, (a, b) in enumerate(zip(read, track.hashes, strict=False)) if a != b]
        return f"{track.request.request_id!r} reads foreign KV at positions {wrong}"

    def on_commit(self, tokens: Sequence[int], outcome: StepOutcome, target: Target) -> None:
        """The oldest open step was committed with the tokens of `execute`."""
        endings.commit(self, self.open.pop(0), tokens, outcome)
        self.check_state(target)

    def on_discard(self, finished: Sequence[Finished], target: Target) -> None:
        """The oldest open step failed and was undone, and with it those after it."""
        failed, self.open = self.open, []
        endings.discard(self, failed, finished)
        if len(failed) > 1 and target.free_order() not in (None, self.blocks.free):
            self.complain("A4", f"free are {target.free_order()}, not {self.blocks.free}")
        self.check_state(target)

    def on_drain(self, target: Target) -> None:
        """Nothing is live any more."""
        endings.drained(self, target)

    def check_state(self, target: Target) -> None:
        """The scheduler's own state against the picture."""
        endings.compare_state(self, target)
