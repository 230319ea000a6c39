"""Fits device and host of asynchronous runs from the times at which results came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.errors import InputError
from sim.calibration.host_fit import fit_host
from sim.calibration.pipeline_samples import Flags, PipelineSamples
from sim.calibration.regression import huber
from sim.cost.device_terms import decode_row, prompt_row
from sim.cost.pipeline import HostTerms
from sim.cost.terms import Graphs
from sim.cost.work import Floats

DECODE_HUBER, PROMPT_HUBER = 0.1, 0.2
MIN_DECODES, MIN_PROMPTS = 200, 30
# A wait so much longer than the launch was spent on the device.
LONGER_THAN_A_LAUNCH = 2.5
NEAR_NS = 2e6


@dataclass(frozen=True, slots=True)
class PipelineFit:
    """Coefficients in ns, aligned with `DECODE_TERMS` and `PROMPT_TERMS`, and the host's terms."""

    decode_ns: Floats
    prompt_ns: Floats
    host: HostTerms


def fit_pipeline(logs: Sequence[PipelineSamples], graphs: Graphs) -> PipelineFit:
    """Fits all logs together.

    Raises:
        InputError: too few steps that show the device.
    """
    decode_ns = _fit(
        [(decode_matrix(log, graphs)[rows], log.periods[rows])
         for log in logs for rows in [pure_decodes(log)]],
        DECODE_HUBER, MIN_DECODES, "pure decode",
    )  # fmt: skip
    host = fit_host(logs, graphs, lambda log: decode_matrix(log, graphs) @ decode_ns)
    parts = []
    for log in logs:
        rows, device_ns = prompt_device_ns(log, graphs, decode_ns, host)
        parts.append((prompt_matrix(log, graphs)[rows], device_ns))
    prompt_ns = _fit(parts, PROMPT_HUBER, MIN_PROMPTS, "prompt")
    return PipelineFit(decode_ns, prompt_ns, host)


def _fit(parts: Sequence[tuple[Floats, Floats]], tolerance: float, least: int, what: str) -> Floats:
    """Runs differ by more than their steps tell, so weights grow with the root of their number."""
    counts = [len(times) for _, times in parts]
    if sum(counts) < least:
        raise InputError(f"{sum(counts)} {what} steps show the device; at least {least} are needed")
    terms = np.vstack([rows for rows, _ in parts])
    times = np.concatenate([column for _, column in parts])
    weights = np.concatenate([np.full(count, max(1, count) ** -0.25) for count in counts])
    size = len(times)
    return huber(terms, times, np.zeros(size), weights, np.full(size, tolerance))


def decode_matrix(log: PipelineSamples, graphs: Graphs) -> Floats:
    """Terms of all steps as if they were pure decode."""
    pairs = zip(log.features, log.recent.tolist(), strict=True)
    return np.array([decode_row(one, recent, graphs) for one, recent in pairs])


def prompt_matrix(log: PipelineSamples, graphs: Graphs) -> Floats:
    """Terms of all steps as if they had prompts."""
    pairs = zip(log.features, log.recent.tolist(), strict=True)
    return np.array([prompt_row(one, recent, graphs) for one, recent in pairs])


def device_ns(log: PipelineSamples, graphs: Graphs, decode_ns: Floats, prompt_ns: Floats) -> Floats:
    """Predicted device times of all steps."""
    decodes, prompts = (
        decode_matrix(log, graphs) @ decode_ns,
        prompt_matrix(log, graphs) @ prompt_ns,
    )
    found: Floats = np.where(log.has_chunks, prompts, decodes)
    return found


def pure_decodes(log: PipelineSamples) -> Flags:
    """Pure decode steps between pure decode steps, whose periods are the device's time."""
    quiet = log.steady & ~log.has_chunks
    flags = np.zeros(len(log), dtype=np.bool_)
    flags[1:-1] = quiet[:-2] & quiet[1:-1] & quiet[2:]
    return flags


def prompt_device_ns(
    log: PipelineSamples, graphs: Graphs, decode_ns: Floats, host: HostTerms
) -> tuple[Flags, Floats]:
    """Steps with prompts whose device time shows, and that time.

    It shows between decode steps where the host waited for its end, and for that of the step two
    before it. Behind a step with prompts the launch may have been held up by the device.
    """
    waited = waited_for_device(log, host)
    decodes = decode_matrix(log, graphs) @ decode_ns
    has_chunks, steady, result = log.has_chunks, log.steady, log.result
    flags, times = np.zeros(len(log), dtype=np.bool_), np.zeros(len(log))
    for step in range(2, len(log) - 1):
        shows = has_chunks[step] and not has_chunks[step - 1] and not has_chunks[step + 1]
        if shows and steady[step - 1] and steady[step] and waited[step] and waited[step - 2]:
            flags[step] = True
            times[step] = result[step] - result[step - 2] - decodes[step - 1]
    return flags, times[flags]


def waited_for_device(log: PipelineSamples, host: HostTerms) -> Flags:
    """Steps whose result came so long after the next step's decision that no launch explains it."""
    launches = launch_ns(log, host)
    flags = np.zeros(len(log), dtype=np.bool_)
    waits, after = log.waits[1:], launches[1:]
    limit = np.where(log.has_chunks[1:], LONGER_THAN_A_LAUNCH * after, after + NEAR_NS)
    # Between decodes the launch always ends first.
    quiet = ~log.has_chunks[1:] & ~log.has_chunks[:-1]
    flags[:-1] = log.steady[1:] & ((waits > limit) | quiet)
    return flags


def launch_ns(log: PipelineSamples, host: HostTerms) -> Floats:
    """Mean launch time of each step."""
    inputs = host.prepare + host.prepare_seq * log.num_seqs
    eager = log.num_tokens > host.graph_up_to
    prompts = np.where(eager, host.eager_launch, host.graph_launch)
    found: Floats = inputs + np.where(log.has_chunks, prompts, host.launch_rest)
    return found
