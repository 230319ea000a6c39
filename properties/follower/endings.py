"""Commit, discard, abort, drain: how requests end, and what the state must be afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core.plan import Finished, StepOutcome
from engine.core.request import RequestId
from properties.follower import goals
from properties.follower.run_sums import Track
from properties.follower.view import Target
from properties.reference.stand_in_model import sequential_outputs

if TYPE_CHECKING:
    from properties.follower.follower import Follower, OpenStep


def commit(follower: Follower, step: OpenStep, tokens: Sequence[int], outcome: StepOutcome) -> None:
    """Applies a step's results in batch order."""
    upcoming = iter(tokens)
    kept: list[tuple[object, int]] = []
    ending: dict[RequestId, str] = {}
    for place, (track, first, count, samples, _) in enumerate(step.entries):
        token = next(upcoming) if samples else None
        if track.preempted == step.preemptions[place]:
            track.pending -= samples
        name = track.request.request_id
        if track.ended:
            if follower.ledger.ended[name] in ("stop", "length"):
                follower.ledger.aborted_work += count  # the entry was void (async)
            continue
        if not follower.mixed or follower.config.async_scheduling:
            follower.register(track, first, first + count, step.number)
        if token is not None and not track.wants_abort:
            kept.append((name, token))
            track.append(token, decoding=track.preempted == step.preemptions[place])
            reason = finish_reason(follower, track, token)
            goals.note_token(follower, track, first, reason)
            if reason is not None:
                ending[name] = reason
    end_all(follower, ending, outcome.finished)
    for table in step.voided:
        follower.blocks.release(table, follower.complain)
    if list(zip(outcome.sampled, outcome.token_ids, strict=True)) != kept:
        follower.complain("S12", f"tokens went to {list(outcome.sampled)}, expected {kept}")
    if len(outcome.finished) > 1:
        follower.ledger.goals["two ends in one step"] += 1
    _check_first_tokens(follower)


def end_all(follower: Follower, ending: dict[RequestId, str], finished: Sequence[Finished]) -> None:
    """Ends requests in the order that was told, which keeps the order of `ending`."""
    for track in follower.live.values():
        if track.wants_abort:
            ending[track.request.request_id] = "abort"
    told = {ended.request_id: ended for ended in finished}
    if set(told) != set(ending):
        follower.complain("L6", f"{list(told)} ended, expected {list(ending)}")
    by_token = [name for name in ending if ending[name] != "abort"]
    if [name for name in told if name in by_token] != by_token:
        follower.complain("L6", f"{list(told)} did not end in batch order {by_token}")
    for name in sorted(ending, key=lambda name: list(told).index(name) if name in told else -1):
        law = "L8" if ending[name] == "abort" else "L6"
        end(follower, follower.live[name], told.get(name), ending[name], law)


def finish_reason(follower: Follower, track: Track, token: int) -> str | None:
    """Why a request ends with this token, if it does."""
    request, config = track.request, follower.config
    if token in request.stop_token_ids and len(track.outputs) > request.min_tokens:
        return "stop"
    bounded = follower.mixed or config.bound_model_len
    if len(track.outputs) >= request.max_tokens:
        return "length"
    return "length" if bounded and track.tokens >= config.max_model_len else None


def _check_first_tokens(follower: Follower) -> None:
    """S9: nobody samples its first token before an earlier arrival did."""
    if follower.config.long_prefill_token_threshold:
        return
    before = True
    for track in sorted(follower.live.values(), key=lambda track: track.arrival):
        if track.first_token and not before:
            follower.complain("S9", f"{track.request.request_id!r} overtook an earlier request")
        before = track.first_token


def end(follower: Follower, track: Track, finished: Finished | None, reason: str, law: str) -> None:
    """Takes a request out of the picture and checks how it ended."""
    request, ledger = track.request, follower.ledger
    name = request.request_id
    if finished is None:
        follower.complain(law, f"{name!r} should have ended with {reason!r}")
    elif finished.reason != reason:
        follower.complain("L6", f"{name!r} ended with {finished.reason!r}, not {reason!r}")
    if finished is not None and list(finished.output_token_ids) != track.outputs:
        follower.complain("L7", f"{name!r} returned {list(finished.output_token_ids)}")
    if reason in ("stop", "length"):
        _check_outputs(follower, track)
        if track not in follower.waiting:  # else a preemption has booked its work already (async)
            ledger.finished_work += len(request.prompt) + len(track.outputs) - 1
    else:
        ledger.aborted_work += track.computed
    if name in ledger.ended:
        follower.complain("L4", f"{name!r} ended twice")
    ledger.ended[name] = reason
    ledger.outputs[name] = track.outputs
    writing = [step for step in follower.open if any(entry[0] is track for entry in step.entries)]
    if writing:
        writing[-1].voided.append(track.table)
    else:
        follower.blocks.release(track.table, follower.complain)
    track.table = []
    track.ended = True
    for queue in (follower.waiting, follower.running):
        if track in queue:
            queue.remove(track)
    del follower.live[name]


