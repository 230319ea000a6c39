"""Fits and profiles: held-out errors, files, the command."""

from __future__ import annotations

import json
import math
from dataclasses import fields as dataclass_fields
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_testing import (
    NAMES,
    make_log,
    make_recording,
    needs_recordings,
    recording_path,
)

from engine.cli import main
from engine.core import ConfigError, InputError
from sim.calibration.build import calibrate, graphs_of, target_of
from sim.calibration.fit import fit_steps, leave_one_out
from sim.calibration.samples import read_samples
from sim.cost.physics import Physics
from sim.cost.profile import load_profile, parse_profile, save_profile, shipped_profiles
from sim.cost.terms import VLLM_GRAPH_SIZES, Graphs
from sim.specs.hardware import hardware_named
from sim.specs.models import MoeShape, model_named

(PROFILE,) = shipped_profiles()
MODEL, HARDWARE = model_named("qwen3-8b"), hardware_named("h200")
PHYSICS = Physics(MODEL, HARDWARE)


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

    def test_a_mixture_of_experts_is_refused(self, tmp_path):
        """Even with the dense fields of the profile's model."""
        fields = {f.name: getattr(MODEL, f.name) for f in dataclass_fields(MODEL)}
        mixture = MoeShape(**fields, num_experts=8, experts_per_token=2, moe_intermediate_size=768)
        assert PROFILE.fits(MODEL, HARDWARE, 1)
        assert not PROFILE.fits(mixture, HARDWARE, 1)
        with pytest.raises(ConfigError, match="dense"):
            target_of(mixture, "h200", "bfloat16", 1, "")

    def test_another_dtype_is_refused(self):
        with pytest.raises(InputError, match="made for dtype bfloat16"):
            PROFILE.check_fits(replace(MODEL, dtype_bytes=4), HARDWARE, 1)

    @pytest.mark.parametrize(
        "change",
        [
            {"format": "other"},
            {"version": 1},
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
