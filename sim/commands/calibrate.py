"""`lockstep sim calibrate`: fits a profile to step logs or recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from engine.steplog.vllm_recording import open_log
from sim.calibration.build import Calibration, calibrate, graphs_of, target_of
from sim.calibration.evaluate import Fold
from sim.calibration.fit_report import render_calibration
from sim.calibration.log_target import check_log, said_dtype, said_hardware
from sim.calibration.pipeline_build import calibrate_pipeline, pipeline_lines
from sim.calibration.pipeline_report import render_pipeline
from sim.calibration.pipeline_samples import PipelineSamples, pipeline_samples
from sim.calibration.samples import Samples, read_samples
from sim.cost.pipeline_profile import pipeline_to_json
from sim.cost.profile import check_dtype, save_profile
from sim.cost.profile_json import profile_text
from sim.cost.terms import HOST_TERMS, STEP_TERMS
from sim.run.option_table import SIM_TABLE
from sim.specs.hardware import hardware_named
from sim.specs.models import ModelShape, model_named


def calibrate_main(argv: Sequence[str]) -> int:
    """Fits and writes a profile; returns the exit code 0.

    Raises:
        ConfigError, InputError: an option or a log is wrong; nothing was written.
    """
    arguments = _parser().parse(argv)
    out: Path = arguments.out
    report: Path = arguments.report or out.with_suffix(".html")
    check_writable("out", out, ".json")
    check_writable("report", report)
    logs = [_samples(path) for path in arguments.logs]
    model, dtype = _model_of(logs, arguments.model), _dtype_of(logs, arguments.dtype)
    model.check_tp(arguments.tensor_parallel_size)
    hardware = hardware_named(_hardware_of(logs, arguments.hardware))
    target = target_of(
        model,
        hardware.name,
        dtype,
        arguments.tensor_parallel_size,
        _engine_of(logs, arguments.engine),
    )
    for log, path in zip(logs, arguments.logs, strict=True):
        check_log(log.header, path, target)
    graphs = graphs_of(logs, arguments.graphs)
    pipelines = [log for log in logs if isinstance(log, PipelineSamples)]
    steps = [log for log in logs if isinstance(log, Samples)]
    if pipelines and steps:
        raise InputError(
            f"{pipelines[0].name} was scheduled asynchronously and {steps[0].name} was not:"
            " calibrate each kind by itself"
        )
    if pipelines:
        made = calibrate_pipeline(pipelines, arguments.logs, target, graphs)
        write_text(out, profile_text(pipeline_to_json(made.profile)))
        lines = pipeline_lines(made)
        write_text(report, render_pipeline(made.profile, lines))
        print("\n".join(lines))
    else:
        result = calibrate(steps, arguments.logs, target, graphs)
        page = render_calibration(result)
        save_profile(result.profile, out)
        write_text(report, page)
        print_result(result)
    print(f"profile: {out}\nreport: {report}")
    return 0


def _samples(path: Path) -> Samples | PipelineSamples:
    """The steps of a log; asynchronous ones in their own form."""
    log = open_log(path)
    if not log.header.kernel.async_scheduling:
        return read_samples(path)
    if log.header.num_replicas != 1:
        raise InputError(f"{path}: {log.header.num_replicas} replicas: calibrate on one engine")
    return pipeline_samples(log)


def print_result(result: Calibration) -> None:
    """The errors and coefficients as a short table."""
    title = "held out" if result.folds else "in sample (one log: nothing was held out)"
    print(f"step time errors, {title}, %: mean absolute / mean / of the total time")
    for fold in result.folds or result.in_sample:
        cells = [
            f"{kind} {error.mape:.2f} / {error.bias:+.2f} / {error.time_bias:+.2f}"
            f" ({error.num_steps:,}{_ahead(fold, kind)})"
            for kind, error in fold.errors.items()
            if kind in ("decode", "mixed")
        ]
        print(f"  {fold.name}: {'; '.join(cells)}; host gaps {fold.gap_error:+.2f} % of the time")
    profile = result.profile
    if profile.pauses is not None:
        print(
            f"the recording process paused once per {profile.pauses.every_entries:,} scheduled"
            f" entries, {profile.pauses.ns_per_entry:,.0f} ns for each entry up to then"
        )
    print("coefficients, us")
    for terms, values in ((STEP_TERMS, profile.step_ns), (HOST_TERMS, profile.host_ns)):
        for term, value in zip(terms, values, strict=True):
            print(f"  {term.name:<16} {value / 1e3:>10.2f} per {term.unit:<12}  {term.meaning}")


def _ahead(fold: Fold, kind: str) -> str:
    return f", one step ahead {fold.ahead[kind].mape:.2f}" if kind in fold.ahead else ""


def _parser() -> VerbParser:
    parser = VerbParser(
        "sim calibrate", "Fit a cost model to step logs or recorded vLLM runs.", SIM_TABLE
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="step log or recording")
    parser.option("out", required=True, detail="the profile, .json")
    parser.option("report", detail="beside the profile if it is left out")
    parser.option("model", detail="or a config.json or name, where the logs do not say")
    parser.option("hardware", detail="where the logs do not say")
    parser.option("dtype", "auto", detail="auto is what the logs say, else bfloat16")
    parser.option("tp", 1, detail="in the logs")
    parser.option("engine")
    parser.option("graphs", "auto")
    return parser


def _hardware_of(logs: Sequence[Samples | PipelineSamples], option: str | None) -> str:
    """The option, or what all logs say."""
    said = {said_hardware(log.header) for log in logs} - {None}
    if option is not None:
        return option
    if len(said) != 1:
        raise InputError("the logs do not say which hardware they are of: give --hardware")
    return str(said.pop())


def _model_of(logs: Sequence[Samples | PipelineSamples], option: str | None) -> ModelShape:
    """The option, or the model that all logs name."""
    said = {str(log.header.model.get("name") or "") for log in logs} - {""}
    if option is None and len(said) != 1:
        raise InputError("the logs do not say which model they are of: give --model")
    return model_named(said.pop() if option is None else option)


def _dtype_of(logs: Sequence[Samples | PipelineSamples], option: str) -> str:
    """The option, or for `auto` what all logs say."""
    if option != "auto":
        return check_dtype(option)
    said = {said_dtype(log.header) for log in logs} - {None}
    if len(said) > 1:
        raise InputError(f"the logs are of dtypes {', '.join(sorted(map(str, said)))}")
    return check_dtype(str(said.pop())) if said else "bfloat16"


def _engine_of(logs: Sequence[Samples | PipelineSamples], option: str | None) -> str:
    if option is not None:
        return option
    said = {str(log.header.options.get("engine", "")).lower() for log in logs} - {""}
    return said.pop() if len(said) == 1 else f"lockstep {logs[0].header.lockstep_version}".strip()
