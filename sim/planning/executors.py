"""Where tasks run: in this process, in processes of this machine, or on a Ray cluster.

Each takes tasks (trials of a plan, runs of a sweep) while it has room and hands back results in
any order; which one is used never changes a result. A run whose worker dies is run again, a few
times: a machine may go away, but a run that takes every worker with it must not go round for ever.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from engine.core.errors import InputError
from sim.planning.sampling import Source
from sim.planning.trial import Trial, TrialResult, Worker

# So many workers may die of one run.
_MOST_TRIES = 3


Task = TypeVar("Task")
Result = TypeVar("Result")
TaskIn = TypeVar("TaskIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class Runner(Protocol[TaskIn, ResultOut]):
    """Carries out tasks in one worker; its failures are results too."""

    def run(self, task: TaskIn, /) -> ResultOut:
        """Carries out a task."""
        ...

    def failed(self, task: TaskIn, text: str, /) -> ResultOut:
        """The result of a task that no worker survives."""
        ...


# Made once in every worker, so it must survive pickling.
MakeRunner = Callable[[], Runner[Task, Result]]


class Executor(Protocol[Task, Result]):
    """Runs tasks; use it as a context."""

    def has_room(self) -> bool:
        """True if another trial would start at once."""
        ...

    def submit(self, key: str, task: Task) -> None:
        """Starts a trial."""
        ...

    def next_result(self) -> tuple[str, Result]:
        """Waits for any trial that was submitted."""
        ...

    def __enter__(self) -> Executor[Task, Result]: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class SerialExecutor(Generic[Task, Result]):
    """One task after the other, here."""

    def __init__(self, make: MakeRunner[Task, Result]) -> None:
        self._runner = make()
        self._queue: deque[tuple[str, Task]] = deque()

    def has_room(self) -> bool:
        """True if nothing waits."""
        return not self._queue

    def submit(self, key: str, task: Task) -> None:
        """Queues a trial."""
        self._queue.append((key, task))

    def next_result(self) -> tuple[str, Result]:
        """Runs the next trial."""
        key, task = self._queue.popleft()
        return key, self._runner.run(task)

    def __enter__(self) -> SerialExecutor[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.clear()


class ProcessExecutor(Generic[Task, Result]):
    """`jobs` worker processes; one that dies is replaced, and its run is run again."""

    def __init__(self, make: MakeRunner[Task, Result], jobs: int) -> None:
        self._make, self._jobs = make, jobs
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, tuple[BaseProcess, str, Task]] = {}
        self._deaths: Counter[str] = Counter()

    def has_room(self) -> bool:
        """True if a worker is idle."""
        return len(self._busy) < self._jobs

    def submit(self, key: str, task: Task) -> None:
        """Sends a trial to an idle worker."""
        process, connection = self._idle.pop() if self._idle else self._start()
        connection.send(task)
        self._busy[connection] = (process, key, task)

    def next_result(self) -> tuple[str, Result]:
        """Waits for the first worker that answers, or for a run that no worker survives."""
        while True:
            ready = wait(list(self._busy))
            connection = next(link for link in self._busy if link in ready)
            process, key, task = self._busy.pop(connection)
            try:
                result: Result = connection.recv()
            except (EOFError, OSError):
                process.join()
                connection.close()
                self._deaths[key] += 1
                if self._deaths[key] < _MOST_TRIES:
                    self.submit(key, task)
                    continue
                return key, _died(
                    self._make, task, f"worker processes (exit code {process.exitcode})"
                )
            self._idle.append((process, connection))
            return key, result

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def __enter__(self) -> ProcessExecutor[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        workers = self._idle + [(process, link) for link, (process, _, _) in self._busy.items()]
        for process, link in workers:
            link.close()
            process.terminate()
        for process, _link in workers:
            process.join()


def _serve(connection: Connection, make: MakeRunner[Any, Any]) -> None:
    """A worker process: ends with its parent, whose end of the pipe then closes."""
    runner = make()
    try:
        while True:
            connection.send(runner.run(connection.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return


class RayExecutor(Generic[Task, Result]):
    """Tasks on a Ray cluster, one per CPU; `address` local starts one on this machine.

    The trace travels to the workers, so other machines need the package but not the file. Ray runs
    a task again, on whatever machine is left, if its worker or machine dies.
    """

    def __init__(
        self, make: MakeRunner[Task, Result], address: str, jobs: int | None = None
    ) -> None:
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
        self._make, self._shared = make, ray.put(make)
        options = {"num_cpus": 1, "max_retries": _MOST_TRIES - 1, "scheduling_strategy": "SPREAD"}
        self._task: Any = ray.remote(**options)(_run_on_ray)
        self._busy: dict[Any, tuple[str, Task]] = {}

    def has_room(self) -> bool:
        """True if fewer tasks run than the cluster has CPUs."""
        return len(self._busy) < self._jobs

    def submit(self, key: str, task: Task) -> None:
        """Starts a task."""
        # In a list the reference is not replaced by its value, which each worker reads once.
        self._busy[self._task.remote([self._shared], task)] = (key, task)

    def next_result(self) -> tuple[str, Result]:
        """Waits for the first task that ends, or that no worker survives."""
        ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        key, task = self._busy.pop(ready[0])
        try:
            result: Result = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            return key, _died(self._make, task, f"Ray workers ({type(error).__name__})")
        return key, result

    def __enter__(self) -> RayExecutor[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()


# Of a Ray worker: what it runs tasks with, by the reference of what made it.
_ray_runners: dict[str, Runner[Any, Any]] = {}


def _run_on_ray(makes: list[Any], task: Any) -> Any:  # noqa: ANN401
    import ray

    (make,) = makes
    if make.hex() not in _ray_runners:
        _ray_runners.clear()
        _ray_runners[make.hex()] = ray.get(make)()
    return _ray_runners[make.hex()].run(task)


def _died(make: MakeRunner[Task, Result], task: Task, whose: str) -> Result:
    return make().failed(task, f"{_MOST_TRIES} {whose} died of it")


def make_executor(
    source: Source, jobs: int, ray_address: str | None
) -> Executor[Trial, TrialResult]:
    """The executor of trials that the options ask for.

    Raises:
        ModuleNotFoundError: Ray is asked for and not installed.
    """
    return executor_of(partial(Worker, source), jobs, ray_address)


def executor_of(
    make: MakeRunner[Task, Result], jobs: int, ray_address: str | None
) -> Executor[Task, Result]:
    """The executor that the options ask for, for any kind of task.

    Raises:
        ModuleNotFoundError: Ray is asked for and not installed.
    """
    if ray_address is not None:
        return RayExecutor(make, ray_address, jobs if jobs > 1 else None)
    return ProcessExecutor(make, jobs) if jobs > 1 else SerialExecutor(make)
