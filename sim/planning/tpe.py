"""Search of a large space with Optuna's tree-structured Parzen estimator.

Optuna is optional: its `ask`/`tell` interface leaves running trials to us, it draws from a seed,
and it handles axes without an order, which local optimisers such as SciPy's do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sim.planning.entries import Entry, score
from sim.planning.space import Candidate, candidate_of
from sim.planning.study import AxisValue, Study

# Fixed, so that the answer does not depend on how many processes there are.
_BATCH = 4


def sample_with_tpe(
    study: Study,
    candidates: Sequence[Candidate],
    look: Callable[[Sequence[Candidate]], list[Entry]],
) -> list[Entry]:
    """Entries of `search.trials` samples of the space, the sampler told of each batch's scores.

    Raises:
        ModuleNotFoundError: Optuna is not installed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=study.search.seed, n_startup_trials=2 * _BATCH)
    optimiser = optuna.create_study(direction="maximize", sampler=sampler)
    possible = {_identity(one): one for one in candidates}
    entries: dict[tuple[object, ...], Entry] = {}
    for begin in range(0, study.search.trials, _BATCH):
        asked = [optimiser.ask() for _ in range(min(_BATCH, study.search.trials - begin))]
        wanted = []
        for trial in asked:
            choice = {
                axis: values[trial.suggest_categorical(axis, list(range(len(values))))]
                for axis, values in study.axes.items()
            }
            wanted.append(_sampled(study, choice, possible))
        fresh = {_identity(one): one for one in wanted if one is not None}
        fresh = {key: one for key, one in fresh.items() if key not in entries}
        entries.update(zip(fresh, look(list(fresh.values())), strict=True))
        for trial, one in zip(asked, wanted, strict=True):
            value = -math.inf if one is None else score(entries[_identity(one)], study)
            optimiser.tell(trial, max(value, -1e9))
    return list(entries.values())


def _sampled(
    study: Study, choice: dict[str, AxisValue], possible: dict[tuple[object, ...], Candidate]
) -> Candidate | None:
    candidate = candidate_of(study, choice)
    exact = possible.get(_identity(candidate))
    if exact is not None or candidate.num_fronts > 1:
        return exact
    # The router makes no difference to one server, so one of the equals was kept.
    equals = (one for one in possible.values() if one.groups == candidate.groups)
    return next(equals, None)


def _identity(candidate: Candidate) -> tuple[object, ...]:
    return candidate.groups, candidate.router
