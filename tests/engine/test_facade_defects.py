"""The facade's law has teeth: every planted defect breaks it within a few disturbed runs."""

from __future__ import annotations

import json
import logging
import random

import pytest
from facade_testing import LetterTokenizer, StandIn, disturbed_run, random_request, stand_in_engine

from engine.core.errors import LockstepError
from engine.models.presets import PRESETS
from properties.defects.facade import FACADE_DEFECTS
from properties.follower.view import LawBroken
from properties.search.sizes import bounded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "config-only"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(PRESETS["tiny-qwen3"]))
    return str(path)


# A defect that needs a failure just while outputs wait shows in 4 of 1,000 runs.
NUM_RUNS = 2000


def breaks_the_law(folder):
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        line = rng.choice([0, rng.randint(1, 2500)])
        try:
            disturbed_run(folder, seed, line=line, num_faults=rng.randint(0, 2))
        except (AssertionError, LookupError, LockstepError, ValueError, TypeError):
            return True
    return False


LOSSES = [defect for defect in FACADE_DEFECTS if not defect.grows]
LEAKS = [defect for defect in FACADE_DEFECTS if defect.grows]


@pytest.mark.parametrize("defect", LOSSES, ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(folder, caplog, defect):
    caplog.set_level(logging.CRITICAL)
    with defect.planted():
        assert breaks_the_law(folder)


def test_a_stand_in_that_is_not_reset_is_found(folder, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(StandIn, "reset", lambda self: None)
    assert breaks_the_law(folder)


def test_without_a_defect_nothing_is_found(folder, caplog):
    caplog.set_level(logging.CRITICAL)
    assert not breaks_the_law(folder)


# What is kept ------------------------------------------------------------------------------------

NUM_CALLS = 2500
LIVE = 12  # requests at one time, at most


def call_again_and_again(folder, asynchronous):
    """Calls of every kind by a caller who takes what is his; few requests at any time."""
    rng = random.Random(5)
    with stand_in_engine(folder, async_scheduling=asynchronous) as llm:
        names = []
        for number in range(NUM_CALLS):
            prompt, params = random_request(rng)
            kind = rng.choice(["add", "add", "abort", "generate", "stream", "leave"])
            if kind == "add":
                names += llm.add_requests([prompt], [params], stream=rng.random() < 0.5)
            elif kind == "abort" and names:
                llm.abort(names.pop())
            elif kind == "generate":
                llm.generate([prompt], params, use_tqdm=False)
            else:
                stream = llm.stream([prompt], params)
                if kind == "stream":
                    list(stream)
                else:
                    next(stream)
                    stream.close()
            while llm._requests.num_running > LIVE or (
                number % 100 == 99 and llm.has_unfinished_requests
            ):
                llm.step()
            llm.step()
            if number % 100 == 99:
                names.clear()
                own = (llm._requests, llm._loop)
                bounded(own, 20 * LIVE, "FACADE", (LetterTokenizer, StandIn, type(llm.options)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_facade_keeps_is_bounded_by_what_runs(folder, asynchronous):
    call_again_and_again(folder, asynchronous)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_of_the_facade_is_found(folder, leak):
    with leak.planted(), pytest.raises((LawBroken, LockstepError)):
        call_again_and_again(folder, False)
