"""Commit, discard, abort, drain: how requests end, and what the state must be afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import Finished, StepOutcome
from engine.core.request import RequestId
from properties.follower import goals, moves
from properties.follower.picture import OpenStep, Picture
from properties.follower.run_sums import Track
from properties.follower.view import Target
from properties.reference.stand_in_model import sequential_outputs


def commit(picture: Picture, step: OpenStep, tokens: Sequence[int], outcome: StepOutcome) -> None:
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
            if picture.ledger.ended[name] in ("stop", "length"):
                picture.ledger.aborted_work += count  # the entry was void (async)
            continue
        if (not picture.mixed or samples) and track.preempted == step.preemptions[place]:
            moves.register(picture, track, first + count, step.number)
        if token is not None and not track.wants_abort:
            kept.append((name, token))
            track.append(token, decoding=track.preempted == step.preemptions[place])
            reason = finish_reason(picture, track, token)
            goals.note_token(picture, track, first, reason)
            if reason is not None:
                ending[name] = reason
    end_all(picture, ending, outcome.finished)
    if list(zip(outcome.sampled, outcome.token_ids, strict=True)) != kept:
        told_ids = set(outcome.sampled)
        stale = {track.request.request_id for track in picture.waiting}
        if told_ids - {name for name, _ in kept} and any(e[0].ended for e in step.entries):
            picture.complain("A2", f"tokens of void entries went to {list(outcome.sampled)}")
        if stale & ({name for name, _ in kept} - told_ids):
            picture.complain("A3", f"{list(outcome.sampled)} got tokens, expected {kept}")
        picture.complain("S12", f"tokens went to {list(outcome.sampled)}, expected {kept}")
    if len(outcome.finished) > 1:
        picture.ledger.goals["two ends in one step"] += 1
    _check_first_tokens(picture)


def end_all(picture: Picture, ending: dict[RequestId, str], finished: Sequence[Finished]) -> None:
    """Ends requests in the order that was told, which keeps the order of `ending`."""
    for track in picture.live.values():
        if track.wants_abort:
            ending[track.request.request_id] = "abort"
    told = {ended.request_id: ended for ended in finished}
    if set(told) != set(ending):
        picture.complain("L6", f"{list(told)} ended, expected {list(ending)}")
    by_token = [name for name in ending if ending[name] != "abort"]
    if [name for name in told if name in by_token] != by_token:
        picture.complain("L6", f"{list(told)} did not end in batch order {by_token}")
    for name in sorted(ending, key=lambda name: list(told).index(name) if name in told else -1):
        law = "L8" if ending[name] == "abort" else "L6"
        end(picture, picture.live[name], told.get(name), ending[name], law)


def finish_reason(picture: Picture, track: Track, token: int) -> str | None:
    """Why a request ends with this token, if it does."""
    request, config = track.request, picture.config
    if token in request.stop_token_ids and len(track.outputs) > request.min_tokens:
        return "stop"
    bounded = picture.mixed or config.bound_model_len
    if len(track.outputs) >= request.max_tokens:
        return "length"
    return "length" if bounded and track.tokens >= config.max_model_len else None


def _check_first_tokens(picture: Picture) -> None:
    """LAW-S9: nobody samples its first token before an earlier arrival did."""
    if picture.config.long_prefill_token_threshold or picture.by_priority:
        return
    if picture.spreads_prefill:
        return  # a request that misses one token goes past a prompt that is held back
    before = True
    for track in sorted(picture.live.values(), key=lambda track: track.arrival):
        if track.first_token and not before:
            picture.complain("S9", f"{track.request.request_id!r} overtook an earlier request")
        before = track.first_token


def end(picture: Picture, track: Track, finished: Finished | None, reason: str, law: str) -> None:
    """Takes a request out of the picture and checks how it ended."""
    request, ledger = track.request, picture.ledger
    name = request.request_id
    if finished is None:
        picture.complain(law, f"{name!r} should have ended with {reason!r}")
    elif finished.reason != reason:
        picture.complain("L6", f"{name!r} ended with {finished.reason!r}, not {reason!r}")
    if finished is not None and list(finished.output_token_ids) != track.outputs:
        picture.complain("L7", f"{name!r} returned {list(finished.output_token_ids)}")
    if reason in ("stop", "length"):
        _check_outputs(picture, track)
        if track not in picture.waiting:  # else a preemption has booked its work already (async)
            ledger.finished_work += len(request.prompt) + len(track.outputs) - 1
    else:
        ledger.aborted_work += track.computed
    if name in ledger.ended:
        picture.complain("L4", f"{name!r} ended twice")
    ledger.ended[name] = reason
    # What was returned, not what was sampled: probes compare the former.
    ledger.outputs[name] = list(finished.output_token_ids) if finished is not None else []
    # At once, though a step in flight may still write to one of them: it runs before all others.
    picture.blocks.release(track.table, picture.complain)
    track.table = []
    track.ended = True
    for queue in (picture.waiting, picture.running):
        if track in queue:
            queue.remove(track)
    del picture.live[name]


def _check_outputs(picture: Picture, track: Track) -> None:
    request = track.request
    if not 1 <= len(track.outputs) <= request.max_tokens:
        picture.complain("L7", f"{request.request_id!r} has {len(track.outputs)} outputs")
    config = picture.config
    limit = config.max_model_len
    if not (picture.mixed or config.bound_model_len):
        limit = len(request.prompt) + request.max_tokens
    expected, _ = sequential_outputs(request, track.seed, picture.vocabulary, limit)
    if expected != track.outputs:
        detail = f"{request.request_id!r}: {track.outputs}, alone {expected}"
        if track.preempted:
            picture.complain("E4", detail)
        if config.hash_bits <= 8:
            picture.complain("K11", detail)
        picture.complain("E1", detail)


def discard(picture: Picture, steps: Sequence[OpenStep], finished: Sequence[Finished]) -> None:
    """A failed step and those after it: keys and members go."""
    ending: dict[RequestId, str] = {}
    for step in steps:
        ending.update(_undo(picture, step))
    if len(steps) > 1 and set(ending) - {end.request_id for end in finished}:
        picture.complain("A4", f"of {list(ending)} only {list(finished)} ended")
    if len(steps) > 1:  # two batches have no common order
        told = [end.request_id for end in finished if end.request_id in ending]
        ending = {name: ending[name] for name in [*told, *ending]}
    end_all(picture, ending, finished)


def _undo(picture: Picture, step: OpenStep) -> dict[RequestId, str]:
    """Takes back one step's keys; nobody knows what its slots hold. Who ends by it."""
    blocks, size = picture.blocks, picture.config.block_size
    goals.note_discard(picture, step)
    for block in range(blocks.num_blocks):
        if blocks.keyed_step[block] == step.number:
            blocks.unregister(block)
    ending: dict[RequestId, str] = {}
    for track, first, count, _, table in step.entries:
        if not track.ended:
            ending[track.request.request_id] = "error"
        elif picture.ledger.ended[track.request.request_id] in ("stop", "length"):
            picture.ledger.aborted_work += count
        for position in range(first, first + count):
            if position // size < len(table):
                blocks.contents[table[position // size]][position % size] = None
    return ending


def compare_state(picture: Picture, target: Target) -> None:
    """Queues, tables, counts and the free queue: the scheduler's against the picture's."""
    live, complain = picture.live, picture.complain
    waiting = [track.request.request_id for track in picture.waiting]
    running = [track.request.request_id for track in picture.running]
    told_waiting, told_running = target.waiting_ids(), target.running_ids()
    if (
        picture.by_priority
        and told_waiting != waiting
        and sorted(map(str, told_waiting)) == sorted(map(str, waiting))
    ):
        complain("S14", f"waiting is {told_waiting}, by priority and arrival {waiting}")
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
        if table and not track.table and track in picture.waiting:
            complain("B8", f"{name!r} was not admitted and holds {table}")
        if table != tuple(track.table):
            complain("B6", f"{name!r} holds {table}, the plans say {track.table}")
        computed = target.num_computed_tokens(name)
        if computed != track.computed:
            complain("S5", f"{name!r}: {computed} computed, not {track.computed}")
        if not picture.open and track.sampled and track.computed != track.tokens - 1:
            complain("S5", f"{name!r} decodes with {computed} of {track.tokens} computed")
    _compare_free(picture, target)


def _compare_free(picture: Picture, target: Target) -> None:
    blocks, complain = picture.blocks, picture.complain
    void = any(entry[0].ended for step in picture.open for entry in step.entries)
    if void and target.num_free_blocks < len(blocks.free):
        complain("A2", f"{target.num_free_blocks} blocks are free, {len(blocks.free)} should be")
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
            picture.open
            and not picture.open[-1].plan.new_blocks
            and (not picture.open[-1].plan.preempted)
        ):
            complain("K10", f"a step that took nothing left the free queue as {order}")
        complain("K9", f"the free queue is {order}, not {blocks.free}")
        if len(order) == len(blocks.free):
            blocks.free = list(order)
    if target.num_free_blocks != len(order):
        complain("B1", f"num_free_blocks={target.num_free_blocks}, the free queue has {len(order)}")
    if order and picture.config.enable_prefix_caching:
        blocks.check_eviction_order(order, complain)


def drained(picture: Picture, target: Target) -> None:
    """Nothing is live: conservation, no leak, and the work identity."""
    ledger, complain = picture.ledger, picture.complain
    if picture.live or target.has_work:
        complain("L3", f"{len(picture.live)} requests never finished")
    if target.num_free_blocks != picture.config.num_blocks or any(picture.blocks.refs):
        complain("L5", f"{target.num_free_blocks} of {picture.config.num_blocks} blocks are free")
    if set(ledger.ended) != ledger.added:
        complain("L4", f"added {sorted(map(str, ledger.added))}, ended {list(ledger.ended)}")
    explained = (
        ledger.finished_work + ledger.preempted_work + ledger.aborted_work - ledger.hit_tokens
    )
    if ledger.scheduled != explained:
        complain("E5", f"{ledger.scheduled} tokens were computed, {explained} are explained")
