"""`lockstep sim validate` on asynchronous runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from engine.core.errors import ConfigError, InputError
from engine.steplog.atomic import write_text
from engine.steplog.vllm_recording import ReadableLog
from sim.calibration.pipeline_samples import PipelineSamples, pipeline_samples
from sim.cost.pipeline_profile import PipelineProfile
from sim.cost.profiles import find_profile, load_any_profile
from sim.report.tables import text_table
from sim.run.engines import family_of
from sim.specs.hardware import Hardware, hardware_named
from sim.specs.models import ModelShape, model_named
from sim.validation.pipeline_compare import (
    HEADER,
    PipelineComparison,
    compare_pipeline,
    pipeline_notes,
    pipeline_rows,
    render_pipelines,
)


def validate_pipelines(arguments: argparse.Namespace, logs: Sequence[ReadableLog]) -> int:
    """Validates each run; returns the exit code 0.

    Raises:
        ConfigError, InputError: an option or a file is wrong; nothing was written.
    """
    if arguments.replicates:
        raise ConfigError(
            "replicates", arguments.replicates, "asynchronous runs are averaged over drifting hosts"
        )
    runs = [pipeline_samples(log) for log in logs]
    profiles = _profiles(arguments, runs)
    comparisons = [
        compare_pipeline(run, profile, arguments.held_out)
        for run, profile in zip(runs, profiles, strict=True)
    ]
    document = {"runs": [comparison.to_json() for comparison in comparisons]}
    text = json.dumps(document, indent=1, allow_nan=False)
    if arguments.json:
        print(text)
    else:
        for comparison in comparisons:
            _print(comparison)
    if arguments.out is not None:
        texts = {
            arguments.out: text + "\n",
            arguments.out.with_suffix(".html"): render_pipelines(comparisons),
        }
        for path, content in texts.items():
            write_text(path, content)
            if not arguments.json:
                print(f"written: {path}")
    return 0


def _profiles(
    arguments: argparse.Namespace, runs: Sequence[PipelineSamples]
) -> list[PipelineProfile]:
    hardware, model = hardware_named(arguments.hardware), model_named(arguments.model)
    tp = arguments.tensor_parallel_size
    model.check_tp(tp)
    if arguments.held_out:
        if arguments.profile is not None:
            raise ConfigError("held_out", True, "fits its own profiles: leave --profile out")
        return _held_out(runs, model, hardware, tp)
    if arguments.profile is not None:
        profile = load_any_profile(arguments.profile)
        profile.check_fits(model, hardware, tp)
        if not isinstance(profile, PipelineProfile):
            raise InputError(f"{arguments.profile}: is of synchronous scheduling, the logs are not")
        return [profile for _ in runs]
    return [_shipped(run, model, hardware, tp) for run in runs]


def _shipped(
    run: PipelineSamples, model: ModelShape, hardware: Hardware, tp: int
) -> PipelineProfile:
    engine = run.header.options.get("engine")
    family = "lockstep" if run.header.writer != "import" else family_of(str(engine).lower())
    found = find_profile(model, hardware, tp, True, family)
    if not isinstance(found, PipelineProfile):
        raise ConfigError(
            "profile",
            None,
            f"no shipped profile of {family or engine} is for {model.name} on {hardware.name}",
        )
    return found


def _held_out(
    runs: Sequence[PipelineSamples], model: ModelShape, hardware: Hardware, tp: int
) -> list[PipelineProfile]:
    """For each run a profile that was fitted to all the others."""
    if len(runs) < 2:
        raise InputError("held-out validation needs at least 2 logs, not 1")
    from sim.calibration.build import graphs_of, target_of
    from sim.calibration.pipeline_build import fit_profile

    graphs = graphs_of(runs, "auto")
    target = target_of(model, hardware.name, "bfloat16", tp, "")
    return [
        fit_profile([other for other in runs if other is not run], [], target, graphs)
        for run in runs
    ]


def _print(comparison: PipelineComparison) -> None:
    print(f"\n{comparison.name}")
    for line in pipeline_notes(comparison):
        print(f"  {line}")
    print(text_table([*HEADER], pipeline_rows(comparison), indent="  "))
