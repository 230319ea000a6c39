"""`lockstep sim validate`: predicted against recorded runs, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError, InputError
from engine.steplog.atomic import write_text
from engine.steplog.vllm_recording import open_log
from sim.calibration.build import calibrate, graphs_of, target_of
from sim.calibration.evaluate import Fit, evaluate
from sim.calibration.host_speed import one_step_ahead
from sim.calibration.log_target import check_log, said_dtype
from sim.calibration.pipeline_free import target_physics
from sim.commands.validate_async import validate_pipelines
from sim.cost.calibrated import CalibratedCost
from sim.cost.physics import Physics
from sim.cost.profile import Profile, Target, load_profile
from sim.cost.profiles import find_profile
from sim.report.tables import text_table
from sim.run.option_table import SIM_TABLE
from sim.specs.hardware import hardware_named
from sim.specs.models import ModelShape, model_named
from sim.validation.compare import Comparison
from sim.validation.error_report import header, notes, render_validation, text_rows
from sim.validation.predicted import free_running, intervals
from sim.validation.recorded import RecordedRun, read_run, teacher_forced


def main(argv: Sequence[str]) -> int:
    """Validates each run; returns the exit code 0.

    Raises:
        ConfigError, InputError: an option or a file is wrong; nothing was written.
    """
    arguments = _parser().parse(argv)
    check_writable("out", arguments.out, ".json")
    if arguments.replicates == 1:
        raise ConfigError("replicates", 1, "must be 0, or at least 2")
    if "seed" in arguments.given and not arguments.replicates:
        raise ConfigError("seed", arguments.seed, "belongs to a validation with replicates")
    logs = [open_log(path) for path in arguments.logs]
    if any(log.header.kernel.async_scheduling for log in logs):
        return validate_pipelines(arguments, logs)
    runs = [read_run(path) for path in arguments.logs]
    profiles = _profiles(arguments, runs)
    comparisons = []
    for run, profile in zip(runs, profiles, strict=True):
        comparison = compare(run, profile, arguments.held_out, arguments.replicates, arguments.seed)
        comparisons.append(comparison)
        if not arguments.json:
            _print(comparison)
    if arguments.json:
        print(_document(comparisons))
    if arguments.out is not None:
        _write(arguments.out, comparisons, told=not arguments.json)
    return 0


def compare(
    run: RecordedRun, profile: Profile, held_out: bool, replicates: int = 0, seed: int = 0
) -> Comparison:
    """Predicts a recorded run in every way that the page shows."""
    physics = physics_of(profile)
    free, cost = free_running(run, profile, physics)
    teacher, different = teacher_forced(run, CalibratedCost(profile, physics))
    fit = Fit(np.array(profile.step_ns), np.array(profile.host_ns))
    ahead = None
    if profile.tracking is not None:
        ahead = one_step_ahead(run.samples, fit, profile.graphs, profile.tracking)
    return Comparison(
        run=run,
        profile=profile,
        held_out=held_out,
        teacher=teacher,
        free=free,
        different_decisions=different,
        num_extrapolated=cost.num_extrapolated,
        steps=evaluate(run.samples, fit, profile.graphs, ahead),
        intervals=intervals(run, profile, physics, replicates, seed) if replicates else None,
    )


def physics_of(profile: Profile) -> Physics:
    """The limits of the hardware and model that a profile was made for."""
    return target_physics(profile.target)


def held_out_profiles(
    runs: Sequence[RecordedRun], model: ModelShape, hardware: str, dtype: str, tp: int
) -> list[Profile]:
    """For each run a profile that was fitted to all the others.

    Raises:
        InputError: fewer than three runs, since the noise needs held-out errors too.
    """
    if len(runs) < 3:
        raise InputError(f"held-out validation needs at least 3 logs, not {len(runs)}")
    graphs = graphs_of([run.samples for run in runs], "auto")
    target = target_of(model, hardware, dtype, tp, "")
    profiles = []
    for run in runs:
        others = [other for other in runs if other is not run]
        result = calibrate(
            [other.samples for other in others], [other.path for other in others], target, graphs
        )
        profiles.append(replace(result.profile, path=f"fit without {run.name}"))
    return profiles


def _profiles(arguments: argparse.Namespace, runs: Sequence[RecordedRun]) -> list[Profile]:
    """A profile for each run, which says of itself nothing that the profile is not for."""
    hardware, model = hardware_named(arguments.hardware), model_named(arguments.model)
    tp = arguments.tensor_parallel_size
    model.check_tp(tp)
    if arguments.held_out:
        if arguments.profile is not None:
            raise ConfigError("held_out", True, "fits its own profiles: leave --profile out")
        dtype = said_dtype(runs[0].log.header) or "bfloat16"
        _check_logs(runs, target_of(model, hardware.name, dtype, tp, ""))
        return held_out_profiles(runs, model, hardware.name, dtype, tp)
    if arguments.profile is None:
        found = find_profile(model, hardware, tp)
        if not isinstance(found, Profile):
            raise ConfigError(
                "profile", None, f"no shipped profile is for {model.name} on {hardware.name}"
            )
        profile = found
    else:
        profile = load_profile(arguments.profile)
        profile.check_fits(model, hardware, tp)
    _check_logs(runs, profile.target)
    return [profile for _ in runs]


def _check_logs(runs: Sequence[RecordedRun], target: Target) -> None:
    for run in runs:
        check_log(run.log.header, run.path, target)


def _parser() -> VerbParser:
    parser = VerbParser(
        "sim validate", "Compare the simulator with recorded runs of a real engine.", SIM_TABLE
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="step log or recording")
    parser.option("profile", detail="the shipped one that fits if it is left out")
    parser.option("held_out")
    parser.option("model", "qwen3-8b", detail="of the logs")
    parser.option("hardware", "h200", detail="of the logs")
    parser.option("tp", 1, detail="in the logs")
    parser.option("replicates", 0)
    parser.option("seed", 0, detail="of the replicates")
    parser.option("out", detail=".json; an HTML page goes beside it")
    parser.option("json", detail="what --out writes")
    return parser


def _print(comparison: Comparison) -> None:
    print(f"\n{comparison.run.name}")
    for line in notes(comparison):
        print(f"  {line}")
    print(text_table(header(comparison), text_rows(comparison), indent="  "))


def _document(comparisons: Sequence[Comparison]) -> str:
    document = {"runs": [comparison.to_json() for comparison in comparisons]}
    return json.dumps(document, indent=1, allow_nan=False)


def _write(out: Path, comparisons: Sequence[Comparison], told: bool) -> None:
    texts = {
        out: _document(comparisons) + "\n",
        out.with_suffix(".html"): render_validation(comparisons),
    }
    for path, text in texts.items():
        write_text(path, text)
        if told:
            print(f"written: {path}")
