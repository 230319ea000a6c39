"""The report of a run opens with what was run, the answer, and a command that repeats it."""

from __future__ import annotations

import html
import re
import shlex

import pytest

from engine.cli import main
from sim.report.headline import gpus_text

RUN = ["sim", "run", "--workload", "poisson", "--num-requests", "60", "--rate", "30", "--tp", "2",
       "--model", "llama3-8b", "--hardware", "h100", "--replicas", "2", "--cost", "roofline",
       "--no-prefix-caching", "--goodput", "ttft:25", "tpot:500", "--seed", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "out"
    assert main([*RUN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def page(out):
    return html.unescape((out / "report.html").read_text())


@pytest.mark.parametrize(
    ("replicas", "tp", "text"),
    [
        (1, 1, "1 x h100"),
        (1, 8, "8 x h100 (1 replica, TP 8)"),
        (2, 4, "8 x h100 (2 replicas, TP 4)"),
        (3, 1, "3 x h100 (3 replicas)"),
    ],
)
def test_gpus_are_counted_and_not_replicas(replicas, tp, text):
    assert gpus_text(replicas, tp, "h100") == text


def test_it_opens_with_the_run_the_answer_and_the_command(page):
    words = ["4 x h100 (2 replicas, TP 2)", "within the SLO (TTFT <= 25 ms, TPOT <= 500 ms)",
             "of requests", "throughput of a GPU", "GPU hours per million output tokens",
             "What was run", "30 req/s asked", "mixed", "roofline", "Repeat it with"]  # fmt: skip
    places = [page.index(word) for word in words]
    assert max(places) < page.index("Latency, ms")


def test_its_command_repeats_the_run(out, page, tmp_path):
    command = re.search(r"Repeat it with</p><pre>(.*?)</pre>", page)[1]
    program, *again = shlex.split(command)
    assert program == "lockstep" and "--out" not in again
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    for name in ("summary.json", "requests.csv", "steps.jsonl", "report.html"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes(), name


def test_plots_show_the_slo_the_queue_the_gaps_and_the_pool_in_percent(page):
    figures = dict(re.findall(r"<figcaption>(.*?)</figcaption>(.*?)</figure>", page))
    by_word = {
        word: next(text for title, text in figures.items() if word in title)
        for word in ("Latency of requests", "TTFT by arrival", "Time per output", "Queue", "ITL")
    }
    assert "SLO TTFT" in by_word["Latency of requests"] and "SLO TTFT" in by_word["TTFT by arrival"]
    assert "SLO TPOT" in by_word["Time per output"]
    assert "<path" in by_word["Queue"] and "<path" in by_word["ITL"]
    assert "% of the pool" in figures["KV blocks in use"]


def test_each_replica_has_a_row(page):
    table = page[page.index("<h2>Replicas") : page.index("<h2>Plots")]
    assert table.count("<tr>") == 3


def test_tables_and_charts_fit_a_phone(page):
    assert "overflow-x: auto" in page and "min(440px, 100%)" in page
    assert page.count("<table>") == page.count('<div class="wide')
