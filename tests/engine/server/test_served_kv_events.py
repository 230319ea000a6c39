"""KV events of served bodies: a subscriber learns the hashes that vLLM has for the same prompts."""

import asyncio
import hashlib
import json
import pickle
import time

import httpx
import msgspec
import pytest
import zmq

from engine.kv_events.options import kv_events_options
from engine.kv_events.wire import BlockStored, KvEventBatch
from engine.server.messages import GenerateRequest
from sim.run.deployment import deployment_with
from sim.twin.body import Twin
from sim.twin.options import TwinOptions
from tests.engine.serving import TINY_OPTIONS, running, write_tiny_with_text


def config_of(folder):
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{folder}/pub",
            "replay_endpoint": f"ipc://{folder}/replay",
        }
    )


def replayed(endpoint):
    """All events that a replica has published, by the way that asks for them."""
    context, found = zmq.Context(), []
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 10_000)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", bytes(8)])
    while (frames := dealer.recv_multipart())[3]:
        found.append(msgspec.msgpack.decode(frames[3], type=KvEventBatch))
    context.destroy(linger=0)
    return found


def hashes_of(token_ids, size, seed):
    """The hashes by their definition."""
    parent = hashlib.sha256(pickle.dumps(seed, 5)).digest()
    chain = []
    for start in range(0, len(token_ids) // size * size, size):
        block = (parent, tuple(token_ids[start : start + size]), None)
        parent = hashlib.sha256(pickle.dumps(block, 5)).digest()
        chain.append(int.from_bytes(parent[-8:], "big"))
    return chain


def stored(batches):
    return [
        one
        for batch in batches
        for event in batch.events
        if isinstance(event, BlockStored)
        for one in event.block_hashes
    ]


async def answer(twin, name, prompt):
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        arrival_ns=time.perf_counter_ns(),
        max_tokens=4,
        ignore_eos=True,
    )
    async for _ in twin.generate(request):
        pass


@pytest.mark.parametrize("engine", ["vllm-0.33", "nano-vllm"])
def test_each_replica_of_a_twin_publishes_what_it_caches(tmp_path, monkeypatch, engine):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    given = {"model": "qwen3-8b", "hardware": "h200", "engine": engine, "block_size": 16}
    fleet = deployment_with({**given, "replicas": 2, "router": "round-robin"})
    prompts = [[*range(100, 180)], [*range(500, 560)]]

    async def check():
        events = kv_events_options(config_of(tmp_path), "sha256")
        twin = Twin(fleet, TwinOptions(speed=200.0), kv_events=events)
        await twin.start()
        try:
            for name, prompt in enumerate(prompts):
                await answer(twin, str(name), prompt)
            ends = ("replay", "replay_dp1")
            return [await asyncio.to_thread(wait_for_events, tmp_path / end) for end in ends]
        finally:
            await twin.close()

    for rank, batches in enumerate(asyncio.run(check())):
        assert {batch.data_parallel_rank for batch in batches} == {rank}
        known = hashes_of(prompts[rank], 16, "7")
        assert stored(batches)[: len(known)] == known


def wait_for_events(path):
    """The events once there are any: publishing has a thread of its own."""
    deadline = time.monotonic() + 20
    while not (found := replayed(f"ipc://{path}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_a_served_engine_publishes_what_it_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    model = write_tiny_with_text(tmp_path / "model")
    options = (*TINY_OPTIONS, "--kv-events-config", config_of(tmp_path))
    with running(model, *options) as server:
        prompt = [*range(20, 43)]
        body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        batches = wait_for_events(tmp_path / "replay")
        assert stored(batches)[:5] == hashes_of(prompt, 4, "7")
        assert server.stop() == 0
