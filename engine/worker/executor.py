"""Where steps are computed: in this process, or by the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Protocol

from engine.options import EngineOptions
from engine.worker.command import StepCommand, StepResult
from engine.worker.info import RunnerInfo


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
    """One runner in this process."""

    def __init__(self, options: EngineOptions) -> None:
        from engine.distributed.group import TpGroup
        from engine.worker.device import resolve_device
        from engine.worker.probe import RankProbe
        from engine.worker.runner import ModelRunner

        self.runner = ModelRunner(options, TpGroup(), resolve_device(options, 0))
        self.info = self.runner.info
        self._probe = RankProbe(self.runner)

    @property
    def is_dead(self) -> bool:
        """Nothing outlives this process, so it never dies."""
        return False

    def launch(self, command: StepCommand) -> None:
        """Starts a step."""
        self.runner.launch(command)

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        return self.runner.collect()

    def reset(self) -> None:
        """Forgets the steps under way."""
        self.runner.drop_steps()

    def ask(self, question: str) -> list[str]:
        """The one runner's answer."""
        return [self._probe.answer(question)]

    def close(self) -> None:
        """Frees the model and the KV cache."""
        self.runner.close()


def make_executor(options: EngineOptions) -> Executor:
    """Starts the executor that the options ask for."""
    if options.tensor_parallel_size == 1:
        return LocalExecutor(options)
    from engine.worker.tp_executor import TpExecutor

    return TpExecutor(options)
