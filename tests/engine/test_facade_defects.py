"""The facade's law has teeth: every planted defect breaks it within a few disturbed runs."""

from __future__ import annotations

import json
import logging
import random

import pytest
from facade_testing import StandIn, disturbed_run

from engine.core.errors import LockstepError
from engine.llm import LLM
from engine.models.presets import PRESETS
from engine.requests.live import LiveRequest
from engine.requests.registry import RequestRegistry
from engine.step.builder import StepBuilder
from engine.step.loop import StepLoop, _Guard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "config-only"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(PRESETS["tiny-qwen3"]))
    return str(path)


def nothing(self, *arguments):
    return None


def take_all_but_the_last(self):
    return self._hand_over([name for name in self._ended if name not in self._kept])[:-1]


def take_and_keep(self):
    return [output for name, output in self._ended.items() if name not in self._kept]


def forget_all(self, error, end_ns):
    self._watched.clear()
    self._running.clear()


def fail_what_has_ended_too(self, error, end_ns):
    for name in [*self._ended]:
        del self._ended[name]
    for name, request in self._running.items():
        self._ended[name] = request.fail(error, end_ns)
    self._watched.clear()
    self._running.clear()


def discard_only_here(self, cause):
    self._builder.forget_rows()
    self._open.clear()


def keep_the_slot(self, finished, end_ns, error=""):
    self.requests.finish(finished, end_ns, error)


def keep_the_kernel(self, cause):
    self._open.clear()
    self.requests.fail_all(cause, self.now_ns())


def trust_the_kernel(self, error):
    self.executor.reset()
    self._discard_open("?")
    self._is_torn = False


def leave_it(self, kind, error, trace):
    self._is_busy = False


def nobody_stops(self, plan, token_ids):
    RequestRegistry_watch(self, plan, token_ids)
    return []


RequestRegistry_watch = RequestRegistry.watch


def only_what_runs(self):
    return self._requests.num_running > 0


def only_the_first(self, step):
    for finished in step.outcome.finished[:1]:
        self.finish(finished, step.end_ns)


def wrong_reason(self, error, end_ns, token_ids=None):
    return LiveRequest_end(self, list(self.token_ids), "length", None, "", end_ns)


LiveRequest_end = LiveRequest._end

DEFECTS = {
    "step() drops one output": (RequestRegistry, "take", take_all_but_the_last),
    "step() hands over twice": (RequestRegistry, "take", take_and_keep),
    "a fresh kernel forgets the old one's requests": (RequestRegistry, "fail_all", forget_all),
    "a failure replaces outputs that wait": (RequestRegistry, "fail_all", fail_what_has_ended_too),
    "outputs of a failed call come up later": (RequestRegistry, "disown", nothing),
    "only one request can end in a step": (RequestRegistry, "record", only_the_first),
    "stop strings stop nobody": (RequestRegistry, "watch", nobody_stops),
    "an error looks like an end": (LiveRequest, "fail", wrong_reason),
    "open plans are not discarded in the kernel": (StepLoop, "_discard_open", discard_only_here),
    "an ended request keeps its slot": (StepLoop, "_end", keep_the_slot),
    "a torn kernel goes on": (StepLoop, "_start_over", keep_the_kernel),
    "a torn kernel is taken for whole": (StepLoop, "undo", trust_the_kernel),
    "nothing is undone": (_Guard, "__exit__", leave_it),
    "a slot is never freed": (StepBuilder, "remove", nothing),
    "steps under way survive a failure": (StandIn, "reset", nothing),
    "outputs that wait are not announced": (
        LLM,
        "has_unfinished_requests",
        property(only_what_runs),
    ),
}


def breaks_the_law(folder):
    for seed in range(150):
        rng = random.Random(seed)
        line = rng.choice([0, rng.randint(1, 2500)])
        try:
            disturbed_run(folder, seed, line=line, num_faults=rng.randint(0, 2))
        except (AssertionError, LookupError, LockstepError, ValueError, TypeError):
            return True
    return False


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS.keys())
def test_a_planted_defect_is_found(folder, monkeypatch, caplog, defect):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(*defect)
    assert breaks_the_law(folder)


def test_without_a_defect_nothing_is_found(folder, caplog):
    caplog.set_level(logging.CRITICAL)
    assert not breaks_the_law(folder)
