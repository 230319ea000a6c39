"""`lockstep sim sweep`: its points are those of `sim run`, however and wherever they are run."""

from __future__ import annotations

import csv
import json
import re
import shlex

import pytest

from engine.cli import main
from sim.commands import sweep_runs
from sim.report import marks
from sim.run.option_table import SIM_TABLE
from sim.sweep.grid import Axis, grid, parse_axis
from sim.sweep.knee import knee_of
from sim.sweep.points import Curve, Point, RunFigures, estimate_of
from tests.places import REPOSITORY

WORKLOAD = ("--workload", "poisson", "--num-requests", "30", "--output-len", "20")
FILES = ("sweep.csv", "runs.csv", "sweep.json", "report.html")


def sweep(out, *words):
    assert main(["sim", "sweep", *WORKLOAD, "--out", str(out), *words]) == 0
    return {name: (out / name).read_bytes() for name in FILES}


def rows(files, name):
    return list(csv.DictReader(files[name].decode().splitlines()))


def summary(capsys, *words):
    capsys.readouterr()
    assert main(["sim", "run", *WORKLOAD, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_run_has_the_figures_of_the_plain_run(tmp_path, capsys):
    grid_words = ("--vary", "rate=2,30", "--vary", "max_num_seqs=1,8", "--seeds", "2")
    found = rows(sweep(tmp_path / "s", *grid_words, "--goodput", "ttft:500"), "runs.csv")
    assert len(found) == 8
    for row in found:
        plain = summary(
            capsys, "--rate", row["rate"], "--max-num-seqs", row["max_num_seqs"],
            "--seed", row["seed"], "--goodput", "ttft:500",
        )  # fmt: skip
        assert float(row["p50_ttft_ms"]) == plain["p50_ttft_ms"]
        assert float(row["request_goodput"]) == plain["request_goodput"]
        assert float(row["output_throughput"]) == plain["output_throughput"]
        assert float(row["mbu"]) == plain["sim"]["mbu"]


def test_points_are_means_over_the_seeds(tmp_path):
    files = sweep(tmp_path / "s", "--vary", "rate=2,30", "--seeds", "4")
    runs = rows(files, "runs.csv")
    for point in rows(files, "sweep.csv"):
        values = [float(run["mean_ttft_ms"]) for run in runs if run["rate"] == point["rate"]]
        one = estimate_of(values)
        assert len(set(values)) == 4
        assert float(point["mean_ttft_ms"]) == one.mean
        assert float(point["mean_ttft_ms_low"]) == one.low < one.mean < one.high


def test_processes_give_the_same_bytes(tmp_path):
    words = ("--vary", "rate=2,30", "--vary", "router=round-robin,least-tokens")
    whole = sweep(tmp_path / "one", *words, "--seeds", "2")
    assert sweep(tmp_path / "two", *words, "--seeds", "2", "--jobs", "2") == whole


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    words = ("--vary", "rate=2,8,30", "--seeds", "2")
    whole = sweep(tmp_path / "whole", *words)
    real, done = sweep_runs.SweepRunner.run, []

    def run(self, task):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(task)
        return real(self, task)

    monkeypatch.setattr(sweep_runs.SweepRunner, "run", run)
    out = tmp_path / "killed"
    assert main(["sim", "sweep", *WORKLOAD, "--out", str(out), *words]) == 130
    assert not (out / "sweep.json").exists()
    done.clear()
    assert sweep(out, *words) == whole
    assert len(done) == 2


def test_a_changed_trace_is_run_anew(tmp_path, monkeypatch):
    trace = tmp_path / "t.csv"
    found = []
    for tokens in (100, 3000):
        trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n0,{tokens},10\n1,200,50\n")
        out, words = tmp_path / "s", ("--vary", "rate_scale=1,2", "--seeds", "1")
        assert main(["sim", "sweep", "--trace", str(trace), "--out", str(out), *words]) == 0
        found.append((out / "sweep.csv").read_text())
    assert found[0] != found[1]


def test_a_run_that_breaks_off_makes_the_sweep_fail(tmp_path, monkeypatch, capsys):
    def run(arguments, **rest):
        assert arguments.rate != 2, "a defect"
        return real(arguments, **rest)

    real = sweep_runs.run_of
    monkeypatch.setattr(sweep_runs, "run_of", run)
    words = ("--vary", "rate=1,2", "--seeds", "1", "--out", str(tmp_path / "s"))
    assert main(["sim", "sweep", *WORKLOAD, *words]) == 1
    assert "left out: rate=2: AssertionError: a defect" in capsys.readouterr().err
    assert (tmp_path / "s" / "sweep.csv").exists()


def test_points_that_cannot_run_are_left_out_and_named(tmp_path, capsys):
    files = sweep(tmp_path / "s", "--vary", "tp=1,3", "--seeds", "1")
    assert "left out: tp=3: tp=3: " in capsys.readouterr().err
    assert [bool(row["error"]) for row in rows(files, "sweep.csv")] == [False, True]
    assert b"Left out" in files["report.html"]


def test_foreign_files_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "sweep.csv").write_text("mine\n")
    assert main(["sim", "sweep", *WORKLOAD, "--vary", "rate=1,2", "--out", str(tmp_path)]) == 2
    assert "holds a sweep.csv that this program did not write" in capsys.readouterr().err
    assert (tmp_path / "sweep.csv").read_text() == "mine\n"


def test_the_grid_is_every_combination_in_order():
    rate = parse_axis("rate=1:2:3", SIM_TABLE, ())
    caching = parse_axis("--enable-prefix-caching=true,false", SIM_TABLE, ())
    assert rate.values == (1.0, 1.5, 2.0)
    assert [tuple(one.values()) for one in grid([rate, caching])] == [
        (1.0, True), (1.0, False), (1.5, True), (1.5, False), (2.0, True), (2.0, False),
    ]  # fmt: skip


def curve(latency_ms, seeds=(1.0,)):
    points = []
    for rate in range(1, 10):
        runs = [
            RunFigures(seed, {"output_throughput": float(rate), "mean_e2el_ms": factor * latency})
            for seed, factor in enumerate(seeds)
            if (latency := latency_ms(rate)) > 0
        ]
        points.append(Point({"rate": float(rate)}, runs))
    return Curve("", points)


def test_the_knee_of_a_single_server_queue_is_at_half_its_capacity():
    """M/M/1 of capacity 10: latency 1 / (10 - rate), so power rate (10 - rate) is highest at 5."""
    knee = knee_of(curve(lambda rate: 1 / (10 - rate)), "rate")
    assert knee.point.setting == {"rate": 5.0}
    assert not knee.at_edge
    assert list(knee.alike) == [knee.point]


def test_a_knee_at_the_end_says_that_it_may_lie_outside():
    assert knee_of(curve(lambda rate: 1.0), "rate").at_edge
    assert knee_of(curve(lambda rate: float(rate) ** 2), "rate").at_edge


def test_neighbours_that_noise_does_not_tell_apart_are_named():
    """A seed that is slow everywhere changes nothing; common seeds cancel out."""
    sure = knee_of(curve(lambda rate: 1 / (10 - rate), (1.0, 2.0, 1.5)), "rate")
    assert len(sure.alike) <= 3
    assert sure.point.setting == {"rate": 5.0}


def test_bars_are_drawn_and_move_the_axes():
    plain = marks.marked_chart([marks.Marks("a", [(1.0, 1.0), (2.0, 2.0)])], "x", "y")
    bar = ((2.0, 1.0), (2.0, 3.0))
    barred = marks.marked_chart([marks.Marks("a", [(1.0, 1.0), (2.0, 2.0)], bars=[bar])], "x", "y")
    assert barred.count('stroke-width="3"') == 1 and 'stroke-width="3"' not in plain


@pytest.mark.parametrize("name, is_load", [("rate", True), ("clients", True), ("tp", False)])
def test_only_loads_have_knees(name, is_load):
    assert Axis(name, SIM_TABLE[name], (1, 2)).is_load is is_load


def test_the_worked_example_prints_what_the_document_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs/sweeps.md").read_text()
    example = text[text.index("## An example") :]
    command = re.search(r"    (lockstep sim sweep (?:.*\\\n)*.*)\n", example)[1]
    assert main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", example, re.DOTALL)[1]
    page = (tmp_path / "curve/report.html").read_text()
    assert page.count("knee, rate=6") == 3  # of the first of two curves, in three charts
    assert page.count('r="7"') == 2 * 3
