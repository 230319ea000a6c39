"""The twin: the times of `sim run`, made-up answers that can be relied on, faults on demand."""

import asyncio
import contextlib

import pytest

from engine.core import ConfigError, InputError
from engine.server.messages import GenerateRequest
from engine.server.protocol import BodyState
from engine.steplog.api import LogHeader, StepLogWriter
from engine.steplog.replay import main as replay_main
from sim.cluster.clock import Clock
from sim.cluster.router import make_router
from sim.commands.serve import serve_main
from sim.run.deployment import build, deployment_with
from sim.run.run import RunPlan, run_plan
from sim.twin.answers import AnswerMaker, AnswerOptions
from sim.twin.body import Twin
from sim.twin.cluster import TwinCluster
from sim.twin.faults import Faults, parse_fail_at, parse_slow
from sim.twin.options import TwinOptions
from sim.twin.pacing import Pace
from sim.twin.tokens import PieceTokenizer
from sim.workloads.generators import generate, preset
from tests.engine.server_testing import client_of

FAST = 200.0


def deployment(**given):
    return deployment_with({"model": "qwen3-8b", "hardware": "h200", **given})


def request_of(workload, row):
    kernel_request = workload.request(row)
    return GenerateRequest(
        request_id=str(row),
        prompt_token_ids=kernel_request.prompt,
        arrival_ns=workload.arrival_ns[row],
        max_tokens=kernel_request.max_tokens,
        ignore_eos=True,
    )


@pytest.mark.parametrize("engine", ["vllm-0.33", "vllm-0.25", "nano-vllm"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_token_comes_when_a_simulated_run_has_it(engine, replicas):
    given = {"engine": engine, "replicas": replicas, "num_kv_blocks": 400, "cost": "roofline"}
    fleet = deployment(**given, router="least-tokens")
    parts = build(fleet, 0)
    spec = preset("poisson", rate=12.0 * replicas, num_requests=60)
    workload = generate("poisson", spec, 0)
    run = run_plan(RunPlan(workload, fleet), parts)

    pace = Pace(Clock())
    pace._origin_ns = 0  # simulated and wall time are the same numbers
    times = {}

    def put(request_id, delta):
        times.setdefault(int(request_id), []).append(delta)

    parts = build(fleet, 0)
    router = make_router("least-tokens")
    cluster = TwinCluster(parts, router, pace, Faults(), put, lambda stats: None)
    maker = AnswerMaker(PieceTokenizer(1000), 1000, AnswerOptions())
    for row in range(len(workload)):
        cluster.add(request_of(workload, row), maker, None)
    pace.clock.run()
    ledger = run.result.ledger
    assert sum(ledger.preemptions) > 0 or replicas > 1 or engine == "nano-vllm"
    for row, deltas in times.items():
        assert deltas[0].time_ns == ledger.first_token_ns[row]
        assert deltas[-1].time_ns == ledger.finish_ns[row]
        assert len(deltas) == ledger.output_tokens[row] == workload.output_tokens[row]
        assert deltas[-1].num_preemptions == ledger.preemptions[row]
        assert deltas[0].engine == ledger.replica[row]
    assert len(times) == len(workload)
    assert cluster.num_open == 0


def twin(faults=None, answers=None, log=None, speed=FAST, **given):
    options = TwinOptions(
        speed=speed, faults=faults or Faults(), answers=answers or AnswerOptions()
    )
    return Twin(deployment(**given), options, log=log)


async def served(body, action):
    async with client_of(body) as client:
        await body.start()
        try:
            return await action(client)
        finally:
            await body.close()


def test_a_conversation_hits_the_prefix_that_the_twin_itself_has_answered():
    async def action(client):
        messages = [{"role": "user", "content": "tell me about rivers " * 40}]
        for _ in range(2):
            got = await client.post(
                "/v1/chat/completions", json={"messages": messages, "max_tokens": 64}
            )
            message = got.json()["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": message["content"].strip()},
                {"role": "user", "content": "and then?"},
            ]
        return got.json()["usage"]

    usage = asyncio.run(served(twin(), action))
    # The first prompt and the answer, in whole blocks of 16.
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16 - 32
    assert usage["completion_tokens"] == 64


def test_the_same_request_gets_the_same_words_and_a_seed_gets_others():
    async def action(client):
        async def text(**fields):
            got = await client.post(
                "/v1/completions", json={"prompt": "a b c", "max_tokens": 9, **fields}
            )
            return got.json()["choices"][0]["text"]

        return await text(), await text(), await text(seed=7)

    first, again, seeded = asyncio.run(served(twin(), action))
    assert first == again != seeded


def test_without_a_limit_lengths_are_drawn_and_end_as_a_model_would():
    async def action(client):
        found = []
        for number in range(40):
            messages = [{"role": "user", "content": f"question {number}"}]
            body = (await client.post("/v1/chat/completions", json={"messages": messages})).json()
            found.append((body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]))
        return found

    answers = AnswerOptions(output_tokens_mean=50, output_tokens_cv=0.5)
    found = asyncio.run(served(twin(answers=answers), action))
    assert {reason for _, reason in found} == {"stop"}
    assert 35 < sum(count for count, _ in found) / 40 < 65
    assert len({count for count, _ in found}) > 10


