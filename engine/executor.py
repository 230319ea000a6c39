"""Where steps are computed: in this process, or by the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Protocol

from engine.commands import StepCommand, StepResult
from engine.options import EngineOptions
from engine.runner_info import RunnerInfo


class Executor(Protocol):
    """Takes steps in order and gives their results in the same order.

    `launch` returns as soon as the step is under way, so one further step can be launched before
    `collect` is called for the first. If a call raises, everything launched is lost; the executor
    takes new steps only if `is_reusable_after_error`.
    """

    info: RunnerInfo
    is_reusable_after_error: bool

    def launch(self, command: StepCommand) -> None:
        """Starts a step."""

    def collect(self) -> StepResult:
        """Waits for the oldest step that was launched and not collected."""

    def close(self) -> None:
        """Frees everything; idempotent."""


class LocalExecutor:
    """One runner in this process."""

    is_reusable_after_error = True

    def __init__(self, options: EngineOptions) -> None:
        from engine.parallel.group import TpGroup
        from engine.runner import ModelRunner
        from engine.start import resolve_device

        self.runner = ModelRunner(options, TpGroup(), resolve_device(options, 0))
        self.info = self.runner.info

    def launch(self, command: StepCommand) -> None:
        """Starts a step; if it raises, no step is under way any more."""
        try:
            self.runner.launch(command)
        except BaseException:
            self.runner.drop_steps()
            raise

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        try:
            return self.runner.collect()
        except BaseException:
            self.runner.drop_steps()
            raise

    def close(self) -> None:
        """Frees the model and the KV cache."""
        self.runner.close()


def make_executor(options: EngineOptions) -> Executor:
    """Starts the executor that the options ask for."""
    if options.tensor_parallel_size == 1:
        return LocalExecutor(options)
    from engine.parallel.executor import TpExecutor

    return TpExecutor(options)
