"""What a benchmark's clients saw is joined to a vLLM's own log by the order of requests."""

import json
import random

import pytest

from engine.cli import main as lockstep
from engine.core import InputError
from engine.steplog.replay import replay
from engine.steplog.vllm_clients import MOST_PLACES_OFF, join_clients
from engine.steplog.vllm_log import RunLogWriter
from engine.steplog.vllm_recording import open_log

CONFIG = {
    "vllm": "0.33.0", "num_gpu_blocks": 401, "block_size": 4, "max_model_len": 512,
    "max_num_seqs": 64, "max_num_batched_tokens": 512, "async_scheduling": True,
}  # fmt: skip
WARM_UPS = 2
WAY_US = 300


def write_run(path, outputs, seed=0):
    """A log of one request after the other; returns when the front end got each, in us."""
    rng = random.Random(seed)
    writer = RunLogWriter(path, CONFIG)
    zero_us = writer._zero_ns // 1000
    lines, now, sent = [], 10_000, []
    for number, count in enumerate(outputs):
        sent.append(now + WAY_US)
        lines.append(["a", now + 2 * WAY_US, number, 5, count, now + WAY_US, [number], 0])
        now += 1000
        for step in range(count):
            entry = [[number, 5 if step == 0 else 1]]
            free = 400 - -(-(5 + step) // 4)
            admitted = [[number, 0]] if step == 0 else []
            lines.append(["s", now, now + 50, entry, admitted, [], 1, 0, free])
            ended = [[number, "length", count, [number]]] if step == count - 1 else []
            at = sum(line[0] == "u" for line in lines)
            lines.append(["u", now + 900, now + 950, at, ended])
            now += 1000 + rng.randrange(50)
    for line in lines:
        writer._line(line)
    writer.close()
    return [time + zero_us for time in sent]


def write_result(path, sent, outputs, order=None, clock_us=0):
    """What the clients of all but the warm-ups saw; one request was refused."""
    rows = [
        ((time - WAY_US + clock_us) / 1e6, count, 0.002, [0.001] * (count - 1))
        for time, count in zip(sent[WARM_UPS:], outputs[WARM_UPS:], strict=True)
    ]
    rows = [rows[place] for place in order or range(len(rows))]
    rows.insert(1, (0.0, 0, 0.0, []))
    columns = zip(*rows, strict=True)
    keys = ("start_times", "output_lens", "ttfts", "itls")
    path.write_text(json.dumps(dict(zip(keys, map(list, columns), strict=True))))
    return path


@pytest.fixture
def run(tmp_path):
    outputs = [3, 7, *random.Random(1).choices(range(1, 6), k=12)]
    log = tmp_path / "run.jsonl"
    return log, write_run(log, outputs), outputs


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_each_request_gets_its_clients_times(run, tmp_path, capsys, ending):
    log, sent, outputs = run
    result, out = write_result(tmp_path / "result.json", sent, outputs), tmp_path / f"out{ending}"
    assert lockstep(["log", "join", str(log), str(result), "--out", str(out)]) == 0
    assert "12 requests joined, 2 of the log came before them; one clock" in capsys.readouterr().out
    before, after = open_log(log).recording, open_log(out).recording
    for one, joined in zip(before.requests, after.requests, strict=True):
        if one.id < WARM_UPS:
            assert joined == one
            continue
        assert joined.sent_us == joined.arrival_us == one.arrival_us - WAY_US
        assert joined.first_token_us == joined.sent_us + 2000
        assert joined.token_gaps_us == (1000,) * (one.output_tokens - 1)
        assert joined.finish_us == joined.first_token_us + 1000 * (one.output_tokens - 1)
    assert after.steps == before.steps
    assert replay(open_log(out)).difference is None


def test_a_second_join_takes_the_place_of_the_first(run, tmp_path):
    log, sent, outputs = run
    result = write_result(tmp_path / "result.json", sent, outputs)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    join_clients(log, result, first)
    join_clients(first, result, second)
    assert first.read_text() == second.read_text()


def test_clients_with_another_clock_are_set_right_by_the_fastest_request(run, tmp_path):
    log, sent, outputs = run
    sent[5] += 100  # sent later: it was faster on its way than the others
    result = write_result(tmp_path / "result.json", sent, outputs, clock_us=86_400_000_000)
    out = tmp_path / "out.jsonl"
    assert not join_clients(log, result, out).same_clock
    requests = open_log(out).recording.requests[WARM_UPS:]
    before = open_log(log).recording.requests[WARM_UPS:]
    ways = [one.arrival_us - joined.sent_us for one, joined in zip(before, requests, strict=True)]
    assert min(ways) == 0 and max(ways) == 100


def test_requests_that_overtook_each_other_find_their_own(run, tmp_path):
    log, sent, outputs = run
    order = list(range(12))
    order[3:8] = reversed(order[3:8])
    sent[5:10] = [sent[7]] * 5  # sent at once
    out = tmp_path / "out.jsonl"
    join_clients(log, write_result(tmp_path / "result.json", sent, outputs, order), out)
    for one in open_log(out).recording.requests[WARM_UPS:]:
        assert len(one.token_gaps_us) == one.output_tokens - 1


def test_another_runs_result_is_refused(run, tmp_path, capsys):
    log, sent, outputs = run
    out = tmp_path / "out.jsonl"
    result = write_result(tmp_path / "result.json", sent, [*outputs[:-1], 99])
    assert lockstep(["log", "join", str(log), str(result), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "request 12 has 99 output tokens" in error and "not the same run" in error
    assert error.count("\n") == 1 and not out.exists()
    many = write_result(tmp_path / "many.json", [*sent, *sent], [*outputs, *outputs])
    with pytest.raises(InputError, match=r"26 requests were answered, .*run.jsonl holds 14"):
        join_clients(log, many, out)
    assert MOST_PLACES_OFF < 26


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON that can be read"),
        ("[1]", "not the result of vllm bench serve"),
        ("{}", "output_lens is missing: save it with --save-detailed"),
        (
            '{"output_lens": [1], "start_times": [], "ttfts": [1], "itls": [[]]}',
            "are of different lengths",
        ),
        (
            '{"output_lens": ["x"], "start_times": [1], "ttfts": [1], "itls": [[]]}',
            "request 0: must hold numbers",
        ),
        (
            '{"output_lens": [0], "start_times": [1], "ttfts": [1], "itls": [[]]}',
            "holds no request that was answered",
        ),
    ],
)
def test_what_is_no_result_is_refused(run, tmp_path, text, words):
    result, out = tmp_path / "result.json", tmp_path / "out.jsonl"
    result.write_text(text)
    with pytest.raises(InputError, match=words):
        join_clients(run[0], result, out)
    assert not out.exists()
