"""Every accepted request is handed over exactly once, whatever fails or is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter

import pytest
from facade_testing import (
    Boom,
    disturbed_run,
    drawn,
    stand_in_engine,
)
from llm_testing import greedy, write_tiny_model

from engine.cli import main as cli
from engine.models.presets import PRESETS
from engine.sampling_params import SamplingParams
from engine.step.loop import StepFailed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nothing but a config: the stand-in has no weights."""
    path = tmp_path_factory.mktemp("models") / "config-only"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(PRESETS["tiny-qwen3"]))
    return str(path)


def params(max_tokens, **rest):
    return SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, **rest)


def stopping_at(output):
    """Parameters with which a prompt of one token ends by a stop id at this output."""
    return params(12, stop_token_ids=[drawn(1, output)])


@pytest.mark.parametrize("call", [4, 5, 6, 7, 8])
def test_a_request_that_ended_before_the_step_ahead_failed_is_returned(folder, call):
    """Its stop token ends it; then the void step that was launched ahead fails."""
    with stand_in_engine(folder, {call: Boom}, async_scheduling=True) as llm:
        [own] = llm.add_requests([[1]], stopping_at(2))
        outputs = []
        while llm.has_unfinished_requests:
            with contextlib.suppress(StepFailed):
                outputs += llm.step()
        assert [output.request_id for output in outputs] == [own]
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks


def test_generate_returns_what_ended_before_a_void_step_failed(folder):
    with stand_in_engine(folder, async_scheduling=True) as llm:
        llm.generate([[1]], stopping_at(2), use_tqdm=False)
        calls = llm.executor._calls
    with stand_in_engine(folder, {calls: Boom}, async_scheduling=True) as llm:
        [output] = llm.generate([[1]], stopping_at(2), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_that_wait_survive_a_step_that_raises(folder, asynchronous):
    """`a` ends while a generate call runs; the next step fails; the one after hands `a` over."""
    with stand_in_engine(folder, async_scheduling=asynchronous) as llm:
        [own] = llm.add_requests([[1]], params(2))
        llm.generate([[2]], params(9), use_tqdm=False)
        [other] = llm.add_requests([[3]], params(5))
        llm.executor._faults[llm.executor._calls + 1] = Boom
        with pytest.raises(StepFailed):
            llm.step()
        assert llm.has_unfinished_requests
        outputs = llm.step()
        assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [
            (own, "length"),
            (other, "error"),
        ]
        assert "Boom: planted" in outputs[1].outputs[0].error


def test_an_output_that_an_abort_brought_to_light_is_announced(folder):
    """Aborting `b` commits the steps ahead, which end `a`: the usual loop must still get it."""
    with stand_in_engine(folder, async_scheduling=True) as llm:
        a, b = llm.add_requests([[1], [2]], [params(3), params(12)])
        llm.step()
        llm.step()
        assert llm.abort(b).outputs[0].finish_reason == "abort"
        assert llm.has_unfinished_requests
        outputs = []
        while llm.has_unfinished_requests:
            outputs += llm.step()
        assert [output.request_id for output in outputs] == [a]


def test_a_stream_keeps_its_outputs_from_other_loops(folder):
    with stand_in_engine(folder) as llm:
        stream = llm.stream([[1]], params(4))
        [own] = llm.add_requests([[2]], params(8))
        seen = [next(stream)]
        taken = []
        while llm.has_unfinished_requests:  # another loop runs the engine dry
            taken += llm.step()
        assert [output.request_id for output in taken] == [own]
        seen += stream
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]


def test_a_token_without_text_ends_its_own_request_only(folder):
    with stand_in_engine(folder, refused=drawn(1, 2)) as llm:
        bad, good = llm.generate([[1], [1, 1, 1]], params(5, stop=["never"]), use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert "Boom: this token has no text" in bad.outputs[0].error
        assert good.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_with_failures_keep_the_law(folder, seed):
    disturbed_run(folder, seed, num_faults=1 + seed % 3)


NUM_LINES = 6000  # of the engine's own code that a run passes, about


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_with_an_interrupt_at_some_line_keep_the_law(folder, seed):
    line = random.Random(seed).randint(1, NUM_LINES)
    disturbed_run(folder, seed % 7, line=line, num_faults=seed % 2, num_acts=10)


@pytest.mark.parametrize("part", ["/llm.py", "/requests/registry.py", "/requests/stream.py"])
@pytest.mark.parametrize("seed", [1, 4])
def test_an_interrupt_at_every_line_of_the_facade_keeps_the_law(folder, seed, part):
    line, place = 0, ""
    while place is not None:
        line += 1
        place, _ = disturbed_run(folder, seed, line=line, num_acts=6, part=part)
        assert place is None or place[0].startswith(part)
    assert line > 5


@pytest.mark.parametrize("seed", range(12))
def test_a_disturbed_run_leaves_a_log_that_replays_or_none(folder, tmp_path, seed):
    log = tmp_path / "steps.jsonl"
    line = random.Random(seed).randint(1, NUM_LINES) if seed % 2 else 0
    disturbed_run(folder, seed, line=line, num_faults=1 - seed % 2, step_log=str(log))
    if log.exists():
        assert cli(["sim", "replay", str(log)]) == 0
    assert [path for path in tmp_path.iterdir() if path != log] == []


def test_a_stretch_of_decodes_that_a_stop_string_ends_replays(folder, tmp_path):
    """Nobody has stop ids, so the replayed kernel would take the last step in one run too."""
    log = tmp_path / "steps.jsonl"
    with stand_in_engine(folder, step_log=str(log)) as llm:
        stop = chr(0x100 + drawn(1, 7))
        [output] = llm.generate([[1]], params(12, stop=[stop]), use_tqdm=False)
        assert len(output.outputs[0].token_ids) > 3
        assert output.outputs[0].finish_reason == "stop"
    assert cli(["sim", "replay", str(log)]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(4))
def test_an_interrupt_at_every_line_keeps_the_law(folder, seed):
    line, places = 1, Counter()
    while True:
        place, _ = disturbed_run(folder, seed, line=line, num_acts=8)
        if place is None:
            break
        places[place] += 1
        line += 1
    assert len(places) > 300


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_many_random_disturbed_runs_keep_the_law(folder):
    first = int(os.environ.get("LOCKSTEP_FIRST_SEED", "0"))
    for seed in range(first, first + int(os.environ.get("LOCKSTEP_DISTURBED_RUNS", "5000"))):
        rng = random.Random(seed)
        line = rng.choice([0, rng.randint(1, 4000), rng.randint(1, 1500)])
        disturbed_run(folder, seed, line=line, num_faults=rng.randint(0, 3))


def test_the_real_engine_recovers_from_an_interrupt_within_the_kernel(tmp_path):
    """A fresh kernel takes over: nothing is cached, the tokens are right."""
    from llm_testing import start, tokens_of

    model = write_tiny_model(tmp_path / "tiny")
    prompts = [list(range(20)), [7, 8]]
    with start(model) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(), use_tqdm=False))
        first = llm.scheduler
        schedule = first.schedule

        def interrupted():
            schedule()
            raise KeyboardInterrupt

        first.schedule = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy(), use_tqdm=False)
        assert llm.scheduler is not first
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        assert tokens_of(outputs) == expected
        assert outputs[0].metrics.num_cached_tokens == 0
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
