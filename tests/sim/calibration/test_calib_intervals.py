"""Every run can carry intervals, and an unstable queue is called that."""

from __future__ import annotations

import json

import pytest

from engine.cli import main

BASE = ["sim", "run", "--workload", "poisson", "--num-requests", "120", "--hardware", "h200"]


def summary_of(capsys, *words):
    assert main([*BASE, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def ttft_line_and_warnings(capsys, *words):
    """The row of the printed table, and what stands on stderr."""
    assert main([*BASE, *words]) == 0
    shown = capsys.readouterr()
    return next(line for line in shown.out.splitlines() if "TTFT" in line), shown.err


def test_intervals_come_from_seeds_and_step_errors(capsys):
    words = ["--rate", "4", "--intervals", "6"]
    summary = summary_of(capsys, *words)
    intervals = summary["sim"]["intervals"]
    assert intervals["resampled"] == ["seed", "step errors", "cost of shared reads"]
    assert (intervals["replicates"], intervals["level"]) == (6, 0.9)
    for key in ("mean_ttft_ms", "p99_ttft_ms", "p99_e2el_ms", "output_throughput"):
        low, high = intervals["bounds"][key]
        assert low < high
    assert summary_of(capsys, *words) == summary
    plain = summary_of(capsys, "--rate", "4")
    assert plain["p99_ttft_ms"] == summary["p99_ttft_ms"]
    assert "[" in ttft_line_and_warnings(capsys, *words)[0]


def test_models_without_known_errors_resample_the_seed_alone(capsys):
    summary = summary_of(capsys, "--rate", "4", "--cost", "roofline", "--intervals", "5")
    assert summary["sim"]["intervals"]["resampled"] == ["seed"]


def test_too_few_replicates_are_refused(capsys):
    assert main([*BASE, "--rate", "4", "--intervals", "2"]) == 2
    assert "intervals=2: must be at least 5" in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "stable"), [("2", True), ("200", False)])
def test_an_overloaded_queue_has_no_tail(capsys, rate, stable):
    words = ["--rate", rate, "--cost", "constant:20", "--max-num-seqs", "8"]
    words += ["--num-requests", "600"]
    summary = summary_of(capsys, *words)
    assert summary["sim"]["stable"] is stable
    for key in ("p90_ttft_ms", "p99_ttft_ms", "p99_e2el_ms"):
        assert (summary[key] is not None) is stable
    assert summary["median_ttft_ms"] is not None
    line, warnings = ttft_line_and_warnings(capsys, *words)
    assert ("unstable" in line) is not stable
    assert ("unstable at this rate" in warnings) is not stable
