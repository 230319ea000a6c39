"""Where trials run: in this process, in processes of this machine, or on a Ray cluster.

Each takes trials while it has room and hands back results in any order; which one is used never
changes a result. A run whose worker dies is run again, a few times: a machine may go away, but a
run that takes every worker with it must not go round for ever.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

from engine.core.errors import InputError
from sim.planning.sampling import Source
from sim.planning.trial import Trial, TrialResult, Worker

# So many workers may die of one run.
_MOST_TRIES = 3


class Executor(Protocol):
    """Runs trials; use it as a context."""

    def has_room(self) -> bool:
        """True if another trial would start at once."""
        ...

    def submit(self, key: str, trial: Trial) -> None:
        """Starts a trial."""
        ...

    def next_result(self) -> tuple[str, TrialResult]:
        """Waits for any trial that was submitted."""
        ...

    def __enter__(self) -> Executor: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class SerialExecutor:
    """One trial after the other, here."""

    def __init__(self, source: Source) -> None:
        self._worker = Worker(source)
        self._queue: deque[tuple[str, Trial]] = deque()

    def has_room(self) -> bool:
        """True if nothing waits."""
        return not self._queue

    def submit(self, key: str, trial: Trial) -> None:
        """Queues a trial."""
        self._queue.append((key, trial))

    def next_result(self) -> tuple[str, TrialResult]:
        """Runs the next trial."""
        key, trial = self._queue.popleft()
        return key, self._worker.run(trial)

    def __enter__(self) -> SerialExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.clear()


class ProcessExecutor:
    """`jobs` worker processes; one that dies is replaced, and its run is run again."""

    def __init__(self, source: Source, jobs: int) -> None:
        self._source, self._jobs = source, jobs
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, tuple[BaseProcess, str, Trial]] = {}
        self._deaths: Counter[str] = Counter()

    def has_room(self) -> bool:
        """True if a worker is idle."""
        return len(self._busy) < self._jobs

    def submit(self, key: str, trial: Trial) -> None:
        """Sends a trial to an idle worker."""
        process, connection = self._idle.pop() if self._idle else self._start()
        connection.send(trial)
        self._busy[connection] = (process, key, trial)

    def next_result(self) -> tuple[str, TrialResult]:
        """Waits for the first worker that answers, or for a run that no worker survives."""
        while True:
            ready = wait(list(self._busy))
            connection = next(link for link in self._busy if link in ready)
            process, key, trial = self._busy.pop(connection)
            try:
                result: TrialResult = connection.recv()
            except (EOFError, OSError):
                process.join()
                connection.close()
                self._deaths[key] += 1
                if self._deaths[key] < _MOST_TRIES:
                    self.submit(key, trial)
                    continue
                return key, _died(trial, f"worker processes (exit code {process.exitcode})")
            self._idle.append((process, connection))
            return key, result

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._source), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def __enter__(self) -> ProcessExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        workers = self._idle + [(process, link) for link, (process, _, _) in self._busy.items()]
        for process, link in workers:
            link.close()
            process.terminate()
        for process, _link in workers:
            process.join()


def _serve(connection: Connection, source: Source) -> None:
    """A worker process: ends with its parent, whose end of the pipe then closes."""
    worker = Worker(source)
    try:
        while True:
            connection.send(worker.run(connection.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return


class RayExecutor:
    """Tasks on a Ray cluster, one per CPU; `address` local starts one on this machine.

    The trace travels to the workers, so other machines need the package but not the file. Ray runs
    a task again, on whatever machine is left, if its worker or machine dies.
    """

    def __init__(self, source: Source, address: str, jobs: int | None = None) -> None:
        # Ray's own log lines would tear the progress line, and it would report usage.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray
        try:
            ray.init(
                address=address,  # local never joins a cluster that runs here already
                num_cpus=jobs if address == "local" else None,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise InputError(f"ray={address!r}: no cluster answers there ({text})") from None
        self._jobs = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._source = ray.put(source)
        options = {"num_cpus": 1, "max_retries": _MOST_TRIES - 1, "scheduling_strategy": "SPREAD"}
        self._task: Any = ray.remote(**options)(_run_on_ray)
        self._busy: dict[Any, tuple[str, Trial]] = {}

    def has_room(self) -> bool:
        """True if fewer tasks run than the cluster has CPUs."""
        return len(self._busy) < self._jobs

    def submit(self, key: str, trial: Trial) -> None:
        """Starts a task."""
        # In a list the reference is not replaced by its value, which each worker reads once.
        self._busy[self._task.remote([self._source], trial)] = (key, trial)

    def next_result(self) -> tuple[str, TrialResult]:
        """Waits for the first task that ends, or that no worker survives."""
        ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        key, trial = self._busy.pop(ready[0])
        try:
            result: TrialResult = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            return key, _died(trial, f"Ray workers ({type(error).__name__})")
        return key, result

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()


# Of a Ray worker: what it runs trials with, by the reference of the source.
_ray_workers: dict[str, Worker] = {}


def _run_on_ray(sources: list[Any], trial: Trial) -> TrialResult:
    import ray

    (source,) = sources
    if source.hex() not in _ray_workers:
        _ray_workers.clear()
        _ray_workers[source.hex()] = Worker(ray.get(source))
    return _ray_workers[source.hex()].run(trial)


def _died(trial: Trial, whose: str) -> TrialResult:
    text = f"{_MOST_TRIES} {whose} died of it"
    return TrialResult(trial.rate, trial.seed, trial.num_requests, error=text)


def make_executor(source: Source, jobs: int, ray_address: str | None) -> Executor:
    """The executor that the options ask for.

    Raises:
        ModuleNotFoundError: Ray is asked for and not installed.
    """
    if ray_address is not None:
        return RayExecutor(source, ray_address, jobs if jobs > 1 else None)
    return ProcessExecutor(source, jobs) if jobs > 1 else SerialExecutor(source)
