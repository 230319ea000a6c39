"""`/metrics` by a real parser, beside the step log of the same run."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine.steplog.api import AbortRecord, AddRecord, StepLogReader, StepRecord
from tests.engine.serving import TINY_OPTIONS, running, write_tiny_with_text


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Metrics, records and what the clients counted, of a run with all kinds of ends."""
    folder = tmp_path_factory.mktemp("tiny")
    run = folder / "run"
    options = ("--max-num-seqs", "4", "--num-kvcache-blocks", "32")
    with running(
        write_tiny_with_text(folder / "model"), *TINY_OPTIONS, *options, "--step-log", str(run)
    ) as server:

        def ask(number):
            asked = {"prompt": [*range(3, 40), number], "max_tokens": 20 + number, "min_p": 0.01}
            asked |= {"ignore_eos": number % 4 != 0, "seed": number}
            asked |= {"prompt_logprobs": 1} if number == 3 else {}
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
            return answer["usage"]["completion_tokens"]

        with ThreadPoolExecutor(16) as pool:
            counts = [*pool.map(ask, range(40))]
        with httpx.stream(
            "POST", f"{server.url}/v1/completions",
            json={"prompt": "b", "max_tokens": 100, "stream": True, "ignore_eos": True},
        ) as stream:  # fmt: skip
            next(stream.iter_lines())
        metrics = server.metrics()
        while metrics["vllm:num_requests_running",] or metrics["vllm:kv_cache_usage_perc",]:
            metrics = server.metrics()
        assert server.stop() == 0
    return metrics, [*StepLogReader(run / "steps.jsonl").expanded()], counts, run


def parts(recorded):
    _, records, _, _ = recorded
    adds = {one.request.request_id: one for one in records if isinstance(one, AddRecord)}
    return adds, [one for one in records if isinstance(one, StepRecord)]


def test_tokens_and_steps_are_those_of_the_log(recorded):
    metrics, _, counts, _ = recorded
    adds, steps = parts(recorded)
    assert metrics["vllm:iteration_tokens_total_count",] == len(steps)
    assert metrics["vllm:iteration_tokens_total_sum",] == sum(one.num_tokens for one in steps)
    prompts = sum(len(one.request.prompt) for one in adds.values())
    assert metrics["vllm:prompt_tokens_total",] == prompts
    assert metrics["vllm:num_preemptions_total",] == sum(len(one.preempted) for one in steps) > 0
    sampled = sum(len(one.sampled_ids) for one in steps)
    # The client that left was given some tokens more in the log than were counted for it.
    assert sum(counts) <= metrics["vllm:generation_tokens_total",] <= sampled


def test_the_prefix_cache_counts_first_admissions(recorded):
    metrics, _, _, _ = recorded
    adds, steps = parts(recorded)
    firsts = [one for step in steps for one in step.admitted if not one.resumed]
    hits = sum(one.hit_tokens for one in firsts)
    assert metrics["vllm:prefix_cache_hits_total",] == hits > 0
    assert metrics["vllm:prompt_tokens_cached_total",] == hits
    assert metrics["vllm:prefix_cache_queries_total",] == sum(
        len(adds[one.request_id].request.prompt)
        for one in firsts
        if not adds[one.request_id].request.extra_keys  # prompt logprobs look nothing up
    )


def test_ends_are_those_of_the_log(recorded):
    metrics, records, _, _ = recorded
    adds, steps = parts(recorded)
    finished = [one.reason for step in steps for one in step.finished]
    ended = {name[1]: count for name, count in metrics.items()
             if name[0] == "vllm:request_success_total"}  # fmt: skip
    aborts = [one for one in records if isinstance(one, AbortRecord)]
    assert sum(ended.values()) == len(adds) == 41
    assert ended["length"] == finished.count("length")
    assert ended["stop"] == finished.count("stop")
    assert ended["abort"] == len(aborts) == 1
    assert metrics["vllm:request_generation_tokens_count",] == 41


def test_times_in_the_queue_are_those_of_the_log(recorded):
    metrics, _, _, _ = recorded
    adds, steps = parts(recorded)
    first_ns = {}
    for step in steps:
        for one in step.admitted:
            first_ns.setdefault(one.request_id, step.start_ns)
    waits = [first_ns[name] - add.arrival_ns for name, add in adds.items()]
    counted = metrics["vllm:request_queue_time_seconds_sum",]
    assert counted == pytest.approx(sum(waits) / 1e9, rel=0.02)
    assert all(add.added_ns >= add.arrival_ns > 0 for add in adds.values())


def test_histograms_are_cumulative_and_have_vllms_buckets(recorded):
    metrics, _, _, _ = recorded
    name = "vllm:time_to_first_token_seconds"
    bounds = [key[1] for key in metrics if key[0] == f"{name}_bucket"]
    assert bounds[:4] == ["0.001", "0.005", "0.01", "0.02"] and bounds[-1] == "+Inf"
    counts = [metrics[f"{name}_bucket", bound] for bound in bounds]
    assert counts == sorted(counts) and counts[-1] == metrics[f"{name}_count",] == 41
    gaps = metrics["vllm:inter_token_latency_seconds_sum",]
    assert gaps == metrics["vllm:time_per_output_token_seconds_sum",]
    assert gaps == pytest.approx(metrics["vllm:request_decode_time_seconds_sum",], rel=1e-6)


def test_the_recording_is_a_step_log_of_the_engine(recorded):
    run = recorded[3]
    assert json.loads((run / "steps.jsonl").read_text().split("\n")[0])["writer"] == "engine"
