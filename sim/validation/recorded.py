"""The recorded side: a log as a workload for the simulator and as an outcome."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.core import KernelConfig, Prompt, Scheduler
from engine.core.errors import InputError
from engine.steplog.api import AddRecord, ExpandedRecord, StepRecord
from engine.steplog.vllm_recording import ImportedLog, ReadableLog, open_log
from engine.steplog.vllm_run import NS_PER_US
from sim.calibration.samples import Samples, collect, record_features
from sim.cost.calibrated import CalibratedCost
from sim.validation.outcome import Outcome, OutcomeBuilder
from sim.workloads.table import Workload


@dataclass(slots=True)
class LoggedWorkload(Workload):
    """The requests of a log, with the prompts that it holds."""

    prompts: tuple[Prompt, ...] = ()

    def prompt(self, row: int) -> Prompt:
        """The recorded prompt."""
        return self.prompts[row]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One log: its records, columns, workload and outcome."""

    name: str
    path: Path
    log: ReadableLog
    records: tuple[ExpandedRecord, ...]
    samples: Samples
    workload: LoggedWorkload
    outcome: Outcome

    @property
    def waiting(self) -> list[int]:
        """Requests that a step left waiting."""
        return [record.num_waiting for record in self.records if isinstance(record, StepRecord)]

    @property
    def kernel(self) -> KernelConfig:
        """The recorded engine's kernel configuration."""
        return self.log.header.kernel


def read_run(path: Path) -> RecordedRun:
    """Reads a log or a recording.

    Raises:
        InputError: not a log, damaged, of several replicas, or with aborted or failed requests.
    """
    log = open_log(path)
    if log.header.num_replicas != 1:
        raise InputError(
            f"{path}: {log.header.num_replicas} replicas: validate one engine at a time"
        )
    records = tuple(log.expanded())
    for record in records:
        if not isinstance(record, AddRecord | StepRecord) or getattr(record, "discarded", False):
            raise InputError(
                f"{path}: holds aborts or failed steps, which validate does not replay"
            )
    samples = collect(path.name, log.header, records)
    if not len(samples):
        raise InputError(f"{path}: holds no step")
    ends = visible_ends(log, samples)
    outcome = _outcome(log, records, ends)
    return RecordedRun(
        path.name, path, log, records, samples, _workload(path, records, outcome), outcome
    )


def visible_ends(log: ReadableLog, samples: Samples) -> list[int]:
    """When the tokens of each step left the engine, in ns.

    That is the end of the step, and for recordings the end of the output processing behind it.
    A recording gives it for steps in which a request got its first or last token; for the others
    it is in proportion to the sampled tokens, and before the next step.
    """
    ends = (samples.start_ns + samples.duration_ns).astype(np.int64)
    if not isinstance(log, ImportedLog):
        return [int(end) for end in ends]
    known: dict[int, int] = {}
    starts = samples.start_ns.astype(np.int64).tolist()
    for request in log.recording.requests:
        for time_us in (request.first_token_us, request.finish_us):
            time_ns = time_us * NS_PER_US
            known[bisect_left(starts, time_ns) - 1] = time_ns
    sampled = np.maximum(samples.column("num_sampled"), 1)
    shares = [(time_ns - ends[step]) / sampled[step] for step, time_ns in known.items()]
    guess = ends + np.median(shares) * sampled if shares else ends.astype(np.float64)
    limit = np.append(samples.start_ns[1:], np.inf)
    return [known.get(step, int(min(guess[step], limit[step]))) for step in range(len(ends))]


def teacher_forced(run: RecordedRun, cost: CalibratedCost) -> tuple[Outcome, int]:
    """The kernel under the recorded step times, with predicted host time behind each step.

    Requests come and steps begin when they were recorded to. Also returns how many steps the
    kernel decided otherwise than recorded.
    """
    scheduler = Scheduler(run.kernel)
    builder = OutcomeBuilder(run.kernel.num_blocks)
    rows: dict[int | str, int] = {}
    different = 0
    for record in run.records:
        if isinstance(record, AddRecord):
            rows[record.request.request_id] = len(rows)
            scheduler.add(record.request)
            builder.add(record.request.request_id, record.arrival_ns)
        elif isinstance(record, StepRecord):
            plan = scheduler.schedule()
            different += [*plan.entries] != [*record.entries]
            features = record_features(record, run.log.header)
            gap_ns = cost.gap_ns(features)
            used = run.kernel.num_blocks - plan.num_free_blocks
            end_ns = record.start_ns + record.duration_ns + gap_ns
            sampled = plan.sampled_ids
            builder.step(record.start_ns, end_ns, sampled, plan.num_running, used)
            scheduler.commit(plan, record.token_ids or [-1] * len(sampled))
    return builder.outcome(), different


def _outcome(log: ReadableLog, records: tuple[ExpandedRecord, ...], ends: list[int]) -> Outcome:
    num_blocks = log.header.kernel.num_blocks
    builder = OutcomeBuilder(num_blocks)
    step = 0
    for record in records:
        if isinstance(record, AddRecord):
            builder.add(record.request.request_id, record.arrival_ns)
        elif isinstance(record, StepRecord):
            used = num_blocks - record.num_free_blocks
            builder.step(record.start_ns, ends[step], record.sampled_ids, record.num_running, used)
            step += 1
    return builder.outcome()


def _workload(path: Path, records: tuple[ExpandedRecord, ...], outcome: Outcome) -> LoggedWorkload:
    adds = [record for record in records if isinstance(record, AddRecord)]
    if len(adds) != len(outcome.arrival_ns):
        raise InputError(f"{path}: {len(adds) - len(outcome.arrival_ns)} requests got no token")
    order = sorted(range(len(adds)), key=lambda row: adds[row].arrival_ns)
    if order != list(range(len(adds))):
        raise InputError(f"{path}: requests reached the engine in another order than they arrived")
    return LoggedWorkload(
        name=path.name,
        arrival_ns=array("q", [record.arrival_ns for record in adds]),
        prompt_tokens=array("q", [len(record.request.prompt) for record in adds]),
        output_tokens=array("q", outcome.output_tokens.tolist()),
        request_ids=None,
        prompts=tuple([record.request.prompt for record in adds]),
    )