def _check_outputs(follower: Follower, track: Track) -> None:
    request = track.request
    if not 1 <= len(track.outputs) <= request.max_tokens:
        follower.complain("L7", f"{request.request_id!r} has {len(track.outputs)} outputs")
    config = follower.config
    limit = config.max_model_len
    if not (follower.mixed or config.bound_model_len):
        limit = len(request.prompt) + request.max_tokens
    expected, _ = sequential_outputs(request, track.seed, follower.vocabulary, limit)
    if expected != track.outputs:
        detail = f"{request.request_id!r}: {track.outputs}, alone {expected}"
        if track.preempted:
            follower.complain("E4", detail)
        if config.hash_bits <= 8:
            follower.complain("K11", detail)
        follower.complain("E1", detail)


def discard(follower: Follower, step: OpenStep, finished: Sequence[Finished]) -> None:
    """A failed step: its keys and its members go, and nobody knows what its slots hold."""
    blocks, size = follower.blocks, follower.config.block_size
    goals.note_discard(follower, step)
    for block in range(blocks.num_blocks):
        if blocks.keyed_step[block] == step.number:
            blocks.unregister(block)
    ending: dict[RequestId, str] = {}
    for track, first, count, samples, table in step.entries:
        if not track.ended:
            track.pending -= samples
            ending[track.request.request_id] = "error"
        elif follower.ledger.ended[track.request.request_id] in ("stop", "length"):
            follower.ledger.aborted_work += count
        for position in range(first, first + count):
            if position // size < len(table):
                blocks.contents[table[position // size]][position % size] = None
    for table in step.voided:
        blocks.release(table, follower.complain)
    end_all(follower, ending, finished)


def compare_state(follower: Follower, target: Target) -> None:
    """Queues, tables, counts and the free queue: the scheduler's against the picture's."""
    live, complain = follower.live, follower.complain
    waiting = [track.request.request_id for track in follower.waiting]
    running = [track.request.request_id for track in follower.running]
    told_waiting, told_running = target.waiting_ids(), target.running_ids()
    if told_waiting != waiting or told_running != running:
        if sorted(map(str, told_waiting + told_running)) != sorted(map(str, waiting + running)):
            complain("L4", f"live are {told_waiting} and {told_running}, not {waiting}, {running}")
        in_both = set(told_waiting) & set(told_running)
        law = "S4" if in_both or set(told_waiting) != set(waiting) else "S6"
        complain(law, f"waiting {told_waiting}, running {told_running}: not {waiting}, {running}")
    if target.has_work != bool(live):
        complain("L4", f"has_work={target.has_work} with {len(live)} live requests")
    for name, track in live.items():
        table = target.block_table(name)
        if table and not track.table and track in follower.waiting:
            complain("B8", f"{name!r} was not admitted and holds {table}")
        if table != tuple(track.table):
            complain("B6", f"{name!r} holds {table}, the plans say {track.table}")
        if not follower.open:
            computed = target.num_computed_tokens(name)
            if computed != track.computed:
                complain("S5", f"{name!r}: {computed} computed, not {track.computed}")
            if track.sampled and track.computed != track.tokens - 1:
                complain("S5", f"{name!r} decodes with {computed} of {track.tokens} computed")
    _compare_free(follower, target)


def _compare_free(follower: Follower, target: Target) -> None:
    blocks, complain = follower.blocks, follower.complain
    order = target.free_order()
    if order is None:  # an adapter that cannot tell
        if target.num_free_blocks != len(blocks.free):
            complain("B4", f"{target.num_free_blocks} blocks are free, not {len(blocks.free)}")
        return
    if order != blocks.free:
        if len(set(order)) != len(order):
            complain("B2", f"the free queue holds a block twice: {order}")
        held = {block for block, refs in enumerate(blocks.refs) if refs}
        if held & set(order):
            complain("B1", f"held blocks {sorted(held & set(order))} are free")
        if len(order) + len(held) != blocks.num_blocks:
            complain("B4", f"{len(order)} free and {len(held)} held of {blocks.num_blocks}")
        if (
            follower.open
            and not follower.open[-1].plan.new_blocks
            and (not follower.open[-1].plan.preempted)
        ):
            complain("K10", f"a step that took nothing left the free queue as {order}")
        complain("K9", f"the free queue is {order}, not {blocks.free}")
        if len(order) == len(blocks.free):
            blocks.free = list(order)
    if target.num_free_blocks != len(order):
        complain("B1", f"num_free_blocks={target.num_free_blocks}, the free queue has {len(order)}")
    if order and follower.config.enable_prefix_caching:
        blocks.check_eviction_order(order, complain)


def drained(follower: Follower, target: Target) -> None:
    """Nothing is live: conservation, no leak, and the work identity."""
    ledger, complain = follower.ledger, follower.complain
    if follower.live or target.has_work:
        complain("L3", f"{len(follower.live)} requests never finished")
    if target.num_free_blocks != follower.config.num_blocks or any(follower.blocks.refs):
        complain("L5", f"{target.num_free_blocks} of {follower.config.num_blocks} blocks are free")
    if set(ledger.ended) != ledger.added:
        complain("L4", f"added {sorted(map(str, ledger.added))}, ended {list(ledger.ended)}")
    explained = (
        ledger.finished_work + ledger.preempted_work + ledger.aborted_work - ledger.hit_tokens
    )
    if ledger.scheduled != explained:
        complain("E5", f"{ledger.scheduled} tokens were computed, {explained} are explained")
