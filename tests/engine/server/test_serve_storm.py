"""Two hundred clients that come, stream and leave as they like; then a kill under load."""

import asyncio
import json
import random
import signal
import time
from pathlib import Path

import httpx

from tests.engine.serving import TINY_OPTIONS, running, write_tiny_with_text

NUM_CLIENTS = 200
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)
STORM_S = 60
OPTIONS = ("--max-num-seqs", "32", "--num-kvcache-blocks", "400", "--debug")


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
    assert await stream(port, asks[0]) == 503
    for asked, events in zip(asks, await asyncio.gather(*streams), strict=True):
        check_whole(events, asked)


def test_a_storm_leaves_no_request_no_block_and_no_memory_behind(tmp_path):
    model = write_tiny_with_text(tmp_path / "model")
    with running(model, *TINY_OPTIONS, *OPTIONS) as server:
        port = int(server.url.rpartition(":")[2])
        pids = (server.process.pid, server.engine_pid())
        memory = []

        async def sample(end):
            while time.monotonic() < end:
                await asyncio.sleep(STORM_S / 6)
                memory.append([resident_mb(pid) for pid in pids])

        counts = asyncio.run(storm(port, 1, sample))
        assert counts["left"] > 50 and counts["whole"] > 200, counts
        for early, late in zip(memory[1], memory[-1], strict=True):
            assert late < early * 1.05 + 10, memory
        metrics = server.metrics()
        while metrics["vllm:num_requests_running",] or metrics["vllm:num_requests_waiting",]:
            time.sleep(0.05)
            metrics = server.metrics()
        assert metrics["vllm:kv_cache_usage_perc",] == 0
        assert metrics["vllm:num_preemptions_total",] > 0
        ended = {name[1]: n for name, n in metrics.items()
                 if name[0] == "vllm:request_success_total"}  # fmt: skip
        assert ended["error"] == 0 and ended["length"] >= counts["whole"]
        assert sum(ended.values()) >= sum(counts.values())
        assert httpx.get(f"{server.url}/health").status_code == 200
        asyncio.run(killed_under_load(server, port))
        assert server.process.wait(30) == 0
    assert not [line for line in server.log if "draining" not in line], server.log
