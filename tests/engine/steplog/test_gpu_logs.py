"""Step logs of the engine on H200s, decided again by a fresh kernel.

Made by benchmarks/gpu_logs.py and, over two ranks, by benchmarks/gpu_tp.py.
"""

import gzip
import json
from pathlib import Path

import pytest

from engine.steplog.api import StepLogReader
from engine.steplog.replay import replay

LOGS = sorted((Path(__file__).parent / "data").glob("steps_*.jsonl.gz"))


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name.split(".")[0])
def test_every_decision_of_a_gpu_run_is_made_again(log):
    result = replay(StepLogReader(log))
    assert result.num_requests == 64
    assert result.num_steps > 400
    assert result.difference is None


def test_the_logs_hold_what_makes_replay_hard():
    texts = [gzip.decompress(log.read_bytes()).decode() for log in LOGS]
    text = "".join(texts)
    headers = [json.loads(text.split("\n", 1)[0]) for text in texts]
    assert {header["kernel"]["policy"] for header in headers} == {"mixed", "prefill_first"}
    assert all(header["kernel"]["async_scheduling"] for header in headers)
    assert all("H200" in header["hardware"]["device_name"] for header in headers)
    assert '"preempted"' in text
    hits = [
        admission[1]
        for line in text.splitlines()
        for admission in json.loads(line).get("admitted", [])
    ]
    assert max(hits) >= 256
