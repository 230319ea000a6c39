"""The front end over a body without a model: shapes of answers, streams and errors."""

import asyncio
import json

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
