"""The steps of an asynchronous run as columns, with what its two clocks show of each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import InputError
from engine.core.request import RequestId
from engine.core.tokens import Prompt
from engine.steplog.api import AddRecord, LogHeader, StepRecord
from engine.steplog.vllm_recording import ImportedLog, ReadableLog
from engine.steplog.vllm_run import NS_PER_US
from sim.calibration.samples import record_features
from sim.cost.features import StepFeatures
from sim.cost.work import Floats, next_recent

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request, in ns; `sent` and `tokens` are the client's, where there was one apart."""

    id: RequestId
    arrival: float
    added: float
    prompt: Prompt
    output_tokens: int
    sent: float | None = None
    tokens: tuple[float, ...] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class PipelineSamples:
    """One asynchronous run; all columns have one row per step, times are in ns.

    `decided` and `result` are the ends of the step's decision and of the wait for its result. In
    `steady` steps the decision came while the step before was in flight, so that `waits` is from
    the decision to the result of the step before: the launch, or the device where it took longer.
    """

    name: str
    header: LogHeader
    requests: tuple[RequestTimes, ...]
    features: tuple[StepFeatures, ...]
    recent: Floats
    begins: Floats
    decided: Floats
    result: Floats
    booked: Floats
    num_admitted: Floats
    num_finished: Floats
    sampled: tuple[tuple[RequestId, ...], ...]
    steady: Flags
    graph_buckets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.features)

    @property
    def has_chunks(self) -> Flags:
        """Steps with prompt chunks."""
        return np.array([bool(one.chunks) for one in self.features])

    @property
    def num_tokens(self) -> Floats:
        """Tokens that each step computes."""
        return np.array([one.num_tokens for one in self.features], dtype=np.float64)

    @property
    def num_seqs(self) -> Floats:
        """Members of each batch."""
        return np.array([one.num_seqs for one in self.features], dtype=np.float64)

    @property
    def num_sampled(self) -> Floats:
        """Tokens that each step samples."""
        return np.array([one.num_sampled for one in self.features], dtype=np.float64)

    @property
    def chunk_tokens(self) -> Floats:
        """Prompt tokens that each step computes."""
        return np.array([one.num_chunk_tokens for one in self.features], dtype=np.float64)

    @property
    def periods(self) -> Floats:
        """From the result of the step before to the step's own; NaN for the first."""
        return np.append(np.nan, np.diff(self.result))

    @property
    def waits(self) -> Floats:
        """From a step's decision to the result of the step before; NaN for the first."""
        return np.append(np.nan, self.result[:-1] - self.decided[1:])


def pipeline_samples(log: ReadableLog) -> PipelineSamples:
    """The columns of an asynchronous run, recorded or logged by this engine.

    Raises:
        InputError: it is a synchronous one, or holds steps without a result.
    """
    if not log.header.kernel.async_scheduling:
        raise InputError(f"{log.path}: was not scheduled asynchronously")
    adds, steps = [], []
    for record in log.expanded():
        if isinstance(record, AddRecord):
            adds.append(record)
        elif isinstance(record, StepRecord) and record.num_tokens and not record.discarded:
            steps.append(record)
    if not steps:
        raise InputError(f"{log.path}: holds no step")
    if isinstance(log, ImportedLog):
        times, steady = _recorded_times(log)
        requests = _recorded_requests(log)
    else:
        times, steady = _logged_times(steps)
        counts = Counter([request_id for record in steps for request_id in record.sampled_ids])
        requests = tuple([
            RequestTimes(one.request.request_id, one.arrival_ns,
                         one.arrival_ns if one.added_ns is None else one.added_ns,
                         one.request.prompt, counts[one.request.request_id])
            for one in adds
            if counts[one.request.request_id]
        ])  # fmt: skip
    begins, decided, result, booked = times
    return PipelineSamples(
        name=log.path.name,
        header=log.header,
        requests=requests,
        features=tuple([record_features(record, log.header) for record in steps]),
        recent=_recent(steps),
        begins=begins,
        decided=decided,
        result=result,
        booked=booked,
        num_admitted=np.array([len(record.admitted) for record in steps], dtype=np.float64),
        num_finished=np.array([len(record.finished) for record in steps], dtype=np.float64),
        sampled=tuple([record.sampled_ids for record in steps]),
        steady=steady,
        graph_buckets=tuple(sorted({one.graph_bucket for one in steps if one.graph_bucket})),
    )


def _recent(steps: Sequence[StepRecord]) -> Floats:
    recent, before = [], 0.0
    for record in steps:
        recent.append(before)
        before = next_recent(before, sum(chunk.num_tokens for chunk in record.chunks))
    return np.array(recent)


def _recorded_times(log: ImportedLog) -> tuple[Floats, Flags]:
    """Begin and end of decision and booking, as they were recorded."""
    recording = log.recording
    rows = [
        (step.schedule_start_us, step.schedule_end_us, update.start_us, update.end_us)
        for step, update in zip(recording.steps, recording.updates, strict=True)
    ]
    times = np.array(rows, dtype=np.float64).T * NS_PER_US
    steady = np.zeros(len(rows), dtype=np.bool_)
    steady[1:] = times[2][:-1] >= times[1][1:]
    return times, steady


def _logged_times(steps: Sequence[StepRecord]) -> tuple[Floats, Flags]:
    """This engine logs ends only: a decision follows the booking of the step two before it.

    So the time of decision and booking is part of the launch.
    """
    result = np.array([record.start_ns + record.duration_ns for record in steps], dtype=np.float64)
    begins = np.array([record.start_ns for record in steps], dtype=np.float64)
    steady = np.array([record.open_plans > 0 for record in steps])
    steady[:2] = False
    begins[2:] = np.where(steady[2:], result[:-2], begins[2:])
    return np.array((begins, begins, result, result)), steady


def _recorded_requests(log: ImportedLog) -> tuple[RequestTimes, ...]:
    found, prompts = [], log.recording.prompts()
    for one in log.recording.requests:
        tokens = None
        if one.token_gaps_us is not None:
            times = accumulate((one.first_token_us, *one.token_gaps_us))
            tokens = tuple([float(time * NS_PER_US) for time in times])
        sent = None if one.sent_us is None else float(one.sent_us * NS_PER_US)
        arrival, added = float(one.arrival_us * NS_PER_US), float(one.added_us * NS_PER_US)
        found.append(
            RequestTimes(one.id, arrival, added, prompts[one.id], one.output_tokens, sent, tokens)
        )
    return tuple(found)
