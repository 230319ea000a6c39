"""LAW-M11: every figure of every summary, in all policies and modes, and defects of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from properties.follower.view import LawBroken
from properties.timed_runs.facts import NO_FIGURES, compare
from properties.timed_runs.random_runs import (
    Judged,
    every_figure,
    judge_seed,
    judged,
    random_run,
)
from properties.timed_runs.recomputed import recomputed
from properties.timed_runs.spoiled import SPOILED, Spoiled, first_noticed

NUM_RUNS = 90


def test_every_figure_of_random_runs_is_that_of_log_and_requests() -> None:
    seen: dict[str, int] = {}
    for seed in range(NUM_RUNS):
        run = judged(random_run(seed))
        every_figure(run)
        sim = run.run.summary.sim
        situations = {
            "preempted": sim.num_preemptions,
            "found in the cache": sim.cache.prefix_hit_tokens,
            "rejected": sim.requests.rejected,
            "never sent": sim.requests.unsent,
            "faster than physics": sim.physical_floor.violations,
            "unstable": not sim.stable,
            "asynchronous": run.facts.config.async_scheduling,
            "several replicas": run.facts.num_replicas - 1,
            "priorities": len(sim.priorities),
        }
        for name, count in situations.items():
            seen[name] = seen.get(name, 0) + bool(count)
    assert min(seen.values()) > 0, seen


@pytest.mark.nightly
def test_every_figure_of_many_random_runs() -> None:
    for seed in range(NUM_RUNS, 4000):
        judge_seed(seed)


@pytest.mark.parametrize("spoiled", SPOILED, ids=lambda spoiled: str(spoiled.name))
def test_a_wrong_figure_of_each_kind_is_noticed(spoiled: Spoiled) -> None:
    found = first_noticed(spoiled, judge_seed, range(NUM_RUNS))
    assert found is not None, spoiled.what
    assert isinstance(found[1], LawBroken), found
    assert found[1].law == "M11"


def _changed(document: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The document with each of its figures changed, one at a time, and what was changed."""
    if isinstance(document, dict):
        for key, item in document.items():
            for name, value in _changed(item, f"{path}.{key}" if path else str(key)):
                yield name, {**document, key: value}
    elif isinstance(document, list):
        for place, item in enumerate(document):
            for name, value in _changed(item, f"{path}[{place}]"):
                yield name, [*document[:place], value, *document[place + 1 :]]
    elif isinstance(document, bool) or document is None:
        yield path, 1.5 if document is None else not document
    elif isinstance(document, str):
        yield path, document + "!"
    else:
        assert isinstance(document, int | float)
        yield path, document * 1.0001 if isinstance(document, float) and document else document + 1


def _judged_run(seed: int) -> Judged:
    return judged(random_run(seed))


def test_no_figure_can_be_wrong_unnoticed() -> None:
    """Each leaf of some summaries is changed by itself, keys that are missing or new included."""
    for seed in (2, 16):
        run = _judged_run(seed)
        expected = recomputed(run.records, run.facts)
        document = run.run.summary.to_json()
        compare(document, expected)
        names = 0
        for name, changed in _changed(document):
            if name.startswith(NO_FIGURES):
                continue
            names += 1
            with pytest.raises(LawBroken):
                compare(changed, expected)  # type: ignore[arg-type]
        assert names > 80
    with pytest.raises(LawBroken, match="nobody recomputes"):
        compare({**document, "new_figure": 1}, expected)
    with pytest.raises(LawBroken, match="not shown"):
        compare({key: value for key, value in document.items() if key != "failed"}, expected)
