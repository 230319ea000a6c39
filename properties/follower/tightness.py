"""The tightness twins T1-T5: a scheduler must not only be safe but also waste nothing.

Safety laws alone accept a scheduler that never hits, never admits two requests or preempts for
fun. Each function here states what the policy could have done with the follower's own picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from properties.follower.run_sums import Track

if TYPE_CHECKING:
    from properties.follower.follower import Follower, OpenStep


def longest_hit(follower: Follower, track: Track) -> list[int]:
    """The blocks that a lookup must find now."""
    if not follower.config.enable_prefix_caching:
        return []
    size = follower.config.block_size
    hits: list[int] = []
    for index in range((track.tokens - 1) // size):
        block = follower.blocks.served(track.hashes[(index + 1) * size - 1])
        if block is None:
            break
        hits.append(block)
    return hits


def admission(follower: Follower, track: Track, hits: Sequence[int], reserve: int) -> None:
    """T1, T5: an admission hits all it can, and what it needs is free."""
    expected = longest_hit(follower, track)
    if list(hits) != expected:
        name = track.request.request_id
        follower.complain("T1", f"{name!r} hits {list(hits)}, not {expected}")
    short = _shortage(follower, track, hits, reserve)
    if short > 0:
        follower.complain("T5", f"{track.request.request_id!r} is admitted {short} blocks short")


def _shortage(follower: Follower, track: Track, hits: Sequence[int], reserve: int) -> int:
    """Blocks that are missing for an admission; at most 0 if it fits."""
    config, blocks = follower.config, follower.blocks
    headroom = 0
    if follower.mixed:
        headroom = config.watermark_blocks if follower.running else 0
        if config.reserve_full_prompt:
            reserve = track.tokens
    free_hits = sum(1 for block in hits if blocks.refs[block] == 0)
    needed = -(-reserve // config.block_size) - len(hits) + free_hits
    return needed + headroom - len(blocks.free)


def chunk_of(follower: Follower, remaining: int, budget_left: int) -> int:
    """Tokens that `mixed` gives to a request."""
    threshold = follower.config.long_prefill_token_threshold
    if 0 < threshold < remaining:
        remaining = threshold
    return min(remaining, budget_left)


def before_step(follower: Follower) -> tuple[list[Track], bool]:
    """The running queue before the step, and whether the head of waiting could start a prefill."""
    can_prefill = not follower.mixed and _head_fits_prefill(follower, 0, 0)
    return list(follower.running), can_prefill


def _head_fits_prefill(follower: Follower, num_entries: int, used: int) -> bool:
    config = follower.config
    budget_left = config.max_num_batched_tokens - used
    if not follower.waiting or num_entries >= config.max_num_seqs or budget_left <= 0:
        return False
    track = follower.waiting[0]
    todo = track.tokens - track.computed
    if not track.table:
        holders = sum(1 for other in follower.live.values() if other.table)
        if config.bound_holders and holders >= config.max_num_seqs:
            return False
        hits = longest_hit(follower, track)
        if _shortage(follower, track, hits, track.tokens) > 0:
            return False
        todo = track.tokens - len(hits) * config.block_size
    return todo <= budget_left or num_entries == 0


def _head_fits_mixed(follower: Follower, budget_left: int) -> bool:
    config = follower.config
    if not follower.waiting or len(follower.running) >= config.max_num_seqs or budget_left <= 0:
        return False
    track = follower.waiting[0]
    hits = longest_hit(follower, track)
    start = len(hits) * config.block_size
    reserve = start + chunk_of(follower, track.tokens - start, budget_left)
    return _shortage(follower, track, hits, reserve) <= 0


def leftover_victims(follower: Follower, victims: list[Track], total: int) -> None:
    """T4: victims that no batch member needed were preempted for the last one of them."""
    if not victims:
        return
    asker = victims[-1]
    follower.ledger.goals["self-preemption"] += 1
    config = follower.config
    known = asker.tokens
    if follower.mixed:
        budget_left = config.max_num_batched_tokens - total
        count = chunk_of(follower, known - asker.computed, budget_left)
        known = asker.computed + count
    needed = -(-known // config.block_size) - len(asker.table)
    for victim in victims:
        if needed <= len(follower.blocks.free):
            name = victim.request.request_id
            follower.complain("T4", f"{name!r} is preempted, {len(follower.blocks.free)} are free")
        follower.preempt(victim)


def after_step(
    follower: Follower,
    step: OpenStep,
    before: tuple[list[Track], bool],
    preempting: bool,
    total: int,
) -> None:
    """T2, T3: budget, seats and blocks are used as far as the policy allows."""
    running_before, could_prefill = before
    budget_left = follower.config.max_num_batched_tokens - total
    members = [entry[0] for entry in step.entries]
    if follower.mixed:
        served = [track for track in running_before if track in members]
        _check_served(follower, running_before, members, served, budget_left <= 0)
        _check_mixed_chunks(follower, step)
        if not preempting and _head_fits_mixed(follower, budget_left):
            follower.complain(
                "T2", f"{_head(follower)!r} fits and waits, {budget_left} tokens left"
            )
        return
    decodes = [track for track in members if track in running_before]
    if not decodes:
        _check_cut(follower, step, total)
        if _head_fits_prefill(follower, len(members), total):
            follower.complain(
                "T2", f"{_head(follower)!r} fits and waits, {budget_left} tokens left"
            )
        return
    if could_prefill or len(decodes) < len(members):
        follower.complain("T2", f"decodes although {_head(follower)!r} could be prefilled")
    limit = follower.config.max_num_seqs
    if follower.config.bound_decode_tokens:
        limit = min(limit, follower.config.max_num_batched_tokens)
    _check_served(follower, running_before, members, decodes, len(members) >= limit)


def _head(follower: Follower) -> object:
    return follower.waiting[0].request.request_id if follower.waiting else None


def _check_served(
    follower: Follower,
    running_before: list[Track],
    members: list[Track],
    served: list[Track],
    full: bool,
) -> None:
    """Running requests are served from the front, all of them unless a limit is reached."""
    expected = [track for track in running_before if track in follower.running]
    names = [track.request.request_id for track in members]
    if members[: len(served)] != served or served != expected[: len(served)]:
        follower.complain("T3", f"batch {names} is not in running order")
    if len(served) < len(expected) and not full:
        name = expected[len(served)].request.request_id
        follower.complain("T3", f"{name!r} runs and gets nothing although the step has room")


def _check_mixed_chunks(follower: Follower, step: OpenStep) -> None:
    budget_left = follower.config.max_num_batched_tokens
    for track, first, count, _, _ in step.entries:
        expected = chunk_of(follower, track.tokens - first, budget_left)
        if count != expected:
            name = track.request.request_id
            follower.complain("T3", f"{name!r} gets {count} tokens where {expected} were possible")
        budget_left -= count


def _check_cut(follower: Follower, step: OpenStep, total: int) -> None:
    for track, first, count, samples, _ in step.entries:
        if samples or first + count == track.tokens:
            continue
        if len(step.entries) > 1 or total != follower.config.max_num_batched_tokens:
            name = track.request.request_id
            follower.complain("T3", f"{name!r} is cut at {count} tokens of a step of {total}")
