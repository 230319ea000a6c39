"""The conformance kit: passes, catches, and never mistakes a broken adapter for a pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from properties.commands import conformance_main
from properties.conformance import check_adapter
from properties.conformance.kernel_adapter import AsyncKernelAdapter, KernelAdapter
from properties.conformance.reference_adapter import NanoAdapter, ReferenceAdapter
from properties.conformance.report import describe
from properties.conformance.toy import BuggyToyAdapter, ToyAdapter
from properties.defects.prefix_cache import TrustsHash
from properties.defects.tables import LeaksFirstBlock
from properties.laws import KERNEL_LAWS


@pytest.mark.parametrize(
    "adapter", [ToyAdapter, ReferenceAdapter, NanoAdapter, KernelAdapter, AsyncKernelAdapter]
)
def test_sound_schedulers_pass(adapter: type) -> None:
    report = check_adapter(adapter, workloads=150)
    assert report.passed, describe(report)
    assert report.workloads == 150
    assert "V1" in report.judged
    assert "E1" in report.judged


def test_planted_bug_is_found_and_shrunk() -> None:
    report = check_adapter(BuggyToyAdapter, workloads=300)
    assert not report.passed
    first = report.findings[0]
    assert first.law == "B7"
    assert not first.behind
    assert len(first.workload.operations) <= 6


class TwoBugs(ToyAdapter):
    """Calls every end a stop, and loses a block with it."""

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Ends as the toy does, but wrongly."""
        tables = {name: list(self.toy.tables.get(name, [])) for name in tokens}
        ended = super().commit(tokens)
        for name, _ in ended:
            self.toy.pool.remove(tables[name][0])
        return [(name, "stop") for name, _ in ended]


def test_all_broken_laws_are_found_in_one_run() -> None:
    report = check_adapter(TwoBugs, workloads=60)
    assert {"L6", "B4"} <= set(report.broken_laws)
    assert len(set(report.broken_laws)) == len(report.broken_laws)
    text = describe(report)
    for law in report.broken_laws:
        assert f"BREAKS LAW-{law}" in text


class CrashesInTheDecode(ToyAdapter):
    """Raises when two requests decode together."""

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Fails deep inside."""
        batch = super().schedule()
        if len(batch) == 2 and all(first > 0 for _, first, _ in batch):
            self._fail()
        return batch

    def _fail(self) -> None:
        raise IndexError("no such row")


def test_a_crash_is_a_finding_with_its_traceback_and_shrunk() -> None:
    report = check_adapter(CrashesInTheDecode, workloads=100)
    assert report.problem is None
    [crash] = [finding for finding in report.findings if finding.law == "CRASH"]
    assert "schedule()" in crash.detail
    assert "_fail" in crash.trace
    assert "IndexError: no such row" in crash.trace
    assert len(crash.workload.operations) <= 6
    assert "CRASHES" in describe(report)


class TrustingKernel(KernelAdapter):
    """Believes the hash."""

    scheduler_class = TrustsHash


def test_a_weak_hash_shows_who_believes_it() -> None:
    report = check_adapter(TrustingKernel, workloads=300)
    assert "K11" in report.judged
    assert "K11" in report.broken_laws
    assert "K11" not in check_adapter(ReferenceAdapter, workloads=1).judged


class AsyncLeak(AsyncKernelAdapter):
    """Loses a block of every table that it releases."""

    scheduler_class = LeaksFirstBlock


def test_an_asynchronous_scheduler_is_judged_with_two_open_steps() -> None:
    assert check_adapter(AsyncKernelAdapter, workloads=1).judged
    assert not check_adapter(AsyncLeak, workloads=40).passed


class Starves(NanoAdapter):
    """Prompts first, and it claims to serve decodes all the same."""

    opt_out = ()


def test_gaps_between_tokens_are_noticed_while_prompts_keep_arriving() -> None:
    report = check_adapter(Starves, workloads=300)
    assert report.broken_laws == ["L9"]


class Choosy(KernelAdapter):
    """No block size of 1, as many tokens as seats, and never more than 10 blocks."""

    kernel_options: Mapping[str, object] = {
        "block_size": range(2, 17),
        "max_num_batched_tokens": lambda config: max(
            config["max_num_seqs"], config["max_num_batched_tokens"]
        ),
    }

    def start(self, config: Mapping[str, Any]) -> None:
        """Refuses large pools."""
        assert config["block_size"] > 1
        assert config["max_num_batched_tokens"] >= config["max_num_seqs"]
        if config["num_blocks"] > 10:
            raise ValueError("at most 10 blocks")
        super().start(config)


def test_configurations_can_be_chosen_and_refused() -> None:
    report = check_adapter(Choosy, workloads=100)
    assert report.passed, describe(report)
    assert report.refused > 0
    assert report.workloads + report.refused == 100
    assert f"{report.refused} configurations were refused" in describe(report)


def test_the_report_says_that_prefix_caching_was_off() -> None:
    report = check_adapter(ToyAdapter, workloads=10)
    assert "K1" not in report.judged
    assert "prefix caching is off (kernel_options)" in describe(report)


class LacksSchedule(ToyAdapter):
    """No schedule."""

    schedule = None  # type: ignore[assignment]


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
    assert not report.findings
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

    class NoLaw(ToyAdapter):
        opt_out: Collection[str] = [law.id for law in KERNEL_LAWS]

    class UnknownOption(ToyAdapter):
        kernel_options: Mapping[str, object] = {"speed": 9}

    for factory, call in (
        (broken, "factory()"),
        (NoPolicy, "policy"),
        (UnknownLaw, "opt_out"),
        (UnknownOption, "kernel_options"),
        (NoLaw, "opt_out"),
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
    assert not report.findings
    assert not report.passed


def test_command_tells_the_difference_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    toy = "properties.conformance.toy"
    assert conformance_main(["--target", f"{toy}:ToyAdapter", "--workloads", "20"]) == 0
    assert "all judged laws are kept" in capsys.readouterr().out
    assert conformance_main(["--target", f"{toy}:BuggyToyAdapter"]) == 1
    assert "BREAKS LAW-B7" in capsys.readouterr().err
