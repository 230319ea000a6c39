"""One server over a tiny model, from its first request to its end under load.

Forty clients first, whose metrics are compared with the step log; then two hundred that come,
stream and leave as they like for a minute; then a kill while a hundred stream.
"""

import asyncio
import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.steplog.api import AbortRecord, AddRecord, StepLogReader, StepRecord
from tests.engine.serving import TINY_OPTIONS, running, write_tiny_with_text

NUM_QUIET = 41  # requests of the first part
NUM_CLIENTS = 200
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)
STORM_S = 60
OPTIONS = ("--max-num-seqs", "24", "--num-kvcache-blocks", "128", "--debug")


async def stream(port, asked, leave_after=None):
    """The events of one stream; None where the client left. Plain sockets: 200 clients and the
    server share two cores."""
    content = json.dumps({**asked, "stream": True, "return_token_ids": True}).encode()
    head = HEAD % len(content)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + content)
        status = int((await reader.readline()).split()[1])
        while await reader.readline() != b"\r\n":
            pass
        if status != 200:
            return status
        found = []
        while line := await reader.readline():
            if line.startswith(b"data: "):
                found.append(line[6:].strip())
            if leave_after is not None and len(found) >= leave_after:
                writer.transport.abort()
                return None
        return found
    finally:
        writer.close()


def check_whole(events, asked):
    """A stream that nobody cut ends with its reason and has as many tokens as it asked for."""
    assert isinstance(events, list), events
    assert events[-1] == b"[DONE]", events[-2:]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert choices[-1]["finish_reason"] == "length"
    assert len(tokens) == asked["max_tokens"]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


def an_ask(rng):
    length = rng.randint(1, 60)
    prompt = [rng.randrange(3, 200) for _ in range(length)]
    if rng.random() < 0.5:
        prompt[:20] = range(10, 30)
    return {"prompt": prompt, "max_tokens": rng.randint(1, 50), "ignore_eos": True,
            "temperature": rng.choice([0, 1])}  # fmt: skip


async def client(port, rng, end, counts):
    while time.monotonic() < end:
        asked = an_ask(rng)
        leaves = rng.random() < 0.3
        leave_after = rng.randint(0, asked["max_tokens"]) if leaves else None
        events = await stream(port, asked, leave_after)
        if events is None:
            counts["left"] += 1
            await asyncio.sleep(rng.random() * 0.2)
        else:
            check_whole(events, asked)
            counts["whole"] += 1


async def storm(port, seed, sample):
    counts = {"left": 0, "whole": 0}
    end = time.monotonic() + STORM_S
    clients = [client(port, random.Random(seed + i), end, counts) for i in range(NUM_CLIENTS)]
    await asyncio.gather(*clients, sample(end))
    return counts


def resident_mb(pid):
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().split("\n")
                if one.startswith("VmRSS"))  # fmt: skip
    return int(line.split()[1]) / 1024


async def killed_under_load(server, port):
    """SIGTERM while all of them stream: every accepted one ends right, and new ones get 503."""
    rng = random.Random(5)
    asks = [{**an_ask(rng), "max_tokens": 60} for _ in range(100)]
    streams = [asyncio.create_task(stream(port, asked)) for asked in asks]
    while (await asyncio.to_thread(server.metrics))["vllm:num_requests_waiting",] < 60:
        await asyncio.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    late = await stream(port, asks[0])
    return [*zip(await asyncio.gather(*streams), asks, strict=True)], late


def quiet(url):
    """What forty clients counted, and one left; every request ends before this returns."""

    def ask(number):
        asked = {"prompt": [*range(3, 40), number], "max_tokens": 20 + number, "min_p": 0.01}
        asked |= {"ignore_eos": number % 4 != 0, "seed": number}
        asked |= {"prompt_logprobs": 1} if number == 3 else {}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        return answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(24) as pool:
        counts = [*pool.map(ask, range(NUM_QUIET - 1))]
    with httpx.stream(
        "POST", f"{url}/v1/completions",
        json={"prompt": "b", "max_tokens": 100, "stream": True, "ignore_eos": True},
    ) as answer:  # fmt: skip
        next(answer.iter_lines())
    return counts


def settled(server):
    """The metrics once nothing runs or waits."""
    metrics = server.metrics()
    while any(
        metrics[name,]
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
    ):
        time.sleep(0.05)
        metrics = server.metrics()
    return metrics


class Life:
    """What was seen of the server's life."""

    def quiet_records(self):
        """Records of the first part: those before the first request of the second."""
        adds = 0
        for record in StepLogReader(self.run / "steps.jsonl").expanded():
            adds += isinstance(record, AddRecord)
            if adds > NUM_QUIET:
                return
            yield record


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    life = Life()
    life.run = folder / "run"
    model = write_tiny_with_text(folder / "model")
    with running(model, *TINY_OPTIONS, *OPTIONS, "--step-log", str(life.run)) as server:
        life.counts = quiet(server.url)
        life.metrics = settled(server)
        port = int(server.url.rpartition(":")[2])
        pids = (server.process.pid, server.engine_pid())
        life.memory = []

        async def sample(end):
            while time.monotonic() < end:
                await asyncio.sleep(STORM_S / 6)
                life.memory.append([resident_mb(pid) for pid in pids])

        life.storm = asyncio.run(storm(port, 1, sample))
        life.after = settled(server)
        life.health = httpx.get(f"{server.url}/health").status_code
        life.killed, life.late = asyncio.run(killed_under_load(server, port))
        life.code = server.process.wait(30)
    life.log = server.log
    life.records = [*life.quiet_records()]
    life.adds = {r.request.request_id: r for r in life.records if isinstance(r, AddRecord)}
    life.steps = [one for one in life.records if isinstance(one, StepRecord)]
    return life


