"""The record of a run: where, with what, and what every case came to; as JSON."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from engine.worker.device import device_name, installed_versions
from golden.results import CaseResult, run_failed

FORMAT = "lockstep-golden-1"


def make_record(
    results: Sequence[CaseResult],
    command: str,
    device: torch.device,
    commit: str | None = None,
    seconds: float = 0.0,
    complete: bool = True,
) -> dict[str, Any]:
    """Everything that a reader needs to trust or repeat the numbers.

    `complete` is False for what is written while the run goes on.
    """
    statuses = [row.status for row in results]
    return {
        "format": FORMAT,
        "command": command,
        "commit": commit or current_commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "versions": {**installed_versions(device), "python": platform.python_version()},
        "seconds": round(seconds, 1),
        "counts": {word: statuses.count(word) for word in ("pass", "fail", "error", "skip")},
        "complete": complete,
        "failure": run_failed(results) if complete else "the run was cut short",
        "cases": [row.to_json() for row in results],
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(finite(record), indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        InputError: it is not one.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not a golden record: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{path}: not a golden record: its format is not {FORMAT!r}")
    return record


def current_commit() -> str:
    """The commit of the source tree, with a mark if it has changes; "unknown" outside git."""
    root = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def finite(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """The same for JSON, which knows no infinities: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
