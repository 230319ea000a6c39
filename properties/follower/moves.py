"""Preemption and registration: the two changes of the picture that several judges make."""

from __future__ import annotations

from properties.follower import goals
from properties.follower.picture import Picture
from properties.follower.run_sums import Track


def preempt(picture: Picture, track: Track) -> None:
    """Applies one preemption to the picture."""
    _check_victim(picture, track)
    if track in picture.running:
        picture.running.remove(track)
        put_back(picture, track)
    else:
        picture.complain("S4", f"victim {track.request.request_id!r} is not running")
    goals.note_victim(picture, track)
    picture.blocks.release(track.table, picture.complain)
    picture.ledger.preempted_work += track.computed
    picture.ledger.preemptions += 1
    track.table = []
    track.computed = track.reserved = track.pending = track.cached = 0
    track.sampled = False
    track.preempted += 1


def _check_victim(picture: Picture, track: Track) -> None:
    """LAW-S10, LAW-S13, LAW-L2: who gives way."""
    name, running = track.request.request_id, picture.running
    if picture.by_priority:
        worst = max(running, key=lambda other: other.rank, default=None)
        if worst is not None and worst is not track:
            told = worst.request.request_id
            picture.complain("S13", f"victim {name!r}, the least important is {told!r}")
        return
    if not running or running[-1] is not track:
        newest = running[-1].request.request_id if running else None
        picture.complain("S10", f"victim {name!r}, the newest is {newest!r}")
    if any(other.arrival > track.arrival for other in running):
        picture.complain("S10", f"victim {name!r} is not the newest arrival")
    if all(other.arrival >= track.arrival for other in picture.live.values()):
        picture.complain("L2", f"the oldest request {name!r} is preempted")


def enqueue(picture: Picture, track: Track) -> None:
    """A new request takes its place in waiting."""
    picture.waiting.append(track)
    if picture.by_priority:
        picture.waiting.sort(key=lambda other: (*other.rank, other.arrival))


def put_back(picture: Picture, track: Track) -> None:
    """A victim takes its place in waiting: before everybody, or by its rank."""
    if picture.by_priority:
        enqueue(picture, track)
    else:
        picture.waiting.insert(0, track)


def register(picture: Picture, track: Track, end: int, step: int) -> None:
    """Gives a key to each block that is full with `end` tokens, as far as these are known."""
    if not picture.config.enable_prefix_caching:
        return
    size = picture.config.block_size
    num_full = min(end, len(track.hashes)) // size
    for index in range(track.cached, min(num_full, len(track.table))):
        last = (index + 1) * size - 1
        parent = track.hashes[index * size - 1] if index else None
        block = track.table[index]
        picture.blocks.unregister(block)
        goals.note_registration(picture, track.hashes[last], step)
        picture.blocks.register(block, track.hashes[last], parent, step)
        track.cached = index + 1
