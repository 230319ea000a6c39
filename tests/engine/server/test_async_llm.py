"""`AsyncLLM` and the engine's loop over a stand-in for the model: failures, aborts, deaths."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
import pytest
from facade_testing import Boom, StandIn, drawn
from llm_testing import write_tiny_model

from engine.async_llm.async_llm import AsyncLLM
from engine.async_llm.engine_process import serve_socket
from engine.core.errors import ConfigError, InputError, RequestRejected
from engine.kv_events.options import kv_events_options
from engine.sampling_params import SamplingParams
from engine.server.messages import GenerateRequest
from engine.server.protocol import BodyState
from tests.engine.serving import TINY_OPTIONS, running

OPTIONS = dict(
    block_size=4, num_kvcache_blocks=16, max_model_len=48, max_num_seqs=3, max_num_batched_tokens=16
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Slow(StandIn):
    """Steps that take a moment, so that what is sent meanwhile finds the engine at work."""

    def collect(self):
        time.sleep(0.002)
        return super().collect()


@contextlib.asynccontextmanager
async def engine(folder, faults=(), executor=Slow, **options):
    """A body whose engine runs in a thread, over a stand-in that fails where it is told to."""
    ours, theirs = socket.socketpair()
    made = []

    def make(options):
        made.append(executor(options, faults))
        return made[0]

    settings = {**OPTIONS, **options}
    with mock.patch("engine.llm.make_executor", make):
        thread = threading.Thread(target=serve_socket, args=(theirs, folder, settings))
        thread.start()
        body = AsyncLLM(folder, **settings)
        await body.connect(ours, folder)
    body.executor = made[0]
    try:
        yield body
    finally:
        await body.close()
        await asyncio.to_thread(thread.join)


def test_an_engine_whose_kv_events_have_no_endpoint_does_not_start(folder):
    async def check():
        ours, theirs = socket.socketpair()
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
            text = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
            events = kv_events_options(text, "sha256")
            with mock.patch("engine.llm.make_executor", lambda options: Slow(options, ())):
                serving = asyncio.to_thread(serve_socket, theirs, folder, OPTIONS, events)
                task = asyncio.create_task(serving)
                body = AsyncLLM(folder, kv_events=events, **OPTIONS)
                with pytest.raises(ConfigError, match=rf"endpoint='tcp://.*{port}'.*in use"):
                    await body.connect(ours, folder)
                assert await task == 1
            await body.close()

    asyncio.run(check())


def ask(name, length=5, **rest):
    settings = {"max_tokens": 8, "seed": 7, "ignore_eos": True, **rest}
    prompt = [*range(length)]
    now = time.perf_counter_ns()
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, arrival_ns=now, **settings)


async def collected(stream):
    """Tokens and the last delta."""
    tokens, last = [], None
    async for deltas in stream:
        for delta in deltas:
            tokens += delta.token_ids
            last = delta
    return tokens, last


def expected(length, count, seed=7):
    return [drawn(seed, length + place) for place in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_gets_its_own_tokens_and_one_end(folder, overlap):
    async def check():
        async with engine(folder, async_scheduling=overlap) as body:
            asks = [ask(str(n), 1 + n % 20, max_tokens=1 + n % 25, seed=n) for n in range(60)]
            found = await asyncio.gather(*(collected(body.generate(one)) for one in asks))
            for one, (tokens, last) in zip(asks, found, strict=True):
                length = len(one.prompt_token_ids)
                assert tokens == expected(length, one.max_tokens, one.seed)
                assert last.finish_reason == "length"
            assert body.num_open == 0

    asyncio.run(check())


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(folder):
    async def check():
        # One call in 37 fails; each step is two calls.
        faults = {number: Boom for number in range(37, 800, 37)}
        async with engine(folder, faults) as body:
            found = []
            for _ in range(5):
                asks = [ask(f"{len(found)}-{n}") for n in range(6)]
                found += await asyncio.gather(*(collected(body.generate(one)) for one in asks))
            reasons = [last.finish_reason for _, last in found]
            assert {*reasons} == {"length", "error"}
            for tokens, last in found:
                assert tokens == expected(5, len(tokens))
                assert ("planted" in (last.error or "")) == (last.finish_reason == "error")
            assert body.state is BodyState.READY and body.num_open == 0

    asyncio.run(check())


@pytest.mark.parametrize("overlap", [False, True])
def test_aborted_requests_leave_nothing_behind(folder, overlap):
    async def check():
        seen = []
        async with engine(folder, async_scheduling=overlap, debug=True) as body:
            body.on_step = seen.append
            for number in range(40):
                keep = asyncio.create_task(collected(body.generate(ask(f"keep{number}"))))
                gone = body.generate(ask(f"gone{number}", max_tokens=30))
                if number % 3:
                    await anext(gone)
                body.abort(f"gone{number}")
                tokens, _ = await keep
                assert tokens == expected(5, 8)
            while seen[-1].num_running or seen[-1].kv_cache_usage:
                await asyncio.sleep(0.01)
            body.abort("gone0")
            body.abort("never")
            assert body.num_open == 0

    asyncio.run(check())


def test_a_dead_engine_ends_everything_and_says_why(folder):
    class Dying(Slow):
        def collect(self):
            self.is_dead = self.is_dead or self._calls > 12
            if self.is_dead:
                raise Boom("the device is gone")
            return super().collect()

    async def check():
        async with engine(folder, executor=Dying) as body:
            streams = [body.generate(ask(str(n), max_tokens=30)) for n in range(5)]
            for stream in streams:
                _, last = await collected(stream)
                assert last.finish_reason == "error"
            await asyncio.wait_for(body.wait_for_death(), 10)
            assert body.state is BodyState.DEAD and "the device is gone" in body.failure
            _, last = await collected(body.generate(ask("late")))
            assert last.finish_reason == "error" and "gone" in last.error

    asyncio.run(check())


def test_a_rank_that_is_lost_while_nothing_runs_is_noticed(folder):
    async def check():
        async with engine(folder) as body:
            body.executor.find_loss = lambda: "rank 1 has ended with exit code -9"
            await asyncio.wait_for(body.wait_for_death(), 10)
            assert "rank 1" in body.failure

    asyncio.run(check())


def test_what_can_never_run_is_refused_before_it_is_sent(folder):
    async def check():
        async with engine(folder) as body:
            vocabulary = body.info.vocab_size
            for wrong, kind, word in (
                (ask("a", 48), RequestRejected, "max_model_len=48"),
                (ask("a", 0), RequestRejected, "0 tokens"),
                (ask("a", max_tokens=5, min_tokens=6), ConfigError, "min_tokens"),
                (ask("a", temperature=-1.0), ConfigError, "temperature"),
                (ask("a", priority=1), ConfigError, "policy priority"),
                (ask("a", extra={"kv_transfer_params": {}}), ConfigError, "kv_transfer_params"),
                (ask("a", stop_token_ids=[-1]), ConfigError, "stop_token_ids"),
            ):
                with pytest.raises(kind, match=word):
                    body.check(wrong)
            outside = GenerateRequest(request_id="a", prompt_token_ids=[vocabulary], arrival_ns=0)
            with pytest.raises(InputError, match="vocabulary"):
                body.check(outside)
            body.check(ask("a"))

    asyncio.run(check())


def test_a_model_that_cannot_be_loaded_is_the_same_error_as_without_a_server(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    async def check():
        body = AsyncLLM(str(tmp_path), device="cpu")
        try:
            with pytest.raises(InputError, match="architectures="):
                await body.start()
        finally:
            await body.close()

    asyncio.run(check())


def test_a_killed_engine_fails_the_health_and_ends_the_server_with_1(folder):
    asked = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}
    with running(folder, *TINY_OPTIONS) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=asked, timeout=60).status_code == 200
        with httpx.stream("POST", url, json={**asked, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert server.process.wait(30) == 1
    assert "lockstep: the engine is dead: its process has ended\n" in server.log
    assert not [line for line in server.log if "Traceback" in line]


def test_every_parameter_reaches_the_engine(folder):
    wanted = dict(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=5, max_tokens=4)
    wanted |= dict(min_tokens=2, ignore_eos=True, stop_token_ids=(30,))

    async def check():
        async with engine(folder) as body:
            with mock.patch("engine.async_llm.engine_process.SamplingParams") as made:
                made.side_effect = SamplingParams
                await collected(body.generate(ask("a", **wanted)))
            found = made.call_args.kwargs
            assert {name: found[name] for name in wanted if name != "stop_token_ids"} == {
                name: value for name, value in wanted.items() if name != "stop_token_ids"
            }
            assert tuple(found["stop_token_ids"]) == (30,) and found["detokenize"] is False

    asyncio.run(check())


def test_a_lower_priority_goes_first_where_the_policy_looks_at_it(folder):
    async def check():
        ends = []

        async def one(body, name, priority):
            await collected(body.generate(ask(name, priority=priority)))
            ends.append(name)

        async with engine(folder, policy="priority", max_num_seqs=1) as body:
            body.check(ask("x", priority=3))
            names = [("first", 0), ("late", 9), ("soon", -5), ("middle", 1)]
            await asyncio.gather(*(one(body, *pair) for pair in names))
        assert ends.index("soon") < ends.index("middle") < ends.index("late")

    asyncio.run(check())


@pytest.mark.nightly
def test_a_killed_rank_ends_an_idle_server_with_1(folder):
    with running(folder, *TINY_OPTIONS, "--tensor-parallel-size", "2") as server:
        asked = {"prompt": [5, 6], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200
        children = Path(f"/proc/{server.engine_pid()}/task/{server.engine_pid()}/children")
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        assert server.process.wait(30) == 1
    assert any("has ended with exit code -9" in line for line in server.log), server.log
