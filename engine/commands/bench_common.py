"""What all engine benchmarks share: step statistics, provenance and the JSON record."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from engine.core.errors import InputError
from engine.llm import LLM
from engine.models.presets import PRESETS
from engine.requests.committed_step import CommittedStep
from engine.steplog.atomic import write_text
from engine.worker.probe import PEAK_MEMORY_BYTES

# Decode steps are grouped by batch size up to these limits.
_DECODE_GROUPS = (1, 16, 64, 128, 192, 224, 256, 512, 1024)


class StepStatistics:
    """Durations of steps by kind: prefill, mixed, and decode by batch size."""

    def __init__(self) -> None:
        self._steps: dict[str, list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, events: CommittedStep) -> None:
        """Books a step; usable as `LLM.on_step`."""
        times = (events.duration_ns, events.device_ns or 0, events.host_ns)
        self._steps[_kind(events)].append(times)

    def summary(self) -> dict[str, dict[str, float]]:
        """Per kind: steps, total seconds, and medians in ms of duration, device and host time."""
        return {
            kind: {
                "steps": len(steps),
                "total_s": sum(step[0] for step in steps) / 1e9,
                "duration_ms_p50": statistics.median(step[0] for step in steps) / 1e6,
                "device_ms_p50": statistics.median(step[1] for step in steps) / 1e6,
                "host_ms_p50": statistics.median(step[2] for step in steps) / 1e6,
                "device_ms_total": sum(step[1] for step in steps) / 1e6,
                "host_ms_total": sum(step[2] for step in steps) / 1e6,
            }
            for kind, steps in sorted(self._steps.items())
        }


def _kind(events: CommittedStep) -> str:
    plan = events.plan
    if plan.chunks:
        return "mixed" if len(plan.decode) else "prefill"
    num_rows = len(plan.decode)
    limit = next((size for size in _DECODE_GROUPS if num_rows <= size), num_rows)
    return f"decode_{limit:04d}"


def provenance(llm: LLM) -> dict[str, object]:
    """Machine, versions, commit and options that the numbers belong to."""
    peaks = [json.loads(answer) for answer in llm.executor.ask(PEAK_MEMORY_BYTES)]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": current_commit(),
        "engine": asdict(llm.info),
        "options": asdict(llm.options),
        # Of the CUDA allocator; None on a CPU.
        "peak_memory_bytes": max(peaks, key=lambda peak: peak or 0),
        "peak_memory_bytes_by_rank": peaks,
    }


def current_commit() -> str | None:
    """What LOCKSTEP_COMMIT says, for a copy of the tree without its history; else git's answer."""
    given = os.environ.get("LOCKSTEP_COMMIT")
    if given:
        return given
    command = ["git", "rev-parse", "HEAD"]
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@contextmanager
def shape_folder(model: str | None, like: str | None) -> Iterator[str]:
    """The model folder to measure: a given one, or a config alone for a known shape.

    Raises:
        InputError: neither or both are given.
    """
    if (model is None) == (like is None):
        raise InputError("give either --model or --like")
    if model is not None:
        yield model
        return
    assert like is not None
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        config = {**PRESETS[like], "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, p90 and p99 with linear interpolation."""
    import numpy as np

    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    mean = statistics.fmean(values)
    return {"mean": mean, "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def write_record(record: dict[str, object], path: Path | None) -> None:
    """Prints the record, and writes it to `path` if there is one."""
    text = json.dumps(record, indent=1)
    print(text)
    if path is not None:
        write_text(path, text + "\n")
