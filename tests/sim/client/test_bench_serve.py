"""`lockstep bench serve` against the twin: every request is sent, measured and written down."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from engine.cli import main as lockstep
from engine.core.tokens import Prompt
from sim.calibration.benchmark_results import requests_of_bench
from sim.client.prompts import PromptMaker
from sim.workloads.recorded import is_recorded_run, read_recorded_run
from tests.places import REPOSITORY

VOCAB = 151_936


@contextmanager
def twin(log):
    """A twin at 20 times the speed on a port of its own: its URL, its step log and its process."""
    words = ["serve", "qwen3-8b", "--body", "sim", "--hardware", "h200", "--cost", "roofline"]
    words += ["--port", "0", "--speed", "20", "--api-key", "k", "--step-log", str(log)]
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        line = process.stdout.readline()
        yield re.search(r"http://\S+", line)[0], log / "steps.jsonl", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A twin for all tests that leave it running, in whatever order they come."""
    with twin(tmp_path_factory.mktemp("twin") / "log") as found:
        yield found


@pytest.fixture
def own_server(tmp_path):
    """A twin that a test may end."""
    with twin(tmp_path / "log") as found:
        yield found


def bench(capsys, url, *words):
    """Exit code and result."""
    code = lockstep(
        ["bench", "serve", "--base-url", url, "--client-api-key", "k", "--json", *words]
    )
    return code, json.loads(capsys.readouterr().out)


def test_a_load_is_measured_in_the_keys_of_vllm_and_calibration_reads_it(server, tmp_path, capsys):
    file = tmp_path / "result.json"
    code, result = bench(
        capsys, server[0], "--workload", "poisson", "--rate", "40", "--num-requests", "40",
        "--prompt-len", "64", "--output-len", "16", "--goodput", "ttft:60000",
        "--result", str(file),
    )  # fmt: skip
    assert code == 0
    assert result["completed"] == 40 and result["failed"] == 0
    assert result["input_lens"] == [64] * 40 and result["output_lens"] == [16] * 40
    assert result["request_goodput"] == result["request_throughput"]
    assert result["total_output_tokens"] == 640
    rows = requests_of_bench("result", file.read_text())
    assert len(rows) == 40
    first = rows[0]["first_token_ts"] - rows[0]["queued_ts"]
    assert first == pytest.approx(result["ttfts"][0])
    for name in ("ttft", "e2el"):
        assert 0 < result[f"median_{name}_ms"] <= result[f"p99_{name}_ms"]
    mean = sum(sum(gaps) for gaps in result["itls"]) / 40 * 1e3 + result["mean_ttft_ms"]
    assert mean == pytest.approx(result["mean_e2el_ms"])


def test_a_conversation_is_sent_with_the_answers_that_the_server_gave(server, capsys):
    code, result = bench(
        capsys, server[0], "--workload", "sessions", "--rate", "20", "--num-requests", "12",
        "--turns", "3", "--think-s", "0.01", "--prompt-len", "100", "--output-len", "40",
        "--vocab-size", str(VOCAB),
    )  # fmt: skip
    assert code == 0 and result["completed"] == 12
    # Second and third turns find all whole blocks of what went before, answers included.
    turns = sorted(result["input_lens"])
    assert turns[0] < turns[-1]
    found = result["total_cached_tokens"]
    assert found > 0.8 * (sum(turns) - 12 * 100 - 12 * 40)


def test_a_limit_on_requests_in_flight_holds(server, capsys):
    code, result = bench(
        capsys, server[0], "--workload", "poisson", "--rate", "1000", "--num-requests", "10",
        "--prompt-len", "8", "--output-len", "8", "--max-concurrency", "1",
    )  # fmt: skip
    assert code == 0
    ends = [
        start + ttft + sum(gaps)
        for start, ttft, gaps in zip(
            result["start_times"], result["ttfts"], result["itls"], strict=True
        )
    ]
    starts = sorted(result["start_times"])
    assert all(start >= end - 1e-6 for start, end in zip(starts[1:], sorted(ends), strict=False))


def test_failed_requests_are_counted_named_and_make_the_exit_code_1(server, capsys):
    code, result = bench(
        capsys, server[0], "--workload", "poisson", "--rate", "100", "--num-requests", "3",
        "--prompt-len", "50000", "--output-len", "2",
    )  # fmt: skip
    assert code == 1
    assert result["failed"] == 3 and result["completed"] == 0
    assert "max_model_len" in result["errors"][0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--base-url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--base-url", "localhost:8000"], "must begin with http://"),
        (["--result", "/"], "is a folder"),
        (["--vocab-size", "3"], "at least 64"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(words, says, capsys):
    assert lockstep(["bench", "serve", "--workload", "poisson", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_twins_log_can_be_sent_again(own_server, capsys):
    url, log, process = own_server
    lockstep(["bench", "serve", "--base-url", url, "--client-api-key", "k", "--workload",
              "poisson", "--num-requests", "5", "--rate", "50", "--output-len", "4"])  # fmt: skip
    process.terminate()
    process.wait(30)
    assert process.returncode == 0
    assert is_recorded_run(log)
    workload = read_recorded_run(log)
    assert list(workload.output_tokens)[-5:] == [4] * 5
    assert len(read_recorded_run(log, 3)) == 3
    assert lockstep(["sim", "replay", str(log)]) == 0
    assert lockstep(["sim", "run", "--trace", str(log), "--cost", "constant:5"]) == 0


def test_rows_share_prompt_ids_exactly_where_the_workload_shares_them():
    maker = PromptMaker(1000)
    one = maker.ids(Prompt.from_spans([range(0, 32), range(1 << 43, (1 << 43) + 8)]), {})
    two = maker.ids(Prompt.from_spans([range(0, 32), range(1 << 44, (1 << 44) + 8)]), {})
    assert one[:32] == two[:32] and one[32:] != two[32:]
    assert all(500 <= token_id < 1000 for token_id in one)
    assert PromptMaker(1000, seed=1).ids(Prompt(range(0, 32)), {}) != one[:32]
