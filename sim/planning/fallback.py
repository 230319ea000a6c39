"""Another cost model for a configuration whose runs leave the range of a calibrated one."""

from __future__ import annotations

from dataclasses import replace

from sim.cost.calibrated import MAX_OUTSIDE
from sim.planning.entries import Entry
from sim.planning.space import Candidate
from sim.run.deployment import build

# Without figures: equal configurations must stay equal, whichever run has shown it.
_REASON = f"more than {MAX_OUTSIDE:.0%} of the steps at the capacity lie outside its range"


def fall_back(entry: Entry) -> bool:
    """Empties an entry that guesses too much, for runs with the next model of `auto`.

    False if it need not or, since the study names its cost model, must not.
    """
    if entry.failure is None or not entry.guesses:
        return False
    candidate = _with_next_cost(entry.candidate)
    if candidate is None:
        return False
    kinds = cost_kinds(candidate)
    entry.notes.append(f"{entry.guessed:.1%} of {_REASON.partition(' of ')[2]}: {kinds} instead")
    entry.candidate = candidate
    entry.seeds, entry.at_rate, entry.failure = [], [], None
    return True


def cost_kinds(candidate: Candidate) -> str:
    """The kinds of cost models of a configuration, as `calibrated` or `calibrated and roofline`."""
    kinds = {build(group.deployment, 0).trust.kind for group in candidate.groups}
    return " and ".join(sorted(kinds))


def unlike_costs(entries: list[Entry]) -> str | None:
    """A warning if the entries that have answers do not all have the same cost model."""
    by_kind: dict[str, int] = {}
    for entry in entries:
        if entry.failure is None:
            kind = cost_kinds(entry.candidate)
            by_kind[kind] = by_kind.get(kind, 0) + 1
    fell = sum(
        any(group.deployment.found_wanting for group in entry.candidate.groups) for entry in entries
    )
    if len(by_kind) < 2 or not fell:
        return None
    shares = ", ".join(f"{count} by {kind}" for kind, count in sorted(by_kind.items()))
    return (
        f"{fell} of {len(entries)} configurations left the range of their calibrated costs, so"
        f" they differ in cost models too ({shares}): compare within one, or name space.cost"
    )


def _with_next_cost(candidate: Candidate) -> Candidate | None:
    groups, changed = [], False
    for group in candidate.groups:
        deployment = group.deployment
        if deployment.cost == "auto":
            kind = build(deployment, 0).trust.kind
            if kind != "roofline":
                wanting = (*deployment.found_wanting, (kind, _REASON))
                deployment = replace(deployment, found_wanting=wanting)
                changed = True
        groups.append(replace(group, deployment=deployment))
    return replace(candidate, groups=tuple(groups)) if changed else None
