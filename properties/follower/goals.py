"""The "sometimes" list: states that a search must have met, or it proves little."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import Finished
from engine.core.request import Request
from properties.follower.picture import OpenStep, Picture
from properties.follower.run_sums import Track

GOALS = (
    "preemption",
    "two victims in one step",
    "preemption of a sharer",
    "preemption in mid-prompt",
    "self-preemption",
    "hit on a used block",
    "hit on a freed block",
    "hit on a block of the same step",
    "hit on generated tokens",
    "hit at re-admission",
    "revival of an evicted prefix",
    "second copy of a registered block",
    "duplicate content in one step",
    "eviction of a registered block",
    "chunk boundary inside a block",
    "prompt length exactly k blocks",
    "prompt longer than the budget",
    "prompt and decode in one step",
    "budget used up by decodes",
    "no free block",
    "all seats taken",
    "end on EOS in the prefill step",
    "end on EOS after a preemption",
    "two ends in one step",
    "abort while waiting",
    "abort in mid-prompt",
    "abort with an open step",
    "abort of a sharer",
    "discard of a step with new keys",
    "discard with a hit of the same step",
)
# Cannot happen under one of the policies.
IMPOSSIBLE = {
    # It prefills within the budget that decodes leave, so decodes never outgrow the budget.
    "mixed": frozenset({"budget used up by decodes"}),
    "prefill_first": frozenset(
        {
            "hit on a block of the same step",
            "prompt and decode in one step",
            "preemption in mid-prompt",
            "discard of a step with new keys",
            "discard with a hit of the same step",
        }
    ),
}


def note_request(picture: Picture, request: Request) -> None:
    """At an accepted add."""
    reached = picture.ledger.goals
    if len(request.prompt) % picture.config.block_size == 0:
        reached["prompt length exactly k blocks"] += 1
    if len(request.prompt) > picture.config.max_num_batched_tokens:
        reached["prompt longer than the budget"] += 1


def note_abort(picture: Picture, track: Track, finished: Finished | None) -> None:
    """At an abort."""
    reached = picture.ledger.goals
    if finished is None:
        reached["abort with an open step"] += 1
    if track in picture.waiting and not track.table:
        reached["abort while waiting"] += 1
    if track.table and not track.sampled:
        reached["abort in mid-prompt"] += 1
    if any(picture.blocks.refs[block] > 1 for block in track.table):
        reached["abort of a sharer"] += 1


def note_victim(picture: Picture, track: Track) -> None:
    """Before a victim's blocks are released."""
    reached = picture.ledger.goals
    reached["preemption"] += 1
    if not track.sampled and not track.pending:
        reached["preemption in mid-prompt"] += 1
    if any(picture.blocks.refs[block] > 1 for block in track.table):
        reached["preemption of a sharer"] += 1


def note_hits(picture: Picture, track: Track, hits: Sequence[int], same_step: int) -> None:
    """Before hits are taken."""
    if not hits:
        return
    reached, blocks = picture.ledger.goals, picture.blocks
    free = sum(1 for block in hits if blocks.refs[block] == 0)
    if free:
        reached["hit on a freed block"] += 1
    if same_step:
        reached["hit on a block of the same step"] += 1
    if len(hits) > free + same_step:
        reached["hit on a used block"] += 1
    if len(hits) * picture.config.block_size > len(track.request.prompt):
        reached["hit on generated tokens"] += 1
    if track.preempted:
        reached["hit at re-admission"] += 1


def note_registration(picture: Picture, key: int, step: int) -> None:
    """Before a block gets its key."""
    reached, blocks = picture.ledger.goals, picture.blocks
    copies = blocks.copies.get(key)
    if copies:
        reached["second copy of a registered block"] += 1
        if any(blocks.keyed_step[block] == step for block in copies):
            reached["duplicate content in one step"] += 1
    elif key in blocks.dropped:
        reached["revival of an evicted prefix"] += 1


def note_step(picture: Picture, step: OpenStep, victims: list[Track]) -> None:
    """After a step was decided."""
    reached, config = picture.ledger.goals, picture.config
    if len(victims) > 1:
        reached["two victims in one step"] += 1
    if picture.blocks.num_evicted:
        reached["eviction of a registered block"] += picture.blocks.num_evicted
        picture.blocks.num_evicted = 0
    if not picture.blocks.free:
        reached["no free block"] += 1
    if len(picture.running) >= config.max_num_seqs and picture.waiting:
        reached["all seats taken"] += 1
    decodes = chunks = 0
    for track, first, count, samples, _ in step.entries:
        if track.sampled or track.pending > samples:  # the latter with a token on its way
            decodes += 1
        else:
            chunks += 1
            if not samples and (first + count) % config.block_size:
                reached["chunk boundary inside a block"] += 1
    if decodes and chunks:
        reached["prompt and decode in one step"] += 1
    if decodes == config.max_num_batched_tokens and decodes < len(picture.running):
        reached["budget used up by decodes"] += 1


def note_token(picture: Picture, track: Track, first: int, reason: str | None) -> None:
    """After a token was appended."""
    reached = picture.ledger.goals
    if reason == "stop":
        if first < len(track.request.prompt):
            reached["end on EOS in the prefill step"] += 1
        if track.preempted:
            reached["end on EOS after a preemption"] += 1


def note_discard(picture: Picture, step: OpenStep) -> None:
    """Before a failed step is undone."""
    reached, blocks = picture.ledger.goals, picture.blocks
    fresh = {b for b in range(blocks.num_blocks) if blocks.keyed_step[b] == step.number}
    if fresh:
        reached["discard of a step with new keys"] += 1
    if any(blocks.refs[block] > 1 for block in fresh):
        reached["discard with a hit of the same step"] += 1
