"""Runs the ranks of a tensor-parallel engine in worker processes.

The engine's own process joins no process group and touches no GPU, so several engines can live in
one process. Every engine has its own rendezvous file and pipes; no port or name is fixed (BUG-B29).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from engine.core.errors import LockstepError
from engine.options import EngineOptions
from engine.worker.command import StepCommand, StepResult
from engine.worker.info import RunnerInfo
from engine.worker.interrupts import DeferredInterrupt
from engine.worker.tp_messages import decode_result, encode_command
from engine.worker.tp_worker import (
    ASK,
    CLOSE,
    COLLECT,
    FAILED,
    REFUSED,
    RESET,
    STEP,
    WorkerPlace,
    worker_main,
)

_CLOSE_TIMEOUT_S = 10.0
# After one rank broke off, the traceback of the rank that failed first may still be on its way,
# or the system still frees the device of a rank that was killed, which ends only then.
_CAUSE_TIMEOUT_S = 10.0


class WorkerFailed(LockstepError):
    """A rank died or raised; its engine is closed. The message holds the rank's traceback."""


class TpExecutor:
    """Owns the worker processes; `launch` and `collect` behave like those of one runner."""

    def __init__(self, options: EngineOptions) -> None:
        self._timeout_s = options.worker_timeout_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._closed = False
        # NCCL's monitor threads look at the rendezvous file for as long as the group lives, and
        # wait for it, until the timeout, if it is gone.
        self._folder = tempfile.mkdtemp(prefix="lockstep-")
        try:
            self._spawn(options, os.path.join(self._folder, "rendezvous"))
            ready = [self._receive(rank) for rank in range(len(self._pipes))]
        except BaseException:
            self._kill()
            raise
        self.info = RunnerInfo.from_json(ready[0].decode())

    def _spawn(self, options: EngineOptions, rendezvous: str) -> None:
        context = multiprocessing.get_context("spawn")
        size = options.tensor_parallel_size
        num_threads = max(1, (os.cpu_count() or 1) // size)
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = WorkerPlace(rank, size, rendezvous, num_threads)
            process = context.Process(
                target=worker_main,
                args=(place, options, theirs),
                name=f"lockstep-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the end of the worker ends the pipe
            self._processes.append(process)
            self._pipes.append(ours)

    @property
    def is_dead(self) -> bool:
        """True once a rank failed or the executor was closed."""
        return self._closed

    def find_loss(self) -> str | None:
        """The first rank whose process has ended."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                return f"rank {rank} has ended with exit code {process.exitcode}"
        return None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the ranks, for diagnosis."""
        return [process.pid for process in self._processes if process.pid is not None]

    def launch(self, command: StepCommand) -> None:
        """Sends a step to every rank and returns at once."""
        self._broadcast(STEP + encode_command(command))

    def collect(self) -> StepResult:
        """Waits for the oldest launched step."""
        self._broadcast(COLLECT)
        return decode_result(self._receive(0))

    def reset(self) -> None:
        """Forgets the steps under way, answers that were not read included."""
        if self._closed:
            return
        with contextlib.suppress(WorkerFailed):
            self._broadcast(RESET)
            while self._receive(0) != RESET:
                pass

    def ask(self, question: str) -> list[str]:
        """Every rank's answer to a question of `engine.worker.probe`."""
        self._broadcast(ASK + question.encode())
        return [self._receive(rank).decode() for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            for pipe in self._pipes:
                pipe.send_bytes(CLOSE)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _broadcast(self, message: bytes) -> None:
        if self._closed:
            raise WorkerFailed("the workers have ended")
        is_sent = False
        try:
            with DeferredInterrupt():
                for pipe in self._pipes:
                    pipe.send_bytes(message)
                is_sent = True
        except OSError as error:
            raise self._failure() from error
        except BaseException:
            # Some ranks have the message and some have not, or one has half of it; an interrupt
            # that waited for the last of them comes when all have it, and costs nothing.
            if not is_sent:
                self._kill()
            raise

    def _receive(self, rank: int) -> bytes:
        """The next payload of a rank; any rank's failure ends the wait."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            ready = wait(self._pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                limit = f"no answer from rank {rank} within worker_timeout_s={self._timeout_s}"
                raise WorkerFailed(limit)
            # A pipe of another rank is readable only if that rank failed or answers early.
            for pipe in ready:
                if pipe is not self._pipes[rank] and self._has_failed(pipe):
                    raise self._failure()
            if self._pipes[rank] in ready:
                return self._payload(rank)
            time.sleep(0.001)

    def _has_failed(self, pipe: object) -> bool:
        place = next(index for index, known in enumerate(self._pipes) if known is pipe)
        return not self._processes[place].is_alive()

    def _payload(self, rank: int) -> bytes:
        message = b""
        try:
            with DeferredInterrupt():
                message = self._pipes[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._failure() from error
        except BaseException:
            if not message:  # the pipe may stand in the middle of one
                self._kill()
            raise
        if message[:1] in (FAILED, REFUSED):
            raise self._failure(message)
        return message[1:]

    def _failure(self, message: bytes | None = None) -> LockstepError:
        """Ends all ranks and tells what went wrong: a rank's typed error, or its traceback."""
        messages = [message] if message else self._last_words()
        ended = [
            f"rank {rank} ended with exit code {process.exitcode}"
            for rank, process in enumerate(self._processes)
            if process.exitcode is not None
        ]
        self._kill()
        for refused in messages:
            if refused[:1] == REFUSED:
                error: LockstepError = pickle.loads(refused[1:])
                return error
        causes = [words[1:].decode() for words in messages]
        return WorkerFailed("\n".join(["a worker failed", *ended, *causes]))

    def _last_words(self) -> list[bytes]:
        """What failing ranks have said; a rank that was killed says nothing."""
        messages: list[bytes] = []
        deadline = time.monotonic() + _CAUSE_TIMEOUT_S
        while not messages and time.monotonic() < deadline:
            for pipe in self._pipes:
                with contextlib.suppress(EOFError, OSError):
                    while pipe.poll():
                        message = pipe.recv_bytes()
                        if message[:1] in (FAILED, REFUSED):
                            messages.append(message)
            if any(process.exitcode not in (None, 0, 1) for process in self._processes):
                break
            time.sleep(0.01)
        return messages

    def _kill(self) -> None:
        self._closed = True
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)
