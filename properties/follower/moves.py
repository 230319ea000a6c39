"""Preemption and registration: the two changes of the picture that several judges make."""

from __future__ import annotations

from properties.follower import goals
from properties.follower.picture import Picture
from properties.follower.run_sums import Track


def preempt(picture: Picture, track: Track) -> None:
    """Applies one preemption to the picture."""
    if not picture.running or picture.running[-1] is not track:
        newest = picture.running[-1].request.request_id if picture.running else None
        picture.complain("S10", f"victim {track.request.request_id!r}, the newest is {newest!r}")
    if any(other.arrival > track.arrival for other in picture.running):
        picture.complain("S10", f"victim {track.request.request_id!r} is not the newest arrival")
    if all(other.arrival >= track.arrival for other in picture.live.values()):
        picture.complain("L2", f"the oldest request {track.request.request_id!r} is preempted")
    if track in picture.running:
        picture.running.remove(track)
        picture.waiting.insert(0, track)
    else:
        picture.complain("S4", f"victim {track.request.request_id!r} is not running")
    goals.note_victim(picture, track)
    picture.blocks.release(track.table, picture.complain)
    picture.ledger.preempted_work += track.computed
    picture.ledger.preemptions += 1
    track.table = []
    track.computed = track.reserved = track.pending = 0
    track.sampled = False
    track.preempted += 1


def register(picture: Picture, track: Track, first: int, end: int, step: int) -> None:
    """Gives a key to each block that is full with `end` tokens and was not with `first`."""
    if not picture.config.enable_prefix_caching:
        return
    size = picture.config.block_size
    for index in range(first // size, min(end // size, len(track.table))):
        last = (index + 1) * size - 1
        if last >= len(track.hashes):
            continue  # its last token is still on its way (async)
        parent = track.hashes[index * size - 1] if index else None
        block = track.table[index]
        if picture.config.async_scheduling and picture.blocks.keys[block] is not None:
            continue  # it had its tokens already when it was assigned
        picture.blocks.unregister(block)
        goals.note_registration(picture, track.hashes[last], step)
        picture.blocks.register(block, track.hashes[last], parent, step)
