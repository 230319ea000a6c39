"""Where trials run: in this process, in processes of this machine, or on a Ray cluster.

Each takes trials while it has room and hands back results in any order; which one is used never
changes a result.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

from engine.core.errors import InputError
from sim.planning.sampling import Source
from sim.planning.trial import Trial, TrialResult, Worker


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
    """`jobs` worker processes; one that dies fails its trial and is replaced."""

    def __init__(self, source: Source, jobs: int) -> None:
        self._source, self._jobs = source, jobs
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, tuple[BaseProcess, str, Trial]] = {}

    def has_room(self) -> bool:
        """True if a worker is idle."""
        return len(self._busy) < self._jobs

    def submit(self, key: str, trial: Trial) -> None:
        """Sends a trial to an idle worker."""
        process, connection = self._idle.pop() if self._idle else self._start()
        connection.send(trial)
        self._busy[connection] = (process, key, trial)

    def next_result(self) -> tuple[str, TrialResult]:
        """Waits for the first worker that answers or dies."""
        ready = wait(list(self._busy))
        connection = next(link for link in self._busy if link in ready)
        process, key, trial = self._busy.pop(connection)
        try:
            result: TrialResult = connection.recv()
        except (EOFError, OSError):
            process.join()
            connection.close()
            text = f"the worker process died (exit code {process.exitcode})"
            return key, TrialResult(trial.rate, trial.seed, trial.num_requests, error=text)
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
    """Actors on a Ray cluster, one per CPU; `address` local starts one on this machine.

    The trace travels with the actors, so other machines need the package but not the file.
    """

    def __init__(self, source: Source, address: str, jobs: int | None = None) -> None:
        # Ray's own log lines would tear the progress line, and it would report usage.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray
        try:
            ray.init(
                address=None if address == "local" else address,
                num_cpus=jobs if address == "local" else None,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise InputError(f"ray={address!r}: no cluster answers there ({text})") from None
        count = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        shared = ray.put(source)
        actor = ray.remote(num_cpus=1, max_restarts=-1)(Worker)
        self._idle = [actor.remote(shared) for _ in range(count)]
        self._busy: dict[Any, tuple[Any, str, Trial]] = {}

    def has_room(self) -> bool:
        """True if an actor is idle."""
        return bool(self._idle)

    def submit(self, key: str, trial: Trial) -> None:
        """Sends a trial to an idle actor."""
        actor = self._idle.pop()
        self._busy[actor.run.remote(trial)] = (actor, key, trial)

    def next_result(self) -> tuple[str, TrialResult]:
        """Waits for the first actor that answers or dies."""
        ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        actor, key, trial = self._busy.pop(ready[0])
        self._idle.append(actor)
        try:
            result: TrialResult = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            text = f"the Ray actor failed ({type(error).__name__})"
            result = TrialResult(trial.rate, trial.seed, trial.num_requests, error=text)
        return key, result

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()


def make_executor(source: Source, jobs: int, ray_address: str | None) -> Executor:
    """The executor that the options ask for.

    Raises:
        ModuleNotFoundError: Ray is asked for and not installed.
    """
    if ray_address is not None:
        return RayExecutor(source, ray_address, jobs if jobs > 1 else None)
    return ProcessExecutor(source, jobs) if jobs > 1 else SerialExecutor(source)
