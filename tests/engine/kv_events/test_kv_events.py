"""KV events: vLLM's hashes and messages, and a mirror of the prefix cache made from them."""

import dataclasses
import json
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.core import ConfigError, KernelConfig, Prompt, Request, Scheduler
from engine.kv_events.block_hash import block_hasher
from engine.kv_events.notes import BlockNotes, Translator
from engine.kv_events.options import endpoint_of, kv_events_options
from engine.kv_events.publisher import KvPublisher
from engine.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from tests.places import REPOSITORY

VLLM = json.loads((Path(__file__).parent / "vllm_0_33.json").read_text())
BLOCK_SIZE = 4


def scheduler_of(num_blocks=12, **options):
    settings = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_model_len": 40}
    settings |= {"max_num_seqs": 3, "max_num_batched_tokens": 16, **options}
    return Scheduler(KernelConfig(**settings))


def run_steps(scheduler, after_step, token=0):
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.commit(plan, [token + plan.step % 3] * len(plan.sampled_ids))
        after_step()


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("row", VLLM["chains"], ids=lambda row: f"{row['algorithm']}-{row['seed']}")
def test_block_hashes_are_those_of_vllm(row, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED")
    if row["seed"] is not None:
        monkeypatch.setenv("PYTHONHASHSEED", row["seed"])
    size = len(VLLM["blocks"][0])
    scheduler = scheduler_of(block_size=size, max_model_len=80, max_num_batched_tokens=80)
    keys = (("salt", row["salt"]),) if row["salt"] else ()
    prompt = [token for block in VLLM["blocks"] for token in block]
    notes = BlockNotes()
    scheduler.observe_blocks(notes)
    scheduler.add(Request("a", Prompt(prompt), 1, extra_keys=keys))
    run_steps(scheduler, lambda: None)
    hasher = dataclasses.replace(block_hasher(row["algorithm"]), as_integers=False)
    (stored,) = Translator(hasher, size).events(notes.take())
    assert [one.hex() for one in stored.block_hashes] == row["chain"]
    assert stored.token_ids == prompt
    assert stored.parent_block_hash is None
    assert stored.extra_keys == [(row["salt"],) if row["salt"] else None, None, None]


def test_published_integers_are_the_low_64_bits(monkeypatch):
    digest = bytes(range(32))
    assert block_hasher("sha256").external(digest) == int.from_bytes(digest[-8:], "big")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert block_hasher("sha256").external(digest) == digest
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "yes")
    with pytest.raises(ConfigError, match="must be 0 or 1"):
        block_hasher("sha256")


def test_xxhash_has_a_secret_seed_where_none_is_given(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED")
    assert block_hasher("xxhash").none_hash != block_hasher("xxhash").none_hash


def test_messages_are_those_of_vllm():
    keywords = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    salted, plain = [("a",), None], [None]
    events = [
        BlockStored([1, 2**64 - 1], None, [5] * 32, 16, None, "GPU", None, salted, **keywords),
        BlockStored([b"x" * 32], b"y" * 32, [6] * 16, 16, None, "GPU", None, plain, **keywords),
        BlockRemoved([1], "GPU", 0),
        AllBlocksCleared(),
    ]
    ours = msgspec.msgpack.encode(KvEventBatch(1700000000.25, events, 0))
    theirs = msgspec.msgpack.decode(bytes.fromhex(VLLM["batch"]))
    assert msgspec.msgpack.decode(ours) == theirs


class Mirror:
    """What a router knows: copies by hash, from events alone."""

    def __init__(self):
        self.copies = {}

    def take(self, event):
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            return
        step = 1 if isinstance(event, BlockStored) else -1
        if step > 0:
            parent = event.parent_block_hash
            assert parent is None or self.copies.get(parent), "a prefix is there before its end"
        for one in event.block_hashes:
            self.copies[one] = self.copies.get(one, 0) + step
            assert self.copies[one] >= 0, "nothing is removed that was not stored"
            if not self.copies[one]:
                del self.copies[one]


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_a_mirror_of_the_events_is_the_prefix_cache(policy):
    drawn = random.Random(5)
    scheduler = scheduler_of(policy=policy)
    notes, mirror = BlockNotes(), Mirror()
    scheduler.observe_blocks(notes)
    translator = Translator(block_hasher("sha256"), BLOCK_SIZE)
    removed = 0

    def compare():
        nonlocal removed
        for event in translator.events(notes.take()):
            removed += isinstance(event, BlockRemoved)
            mirror.take(event)
        nodes = scheduler.state.manager.index.nodes()
        assert sum(mirror.copies.values()) == sum(len(node.blocks) for node in nodes)
        assert len(translator) == len(mirror.copies) == sum(1 for node in nodes if node.blocks)

    for number in range(150):
        prompt = [drawn.randrange(2) for _ in range(drawn.randint(1, 26))]
        scheduler.add(Request(str(number), Prompt(prompt), drawn.randint(1, 12)))
        if number % 4 == 3:
            plan = scheduler.schedule()
            if number % 8 == 3:
                scheduler.discard(plan)
            else:
                scheduler.commit(plan, [1] * len(plan.sampled_ids))
            compare()
            run_steps(scheduler, compare)
    assert removed > 100


def test_an_observer_changes_no_decision():
    def plans(watched):
        drawn, scheduler, seen = random.Random(9), scheduler_of(), []
        if watched:
            scheduler.observe_blocks(BlockNotes())
        for number in range(40):
            prompt = [drawn.randrange(2) for _ in range(drawn.randint(1, 26))]
            scheduler.add(Request(str(number), Prompt(prompt), 6))
        while scheduler.has_work:
            plan = scheduler.schedule()
            seen.append((plan.sampled_ids, plan.num_tokens, plan.preempted))
            scheduler.commit(plan, [1] * len(plan.sampled_ids))
        return seen

    assert plans(False) == plans(True)


def test_blocks_that_nobody_else_can_hit_are_left_out():
    scheduler, notes = scheduler_of(), BlockNotes()
    scheduler.observe_blocks(notes)
    own = (("prompt_logprobs", "a"),)
    scheduler.add(Request("a", Prompt(range(12)), 1, extra_keys=own))
    run_steps(scheduler, lambda: None)
    assert notes._notes
    assert Translator(block_hasher("sha256"), BLOCK_SIZE).events(notes.take()) == []


@contextmanager
def publishing(tmp_path, scheduler, **given):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/pub",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@pod",
        **given,
    }
    options = kv_events_options(json.dumps(config), "sha256")
    publisher = KvPublisher(options, scheduler)
    context = zmq.Context()
    try:
        yield publisher, context, config
    finally:
        publisher.close()
        context.destroy(linger=0)


