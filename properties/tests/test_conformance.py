"""The conformance kit: passes, catches, and never mistakes a broken adapter for a pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from properties.commands import conformance_main
from properties.conformance import check_adapter
from properties.conformance.reference_adapter import NanoAdapter, ReferenceAdapter
from properties.conformance.toy import BuggyToyAdapter, ToyAdapter


@pytest.mark.parametrize("adapter", [ToyAdapter, ReferenceAdapter, NanoAdapter])
def test_sound_schedulers_pass(adapter: type) -> None:
    report = check_adapter(adapter, workloads=150)
    assert report.passed
    assert report.workloads == 150
    assert "V1" in report.judged
    assert "E1" in report.judged


def test_planted_bug_is_found_and_shrunk() -> None:
    report = check_adapter(BuggyToyAdapter)
    assert not report.passed
    assert report.broken is not None
    assert report.broken.law == "B7"
    assert report.workload is not None
    assert len(report.workload.operations) <= 6


class LacksSchedule(ToyAdapter):
    """No schedule."""

    schedule = None  # type: ignore[assignment]


class Raises(ToyAdapter):
    """Fails inside a call."""

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Fails."""
        raise RuntimeError("no device")


class ReturnsNothing(ToyAdapter):
    """Returns no batch."""

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Forgets to return."""
        self.toy.admit()
        return None  # type: ignore[return-value]


class ReturnsStrangers(ToyAdapter):
    """Schedules a request that nobody added."""

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Names an unknown id."""
        return [(77, 0, 1)]


class CountsInWords(ToyAdapter):
    """Returns a count that is none."""

    def num_free_blocks(self) -> int:
        """A word."""
        return "many"  # type: ignore[return-value]


class TablesOfNames(ToyAdapter):
    """Tables without block ids."""

    def block_table(self, request_id: int) -> Sequence[int]:
        """Names instead of ids."""
        return ["first"] if super().block_table(request_id) else []  # type: ignore[list-item]


class EndsStrangers(ToyAdapter):
    """Ends a request that is not live."""

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Names an unknown id."""
        return [(77, "stop")]


@pytest.mark.parametrize(
    ("adapter", "call"),
    [
        (LacksSchedule, "schedule()"),
        (Raises, "schedule()"),
        (ReturnsNothing, "schedule()"),
        (ReturnsStrangers, "schedule()"),
        (CountsInWords, "num_free_blocks()"),
        (TablesOfNames, "block_table(0)"),
        (EndsStrangers, "commit()"),
    ],
)
def test_problem_of_an_adapter_is_named_and_is_no_pass(adapter: type, call: str) -> None:
    report = check_adapter(adapter, workloads=50)
    assert not report.passed
    assert report.broken is None
    assert report.problem is not None
    assert report.problem.call == call
    assert report.problem.laws


def test_factory_that_raises_and_wrong_attributes_are_problems() -> None:
    def broken() -> object:
        raise OSError("no such library")

    class NoPolicy(ToyAdapter):
        policy = "fifo"

    class UnknownLaw(ToyAdapter):
        opt_out: Collection[str] = ("Z9",)

    class UnknownOption(ToyAdapter):
        kernel_options: Mapping[str, object] = {"speed": 9}

    for factory, call in (
        (broken, "factory()"),
        (NoPolicy, "policy"),
        (UnknownLaw, "opt_out"),
        (UnknownOption, "kernel_options"),
    ):
        report = check_adapter(factory)
        assert report.problem is not None
        assert report.problem.call == call
        assert not report.passed


def test_adapter_that_schedules_nothing_is_no_pass() -> None:
    class RefusesAll(ToyAdapter):
        def add(
            self,
            request_id: int,
            prompt: Sequence[int],
            max_tokens: int,
            stop_token_ids: Sequence[int],
        ) -> None:
            raise ValueError("closed")

    report = check_adapter(RefusesAll, workloads=10)
    assert report.broken is None
    assert not report.passed


def test_command_tells_the_difference_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    toy = "properties.conformance.toy"
    assert conformance_main(["--target", f"{toy}:ToyAdapter", "--workloads", "20"]) == 0
    assert "all judged laws are kept" in capsys.readouterr().out
    assert conformance_main(["--target", f"{toy}:BuggyToyAdapter"]) == 1
    assert "BREAKS LAW-B7" in capsys.readouterr().err
