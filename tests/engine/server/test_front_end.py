"""The front end over a body without a model: shapes of answers, streams and errors."""

import asyncio
import json

from engine.arguments.parser import VerbParser
from engine.server.delta_stream import DeltaStream
from engine.server.messages import Delta
from engine.server.options import add_server_options, server_options
from tests.engine.server_testing import EchoBody, client_of


def run(check, body=None, **options):
    async def within():
        async with client_of(body or EchoBody(), **options) as client:
            await check(client)

    asyncio.run(within())


def events(response):
    lines = [line for line in response.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_has_openais_shape():
    async def check(client):
        asked = {"model": "echo", "prompt": "abc", "max_tokens": 5}
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert answer["choices"][0]["text"] == "abcab"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["object"] == "text_completion"

    run(check)


def test_a_stream_of_events_is_the_whole_text_in_parts():
    async def check(client):
        asked = {"prompt": "abc", "max_tokens": 5, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        found = events(await client.post("/v1/completions", json=asked))
        assert "".join(one["choices"][0]["text"] for one in found[:-1]) == "abcab"
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == 5

    run(check)


def test_a_chat_begins_with_its_role():
    async def check(client):
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        answer = (await client.post("/v1/chat/completions", json=asked)).json()
        assert answer["choices"][0]["message"]["content"] == "<use"
        found = events(await client.post("/v1/chat/completions", json={**asked, "stream": True}))
        assert found[0]["choices"][0]["delta"]["role"] == "assistant"

    run(check)


def test_a_wrong_body_is_one_line_of_json():
    async def check(client):
        for content in ("", "{", "[]", '{"prompt": 5}', '{"prompt": "a", "nonsense": 1}'):
            response = await client.post("/v1/completions", content=content)
            assert response.status_code == 400
            assert "\n" not in response.text
            assert response.json()["error"]["message"]

    run(check)


def test_a_full_queue_is_answered_503_with_retry_after_and_counted():
    async def check(client):
        asked = {"prompt": "abc", "max_tokens": 1000}
        first = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(6)]
        while client.server.num_open < 6:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", json=asked)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        several = await client.post("/v1/completions", json={**asked, "n": 7})
        assert several.status_code == 400  # it can never be taken
        text = (await client.get("/metrics")).text
        assert (
            'admission_rejections_total{model_name="echo",reason="max_num_queued_reqs"} 1' in text
        )
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)

    run(check, EchoBody(step_s=0.01), max_queue=2)


def test_a_draining_server_finishes_what_it_has_and_refuses_the_rest():
    async def check(client):
        asked = {"prompt": "abc", "max_tokens": 50}
        first = asyncio.create_task(client.post("/v1/completions", json=asked))
        while not client.server.num_open:
            await asyncio.sleep(0.001)
        client.server.is_draining = True
        assert (await client.post("/v1/completions", json=asked)).status_code == 503
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        await client.server.wait_until_idle()
        assert len((await first).json()["choices"][0]["text"]) == 50

    run(check, EchoBody(step_s=0.002))


def test_a_dead_body_fails_the_health_and_takes_nothing():
    async def check(client):
        client.server.body.die("rank 1 is gone")
        health = await client.get("/health")
        assert health.status_code == 503 and "rank 1" in health.text
        asked = {"prompt": "abc", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=asked)).status_code == 503

    run(check)


def test_a_sleeping_body_is_alive_and_not_ready():
    async def check(client):
        assert (await client.post("/sleep?level=1")).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.post("/wake_up")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.post("/sleep?level=9")).status_code == 400

    run(check)


def test_a_stop_string_that_only_the_front_end_sees_ends_the_body_too():
    async def check(client):
        asked = {"prompt": "abcX", "max_tokens": 900, "stop": ["X", "no"]}
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={**asked, "stream": stream})
            choice = events(answer)[-1] if stream else answer.json()
            assert choice["choices"][0]["finish_reason"] == "stop"
            assert choice["choices"][0]["stop_reason"] == "X"
        assert len(client.server.body.aborted) == 2 and not client.server.num_open
        assert (
            'finished_reason="stop",model_name="echo"} 2' in client.server.metrics.text().decode()
        )

    run(check)


def test_usage_counts_the_prompt_of_n_choices_once():
    async def check(client):
        asked = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 4}
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert [one["text"] for one in answer["choices"]] == ["abca", "abca", "dede", "dede"]
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 16

    run(check)


