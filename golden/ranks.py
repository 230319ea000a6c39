"""Teacher-forced runs on tensor-parallel ranks: one process, one kernel and one runner per rank.

Every rank makes its own plans, since the kernel is deterministic; that all ranks end with the same
block tables is then a result and not an assumption. A rank that dies or hangs ends the run.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from engine.core.errors import LockstepError
from engine.distributed.group import TpGroup
from engine.distributed.one_shot import connect_group
from engine.options import EngineOptions
from golden.cases import ForcedSequence
from golden.forced import Events, ForcedRunner, Observed

JOIN_TIMEOUT_S = 10.0
# Rank, number of ranks, device type, rendezvous file, timeout in seconds.
Place = tuple[int, int, str, str, float]


class RankFailed(LockstepError):
    """A rank died, raised or did not answer in time."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """One run on all ranks. `defect` names one of `DEFECTS`.

    `changes` are fields of the kernel's configuration, `alone` runs one sequence after the other,
    and of several `runs` the last one counts, with what the others left in the prefix cache.
    """

    options: EngineOptions
    sequences: tuple[ForcedSequence, ...]
    defect: str | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    alone: bool = False
    runs: int = 1


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw; `positions` and `logits` only from rank 0."""

    logits_digest: str
    tables_digest: str  # of every block table at every step
    device_digest: str  # of the tables and tokens on the device
    drawn: dict[str, dict[int, int]]
    events: dict[str, Events]
    positions: dict[str, list[int]] | None = None
    logits: dict[str, np.ndarray] | None = None  # float32


def swap_shards(runner: ForcedRunner, group: TpGroup) -> None:
    """This rank takes its neighbour's part of a gate/up projection."""
    weight = runner.model.get_parameter("layers.0.mlp.gate_up.weight")
    with torch.no_grad():
        parts = group.all_gather(weight[None].contiguous(), dim=0)
        weight.copy_(parts[(group.rank + 1) % group.size])


def die_in_a_step(runner: ForcedRunner, group: TpGroup) -> None:
    """The last rank disappears in the middle of a forward pass."""
    if group.rank == group.size - 1:
        runner.model.layers[1].register_forward_pre_hook(lambda *_: os._exit(17))


DEFECTS = {"swap_shards": swap_shards, "die_in_a_step": die_in_a_step}


def run_ranks(
    jobs: Sequence[RankJob], size: int, device: str = "cpu", timeout_s: float = 120.0
) -> list[list[RankReport]]:
    """Reports by job and rank.

    Raises:
        RankFailed: a rank broke off or was late; no process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-golden-") as folder:
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                place = (rank, size, device, str(Path(folder) / "rendezvous"), timeout_s)
                process = context.Process(
                    target=_rank_main, args=(place, tuple(jobs), theirs), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            by_rank = _receive_all(processes, pipes, time.monotonic() + timeout_s)
        finally:
            _end(processes)
    return [list(reports) for reports in zip(*by_rank, strict=True)]


def _receive_all(
    processes: list[BaseProcess], pipes: list[Connection], deadline: float
) -> list[list[RankReport]]:
    answers: dict[int, list[RankReport]] = {}
    while len(answers) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {_missing(answers, len(pipes))} did not answer in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answer = pipes[rank].recv()
            except EOFError:
                processes[rank].join(JOIN_TIMEOUT_S)
                code = processes[rank].exitcode
                raise RankFailed(f"rank {rank} ended with exit code {code}") from None
            if isinstance(answer, str):
                raise RankFailed(f"rank {rank} failed: {answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _missing(answers: dict[int, list[RankReport]], size: int) -> list[int]:
    return [rank for rank in range(size) if rank not in answers]


def _end(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    for process in processes:
        # After an answer a rank ends by itself; after a failure none is worth waiting for.
        process.join(max(0.0, min(2.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def _rank_main(place: Place, jobs: tuple[RankJob, ...], pipe: Connection) -> None:
    try:
        pipe.send(_run_jobs(place, jobs))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
        os._exit(1)  # a collective may still hold a thread


def _run_jobs(
    place: tuple[int, int, str, str, float], jobs: tuple[RankJob, ...]
) -> list[RankReport]:
    import torch.distributed as dist

    rank, size, device_type, rendezvous, timeout_s = place
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    try:
        group = connect_group(rank, size, device)
        return [_run_job(job, group, device) for job in jobs]
    finally:
        dist.destroy_process_group()


def _run_job(job: RankJob, group: TpGroup, device: torch.device) -> RankReport:
    with ForcedRunner(job.options, group, device) as runner:
        if job.defect is not None:
            DEFECTS[job.defect](runner, group)
        observed = _observed(runner, job)
        logits = {
            name: runner.logits(item.hidden()).float().cpu().numpy()
            for name, item in observed.items()
        }
        digest = hashlib.sha256()
        for array in logits.values():
            digest.update(array.tobytes())
        first = group.rank == 0
        return RankReport(
            logits_digest=digest.hexdigest(),
            tables_digest=runner.tables_digest,
            device_digest=runner.runner.state_digest(),
            drawn={name: dict(item.drawn) for name, item in observed.items()},
            events={name: item.events for name, item in observed.items()},
            positions={n: item.positions for n, item in observed.items()} if first else None,
            logits=logits if first else None,
        )


def _observed(runner: ForcedRunner, job: RankJob) -> dict[str, Observed]:
    runner.reset(**job.changes)
    observed: dict[str, Observed] = {}
    for _ in range(job.runs):
        for batch in [[item] for item in job.sequences] if job.alone else [job.sequences]:
            observed |= runner.run(batch)
    return observed
