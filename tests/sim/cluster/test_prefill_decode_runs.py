"""`sim run` with servers for prefill and for decode: what moves, when, and that nothing is lost."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from engine.cli import main as lockstep
from engine.steplog.api import StepLogReader, StepRecord
from sim.cluster.prefill_decode import KvLink

PREFILLS, DECODES = 2, 3
LOAD = (
    "--workload", "poisson", "--rate", "30", "--num-requests", "120", "--model", "qwen3-0.6b",
    "--hardware", "h100", "--cost", "roofline", "--prompt-len", "uniform:20:900", "--output-len",
    "uniform:1:60",
)  # fmt: skip


def rows_of(folder):
    return list(csv.DictReader((folder / "requests.csv").read_text().splitlines()))


def run(folder, *words, split=True):
    roles = ("--prefill-replicas", str(PREFILLS), "--decode-replicas", str(DECODES))
    command = ["sim", "run", *LOAD, *(roles if split else ("--replicas", "5")), *words]
    assert lockstep([*command, "--out", str(folder)]) == 0
    return rows_of(folder), json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "split"
    run(path)
    return path


def test_every_request_ends_once_with_all_its_tokens(folder, tmp_path):
    rows = rows_of(folder)
    plain, _ = run(tmp_path / "plain", split=False)
    for split, whole in zip(rows, plain, strict=True):
        assert split["status"] == "completed"
        for name in ("request_id", "arrival_ns", "prompt_tokens", "output_tokens"):
            assert split[name] == whole[name]
        server = int(split["replica"])
        # One token is made where the prompt is; more by a decode server.
        assert (server < PREFILLS) == (split["output_tokens"] == "1"), split


def test_step_by_step_gives_the_same(folder, tmp_path):
    rows, _ = run(tmp_path / "slow", "--step-by-step")
    assert rows == rows_of(folder)


def test_servers_keep_to_their_roles(folder):
    log = StepLogReader(folder / "steps.jsonl")
    computed, sampled = Counter(), Counter()
    for record in log.expanded():
        if not isinstance(record, StepRecord):
            continue
        if record.replica < PREFILLS:
            assert not record.decode_ids
            computed.update({chunk.request_id: chunk.num_tokens for chunk in record.chunks})
        sampled.update(record.decode_ids)
        sampled.update(chunk.request_id for chunk in record.chunks if chunk.samples)
    rows = rows_of(folder)
    for row in rows:
        request_id = int(row["request_id"])
        hits = int(row["hit_tokens"])
        assert computed[request_id] + hits == int(row["prompt_tokens"])
        assert sampled[request_id] == int(row["output_tokens"])


def test_a_slow_link_delays_what_follows_the_first_token_only(folder, tmp_path):
    fast = rows_of(folder)
    slow, _ = run(tmp_path / "slow", "--kv-transfer-gb-per-s", "1")
    layers, summary = run(
        tmp_path / "layers", "--kv-transfer-gb-per-s", "1", "--kv-transfer-layerwise"
    )
    later = 0
    for quick, one, overlapped in zip(fast, slow, layers, strict=True):
        assert quick["first_token_ns"] == one["first_token_ns"] == overlapped["first_token_ns"]
        if quick["output_tokens"] == "1":
            continue
        num_bytes = int(one["prompt_tokens"]) * 28 * 2 * 8 * 128 * 2
        took = int(one["finish_ns"]) - int(one["first_token_ns"])
        assert took > num_bytes  # a byte takes a nanosecond
        later += took - (int(overlapped["finish_ns"]) - int(overlapped["first_token_ns"]))
    assert later > 0
    deployment = summary["sim"]["provenance"]["deployment"]
    assert (deployment["prefill_replicas"], deployment["decode_replicas"]) == (2, 3)
    assert deployment["kv_transfer_layerwise"] is True


def test_a_run_of_whole_servers_says_nothing_of_roles(tmp_path):
    _, summary = run(tmp_path / "plain", split=False)
    assert not [name for name in summary["sim"]["provenance"]["deployment"] if "transfer" in name]


def test_a_split_run_has_its_report_trace_and_diff(folder, tmp_path, capsys):
    report = (folder / "report.html").read_text()
    assert "2 prefill, 3 decode; KV as a whole at 50 GB/s, 100 us" in report
    assert json.loads((folder / "trace.json").read_text())
    run(tmp_path / "plain", split=False)
    capsys.readouterr()
    assert lockstep(["sim", "diff", str(tmp_path / "plain"), str(folder)]) == 0
    assert "120 requests in both runs" in capsys.readouterr().out


def test_its_log_is_not_replayed(folder, capsys):
    assert lockstep(["sim", "replay", str(folder / "steps.jsonl")]) == 2
    assert "a log of prefill and decode servers" in capsys.readouterr().err


def test_a_transfer_leaves_the_link_behind_those_before_it():
    whole, layered = KvLink(1e9, 5), KvLink(1e9, 5, layerwise=True)
    assert whole.end_ns(100, begun_ns=0, now_ns=50, free_ns=0, layers=4) == 150
    assert whole.end_ns(100, begun_ns=0, now_ns=50, free_ns=70, layers=4) == 170
    # Begun with the prefill, and not ended before the last layer has gone.
    assert layered.end_ns(100, begun_ns=0, now_ns=50, free_ns=0, layers=4) == 100
    assert layered.end_ns(100, begun_ns=0, now_ns=500, free_ns=0, layers=4) == 525
    assert layered.end_ns(100, begun_ns=0, now_ns=50, free_ns=70, layers=4) == 170
