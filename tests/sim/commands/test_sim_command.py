"""`lockstep sim run`: outputs, exit codes, and nothing half-written."""

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from sim_testing import MS, SHARED, TRACES, needs_shared

from engine.cli import main
from engine.steplog.api import StepLogReader
from sim.workloads.readers import TraceOptions, read_trace

BASE = ["--model", "smollm2-135m", "--hardware", "l4", "--cost", "roofline"]
QUICK = ["--workload", "poisson", "--num-requests", "30", *BASE]
FILES = ["report.html", "requests.csv", "steps.jsonl", "summary.json", "trace.json"]


def sim_run(*arguments: object) -> int:
    return main(["sim", "run", *[str(argument) for argument in arguments]])


def test_a_run_writes_everything_and_prints_a_short_table(tmp_path, capsys):
    out = tmp_path / "runs" / "first"
    assert sim_run(*QUICK, "--out", out, "--goodput", "ttft:500", "tpot:50") == 0
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".parquet") == FILES
    assert [p.name for p in out.parent.iterdir()] == ["first"]
    printed = capsys.readouterr()
    assert "TTFT" in printed.out and "goodput" in printed.out and str(out) in printed.out
    assert len(printed.out.splitlines()) < 25 and printed.err == ""


def test_the_summary_has_vllms_keys_and_no_trace_of_the_host(tmp_path):
    out = tmp_path / "out"
    assert sim_run(*QUICK, "--out", out, "--goodput", "ttft:500") == 0
    text = (out / "summary.json").read_text()
    summary = json.loads(text)
    latencies = [
        f"{statistic}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    ]
    for key in ("duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
                "request_throughput", "request_goodput", "output_throughput",
                "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
                *latencies):  # fmt: skip
        assert isinstance(summary[key], int | float), key
    assert summary["completed"] == 30
    assert str(tmp_path) not in text and os.uname().nodename not in text
    provenance = summary["sim"]["provenance"]
    assert provenance["cost"]["name"] == "roofline" and provenance["seed"] == 0


def test_the_request_table_is_itself_a_trace(tmp_path):
    out = tmp_path / "out"
    sim_run(*QUICK, "--out", out)
    with (out / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30
    for row in rows:
        wait = int(row["first_token_ns"]) - int(row["arrival_ns"])
        assert float(row["ttft_ms"]) == wait / MS
        assert row["status"] == "completed"
    trace = read_trace(out / "requests.csv", TraceOptions())
    assert list(trace.prompt_tokens) == [int(row["prompt_tokens"]) for row in rows]


def test_the_parquet_table_equals_the_csv(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out"
    sim_run(*QUICK, "--out", out)
    rows = parquet.read_table(out / "requests.parquet").to_pylist()
    with (out / "requests.csv").open() as file:
        for row, texts in zip(rows, csv.DictReader(file), strict=True):
            assert {key: "" if v is None else str(v) for key, v in row.items()} == texts


def test_the_step_log_can_be_read_and_ends_with_the_run(tmp_path):
    out = tmp_path / "out"
    sim_run(*QUICK, "--out", out)
    log = StepLogReader(out / "steps.jsonl")
    last = list(log.expanded())[-1]
    summary = json.loads((out / "summary.json").read_text())
    assert (last.start_ns + last.duration_ns) / 1e9 == summary["duration"]
    assert log.header.writer == "sim" and log.header.kernel.block_size == 16


def test_json_prints_the_summary(tmp_path, capsys):
    assert sim_run(*QUICK, "--json", "--out", tmp_path / "out") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        (tmp_path / "out" / "summary.json").read_text()
    )


def test_the_report_is_one_well_formed_page_without_references(tmp_path):
    out = tmp_path / "out"
    sim_run(*QUICK, "--out", out)
    page = (out / "report.html").read_text()
    assert "http" not in page and "<script" not in page and "src=" not in page
    drawings = page.split("<svg")[1:]
    assert len(drawings) == 9
    for drawing in drawings:
        svg = ElementTree.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")
        assert svg.findall("path"), "every plot has a line"
        assert "nan" not in drawing.split("</svg>")[0]


def test_two_processes_with_other_hash_seeds_write_the_same_bytes(tmp_path):
    folders = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "sim", "run", "--workload", "sessions", "--replicas", "2",
                   "--router", "prefix-affine", "--num-requests", "60", *BASE,
                   "--num-kv-blocks", "400", "--out", str(out)]  # fmt: skip
        subprocess.run(command, env=environment, check=True, cwd=Path(__file__).parents[3],
                       capture_output=True)  # fmt: skip
        folders.append(out)
    for name in ("summary.json", "requests.csv", "steps.jsonl", "report.html", "trace.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_an_earlier_run_is_replaced_and_a_foreign_folder_refused(tmp_path, capsys):
    out = tmp_path / "out"
    sim_run(*QUICK, "--out", out)
    assert sim_run(*QUICK, "--seed", 5, "--out", out) == 0
    assert json.loads((out / "summary.json").read_text())["sim"]["provenance"]["seed"] == 5
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("x")
    capsys.readouterr()
    assert sim_run(*QUICK, "--out", foreign) == 2
    assert "out=" in capsys.readouterr().err
    assert [p.name for p in foreign.iterdir()] == ["precious.txt"]


TRACE = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,5000\n2,9000,10\n3,50,5\n"

BAD_LINES = {
    "unknown model": ["--model", "gpt-5"],
    "unknown hardware": ["--hardware", "h300"],
    "unknown policy": ["--policy", "fifo"],
    "unknown router": ["--router", "x"],
    "unknown cost": ["--cost", "x"],
    "unknown workload": ["--workload", "x"],
    "unknown option": ["--colour", "red"],
    "budget below one": ["--max-num-batched-tokens", "0"],
    "no seats": ["--max-num-seqs", "0"],
    "no blocks": ["--num-kv-blocks", "0"],
    "tp": ["--tp", "5"],
    "negative rate": ["--rate", "-3"],
    "nan rate": ["--rate", "nan"],
    "rate scale": ["--rate-scale", "0"],
    "no requests": ["--num-requests", "0"],
    "goodput metric": ["--goodput", "latency:5"],
    "goodput value": ["--goodput", "ttft:-5"],
    "oversize": ["--on-oversize", "clip"],
    "concurrency": ["--max-concurrency", "0"],
    "lengths": ["--prompt-len", "uniform:9:1"],
    "seed": ["--seed", "-1"],
    "two sources": ["--trace", "x.csv"],
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_option_is_exit_code_2_and_one_line(tmp_path, capsys, name):
    out = tmp_path / "out"
    assert sim_run(*QUICK, *BAD_LINES[name], "--out", out) == 2
    error = capsys.readouterr().err
    wanted = BAD_LINES[name][1] if name != "two sources" else "--trace"
    assert wanted in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_would_be_ignored_is_refused(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    assert sim_run("--trace", path, "--prompt-len", "100", *BASE) == 2
    assert "prompt_len" in capsys.readouterr().err


def test_a_bad_trace_leaves_nothing_behind(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(TRACE + "4,x,1\n")
    assert sim_run("--trace", path, *BASE, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "t.csv:6" in error and "'x'" in error
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_oversize_requests_are_counted_and_left_out(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    assert sim_run("--trace", path, *BASE, "--max-model-len", 4096, "--json") == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (summary["completed"], summary["failed"]) == (2, 2)
    assert summary["sim"]["rejections"] == {"exceeds_max_model_len": 2}
    assert "2 requests were left out" in printed.err


def test_oversize_requests_end_the_run_on_demand(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    out = tmp_path / "out"
    limits = ["--max-model-len", 4096, "--on-oversize", "error", "--out", out]
    assert sim_run("--trace", path, *BASE, *limits) == 2
    error = capsys.readouterr().err
    assert "row 2" in error and "5000" in error and "4096" in error
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1


def test_a_run_without_any_feasible_request_is_exit_code_2(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1000,10\n")
    out = tmp_path / "runs" / "out"
    assert sim_run("--trace", path, *BASE, "--num-kv-blocks", 10, "--out", out) == 2
    assert "no request can run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_a_request_larger_than_the_pool_is_counted(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1000,10\n1,100,10\n")
    limits = ["--num-kv-blocks", 10, "--max-model-len", 4096, "--json"]
    assert sim_run("--trace", path, *BASE, *limits) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["sim"]["rejections"] == {"pool_too_small": 1}


def test_help_names_every_option_and_its_default(capsys):
    assert sim_run("--help") == 0
    text = capsys.readouterr().out
    for option in ("--trace", "--workload", "--max-num-batched-tokens", "--goodput", "--out"):
        assert option in text
    assert "(default: 2048)" in text and "None" not in text


@needs_shared
@pytest.mark.shared
def test_the_azure_conversation_trace_conserves_its_tokens(tmp_path):
    trace = TRACES / "azure_llm_2023_conv.csv"
    out = tmp_path / "conv"
    arguments = ["--trace", trace, "--model", "qwen3-8b", "--hardware", "h200", "--replicas", 2]
    assert sim_run(*arguments, "--no-perfetto", "--out", out) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == 19_366
    assert summary["total_output_tokens"] == sum(read_trace(trace, TraceOptions()).output_tokens)
    assert summary["sim"]["physical_floor"]["violations"] == 0
    assert SHARED.is_dir()
