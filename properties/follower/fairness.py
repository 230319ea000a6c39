"""LAW-L9 and LAW-L10: nobody starves in mid-output, and nobody is preempted for a newcomer.

Both speak of what users feel while prompts keep arriving: a gap between two tokens, and work that
is thrown away. A scheduler can keep all other laws and break these.
"""

from __future__ import annotations

from collections.abc import Sequence

from properties.follower.picture import OpenStep, Picture
from properties.follower.run_sums import Track

# Steps that a decode may be passed over in a row.
GAP_STEPS = 4


def after_step(picture: Picture, step: OpenStep, victims: Sequence[Track]) -> None:
    """Judges one step that was decided."""
    # Past a prompt that is held back (P-R4) a decode may come to stand behind a half-done one.
    if not picture.config.long_prefill_token_threshold and not picture.spreads_prefill:
        _check_gaps(picture, step)
    if picture.config.policy in ("mixed", "prefill_first"):  # others serve by more than arrival
        _check_newcomers(picture, step, victims)


def _check_gaps(picture: Picture, step: OpenStep) -> None:
    members = {id(entry[0]) for entry in step.entries}
    for track in picture.running:
        if not track.sampled or track.pending or id(track) in members:
            track.idle_steps = 0
            continue
        track.idle_steps += 1
        if track.idle_steps > GAP_STEPS:
            name = track.request.request_id
            picture.complain("L9", f"{name!r} decodes and gets no token for {GAP_STEPS + 1} steps")


def _check_newcomers(picture: Picture, step: OpenStep, victims: Sequence[Track]) -> None:
    gained = [gain.request_id for gain in step.plan.new_blocks if gain.block_ids]
    for victim in victims:
        later = [
            name
            for name in gained
            if name in picture.live and picture.live[name].arrival > victim.arrival
        ]
        if later:
            name = victim.request.request_id
            picture.complain("L10", f"{name!r} is preempted while {later} gain blocks")