def subscribed(context, publisher, endpoint):
    """A subscriber that is connected: PUB says so to nobody, so the socket is watched."""
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
    sub.setsockopt(zmq.RCVTIMEO, 10_000)
    monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    sub.connect(endpoint)
    assert monitor.poll(10_000)
    sub.disable_monitor()
    monitor.close()
    time.sleep(0.1)  # the subscription follows the handshake
    return sub


def replayed(context, endpoint, start):
    """What a client gets; a REQ socket would give the first answer only."""
    found = []
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 10_000)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    while True:
        empty, topic, number, payload = dealer.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            assert (topic, payload) == (b"", b"")
            break
        found.append((int.from_bytes(number, "big"), payload))
    dealer.close()
    return found


def test_subscribers_get_each_step_and_replays_what_they_missed(tmp_path):
    scheduler = scheduler_of()
    with publishing(tmp_path, scheduler, buffer_steps=3) as (publisher, context, config):
        sub = subscribed(context, publisher, config["endpoint"])
        scheduler.add(Request("a", Prompt(range(20)), 16))
        run_steps(scheduler, publisher.flush)
        received = []
        for expected in range(5):
            topic, number, payload = sub.recv_multipart()
            assert topic == b"kv@pod"
            assert int.from_bytes(number, "big") == expected
            batch = msgspec.msgpack.decode(payload, type=KvEventBatch)
            assert batch.data_parallel_rank == 0
            assert abs(batch.ts - time.time()) < 60
            received.append((expected, payload))
        blocks = sum(
            len(event.block_hashes)
            for _, payload in received
            for event in msgspec.msgpack.decode(payload, type=KvEventBatch).events
        )
        assert blocks == 8  # 35 computed tokens
        last = received[-1][0]
        assert replayed(context, config["replay_endpoint"], 0) == received[-3:]
        assert replayed(context, config["replay_endpoint"], last) == received[-1:]
        assert replayed(context, config["replay_endpoint"], last + 1) == []


def test_the_example_of_the_page_prints_a_batch(tmp_path):
    page = (REPOSITORY / "docs/server.md").read_text()
    (text,) = [
        one for one in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "zmq" in one
    ]
    scheduler = scheduler_of()
    with publishing(tmp_path, scheduler) as (publisher, _, config):
        text = text.replace("tcp://127.0.0.1:5557", config["endpoint"])
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            # Until the subscriber is there, nobody hears the batches.
            scheduler.add(Request("a", Prompt([publisher._next + 1] * 8), 1))
            run_steps(scheduler, publisher.flush)
            time.sleep(0.05)
        process.kill()
        answer = process.communicate()[0]
        assert re.fullmatch(r"\d+ \[.*'BlockStored'\]\n", answer), answer


def test_a_new_scheduler_means_that_all_is_cleared(tmp_path):
    scheduler = scheduler_of()
    with publishing(tmp_path, scheduler) as (publisher, context, config):
        sub = subscribed(context, publisher, config["endpoint"])
        publisher.follow(scheduler)
        publisher.follow(scheduler_of())
        publisher.flush()
        batch = msgspec.msgpack.decode(sub.recv_multipart()[2], type=KvEventBatch)
        assert batch.events == [AllBlocksCleared()]


def test_an_endpoint_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"kv_events_config\.endpoint=.*{port}.*in use"),
            publishing(tmp_path, scheduler_of(), endpoint=f"tcp://*:{port}"),
        ):
            pass


def test_replicas_publish_at_ports_of_their_own():
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of("ipc:///a/b", 2) == "ipc:///a/b_dp2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not its JSON"),
        ('{"endpoints": "a"}', "unknown field `endpoints`"),
        ('{"buffer_steps": 0}', "buffer_steps=0: must be from 1"),
        ('{"publisher": "kafka"}', "must be zmq or null"),
        ('{"endpoint": "http://a:1"}', "must be tcp://HOST:PORT or ipc://PATH"),
        ('{"replay_endpoint": "tcp://a:70000"}', "replay_endpoint="),
    ],
)
def test_a_wrong_config_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        kv_events_options(text, "sha256")


def test_nothing_is_published_unless_it_is_asked_for():
    assert kv_events_options(None, "sha256") is None
    assert kv_events_options("{}", "sha256") is None
    off = '{"enable_kv_cache_events": true, "publisher": "null"}'
    assert kv_events_options(off, "sha256") is None


def test_events_need_the_prefix_cache(tmp_path):
    scheduler = scheduler_of(enable_prefix_caching=False)
    with (
        pytest.raises(ConfigError, match="needs enable_prefix_caching"),
        publishing(tmp_path, scheduler),
    ):
        pass
