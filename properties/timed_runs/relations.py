"""Relations between timed runs: those that hold, and beliefs that do not.

Each takes a case and returns None (kept), a text (broken), or `SKIP` where it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from properties.timed_runs.timed import Case, Job, Timed, simulate

SKIP = "skip"
Check = Callable[[Case], str | None]
PLENTY = 1000


@dataclass(frozen=True, slots=True)
class Relation:
    """A statement about how runs relate."""

    name: str
    text: str
    check: Check


def without_cache(case: Case) -> Case:
    """The same case with prefix caching off."""
    return _configured(case, enable_prefix_caching=False)


def _configured(case: Case, **changes: object) -> Case:
    return replace(case, config=replace(case.config, **changes))  # type: ignore[arg-type]


def _at_zero(case: Case) -> Case:
    return replace(case, jobs=tuple([replace(job, arrival=0) for job in case.jobs]))


def _unlimited(case: Case) -> Case:
    changes = {"num_blocks": PLENTY, "max_num_seqs": PLENTY, "max_num_batched_tokens": PLENTY}
    return _configured(case, **changes)


def _alone(case: Case, job: Job) -> Timed:
    return simulate(replace(case, jobs=(replace(job, arrival=0),)))


def _apart(case: Case) -> Case:
    jobs = [replace(job, arrival=10_000 * place) for place, job in enumerate(case.jobs)]
    return replace(case, jobs=tuple(jobs))


# ---- relations that hold ----


def scaling(case: Case) -> str | None:
    """All costs and arrivals times k: all times times k, decisions equal."""
    one = simulate(case)
    jobs = tuple([replace(job, arrival=job.arrival * 8) for job in case.jobs])
    other = simulate(replace(case, jobs=jobs, scale=case.scale * 8))
    if one.decisions != other.decisions:
        return "decisions differ"
    scaled = {name: time * 8 for name, time in one.e2e.items()}
    return None if scaled == other.e2e else f"{scaled} and {other.e2e}"


def shifting(case: Case) -> str | None:
    """All arrivals later by T: latencies and decisions equal."""
    one = simulate(case)
    jobs = tuple([replace(job, arrival=job.arrival + 12_345) for job in case.jobs])
    other = simulate(replace(case, jobs=jobs))
    same = (one.decisions, one.e2e, one.ttft) == (other.decisions, other.e2e, other.ttft)
    return None if same else f"{one.e2e} and {other.e2e}"


def relabelling(case: Case) -> str | None:
    """Token ids renamed one to one: decisions and times equal, cache on or off."""
    one = simulate(case)
    jobs = tuple([replace(job, prompt=tuple([7 * t + 3 for t in job.prompt])) for job in case.jobs])
    other = simulate(replace(case, jobs=jobs))
    return None if one.steps == other.steps else "the runs differ"


def idle_split(case: Case) -> str | None:
    """Cache off: after a long idle gap a second copy behaves as the first did."""
    cold = without_cache(case)
    gap = 1_000_000
    copy = [replace(job, name=job.name + "'", arrival=job.arrival + gap) for job in cold.jobs]
    one, both = simulate(cold), simulate(replace(cold, jobs=(*cold.jobs, *copy)))
    for name, time in one.e2e.items():
        if both.e2e[name] != time or both.e2e[name + "'"] != time:
            return f"{name}: {time}, in the pair {both.e2e[name]} and {both.e2e[name + chr(39)]}"
    return None


def permuting_identical(case: Case) -> str | None:
    """Identical requests at one time: the multiset of latencies does not depend on their names."""
    first = case.jobs[0]
    jobs = [replace(first, name=job.name, arrival=0) for job in case.jobs]
    one = simulate(replace(case, jobs=tuple(jobs)))
    other = simulate(replace(case, jobs=tuple(reversed(jobs))))
    return None if sorted(one.e2e.values()) == sorted(other.e2e.values()) else "they differ"


def _demand(case: Case) -> int:
    size = case.config.block_size
    return sum(ceil((len(job.prompt) + job.outputs) / size) for job in case.jobs)


def ample_pool(case: Case) -> str | None:
    """Cache off, a pool for everybody at once: no preemption, and more blocks change no time."""
    cold = without_cache(case)
    enough = _demand(cold)
    one = simulate(_configured(cold, num_blocks=enough))
    other = simulate(_configured(cold, num_blocks=enough + 7))
    if one.preemptions:
        return f"{one.preemptions} preemptions in a pool of {enough}"
    same = [step.entries for step in one.steps] == [step.entries for step in other.steps]
    return None if same and one.e2e == other.e2e else f"{one.e2e} and {other.e2e}"


def not_faster_than_alone(case: Case) -> str | None:
    """Cache off: no request is faster than alone on an empty system."""
    cold = without_cache(case)
    together = simulate(cold)
    for job in cold.jobs:
        alone = _alone(cold, job)
        if together.e2e[job.name] < alone.e2e[job.name]:
            return f"{job.name}: e2e {together.e2e[job.name]}, alone {alone.e2e[job.name]}"
        if together.ttft[job.name] < alone.ttft[job.name]:
            return f"{job.name}: TTFT {together.ttft[job.name]}, alone {alone.ttft[job.name]}"
    return None


def one_at_a_time(case: Case) -> str | None:
    """Without overlap, more blocks and the cache never cost time, and more blocks never hits."""
    base = _apart(case)
    one, more = simulate(base), simulate(_configured(base, num_blocks=base.config.num_blocks + 3))
    cold = simulate(without_cache(base))
    if more.hit_tokens < one.hit_tokens:
        return f"hits fall from {one.hit_tokens} to {more.hit_tokens}"
    for name, time in one.e2e.items():
        if more.e2e[name] > time or time > cold.e2e[name]:
            return f"{name}: {more.e2e[name]} with more blocks, {time}, cold {cold.e2e[name]}"
    return None


def computed_tokens(case: Case) -> str | None:
    """Cache off: computed >= sum of (prompt + outputs - 1), equal without preemption."""
    run = simulate(without_cache(case))
    needed = sum(len(job.prompt) + job.outputs - 1 for job in case.jobs)
    if run.computed < needed or (run.computed > needed and not run.preemptions):
        return f"{run.computed} computed, {needed} needed, {run.preemptions} preemptions"
    return None


def removal_without_limits(case: Case) -> str | None:
    """All at time 0, no limits, cache off: removing a request delays nobody."""
    base = _unlimited(_at_zero(without_cache(case)))
    one = simulate(base)
    for gone in base.jobs:
        rest = tuple([job for job in base.jobs if job is not gone])
        if not rest:
            return SKIP
        other = simulate(replace(base, jobs=rest))
        for job in rest:
            if other.e2e[job.name] > one.e2e[job.name]:
                return f"without {gone.name}, {job.name} takes {other.e2e[job.name]}"
    return None


def causality(case: Case) -> str | None:
    """LAW-M8: a later arrival changes nothing that had ended, or was decided, by then."""
    if len(case.jobs) < 2:
        return SKIP
    whole = simulate(case)
    part = simulate(replace(case, jobs=case.jobs[:-1]))
    arrival = case.jobs[-1].arrival
    before = [step for step in whole.steps if step.start < arrival]
    if [s for s in part.steps if s.start < arrival] != before:
        return f"steps before the arrival at {arrival} differ"
    return None


def oracle_boundary(case: Case) -> str | None:
    """LAW-M9: no decision depends on an output length before that output ends."""
    shorter = case.jobs[0]
    if len(shorter.prompt) + shorter.outputs + 1 > 2 * case.config.num_blocks:
        return SKIP
    longer = replace(shorter, outputs=shorter.outputs + 1)
    one, other = simulate(case), simulate(replace(case, jobs=(longer, *case.jobs[1:])))
    end = shorter.arrival + one.e2e[shorter.name]
    earlier = [(s.entries, s.new_blocks, s.preempted) for s in one.steps if s.start < end]
    later = [(s.entries, s.new_blocks, s.preempted) for s in other.steps if s.start < end]
    return None if earlier == later else f"decisions before {end} differ"


def makespan_bounds(case: Case) -> str | None:
    """Work / best rate and the longest lone request bound the makespan from below (cache off)."""
    cold = without_cache(case)
    run = simulate(cold)
    for job in cold.jobs:
        least = job.arrival + _alone(cold, job).e2e[job.name]
        if run.makespan < least:
            return f"makespan {run.makespan}, {job.name} alone would end at {least}"
    steps = ceil(run.computed / max(1, cold.config.max_num_batched_tokens))
    least = run.computed + cold.overhead * min(steps, len(run.steps))
    first = min(job.arrival for job in cold.jobs)
    return None if run.makespan - first >= least else f"makespan {run.makespan} < {least}"


TRUE_RELATIONS = tuple(
    Relation(check.__name__, (check.__doc__ or "").strip(), check)
    for check in (
        scaling,
        shifting,
        relabelling,
        idle_split,
        permuting_identical,
        ample_pool,
        not_faster_than_alone,
        one_at_a_time,
        computed_tokens,
        removal_without_limits,
        causality,
        oracle_boundary,
        makespan_bounds,
    )
)


# ---- beliefs that do not hold ----

Metric = Callable[[Timed], float]
MAKESPAN: Metric = lambda run: run.makespan  # noqa: E731
MEAN_E2E: Metric = lambda run: sum(run.e2e.values()) / len(run.e2e)  # noqa: E731
MEAN_TTFT: Metric = lambda run: sum(run.ttft.values()) / len(run.ttft)  # noqa: E731
PREEMPTIONS: Metric = lambda run: run.preemptions  # noqa: E731
COMPUTED: Metric = lambda run: run.computed  # noqa: E731
METRICS = {
    "makespan": MAKESPAN,
    "mean e2e": MEAN_E2E,
    "mean TTFT": MEAN_TTFT,
    "preemptions": PREEMPTIONS,
    "computed tokens": COMPUTED,
}


@dataclass(frozen=True, slots=True)
class Belief:
    """'This change never raises these metrics'; `base` prepares a case, `change` the other."""

    text: str
    metrics: tuple[str, ...]
    change: Callable[[Case], Case | None]
    base: Callable[[Case], Case] = lambda case: case

    def violations(self, case: Case) -> dict[str, tuple[float, float]]:
        """Metric -> (before, after) where the change made things worse."""
        start = self.base(case)
        changed = self.change(start)
        if changed is None:
            return {}
        before, after = simulate(start), simulate(changed)
        worse = {}
        for name in self.metrics:
            if name == "some e2e":
                names = [n for n in after.e2e if after.e2e[n] > before.e2e[n]]
                if names:
                    worse[name] = (float(before.e2e[names[0]]), float(after.e2e[names[0]]))
            elif METRICS[name](after) > METRICS[name](before):
                worse[name] = (METRICS[name](before), METRICS[name](after))
        return worse


def _one_more_block(case: Case) -> Case:
    return _configured(case, num_blocks=case.config.num_blocks + 1)


def _removed(case: Case) -> Case | None:
    return replace(case, jobs=case.jobs[1:]) if len(case.jobs) > 1 else None


def _shorter(case: Case) -> Case | None:
    first = case.jobs[0]
    if first.outputs < 2:
        return None
    return replace(case, jobs=(replace(first, outputs=first.outputs - 1), *case.jobs[1:]))


def _cold_identical(case: Case) -> Case:
    jobs = [replace(case.jobs[0], name=job.name, arrival=0) for job in case.jobs]
    return without_cache(replace(case, jobs=tuple(jobs)))


ALL = ("makespan", "mean e2e", "mean TTFT", "preemptions", "computed tokens")
BELIEFS = (
    Belief("one more KV block never raises", ALL, _one_more_block),
    Belief("one more KV block never raises (cache off)", ALL, _one_more_block, without_cache),
    Belief(
        "one more KV block never raises (identical requests at time 0, cache off)",
        ("makespan",),
        _one_more_block,
        _cold_identical,
    ),
    Belief(
        "an unlimited pool is best, it never raises",
        ("makespan",),
        lambda case: _configured(case, num_blocks=PLENTY),
    ),
    Belief(
        "the prefix cache never raises",
        ALL,
        lambda case: _configured(case, enable_prefix_caching=True),
        without_cache,
    ),
    Belief(
        "twice the token budget never raises",
        ("makespan", "mean TTFT", "preemptions"),
        lambda case: _configured(
            case, max_num_batched_tokens=2 * case.config.max_num_batched_tokens
        ),
    ),
    Belief(
        "one more seat never raises",
        ("makespan", "mean e2e", "mean TTFT", "preemptions"),
        lambda case: _configured(case, max_num_seqs=case.config.max_num_seqs + 1),
    ),
    Belief("removing a request never raises", ("some e2e", "makespan"), _removed),
    Belief(
        "removing a request never raises (no limits)",
        ("some e2e", "makespan"),
        _removed,
        _unlimited,
    ),
    Belief("a shorter output never raises", ("some e2e", "makespan"), _shorter),
    Belief(
        "cheaper steps never raise",
        ("some e2e", "mean e2e", "makespan"),
        lambda case: replace(case, overhead=case.overhead - 1) if case.overhead > 1 else None,
    ),
)
