"""Synthetic workloads: open loop, closed loop, multi-turn sessions, and named presets."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from engine.core.errors import ConfigError
from sim.workloads.arrivals import PROCESSES, check_rate, draw_arrivals
from sim.workloads.lengths import Lengths, parse_lengths
from sim.workloads.table import AFTER_PREDECESSOR, Sessions, Workload


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Parameters of a synthetic workload; which ones matter depends on `kind`.

    For sessions `rate` counts new sessions and `prompt` the new tokens of each turn.
    """

    kind: str
    rate: float = 4.0
    burstiness: float = 1.0
    prompt: str = "uniform:512:1536"
    output: str = "uniform:64:192"
    num_requests: int = 1000
    clients: int = 8
    think_s: float = 0.0
    turns: str = "uniform:2:6"
    shared_prefix: int = 0


# Medians, 99th percentiles and burstiness of public traces: Azure 2023 conversation and code,
# ServeGen deepseek-r1, and the mini-SWE-agent sessions at four characters a token.
WORKLOADS: dict[str, Synthetic] = {
    "poisson": Synthetic("poisson"),
    "gamma": Synthetic("gamma", burstiness=0.5),
    "constant": Synthetic("constant"),
    "closed": Synthetic("closed"),
    "sessions": Synthetic("sessions", rate=1.0, think_s=5.0, shared_prefix=256),
    "chat": Synthetic(
        "gamma",
        rate=5.53,
        burstiness=0.84,
        prompt="lognormal:1020:4142",
        output="lognormal:129:601",
    ),
    "code": Synthetic(
        "gamma",
        rate=2.57,
        burstiness=0.0058,
        prompt="lognormal:1469:7436",
        output="lognormal:13:251",
    ),
    "reasoning": Synthetic(
        "poisson", rate=1.0, prompt="lognormal:208:23423", output="lognormal:792:12607"
    ),
    "agent": Synthetic(
        "sessions",
        rate=0.2,
        prompt="lognormal:90:1500",
        output="lognormal:98:293",
        think_s=1.0,
        turns="uniform:6:30",
        shared_prefix=1300,
    ),
}


def preset(name: str, **changes: object) -> Synthetic:
    """A named workload with some parameters changed (None keeps the preset's).

    Raises:
        ConfigError: no such workload.
    """
    if name not in WORKLOADS:
        raise ConfigError("workload", name, f"must be one of {', '.join(WORKLOADS)}")
    given = {key: value for key, value in changes.items() if value is not None}
    return replace(WORKLOADS[name], **given)  # type: ignore[arg-type]


def generate(
    name: str, spec: Synthetic, seed: int, read_lengths: Callable[[Path], Workload] | None = None
) -> Workload:
    """Draws a workload; arrivals, prompts and outputs have random streams of their own."""
    if spec.num_requests < 1:
        raise ConfigError("num_requests", spec.num_requests, "must be at least 1")

    def prompts_of(path: Path) -> array[int]:
        assert read_lengths is not None
        return read_lengths(path).prompt_tokens

    def outputs_of(path: Path) -> array[int]:
        assert read_lengths is not None
        return read_lengths(path).output_tokens

    prompt = parse_lengths("prompt_len", spec.prompt, prompts_of if read_lengths else None)
    output = parse_lengths("output_len", spec.output, outputs_of if read_lengths else None)
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4)]
    if spec.kind in PROCESSES:
        workload = _open_loop(name, spec, prompt, output, streams)
    elif spec.kind == "closed":
        workload = _closed_loop(name, spec, prompt, output, streams)
    else:
        workload = _sessions(name, spec, prompt, output, streams)
    workload.parameters = asdict(spec)
    return workload


def _open_loop(
    name: str, spec: Synthetic, prompt: Lengths, output: Lengths, rngs: list[np.random.Generator]
) -> Workload:
    count = spec.num_requests
    arrivals = draw_arrivals(spec.kind, spec.rate, count, rngs[0], spec.burstiness)
    return Workload(name, arrivals, prompt.draw(rngs[1], count), output.draw(rngs[2], count))


def _closed_loop(
    name: str, spec: Synthetic, prompt: Lengths, output: Lengths, rngs: list[np.random.Generator]
) -> Workload:
    """Client c sends rows c, c + clients, ... one after the other."""
    count, clients = spec.num_requests, spec.clients
    if clients < 1:
        raise ConfigError("clients", clients, "must be at least 1")
    first = min(count, clients)
    return Workload(
        name,
        array("q", [0]) * first + array("q", [AFTER_PREDECESSOR]) * (count - first),
        prompt.draw(rngs[1], count),
        output.draw(rngs[2], count),
        next_row=array(
            "q", [row + clients if row + clients < count else -1 for row in range(count)]
        ),
        think_ns=_think_times(spec, count, rngs[3]),
    )


def _sessions(
    name: str, spec: Synthetic, prompt: Lengths, output: Lengths, rngs: list[np.random.Generator]
) -> Workload:
    count = spec.num_requests
    lengths = parse_lengths("turns", spec.turns).draw(rngs[3], count)
    starts = draw_arrivals("poisson", spec.rate, count, rngs[0])
    new_tokens, output_tokens = prompt.draw(rngs[1], count), output.draw(rngs[2], count)
    previous, next_row = array("q", [-1]) * count, array("q", [-1]) * count
    arrivals = array("q", [AFTER_PREDECESSOR]) * count
    prompt_tokens = array("q", [0]) * count
    row = session = 0
    while row < count:
        arrivals[row] = starts[session]
        total = spec.shared_prefix
        for turn in range(row, min(row + lengths[session], count)):
            total += new_tokens[turn]
            prompt_tokens[turn] = total
            total += output_tokens[turn]
            if turn > row:
                previous[turn], next_row[turn - 1] = turn - 1, turn
        row += lengths[session]
        session += 1
    return Workload(
        name,
        arrivals,
        prompt_tokens,
        output_tokens,
        next_row=next_row,
        think_ns=_think_times(spec, count, rngs[3]),
        sessions=Sessions(previous, new_tokens, spec.shared_prefix),
    )


def _think_times(spec: Synthetic, count: int, rng: np.random.Generator) -> array[int]:
    if spec.think_s == 0:
        return array("q", [0]) * count
    check_rate("think_s", spec.think_s)
    return array("q", [round(time) for time in rng.exponential(spec.think_s * 1e9, count).tolist()])