def test_echo_gives_the_prompt_back():
    async def action(client):
        fields = {"prompt": "say this again please", "max_tokens": 90}
        got = await client.post("/v1/completions", json=fields)
        return got.json()["choices"][0]

    choice = asyncio.run(served(twin(answers=AnswerOptions(mode="echo")), action))
    assert (choice["text"], choice["finish_reason"]) == ("say this again please", "stop")


@pytest.mark.parametrize("engine", ["vllm-0.33", "vllm-0.25", "nano-vllm"])
def test_its_step_log_replays_with_aborts_in_it(tmp_path, engine):
    fleet = {"engine": engine, "num_kv_blocks": 120, "replicas": 2, "cost": "roofline"}
    parts = build(deployment(**fleet), 0)
    path = tmp_path / "steps.jsonl"
    header = LogHeader(writer="sim", kernel=parts.kernel, num_replicas=2)

    async def action(client):
        async def one(number):
            goes = number % 3 == 0
            json = {"prompt": f"{number} words " * 30, "max_tokens": 1800 if goes else 200}
            call = client.post("/v1/completions", json={**json, "ignore_eos": True})
            # Those that are given up wait, run, or have ended, as it comes.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call, 0.1 + 0.01 * number if goes else 60)

        await asyncio.gather(*map(one, range(24)))
        await client.server.wait_until_idle()
        while client.server.body._cluster.num_open:
            await asyncio.sleep(0.01)

    with StepLogWriter(path, header) as log:
        asyncio.run(served(twin(log=log, speed=20.0, **fleet), action))
    assert replay_main([str(path)]) == 0
    text = path.read_text()
    assert '"abort"' in text


def test_a_failed_replica_ends_its_requests_and_the_other_goes_on():
    async def action(client):
        json = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        calls = [client.post("/v1/completions", json=json) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        late = await client.post("/v1/completions", json={"prompt": "y", "max_tokens": 3})
        return sorted(answer.status_code for answer in answers), late.status_code

    faults = Faults(fail_at=parse_fail_at(["1@10"]))
    assert asyncio.run(served(twin(faults, speed=20.0, replicas=2), action)) == (
        [200, 200, 500, 500],
        200,
    )


def test_the_twin_is_dead_when_all_replicas_have_failed():
    async def action(client):
        json = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=json)
        await asyncio.wait_for(client.server.body.wait_for_death(), 5)
        await client.post("/sleep")
        await client.post("/wake_up")
        health = await client.get("/health")
        return answer.status_code, health.status_code, client.server.body.state

    faults = Faults(fail_at=parse_fail_at(["2"]))
    assert asyncio.run(served(twin(faults), action)) == (500, 503, BodyState.DEAD)