def test_fields_that_ask_for_nothing_pass_and_others_are_refused_by_name():
    async def check(client):
        asked = {"prompt": "a", "max_tokens": 1}
        for name, neutral, asking in (
            ("frequency_penalty", 0.0, 0.5),
            ("logit_bias", {}, {"5": 1}),
            ("response_format", {"type": "text"}, {"type": "json_object"}),
            ("tools", [], [{"type": "function"}]),
            ("best_of", 1, 4),
            ("suffix", None, "x"),
        ):
            good = await client.post("/v1/completions", json={**asked, name: neutral})
            bad = await client.post("/v1/completions", json={**asked, name: asking})
            assert (good.status_code, bad.status_code) == (200, 400), name
            assert bad.json()["error"]["param"] == name
        assert (await client.post("/v1/completions", json={**asked, "user": "u"})).is_success

    run(check)


def test_what_would_be_cut_short_at_the_models_limit_is_refused():
    async def check(client):
        for asked, status in (
            ({"prompt": "abc", "max_tokens": 7}, 200),
            ({"prompt": "abc", "max_tokens": 8}, 400),
            ({"prompt": "abc", "max_tokens": None}, 200),
            ({"prompt": "abcdefghij", "max_tokens": 1}, 400),
        ):
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == status, asked
        assert answer.json()["error"]["message"] == "10 tokens"

    run(check, EchoBody(max_model_len=10))


def test_requests_are_logged_where_that_is_asked_and_without_their_text(caplog):
    async def check(client):
        asked = {"prompt": "a secret", "max_tokens": 3, "request_id": "mine"}
        await client.post("/v1/completions", json=asked)

    caplog.set_level("INFO", logger="lockstep.server")
    run(check)
    assert not caplog.records
    run(check, log_requests=True)
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("cmpl-mine-0: 8 prompt tokens, 0 cached, 3 output tokens, length, ttft")
    assert "secret" not in line


def test_keys_come_from_the_command_line_or_else_from_the_environment(monkeypatch):
    def keys(*argv):
        parser = VerbParser("serve", "")
        add_server_options(parser)
        return server_options(parser.parse(argv)).api_key

    assert keys() == ()
    monkeypatch.setenv("LOCKSTEP_API_KEY", "one two")
    assert keys() == ("one", "two")
    assert keys("--api-key", "three") == ("three",)


def test_every_field_reaches_the_body_under_its_own_name():
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "priority": -2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }

    async def check(client):
        seen = []
        client.server.body.check = seen.append
        await client.post("/v1/completions", json={**asked, "prompt": "abc"})
        chat = {**asked, "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 9}
        del chat["max_tokens"]
        messages = [{"role": "user", "content": "hi"}]
        await client.post("/v1/chat/completions", json={**chat, "messages": messages})
        assert len(seen) == 2
        for request in seen:
            extra = {"kv_transfer_params": asked["kv_transfer_params"]}
            assert request.extra == extra
            for name, value in asked.items():
                if name not in extra:
                    found = getattr(request, name)
                    assert (list(found) if isinstance(found, tuple) else found) == value, name
        assert seen[0].prompt_text == "abc" and seen[0].prompt_token_ids == [97, 98, 99]

    run(check)


class Failing(EchoBody):
    """Ends every request with an error after its second token."""

    def generate(self, request):
        stream = DeltaStream()
        for place in range(2):
            stream.put(Delta(token_ids=[97], time_ns=place, scheduled_ns=0))
        error = "the step failed: OutOfMemoryError"
        stream.put(Delta(token_ids=(), time_ns=2, finish_reason="error", error=error))
        return stream


def test_a_failed_step_is_500_or_an_event_of_the_stream():
    async def check(client):
        asked = {"prompt": "abc", "max_tokens": 9}
        whole = await client.post("/v1/completions", json=asked)
        assert whole.status_code == 500 and "OutOfMemory" in whole.json()["error"]["message"]
        streamed = await client.post("/v1/completions", json={**asked, "stream": True})
        found = events(streamed)
        assert found[-1]["error"]["code"] == 500 and streamed.status_code == 200
        assert client.server.num_open == 0
        assert (
            'finished_reason="error",model_name="echo"} 2' in client.server.metrics.text().decode()
        )

    run(check, Failing())
