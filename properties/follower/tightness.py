"""The tightness twins LAW-T1 to LAW-T5: a scheduler must not only be safe but also waste nothing.

Safety laws alone accept a scheduler that never hits, never admits two requests or preempts for
fun. Each function here states what the policy could have done in this picture.
"""

from __future__ import annotations

from collections.abc import Sequence

from properties.follower import moves
from properties.follower.picture import OpenStep, Picture
from properties.follower.run_sums import Track


def longest_hit(picture: Picture, track: Track) -> list[int]:
    """The blocks that a lookup must find now."""
    if not picture.config.enable_prefix_caching:
        return []
    size = picture.config.block_size
    hits: list[int] = []
    for index in range((track.tokens - 1) // size):
        block = picture.blocks.served(track.hashes[(index + 1) * size - 1])
        if block is None:
            break
        hits.append(block)
    return hits


def admission(picture: Picture, track: Track, hits: Sequence[int], reserve: int) -> None:
    """LAW-T1, LAW-T5: an admission hits all it can, and what it needs is free."""
    expected = longest_hit(picture, track)
    if list(hits) != expected:
        name = track.request.request_id
        picture.complain("T1", f"{name!r} hits {list(hits)}, not {expected}")
    short = _shortage(picture, track, hits, reserve)
    if short > 0:
        picture.complain("T5", f"{track.request.request_id!r} is admitted {short} blocks short")


def _shortage(picture: Picture, track: Track, hits: Sequence[int], reserve: int) -> int:
    """Blocks that are missing for an admission; at most 0 if it fits."""
    config, blocks = picture.config, picture.blocks
    headroom = 0
    if picture.mixed:
        headroom = config.watermark_blocks if picture.running else 0
        if config.reserve_full_prompt:
            reserve = track.tokens
    free_hits = sum(1 for block in hits if blocks.refs[block] == 0)
    needed = -(-reserve // config.block_size) - len(hits) + free_hits
    return needed + headroom - len(blocks.free)


def chunk_of(picture: Picture, remaining: int, budget_left: int) -> int:
    """Tokens that `mixed` gives to a request."""
    config, num_requests = picture.config, len(picture.live)
    threshold = config.long_prefill_token_threshold
    if num_requests <= 1 and not config.threshold_when_alone:
        threshold = 0
    if threshold and config.long_prefill_token_threshold_adaptive:
        threshold = max(threshold, config.max_num_batched_tokens // num_requests)
    if 0 < threshold < remaining:
        remaining = threshold
    return min(remaining, budget_left)


def waits_for_last_token(picture: Picture, track: Track) -> bool:
    """P-P2: its token in flight ends it for its length, so it has nothing to compute."""
    if not track.pending:
        return False
    bounded = picture.mixed or picture.config.bound_model_len
    if bounded and track.tokens + track.pending >= picture.config.max_model_len:
        return True
    return len(track.outputs) + track.pending >= track.request.max_tokens


def before_step(picture: Picture) -> tuple[list[Track], bool]:
    """The running queue before the step, and whether the head of waiting could start a prefill."""
    can_prefill = not picture.mixed and _head_fits_prefill(picture, 0, 0)
    return list(picture.running), can_prefill


def _head_fits_prefill(picture: Picture, num_entries: int, used: int) -> bool:
    config = picture.config
    budget_left = config.max_num_batched_tokens - used
    if not picture.waiting or num_entries >= config.max_num_seqs or budget_left <= 0:
        return False
    track = picture.waiting[0]
    todo = track.tokens - track.computed
    if not track.table:
        holders = sum(1 for other in picture.live.values() if other.table)
        if config.bound_holders and holders >= config.max_num_seqs:
            return False
        hits = longest_hit(picture, track)
        if _shortage(picture, track, hits, track.tokens) > 0:
            return False
        todo = track.tokens - len(hits) * config.block_size
    return todo <= budget_left or num_entries == 0


def _head_fits_mixed(picture: Picture, budget_left: int) -> bool:
    config = picture.config
    if not picture.waiting or len(picture.running) >= picture.seats or budget_left <= 0:
        return False
    track = picture.waiting[0]
    hits = longest_hit(picture, track)
    start = len(hits) * config.block_size
    reserve = start + chunk_of(picture, track.tokens - start, budget_left)
    return _shortage(picture, track, hits, reserve) <= 0


def leftover_victims(picture: Picture, victims: list[Track], total: int) -> None:
    """LAW-T4: victims that no batch member needed were preempted for the last one of them."""
    if not victims:
        return
    asker = victims[-1]
    picture.ledger.goals["self-preemption"] += 1
    config = picture.config
    known = asker.tokens + asker.pending
    if picture.mixed:
        budget_left = config.max_num_batched_tokens - total
        count = chunk_of(picture, known - asker.computed, budget_left)
        known = asker.computed + count
    needed = -(-known // config.block_size) - len(asker.table)
    for victim in victims:
        if needed <= len(picture.blocks.free):
            name = victim.request.request_id
            picture.complain("T4", f"{name!r} is preempted, {len(picture.blocks.free)} are free")
        moves.preempt(picture, victim)


def after_step(
    picture: Picture,
    step: OpenStep,
    before: tuple[list[Track], bool],
    preempting: bool,
    total: int,
) -> None:
    """LAW-T2, LAW-T3: budget, seats and blocks are used as far as the policy allows."""
    running_before, could_prefill = before
    budget_left = picture.config.max_num_batched_tokens - total
    members = [entry[0] for entry in step.entries]
    if picture.mixed:
        served = [track for track in running_before if track in members]
        _check_served(picture, running_before, members, served, budget_left <= 0)
        # A victim of `priority` gives tokens back after the asker's share was fixed.
        if not (picture.by_priority and preempting):
            _check_mixed_chunks(picture, step)
        if not preempting and _head_fits_mixed(picture, budget_left):
            picture.complain("T2", f"{_head(picture)!r} fits and waits, {budget_left} tokens left")
        return
    decodes = [track for track in members if track in running_before]
    if not decodes:
        _check_cut(picture, step, total)
        if not preempting and _head_fits_prefill(picture, len(members), total):
            picture.complain("T2", f"{_head(picture)!r} fits and waits, {budget_left} tokens left")
        return
    if could_prefill or len(decodes) < len(members):
        picture.complain("T2", f"decodes although {_head(picture)!r} could be prefilled")
    limit = picture.config.max_num_seqs
    if picture.config.bound_decode_tokens:
        limit = min(limit, picture.config.max_num_batched_tokens)
    _check_served(picture, running_before, members, decodes, len(members) >= limit)


def _head(picture: Picture) -> object:
    return picture.waiting[0].request.request_id if picture.waiting else None


def _check_served(
    picture: Picture,
    running_before: list[Track],
    members: list[Track],
    served: list[Track],
    full: bool,
) -> None:
    """Running requests are served from the front, all of them unless a limit is reached."""
    expected = [
        track
        for track in running_before
        if track in picture.running
        and (track in members or not waits_for_last_token(picture, track))
    ]
    names = [track.request.request_id for track in members]
    if members[: len(served)] != served or served != expected[: len(served)]:
        picture.complain("T3", f"batch {names} is not in running order")
    if len(served) < len(expected) and not full:
        name = expected[len(served)].request.request_id
        picture.complain("T3", f"{name!r} runs and gets nothing although the step has room")


def _check_mixed_chunks(picture: Picture, step: OpenStep) -> None:
    budget_left = picture.config.max_num_batched_tokens
    for track, first, count, samples, _ in step.entries:
        known = track.tokens + track.pending - samples
        expected = chunk_of(picture, known - first, budget_left)
        if count != expected:
            name = track.request.request_id
            picture.complain("T3", f"{name!r} gets {count} tokens where {expected} were possible")
        budget_left -= count


def _check_cut(picture: Picture, step: OpenStep, total: int) -> None:
    for track, first, count, samples, _ in step.entries:
        if samples or first + count == track.tokens:
            continue
        if len(step.entries) > 1 or total != picture.config.max_num_batched_tokens:
            name = track.request.request_id
            picture.complain("T3", f"{name!r} is cut at {count} tokens of a step of {total}")
