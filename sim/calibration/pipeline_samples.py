"""The steps of an asynchronous run as columns, with what its two clocks show of each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core import KernelConfig
from engine.core.errors import InputError
from engine.core.request import RequestId
from engine.steplog.api import AddRecord, StepRecord
from engine.steplog.vllm_recording import ImportedLog
from engine.steplog.vllm_run import NS_PER_US, Recording
from sim.calibration.samples import record_features
from sim.cost.features import StepFeatures
from sim.cost.work import Floats, next_recent

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PipelineSamples:
    """One asynchronous run; all columns have one row per step, times are in ns.

    `decided` and `result` are the ends of the step's decision and of the wait for its result. In
    `steady` steps the decision came while the step before was in flight, so that `waits` is from
    the decision to the result of the step before: the launch, or the device where it took longer.
    """

    name: str
    kernel: KernelConfig
    recording: Recording
    features: tuple[StepFeatures, ...]
    recent: Floats
    begins: Floats
    decided: Floats
    result: Floats
    booked: Floats
    num_admitted: Floats
    num_finished: Floats
    sampled: tuple[tuple[RequestId, ...], ...]

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
    def steady(self) -> Flags:
        """Steps that were decided while the one before was in flight."""
        flags = np.zeros(len(self), dtype=np.bool_)
        flags[1:] = self.result[:-1] >= self.decided[1:]
        return flags

    @property
    def periods(self) -> Floats:
        """From the result of the step before to the step's own; NaN for the first."""
        return np.append(np.nan, np.diff(self.result))

    @property
    def waits(self) -> Floats:
        """From a step's decision to the result of the step before; NaN for the first."""
        return np.append(np.nan, self.result[:-1] - self.decided[1:])


def pipeline_samples(log: ImportedLog) -> PipelineSamples:
    """The columns of an asynchronous recording.

    Raises:
        InputError: it is a synchronous one.
    """
    recording = log.recording
    if not recording.updates:
        raise InputError(f"{log.path}: was not scheduled asynchronously")
    features, recent, admitted, finished, sampled = [], [], [], [], []
    before = 0.0
    for record in log.expanded():
        if isinstance(record, AddRecord):
            continue
        assert isinstance(record, StepRecord)
        features.append(record_features(record, log.header))
        recent.append(before)
        before = next_recent(before, features[-1].num_chunk_tokens)
        admitted.append(len(record.admitted))
        finished.append(len(record.finished))
        sampled.append(record.sampled_ids)
    times = np.array(
        [
            (step.schedule_start_us, step.schedule_end_us, update.start_us, update.end_us)
            for step, update in zip(recording.steps, recording.updates, strict=True)
        ],
        dtype=np.float64,
    )
    begins, decided, result, booked = (times * NS_PER_US).T
    return PipelineSamples(
        name=log.path.name,
        kernel=log.header.kernel,
        recording=recording,
        features=tuple(features),
        recent=np.array(recent),
        begins=begins,
        decided=decided,
        result=result,
        booked=booked,
        num_admitted=np.array(admitted, dtype=np.float64),
        num_finished=np.array(finished, dtype=np.float64),
        sampled=tuple(sampled),
    )
