"""`calibrate-requests` reads what public load generators write, without conversion."""

from __future__ import annotations

import json

import pytest

from engine.core import InputError
from sim.commands.calibrate_requests import read_requests

PLAIN = [
    {"prompt_tokens": 100 + serial, "output_tokens": 5, "queued_ts": 10.0 + serial,
     "first_token_ts": 10.5 + serial, "last_token_ts": 11.5 + serial}
    for serial in range(4)
]  # fmt: skip


def bench(**changes):
    document = {
        "request_throughput": 1.0,
        "input_lens": [row["prompt_tokens"] for row in PLAIN] + [7],
        "output_lens": [5, 5, 5, 5, 0],
        "start_times": [row["queued_ts"] for row in PLAIN] + [20.0],
        "ttfts": [0.5, 0.5, 0.5, 0.5, 0.0],
        "itls": [[0.25] * 4] * 4 + [[]],
    }
    return json.dumps({**document, **changes})


def aiperf(row, **changes):
    entry = {
        "metadata": {"request_start_ns": int(row["queued_ts"] * 1e9), "was_cancelled": False},
        "metrics": {
            "input_sequence_length": {"value": row["prompt_tokens"]},
            "output_sequence_length": {"value": row["output_tokens"]},
            "time_to_first_token": {"value": 500.0, "unit": "ms"},
            "request_latency": {"value": 1500.0, "unit": "ms"},
        },
        "error": None,
    }
    return json.dumps({**entry, **changes})


def read(tmp_path, text):
    path = tmp_path / "requests.json"
    path.write_text(text)
    workload, times = read_requests(path)
    return list(workload.prompt_tokens), list(workload.output_tokens), times


def test_all_formats_say_the_same(tmp_path):
    plain = read(tmp_path, "\n".join(map(json.dumps, PLAIN)))
    failed = aiperf(PLAIN[0], error={"message": "no"})
    for text in (bench(), "\n".join([*map(aiperf, PLAIN), failed])):
        prompts, outputs, times = read(tmp_path, text)
        assert (prompts, outputs) == plain[:2]
        assert list(times.decode_ns) == pytest.approx(list(plain[2].decode_ns))
        assert list(times.wait_ns) == pytest.approx(list(plain[2].wait_ns))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bench(itls=None), "--save-detailed"),
        (bench(ttfts=[0.5]), "different lengths"),
        (bench(ttfts=["a"] * 5), "must hold numbers"),
        (aiperf(PLAIN[0], metrics={"request_latency": {"value": 1.0}}), "--streaming"),
    ],
)
def test_what_is_missing_is_named(tmp_path, text, words):
    with pytest.raises(InputError, match=words):
        read(tmp_path, text)
