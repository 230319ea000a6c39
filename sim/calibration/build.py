"""From logs to a profile: fit, held-out errors, noise, provenance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.core import KernelConfig
from engine.core.errors import InputError
from engine.steplog.api import LogHeader
from sim.calibration.evaluate import Fold, evaluate, fold_json, kinds
from sim.calibration.fit import fit_steps, fit_tracking, leave_one_out
from sim.calibration.pauses import fit_pauses, without_pauses
from sim.calibration.samples import Samples
from sim.cost.profile import NoiseSource, Profile, Target, check_dense, shape_fields
from sim.cost.terms import KINDS, VLLM_GRAPH_SIZES, Graphs
from sim.specs.models import ModelShape

# Length of a block of noise in steps, and how many are kept per log and kind.
BLOCK_STEPS, MAX_BLOCKS = 64, 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile with what its report shows."""

    profile: Profile
    logs: tuple[Samples, ...]
    folds: tuple[Fold, ...]
    in_sample: tuple[Fold, ...]


def calibrate(
    logs: Sequence[Samples], paths: Sequence[Path], target: Target, graphs: Graphs
) -> Calibration:
    """Fits a profile to the logs and tests it on each log with a fit to the others.

    Raises:
        InputError: too few steps, or logs of different engines.
    """
    _check_alike(logs)
    fit = fit_steps(logs, graphs)
    folds = leave_one_out(logs, graphs)
    profile = Profile(
        target=target,
        graphs=graphs,
        step_ns=tuple(fit.step_ns.tolist()),
        host_ns=tuple(fit.host_ns.tolist()),
        limits=limits_of(logs),
        pauses=fit_pauses(logs, fit, graphs),
        tracking=fit_tracking(logs, fit, graphs),
        noise=tuple(noise_of(log, fold, graphs) for log, fold in zip(logs, folds, strict=False)),
        sources=tuple(
            log_source(log.name, path, len(log), int(log.is_mixed.sum()), log.header.kernel)
            for log, path in zip(logs, paths, strict=True)
        ),
        held_out=tuple(fold_json(fold) for fold in folds),
        lockstep_version=version(),
    )
    in_sample = tuple(evaluate(log, fit, graphs) for log in logs)
    return Calibration(profile, tuple(logs), tuple(folds), in_sample)


class HasHeader(Protocol):
    """A log's columns, of which only the header and the graphs matter here."""

    @property
    def header(self) -> LogHeader:
        """The log's header."""
        ...

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Graph sizes that steps were logged with."""
        ...


def graphs_of(logs: Sequence[HasHeader], option: str) -> Graphs:
    """The captured graphs: `vllm`, `none`, explicit sizes, or `auto`.

    `auto` takes vLLM's for imported recordings and the buckets that steps were logged with else.
    """
    if option == "auto":
        if all(log.header.writer == "import" for log in logs):
            option = "vllm"
        else:
            buckets = sorted({size for log in logs for size in log.graph_buckets})
            return Graphs(tuple(buckets), 0)
    if option == "vllm":
        # The largest graph holds twice the largest batch, at most 512 tokens.
        limit = min(512, 2 * max(log.header.kernel.max_num_seqs for log in logs))
        sizes = tuple(size for size in VLLM_GRAPH_SIZES if size <= limit)
        return Graphs(sizes, sizes[-1])
    if option == "none":
        return Graphs()
    try:
        sizes = tuple(int(text) for text in option.split(","))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise InputError(f"graphs={option!r}: must be auto, vllm, none, or ascending sizes")
    return Graphs(sizes, 0)


def limits_of(logs: Sequence[Samples]) -> dict[str, int]:
    """The largest step of each kind of work."""
    columns = [_range_columns(log) for log in logs]
    return {name: int(max(column[name].max() for column in columns)) for name in columns[0]}


def _range_columns(log: Samples) -> dict[str, Any]:
    return {
        "sequences": log.column("num_decodes") + log.column("num_chunks"),
        "tokens": log.column("num_decodes") + log.column("chunk_tokens"),
        "kv_tokens": log.column("decode_context") + log.column("chunk_context"),
        "chunk_pairs": log.column("chunk_pairs"),
    }


def noise_of(log: Samples, fold: Fold, graphs: Graphs) -> NoiseSource:
    """Blocks of consecutive held-out errors, evenly spaced over the log, pauses left out."""
    kept = without_pauses(log, fold.fit, graphs)
    kind_of = kinds(log, graphs)[kept]
    relative, recorded = fold.relative[kept], log.duration_ns[kept]
    blocks = []
    for kind in range(len(KINDS)):
        errors = np.round(relative[kind_of == kind], 4)
        starts = range(0, len(errors), BLOCK_STEPS)
        chosen = {starts[round(place)] for place in np.linspace(0, len(starts) - 1, MAX_BLOCKS)} \
            if starts else set()  # fmt: skip
        blocks.append(
            tuple(tuple(errors[start : start + BLOCK_STEPS].tolist()) for start in sorted(chosen))
        )
    mean = float(recorded.sum() / (recorded / (1 + relative)).sum() - 1)
    return NoiseSource(log.name, mean, tuple(blocks))


def target_of(model: ModelShape, hardware: str, dtype: str, tp: int, engine: str) -> Target:
    """What the profile will hold for.

    Raises:
        ConfigError: the model is a mixture of experts.
    """
    check_dense(model)
    return Target({"name": model.name, **shape_fields(model)}, hardware, dtype, tp, engine)


def log_source(
    name: str, path: Path, steps: int, mixed_steps: int, kernel: KernelConfig
) -> dict[str, Any]:
    """What a profile says of a log that it was made from."""
    return {
        "name": name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "steps": steps,
        "mixed_steps": mixed_steps,
        "kernel": asdict(kernel),
    }


def _check_alike(logs: Sequence[Samples]) -> None:
    """Logs of one profile must come from one model on one kind of hardware."""
    for what in ("model", "hardware"):
        known = {repr(dict(getattr(log.header, what))): log.name for log in logs}
        if len(known) > 1:
            first, second, *_ = known.values()
            raise InputError(f"{second}: another {what} than {first}")


def version() -> str:
    """The version of this package, for provenance."""
    try:
        return metadata.version("lockstep-llm")
    except metadata.PackageNotFoundError:
        return ""