def test_tokens_and_steps_are_those_of_the_log(life):
    metrics, adds, steps = life.metrics, life.adds, life.steps
    assert metrics["vllm:iteration_tokens_total_count",] == sum(one.num_tokens > 0 for one in steps)
    assert metrics["vllm:iteration_tokens_total_sum",] == sum(one.num_tokens for one in steps)
    prompts = sum(len(one.request.prompt) for one in adds.values())
    assert metrics["vllm:prompt_tokens_total",] == prompts
    assert metrics["vllm:num_preemptions_total",] == sum(len(one.preempted) for one in steps) > 0
    sampled = sum(len(one.sampled_ids) for one in steps)
    # The client that left was given some tokens more in the log than were counted for it.
    assert sum(life.counts) <= metrics["vllm:generation_tokens_total",] <= sampled


def test_the_prefix_cache_counts_first_admissions(life):
    metrics, adds, steps = life.metrics, life.adds, life.steps
    firsts = [one for step in steps for one in step.admitted if not one.resumed]
    hits = sum(one.hit_tokens for one in firsts)
    assert metrics["vllm:prefix_cache_hits_total",] == hits > 0
    assert metrics["vllm:prompt_tokens_cached_total",] == hits
    assert metrics["vllm:prefix_cache_queries_total",] == sum(
        len(adds[one.request_id].request.prompt)
        for one in firsts
        if not adds[one.request_id].request.extra_keys  # prompt logprobs look nothing up
    )


def test_ends_are_those_of_the_log(life):
    metrics, adds, steps = life.metrics, life.adds, life.steps
    finished = [one.reason for step in steps for one in step.finished]
    ended = {name[1]: count for name, count in metrics.items()
             if name[0] == "vllm:request_success_total"}  # fmt: skip
    aborts = [one for one in life.records if isinstance(one, AbortRecord)]
    assert sum(ended.values()) == len(adds) == NUM_QUIET
    assert ended["length"] == finished.count("length")
    assert ended["stop"] == finished.count("stop")
    assert ended["abort"] == len(aborts) == 1
    assert metrics["vllm:request_generation_tokens_count",] == NUM_QUIET


def test_times_in_the_queue_are_those_of_the_log(life):
    metrics, adds, steps = life.metrics, life.adds, life.steps
    first_ns = {}
    for step in steps:
        for one in step.admitted:
            first_ns.setdefault(one.request_id, step.start_ns)
    waits = [first_ns[name] - add.arrival_ns for name, add in adds.items()]
    counted = metrics["vllm:request_queue_time_seconds_sum",]
    assert counted == pytest.approx(sum(waits) / 1e9, rel=0.02)
    assert all(add.added_ns >= add.arrival_ns > 0 for add in adds.values())


def test_histograms_are_cumulative_and_have_vllms_buckets(life):
    metrics = life.metrics
    name = "vllm:time_to_first_token_seconds"
    bounds = [key[1] for key in metrics if key[0] == f"{name}_bucket"]
    assert bounds[:4] == ["0.001", "0.005", "0.01", "0.02"] and bounds[-1] == "+Inf"
    counts = [metrics[f"{name}_bucket", bound] for bound in bounds]
    assert counts == sorted(counts) and counts[-1] == metrics[f"{name}_count",] == NUM_QUIET
    gaps = metrics["vllm:inter_token_latency_seconds_sum",]
    assert gaps == metrics["vllm:time_per_output_token_seconds_sum",]
    assert gaps == pytest.approx(metrics["vllm:request_decode_time_seconds_sum",], rel=1e-6)


def test_the_recording_is_a_step_log_of_the_engine(life):
    with (life.run / "steps.jsonl").open() as lines:
        assert json.loads(next(lines))["writer"] == "engine"


def test_a_storm_leaves_no_request_no_block_and_no_memory_behind(life):
    counts, metrics = life.storm, life.after
    assert counts["left"] > 50 and counts["whole"] > 200, counts
    for early, late in zip(life.memory[1], life.memory[-1], strict=True):
        assert late < early * 1.05 + 10, life.memory
    ended = {name[1]: n for name, n in metrics.items() if name[0] == "vllm:request_success_total"}
    assert ended["error"] == 0 and ended["length"] >= counts["whole"]
    assert sum(ended.values()) - NUM_QUIET >= sum(counts.values()) * 0.99
    assert life.health == 200


def test_a_kill_under_load_loses_no_accepted_request(life):
    for events, asked in life.killed:
        check_whole(events, asked)
    assert life.late == 503 and life.code == 0
    assert not [line for line in life.log if "draining" not in line], life.log