def test_a_slow_replica_takes_longer_by_its_factor():
    async def decode_ns(body):
        await body.start()
        stream = body.generate(
            GenerateRequest(request_id="x", prompt_token_ids=[1, 2], arrival_ns=0, max_tokens=50)
        )
        deltas = [delta async for some in stream for delta in some]
        await body.close()
        return deltas[-1].time_ns - deltas[0].time_ns

    given = {"cost": "constant:5", "speed": 100.0}
    fast = asyncio.run(decode_ns(twin(**given)))
    slow = asyncio.run(decode_ns(twin(Faults(slow=parse_slow(["0:20"])), **given)))
    assert slow == pytest.approx(20 * fast, rel=0.01)


@pytest.mark.parametrize("engine", ["vllm-0.33", "vllm-0.25", "nano-vllm"])
def test_a_replica_that_is_hardly_slower_is_never_faster(engine):
    """So a slow replica has kept the host of its cost model, and the time between its steps."""

    def times(faults):
        parts = build(deployment(engine=engine), 0)
        pace = Pace(Clock())
        pace._origin_ns = 0
        found = []
        cluster = TwinCluster(
            parts,
            make_router("round-robin"),
            pace,
            faults,
            lambda request_id, delta: found.append(delta.time_ns),
            lambda stats: None,
        )
        maker = AnswerMaker(PieceTokenizer(1000), 1000, AnswerOptions())
        for number in range(3):
            prompt = range(10 * number, 10 * number + 700)
            request = GenerateRequest(
                request_id=str(number), prompt_token_ids=prompt, arrival_ns=number, max_tokens=30
            )
            cluster.add(request, maker, None)
        pace.clock.run()
        return found

    as_is, slower = times(Faults()), times(Faults(slow=((0, 1.001),)))
    assert len(as_is) == len(slower) == 90
    assert all(after >= before for before, after in zip(as_is, slower, strict=True))
    assert sum(slower) > sum(as_is)
    assert sum(slower) < 1.01 * sum(as_is)


def test_errors_come_at_their_rate():
    async def codes(client):
        json = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        return [(await client.post("/v1/completions", json=json)).status_code for _ in range(3)]

    assert asyncio.run(served(twin(), codes)) == [200, 200, 200]
    assert asyncio.run(served(twin(Faults(error_rate=1.0)), codes)) == [500, 500, 500]


def test_time_stands_still_while_it_sleeps():
    async def action(client):
        await client.post("/sleep")
        call = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        )
        done, _ = await asyncio.wait([call], timeout=0.2)
        await client.post("/wake_up")
        return bool(done), (await call).status_code

    assert asyncio.run(served(twin(), action)) == (False, 200)


@pytest.mark.parametrize(
    ("prompt", "status", "says"),
    [
        ([999_999], 400, "151936"),
        ([1] * 5000, 400, "max_model_len=4096"),
        ("", 400, "prompt"),
    ],
)
def test_what_can_never_run_is_refused_with_the_limit(prompt, status, says):
    async def action(client):
        return await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})

    answer = asyncio.run(served(twin(max_model_len=4096), action))
    assert answer.status_code == status
    assert says in answer.text


def test_pieces_have_equal_ids_everywhere_and_come_back_as_their_text():
    text = "The rivers, 12345 of them: naïve café 日本 <|im_end|>\n  ok"
    ids = PieceTokenizer(151_936).encode(text, add_special_tokens=False)
    other = PieceTokenizer(151_936)
    assert other.encode(text, add_special_tokens=False) == ids
    assert other.decode(ids, skip_special_tokens=True) == text
    assert max(ids) < 151_936


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["qwen3-8b", "--fail-at", "x"],
        ["qwen3-8b", "--fail-at", "3@5"],
        ["qwen3-8b", "--slow", "0"],
        ["qwen3-8b", "--speed", "0"],
        ["qwen3-8b", "--model", "qwen3-8b"],
        ["qwen3-8b", "--tokenizer", "nowhere"],
    ],
)
def test_wrong_options_are_refused_before_anything_is_served(words, tmp_path):
    log = tmp_path / "log"
    with pytest.raises((ConfigError, InputError)):
        serve_main([*words, "--body", "sim", "--port", "0", "--step-log", str(log)])
    assert not log.exists()
