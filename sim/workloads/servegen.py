"""ServeGen archives: clients with rates by window and length histograms, drawn with a seed."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import tarfile
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.core.errors import ConfigError, InputError
from sim.workloads.table import MAX_TOKENS, Workload

_MEMBER = re.compile(r".*chunk-(\d+)-(trace\.csv|dataset\.json)$")
_WINDOW_S = 600
_PROMPT_FIELDS = ("input_tokens", "text_tokens")


@dataclass(frozen=True, slots=True)
class Window:
    """One client's arrival process in one window; `shape` is of the gamma or Weibull gaps."""

    start_s: int
    rate: float
    process: str
    shape: float


@dataclass(frozen=True, slots=True)
class ServeGenOptions:
    """The part of the archive to draw, in seconds from its start."""

    start_s: int = 0
    duration_s: int = 600
    seed: int = 0
    num_requests: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.start_s < 0:
            raise ConfigError("window_start", self.start_s, "must not be negative")
        if self.duration_s < 1:
            raise ConfigError("window_length", self.duration_s, "must be at least 1")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError("num_requests", self.num_requests, "must be at least 1")


def is_servegen(path: Path) -> bool:
    """True for a tar archive, the only form in which ServeGen clients are read."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_servegen(path: Path, options: ServeGenOptions) -> Workload:
    """Draws the requests of all clients with a length histogram in a stretch of time.

    Image, audio and video tokens are left out: the modelled engines serve text.

    Raises:
        InputError: the archive is damaged, has no clients, or no traffic in that stretch.
    """
    members = _read_members(path, options)
    arrivals: list[np.ndarray] = []
    prompts: list[np.ndarray] = []
    outputs: list[np.ndarray] = []
    without_lengths = 0
    for client, (trace, dataset) in sorted(members.items()):
        if trace is None:
            raise InputError(f"{path}: client {client} has lengths but no trace")
        windows = _parse_windows(f"{path}: chunk-{client}-trace.csv", trace, options)
        if dataset is None:
            without_lengths += 1
            continue
        rng = np.random.default_rng((options.seed, client))
        times = _draw_times(windows, options, rng)
        lengths = _draw_lengths(f"{path}: chunk-{client}-dataset.json", dataset, times, rng)
        arrivals.append(times)
        prompts.append(lengths[0])
        outputs.append(lengths[1])
    time_s = np.concatenate(arrivals) if arrivals else np.empty(0)
    if not len(time_s):
        raise InputError(
            f"{path}: no requests from {options.start_s} s on for {options.duration_s} s"
        )
    order = np.argsort(time_s, kind="stable")[: options.num_requests]
    first_s = float(time_s[order[0]])
    workload = Workload(
        path.name,
        array("q", [round((time - first_s) * 1e9) for time in time_s[order].tolist()]),
        array("q", np.concatenate(prompts)[order].tolist()),
        array("q", np.concatenate(outputs)[order].tolist()),
        parameters={
            "trace": path.name,
            "format": "servegen",
            "window_start_s": options.start_s,
            "window_length_s": options.duration_s,
            "clients": len(members) - without_lengths,
            "clients_without_lengths": without_lengths,
        },
    )
    if options.rate is not None:
        own = workload.mean_rate()
        if own is None:
            raise ConfigError("rate", options.rate, f"{path.name} spans no time")
        workload.scale_arrivals(options.rate / own)
    return workload


Members = dict[int, tuple[str | None, str | None]]


def _read_members(path: Path, options: ServeGenOptions) -> Members:
    members: Members = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for info in archive:
                match = _MEMBER.match(info.name)
                if match is None or not info.isfile():
                    continue
                file = archive.extractfile(info)
                assert file is not None
                text = file.read().decode("utf-8-sig")
                trace, dataset = members.get(int(match[1]), (None, None))
                if match[2] == "trace.csv":
                    trace = text
                else:
                    dataset = text
                members[int(match[1])] = (trace, dataset)
    except (tarfile.TarError, EOFError, zlib.error, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: truncated or damaged archive ({error})") from None
    if not members:
        raise InputError(f"{path}: holds no chunk-N-trace.csv of a ServeGen client")
    return members


def _parse_windows(where: str, text: str, options: ServeGenOptions) -> list[Window]:
    windows = []
    end_s = options.start_s + options.duration_s
    for line, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            start_s, rate, _, process, shape, _ = row
            window = Window(int(start_s), float(rate), process, float(shape))
        except ValueError:
            raise InputError(f"{where}:{line}: {row}: must be six fields of numbers") from None
        if not 0 <= window.rate < float("inf") or window.process not in {"", "Gamma", "Weibull"}:
            raise InputError(f"{where}:{line}: {row}: bad rate or distribution")
        if window.rate and options.start_s - _WINDOW_S < window.start_s < end_s:
            windows.append(window)
    return windows


def _draw_times(
    windows: list[Window], options: ServeGenOptions, rng: np.random.Generator
) -> np.ndarray:
    """Arrival times; gaps have the window's shape and exactly its mean 1 / rate."""
    times = []
    end_s = options.start_s + options.duration_s
    for window in windows:
        count = int(window.rate * _WINDOW_S * 1.5) + 20
        if window.process and window.shape > 0:
            if window.process == "Gamma":
                gaps = rng.gamma(window.shape, 1.0, count) / window.shape
            else:
                gaps = rng.weibull(window.shape, count) / math.gamma(1 + 1 / window.shape)
        else:
            gaps = rng.exponential(1.0, count)
        drawn = window.start_s + np.cumsum(gaps / window.rate)
        stop = min(window.start_s + _WINDOW_S, end_s)
        times.append(drawn[(drawn >= options.start_s) & (drawn < stop)])
    return np.concatenate(times) if times else np.empty(0)


def _draw_lengths(
    where: str, text: str, times: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output lengths from the histogram in force at each time."""
    try:
        dataset = json.loads(text)
        starts = np.array(sorted(int(key) for key in dataset))
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: not a ServeGen data set ({error})") from None
    prompts = np.ones(len(times), dtype=np.int64)
    outputs = np.ones(len(times), dtype=np.int64)
    which = np.searchsorted(starts, times, side="right") - 1
    usable: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for window in sorted(set(which.tolist())):
        here = which == window
        fields = dataset[str(starts[max(0, window)])]
        prompt_field = next((name for name in _PROMPT_FIELDS if name in fields), None)
        if prompt_field is None or "output_tokens" not in fields:
            raise InputError(f"{where}: window {starts[max(0, window)]}: lacks token lengths")
        for column, name in ((prompts, prompt_field), (outputs, "output_tokens")):
            values = _histogram(f"{where}: window {starts[max(0, window)]}: {name}", fields[name])
            # An empty histogram of a busy window falls back to the client's one before.
            values = values or usable.get(name)
            if values is not None:
                usable[name] = values
                column[here] = rng.choice(values[0], int(here.sum()), p=values[1])
    return prompts, outputs


def _histogram(where: str, text: str) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        table = ast.literal_eval(text)
        if not table:
            return None
        lengths = np.array([int(length) for length in table], dtype=np.int64)
        weights = np.array([float(weight) for weight in table.values()])
    except (ValueError, SyntaxError, TypeError, AttributeError):
        raise InputError(f"{where}: {str(text)[:60]!r} is not a length histogram") from None
    if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() <= 0:
        raise InputError(f"{where}: probabilities must be finite and not negative")
    # Some histograms put mass on 0, which no engine can serve.
    return np.clip(lengths, 1, MAX_TOKENS - 1), weights / weights.sum()
