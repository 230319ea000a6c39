"""The state machine: Hypothesis chooses operations, driver and follower judge each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.core.config import KernelConfig
from properties.follower.view import LawBroken, Target
from properties.search.driver import Operation
from properties.search.failures import KERNEL, write_failure
from properties.search.run import kernel, make_driver, translated
from properties.search.strategies import configs, request_specs
from properties.search.workloads import Workload


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, fails and drains a scheduler; subclasses choose which one.

    Every goal that a run meets is reported as an event and counted in `goals_met`. A failure is
    written to a file, and the error's note says how to replay it.
    """

    factory: ClassVar[Callable[..., Target]] = staticmethod(kernel)
    target: ClassVar[str] = KERNEL
    policy: ClassVar[str | None] = None
    is_async: ClassVar[bool] = False
    perturbed: ClassVar[bool] = False
    goals_met: ClassVar[Counter[str]]
    failure_folder: ClassVar[Path] = Path("out/failures")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.goals_met = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.added = 0

    @initialize(data=st.data(), vocabulary=st.sampled_from((2, 3, 5)))
    def configure(self, data: st.DataObject, vocabulary: int) -> None:
        """Builds the scheduler."""
        config: KernelConfig = data.draw(configs(self.policy, self.is_async))
        self.config = config
        self.vocabulary = vocabulary
        factory = type(self).factory
        self.driver = make_driver(config, vocabulary, factory, perturbed=self.perturbed)

    @precondition(lambda self: self.added < 8)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        """A request arrives."""
        spec = data.draw(request_specs(self.added, self.config, self.vocabulary))
        self.added += 1
        self._apply(["add", spec])

    @rule()
    def step(self) -> None:
        """One step is scheduled and committed."""
        self._apply(["step"])

    @rule()
    def open(self) -> None:
        """A step is scheduled and stays open."""
        self._apply(["open"])

    @rule()
    def close(self) -> None:
        """The oldest open step is committed."""
        self._apply(["close"])

    @precondition(lambda self: self.driver.follower.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A live request is aborted, whatever it is doing."""
        self._apply(["abort", data.draw(st.sampled_from(sorted(self.driver.follower.live)))])

    @rule()
    def discard(self) -> None:
        """A step fails."""
        self._apply(["discard"])

    @precondition(lambda self: not self.perturbed and not self.is_async)
    @rule(want=st.integers(0, 7))
    def run(self, want: int) -> None:
        """A stretch of decodes is done in one go."""
        self._apply(["run", want])

    @rule()
    def drain(self) -> None:
        """Arrivals stop until everything has ended, within the bound of LAW-L3."""
        self._apply(["drain"])

    def teardown(self) -> None:
        """Ends every run with the liveness phase (LAW-L3, LAW-L5)."""
        if not hasattr(self, "driver"):
            return
        self._apply(["drain"])
        for goal, times in self.driver.follower.ledger.goals.items():
            event(goal)
            type(self).goals_met[goal] += times

    def _apply(self, operation: Operation) -> None:
        self.operations.append(operation)
        try:
            with translated(self.driver.follower):
                self.driver.apply(operation)
        except LawBroken as broken:
            workload = Workload(self.config, self.vocabulary, tuple(self.operations))
            path = self.failure_folder / f"machine-{broken.law}.json"
            write_failure(path, workload, broken, None, self.target)
            broken.add_note(f"replay with: lockstep verify replay {path}")
            raise
