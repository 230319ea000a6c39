"""Where steps are computed: in this process, or by the ranks of a tensor-parallel group."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.options import EngineOptions
from engine.worker.command import StepCommand, StepResult
from engine.worker.info import RunnerInfo

if TYPE_CHECKING:
    import torch


class Executor(Protocol):
    """Takes steps in order and gives their results in the same order.

    `launch` returns as soon as the step is under way, so one further step can be launched before
    `collect` is called for the first. After a call that raised, `reset` must be called; the
    executor then takes new steps unless `is_dead`.
    """

    @property
    def info(self) -> RunnerInfo:
        """Agreed sizes and start-up facts."""

    @property
    def is_dead(self) -> bool:
        """True once it can take no more steps."""

    def find_loss(self) -> str | None:
        """What would make the next step fail, as far as it can be seen without one."""

    def launch(self, command: StepCommand) -> None:
        """Starts a step."""

    def collect(self) -> StepResult:
        """Waits for the oldest step that was launched and not collected."""

    def reset(self) -> None:
        """Forgets all steps under way; never raises."""

    def ask(self, question: str) -> list[str]:
        """Every rank's answer to a question of `engine.worker.probe`."""

    def close(self) -> None:
        """Frees everything; idempotent."""


class LocalExecutor:
    """One runner in this process.

    On a GPU it has a stream of its own, so neither the caller's current device nor its streams
    can change the order of its work.
    """

    def __init__(self, options: EngineOptions) -> None:
        from engine.distributed.group import TpGroup
        from engine.worker.device import resolve_device
        from engine.worker.probe import RankProbe
        from engine.worker.runner import ModelRunner

        device = resolve_device(options, 0)
        self._own_stream = _own_stream(device)
        self._is_dead = False
        with self._own_stream():
            self.runner = ModelRunner(options, TpGroup(), device)
        self.info = self.runner.info
        self._probe = RankProbe(self.runner)

    @property
    def is_dead(self) -> bool:
        """True once the device fails even when nothing is asked of it (a sticky CUDA error)."""
        return self._is_dead

    def find_loss(self) -> str | None:
        """Nothing: an error of the device shows in a step only."""
        return None

    def launch(self, command: StepCommand) -> None:
        """Starts a step; one that finds too little memory is tried a second time."""
        import torch

        with self._own_stream():
            if command.is_plain and not command.chunks:  # its memory is there since the start
                self.runner.launch(command)
                return
            state = self.runner.state
            kept = [(row, row.clone()) for row in (state.row_positions, state.last_tokens)]
            try:
                self.runner.launch(command)
            except torch.OutOfMemoryError:
                self._free_memory()
                for row, before in kept:
                    row.copy_(before)
                self.runner.launch(command)

    def _free_memory(self) -> None:
        """Waits for the step before and gives its cached memory back to the device."""
        import torch

        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
            torch.cuda.empty_cache()

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        with self._own_stream():
            return self.runner.collect()

    def reset(self) -> None:
        """Forgets the steps under way."""
        try:
            self.runner.drop_steps()
        except Exception:
            # An error of the device that comes back at every call; only a new process is free
            # of it. The caller has the error that came first.
            self._is_dead = True

    def ask(self, question: str) -> list[str]:
        """The one runner's answer."""
        with self._own_stream():
            return [self._probe.answer(question)]

    def close(self) -> None:
        """Frees the model and the KV cache; those of a dead device stay until the process ends."""
        if self._is_dead:
            _keep_until_exit(self.runner)
            return
        self.runner.close()


def _keep_until_exit(thing: object) -> None:
    """Makes sure that nothing frees it, not even the end of the interpreter.

    After a sticky CUDA error torch ends the process when pinned memory is freed: the allocator
    raises in a destructor.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _own_stream(
    device: torch.device,
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Makes contexts in which a fresh stream of the device is the current one."""
    if device.type != "cuda":
        return contextlib.nullcontext
    import torch

    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return lambda: torch.cuda.stream(stream)


def make_executor(options: EngineOptions) -> Executor:
    """Starts the executor that the options ask for."""
    if options.tensor_parallel_size == 1:
        return LocalExecutor(options)
    from engine.worker.tp_executor import TpExecutor

    return TpExecutor(options)
