"""Fitted cost models: physical, monotone, honest about their range and their errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from calib_testing import (
    NAMES,
    make_log,
    make_recording,
    make_workload,
    needs_recordings,
    recording_path,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.core import InputError
from sim.calibration.build import calibrate, graphs_of, target_of
from sim.calibration.cost import CalibratedCost
from sim.calibration.fit import fit_steps, leave_one_out
from sim.calibration.noise import Noise
from sim.calibration.profile import load_profile, parse_profile, save_profile, shipped_profiles
from sim.calibration.samples import next_recent, read_samples, work_row
from sim.calibration.terms import HOST_NAMES, STEP_NAMES, VLLM_GRAPH_SIZES, Graphs, step_row
from sim.cost.features import StepFeatures
from sim.cost.physics import Physics
from sim.hardware import hardware_named
from sim.models import model_named
from sim.runs import RunPlan, simulate
from sim.setup import Deployment, build
from sim.simulation import RunOptions

(PROFILE,) = shipped_profiles()
MODEL, HARDWARE = model_named("qwen3-8b"), hardware_named("h200")
PHYSICS = Physics(MODEL, HARDWARE)


def cost(profile=PROFILE, seed=None):
    noise = None if seed is None else Noise(profile.noise, seed)
    return CalibratedCost(profile, PHYSICS, noise)


def features(decodes=8, context=None, chunks=(), shared=0):
    context = 500 * decodes if context is None else context
    sampled = decodes + len(chunks)
    return StepFeatures(decodes, context, tuple(chunks), sampled, shared)


steps = st.builds(
    features,
    st.integers(1, 256),
    st.integers(256, 400_000),
    st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 700)), max_size=3),
)


class TestModel:
    def test_coefficients_are_times(self):
        assert all(value >= 0 for value in (*PROFILE.step_ns, *PROFILE.host_ns))
        assert PROFILE.step_ns[STEP_NAMES.index("kv_read")] > 0
        assert PROFILE.host_ns[HOST_NAMES.index("added")] > 0

    @settings(max_examples=200, deadline=None)
    @given(step=steps, more=st.integers(1, 4000), recent=st.integers(0, 2048))
    def test_more_work_never_takes_less_time(self, step, more, recent):
        def time_ns(work):
            model = cost()
            model.observe(features(0, 0, [(0, recent)] if recent else []), 1)
            return model.step_time_ns(work)

        before = time_ns(step)
        context = step.decode_context_sum
        assert time_ns(replace(step, decode_context_sum=context + more)) >= before
        assert time_ns(features(step.num_decodes + 1, context + 1, step.chunks)) >= before
        assert time_ns(features(step.num_decodes, context, (*step.chunks, (more, 1)))) >= before
        if step.chunks:
            (first, length), *others = step.chunks
            for bigger in ((first + more, length), (first, length + more)):
                assert time_ns(replace(step, chunks=(bigger, *others))) >= before

    @settings(max_examples=200, deadline=None)
    @given(step=steps, recent=st.sampled_from([0, 2048]), shared=st.sampled_from([0, 160]))
    def test_the_simulator_predicts_what_the_fit_does(self, step, recent, shared):
        """The fit multiplies columns of terms, the simulator keeps what it can."""
        step = replace(step, kv_shared_tokens=shared)
        model = cost()
        if recent:
            model.observe(features(0, 0, [(0, recent)]), 1)
        terms = step_row(work_row(step, next_recent(0.0, recent)), PROFILE.graphs)
        expected = float(np.dot(terms, PROFILE.step_ns)) + model.gap_ns(step)
        expected = max(expected, PHYSICS.floor_ns(PHYSICS.step_work(step)))
        assert model.step_time_ns(step) == pytest.approx(expected, abs=3)

    @settings(max_examples=100, deadline=None)
    @given(step=steps, shared=st.integers(0, 100_000))
    def test_shared_context_costs_less_and_not_nothing(self, step, shared):
        shared = min(shared, step.decode_context_sum // 2)
        time_ns = cost().step_time_ns(replace(step, kv_shared_tokens=shared))
        assert time_ns <= cost().step_time_ns(step)
        unique = replace(step, decode_context_sum=step.decode_context_sum - shared)
        assert time_ns >= cost().step_time_ns(unique)

    @settings(max_examples=100, deadline=None)
    @given(
        rows=st.integers(1, 256),
        context=st.integers(256, 300_000),
        count=st.integers(1, 80),
        recent=st.sampled_from([0, 1, 700, 2048]),
        seed=st.sampled_from([None, 3]),
    )
    def test_a_decode_run_takes_what_its_steps_take(self, rows, context, count, recent, seed):
        together, alone = cost(seed=seed), cost(seed=seed)
        for model in (together, alone):
            if recent:
                model.observe(features(0, 0, [(0, recent)]), 1)
        run = together.decode_run_ns(rows, context, count, 16)
        single = []
        for offset in range(count):
            step = StepFeatures(rows, context + offset * rows, (), rows, 16)
            single.append(alone.step_time_ns(step))
            alone.observe(step, 1)
        assert run == single
        together.observe(StepFeatures(rows, context, (), rows, 16), count)
        after = features(rows, context + 7)
        assert together.step_time_ns(after) == alone.step_time_ns(after)

    def test_planned_steps_that_did_not_run_leave_no_trace(self):
        model, fresh = cost(seed=1), cost(seed=1)
        model.decode_run_ns(8, 4000, 50)
        model.step_time_ns(features(chunks=[(0, 500)]))
        assert model.step_time_ns(features()) == fresh.step_time_ns(features())

    @settings(max_examples=100, deadline=None)
    @given(step=steps, seed=st.integers(0, 20))
    def test_no_step_beats_the_data_sheet(self, step, seed):
        fast = replace(
            PROFILE,
            step_ns=tuple(value / 1000 for value in PROFILE.step_ns),
            host_ns=tuple(0.0 for _ in PROFILE.host_ns),
        )
        floor_ns = PHYSICS.floor_ns(PHYSICS.step_work(step))
        assert cost(fast).step_time_ns(step) >= floor_ns
        assert cost(fast, seed).step_time_ns(step) >= floor_ns
        assert cost(PROFILE, seed).step_time_ns(step) >= floor_ns

    def test_prefill_slows_the_steps_after_it_down_for_a_while(self):
        model = cost()
        rested = model.step_time_ns(features())
        model.observe(features(chunks=[(0, 2048)]), 1)
        times = []
        for _ in range(60):
            times.append(model.step_time_ns(features()))
            model.observe(features(), 1)
        assert times == sorted(times, reverse=True)
        assert times[0] > rested == times[-1]


class TestRange:
    def test_steps_outside_are_counted_and_refused_above_a_share(self):
        model = cost()
        model.observe(features(), 95)
        model.check_range()
        model.observe(features(context=PROFILE.limits["kv_tokens"] + 1), 5)
        model.check_range()
        assert model.num_extrapolated == 5
        model.observe(features(decodes=PROFILE.limits["sequences"] + 1), 5)
        with pytest.raises(InputError, match=r"9\.5% of the steps lie outside"):
            model.check_range()

    def test_every_limit_counts(self):
        tokens = PROFILE.limits["tokens"]
        for step in (
            features(1, 10, [(0, tokens)]),
            features(1, 10, [(PROFILE.limits["kv_tokens"], 1)]),
            features(1, 10, [(PROFILE.limits["chunk_pairs"] // 1000, 1001)]),
        ):
            model = cost()
            model.observe(step, 1)
            assert model.num_extrapolated == 1

    def test_a_run_far_outside_exits_2(self, capsys):
        words = ["sim", "run", "--workload", "poisson", "--rate", "1000", "--num-requests", "600"]
        words += ["--hardware", "h200", "--max-num-seqs", "600", "--prompt-len", "20"]
        assert main([*words, "--output-len", "300", "--cost", "calibrated"]) == 2
        assert "outside the range" in capsys.readouterr().err


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    found = []
    for serial, gap_ms in enumerate((15, 35, 60)):
        path = folder / f"log{serial}.jsonl"
        make_log(path, gap_ms)
        found.append(read_samples(path))
    return found


class TestFit:
    def test_a_simulated_log_gives_its_own_step_times_back(self, samples):
        """The log's times are those of a known law with the host's work included."""
        folds = leave_one_out(samples, PROFILE.graphs)
        for fold in folds:
            for kind in ("decode", "mixed"):
                assert fold.errors[kind].mape < 1.5, (fold.name, kind, fold.errors[kind])
                assert abs(fold.errors[kind].time_bias) < 1.5

    def test_a_wrong_law_would_be_noticed(self, samples):
        """Canary of the test above: times that do not follow from the work do not fit."""
        rng = np.random.default_rng(0)
        noisy = [
            replace(log, duration_ns=log.duration_ns * rng.lognormal(0, 0.1, len(log)))
            for log in samples
        ]
        assert leave_one_out(noisy, PROFILE.graphs)[0].errors["decode"].mape > 5

    def test_coefficients_stay_non_negative_on_noise(self, samples):
        rng = np.random.default_rng(1)
        log = replace(samples[0], duration_ns=rng.uniform(1e6, 1e8, len(samples[0])))
        fit = fit_steps([log], Graphs(VLLM_GRAPH_SIZES, 512))
        assert (fit.step_ns >= 0).all()
        assert (fit.host_ns >= 0).all()

    def test_too_few_steps_are_refused(self, samples):
        log = samples[0]
        few = replace(
            log,
            work=log.work[:50],
            **{
                name: getattr(log, name)[:50]
                for name in ("duration_ns", "gap_ns", "num_finished", "num_added", "added_tokens",
                             "start_ns", "host_ns")
            },
        )  # fmt: skip
        with pytest.raises(InputError, match="50 steps are too few"):
            fit_steps([few], Graphs())

    def test_graph_options(self, samples):
        assert graphs_of(samples, "none") == Graphs()
        assert graphs_of(samples, "vllm").mixed_up_to == 512
        assert graphs_of(samples, "1,2,4").padded(3, False) == 4
        for wrong in ("4,2", "0,1", "many", ""):
            with pytest.raises(InputError, match="graphs="):
                graphs_of(samples, wrong)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 4096), st.booleans())
    def test_padding_is_monotone_and_never_shrinks(self, tokens, mixed):
        graphs = Graphs(VLLM_GRAPH_SIZES, 512)
        assert tokens <= graphs.padded(tokens, mixed) <= graphs.padded(tokens + 1, mixed)


class TestProfile:
    def test_it_survives_its_file(self, tmp_path):
        path = tmp_path / "profile.json"
        save_profile(PROFILE, path)
        again = load_profile(path)
        assert replace(again, path="") == replace(PROFILE, path="")

    def test_the_shipped_one_says_what_it_is_made_of(self):
        assert [source["name"] for source in PROFILE.sources] == [
            f"{name}.json.gz" for name in NAMES
        ]
        assert sum(source["steps"] for source in PROFILE.sources) == 31_946
        assert PROFILE.target.engine == "vllm 0.25.1"
        assert len(PROFILE.held_out) == len(PROFILE.noise) == 5

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (["--model", "llama-3.1-8b"], "model"),
            (["--hardware", "h100"], "hardware"),
            (["--tp", "2"], "tp"),
        ],
    )
    def test_another_target_is_refused(self, tmp_path, capsys, words, what):
        path = tmp_path / "profile.json"
        save_profile(PROFILE, path)
        base = ["sim", "run", "--workload", "poisson", "--rate", "1", "--num-requests", "5"]
        base += ["--model", "qwen3-8b", "--hardware", "h200", "--cost", f"calibrated:{path}"]
        assert main([*base, *words, "--out", str(tmp_path / "out")]) == 2
        message = capsys.readouterr().err
        assert f"made for {what}" in message
        assert message.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_another_dtype_is_refused(self):
        with pytest.raises(InputError, match="made for dtype bfloat16"):
            PROFILE.check_fits(replace(MODEL, dtype_bytes=4), HARDWARE, 1)

    @pytest.mark.parametrize(
        "change",
        [
            {"format": "other"},
            {"version": 2},
            {"step_terms": []},
            {"calibrated_up_to": {}},
            {"graphs": {"sizes": [2, 1], "mixed_up_to": 0}},
        ],
    )
    def test_a_damaged_one_is_refused(self, tmp_path, change):
        path = tmp_path / "profile.json"
        save_profile(PROFILE, path)
        document = {**json.loads(path.read_text()), **change}
        with pytest.raises(InputError, match=r"p\.json"):
            parse_profile(json.dumps(document), "p.json")

    def test_negative_and_infinite_coefficients_are_refused(self, tmp_path):
        path = tmp_path / "profile.json"
        save_profile(PROFILE, path)
        for value in (-1.0, math.inf):
            document = json.loads(path.read_text())
            document["step_terms"][0]["ns"] = value
            with pytest.raises(InputError, match="negative or not finite"):
                parse_profile(json.dumps(document), "p.json")


class TestServer:
    def test_fast_forward_equals_step_by_step(self):
        runs = []
        for step_by_step in (False, True):
            plan = RunPlan(
                make_workload(), Deployment(hardware="h200", cost="calibrated"),
                RunOptions(step_by_step=step_by_step),
            )  # fmt: skip
            runs.append(simulate(plan))
        first, second = (run.result.ledger for run in runs)
        assert first.finish_ns == second.finish_ns
        assert first.first_token_ns == second.first_token_ns

    def test_taking_in_a_request_delays_its_first_step(self):
        plan = RunPlan(make_workload(1), Deployment(hardware="h200", cost="calibrated"))
        run = simulate(plan)
        intake_ns = cost().intake_ns(plan.workload.prompt_tokens[0])
        assert intake_ns > 0
        assert run.result.ledger.first_scheduled_ns[0] == intake_ns

    def test_the_default_is_calibrated_only_where_a_profile_fits(self):
        def name(**options):
            return build(Deployment(**options), 0).costs[0].name

        assert name(model="qwen3-8b", hardware="h200") == "calibrated"
        assert name(model="qwen3-8b", hardware="h100") == "roofline"
        assert name(model="qwen3-4b", hardware="h200") == "roofline"
        assert name(model="qwen3-8b", hardware="h200", tp=2) == "roofline"

    def test_the_summary_says_which_and_from_what(self):
        plan = RunPlan(make_workload(5), Deployment(hardware="h200"))
        described = simulate(plan).summary["sim"]["provenance"]["cost"]
        assert described["name"] == "calibrated"
        assert described["engine"] == "vllm 0.25.1"
        assert described["sources"] == [f"{name}.json.gz" for name in NAMES]


class TestCommand:
    def test_it_writes_profile_and_report(self, tmp_path, capsys):
        logs = []
        for serial, step_us in enumerate((7000, 8000)):
            logs.append(str(tmp_path / f"log{serial}.json.gz"))
            make_recording(logs[-1], 90, step_us)
        out = tmp_path / "profile.json"
        words = ["--model", "qwen3-0.6b", "--hardware", "h100", "--out", str(out)]
        assert main(["sim", "calibrate", *logs, *words]) == 0
        assert "held out" in capsys.readouterr().out
        profile = load_profile(out)
        assert profile.target.hardware == "h100"
        assert [source["name"] for source in profile.sources] == ["log0.json.gz", "log1.json.gz"]
        page = out.with_suffix(".html").read_text()
        assert page.count("<svg") == 6
        assert "log1.json.gz" in page

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--model", "nothing"], "model='nothing'"),
            (["--hardware", "abacus"], "hardware='abacus'"),
            (["--dtype", "int3"], "dtype='int3'"),
            (["--tp", "5"], "tp=5"),
            (["--graphs", "x"], "graphs='x'"),
            (["--out", "profile.txt"], "ends with .json"),
        ],
    )
    def test_wrong_options_write_nothing(self, tmp_path, capsys, monkeypatch, words, message):
        monkeypatch.chdir(tmp_path)
        make_recording("log.json.gz", 90)
        base = ["--model", "qwen3-0.6b", "--hardware", "h100", "--out", "profile.json"]
        assert main(["sim", "calibrate", "log.json.gz", *base, *words]) == 2
        text = capsys.readouterr().err
        assert message in text
        assert text.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["log.json.gz"]

    def test_too_few_steps_write_nothing(self, tmp_path, capsys):
        make_recording(tmp_path / "log.json.gz", 3)
        out = tmp_path / "profile.json"
        words = ["--model", "qwen3-0.6b", "--hardware", "h100", "--out", str(out)]
        assert main(["sim", "calibrate", str(tmp_path / "log.json.gz"), *words]) == 2
        assert "too few" in capsys.readouterr().err
        assert not out.exists()


@pytest.mark.shared
@needs_recordings
def test_held_out_errors_are_those_of_the_shipped_profile():
    """The bounds are what docs/fidelity.md reports, rounded up to a tenth."""
    paths = [recording_path(name) for name in NAMES]
    logs = [read_samples(path) for path in paths]
    target = target_of(MODEL, "h200", "bfloat16", 1, "vllm 0.25.1")
    result = calibrate(logs, paths, target, graphs_of(logs, "auto"))
    np.testing.assert_allclose(result.profile.step_ns, PROFILE.step_ns, rtol=0.02, atol=5)
    decode = [fold.errors["decode"] for fold in result.folds]
    mixed = [fold.errors["mixed"] for fold in result.folds]
    assert max(error.mape for error in decode) <= 3.2
    assert max(abs(error.time_bias) for error in decode) <= 0.8
    assert max(error.mape for error in mixed) <= 8.3
    assert max(abs(error.time_bias) for error in mixed) <= 1.2
    assert max(abs(fold.gap_error) for fold in result.folds) <= 0.3
    assert pooled(decode) <= 3.0
    assert pooled(mixed) <= 5.9
    assert pooled([fold.ahead["decode"] for fold in result.folds]) <= 2.1
    assert pooled([fold.ahead["mixed"] for fold in result.folds]) <= 5.0


def pooled(errors):
    """Mean absolute error over all steps of all logs."""
    total = sum(error.mape * error.num_steps for error in errors)
    return total / sum(error.num_steps for error in errors)
