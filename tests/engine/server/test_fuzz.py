"""Whatever a client sends, it gets an answer or an error of one line; nothing of it is logged."""

import asyncio
import json
import logging

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.server.app import build_app
from engine.server.options import ServerOptions
from engine.server.state import ServerState
from tests.engine.server_testing import EchoBody

KEY = "secret-key-of-the-test"
# Long enough to be told from anything the server says by itself.
SECRET = "what-only-the-client-knows"


def make_app():
    options = ServerOptions(max_body_bytes=100_000, api_key=(KEY,))
    return build_app(ServerState(EchoBody(max_num_seqs=200, max_model_len=100), options))


APP = make_app()
SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", APP, headers={"Authorization": f"Bearer {KEY}"}
)


def check(response):
    """An answer, or an error in OpenAI's shape and one line."""
    assert response.status_code < 500 or response.status_code == 503
    if response.status_code >= 400:
        text = response.text
        assert "\n" not in text and "Traceback" not in text and 'File "' not in text
        error = json.loads(text)["error"]
        assert error["code"] == response.status_code
        assert error["message"] and len(error["message"]) <= 500
    assert response.headers["x-request-id"]


@SCHEMA.include(method="POST").parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck],
          phases=[Phase.explicit, Phase.generate])  # fmt: skip
def test_bodies_and_headers_made_from_the_schema(case):
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 50)
    check(case.call(headers={"Authorization": f"Bearer {KEY}"}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "max_tokens", "n", "stop", "stream", "stream_options", "temperature",
     "logprobs", "top_logprobs", "echo", "model", "seed", "tokens", "min_p", "user", "tools",
     "prompt_logprobs", "stop_token_ids", "kv_transfer_params", "logit_bias", "request_id"]
)  # fmt: skip
NEARLY = {"prompt": "a", "max_tokens": 3}
BODIES = st.one_of(
    st.binary(max_size=200),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(NAMES, JSON, max_size=5).map(lambda some: json.dumps(some).encode()),
    st.tuples(NAMES, JSON).map(lambda one: json.dumps({**NEARLY, one[0]: one[1]}).encode()),
)
PATHS = st.sampled_from(
    ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/sleep?level=x"]
)


async def answer(content, path, headers=None):
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        given_headers = {"Authorization": f"Bearer {KEY}", **(headers or {})}
        return await client.post(path, content=content, headers=given_headers)


@given(content=BODIES, path=PATHS)
@settings(max_examples=120, deadline=None)
def test_any_bytes_at_all(content, path):
    check(asyncio.run(answer(content, path)))


@given(
    value=st.binary(max_size=40),
    name=st.sampled_from(
        ["X-Request-Id", "Content-Type", "Authorization", "Content-Length", "Accept", "Cookie"]
    ),
)
@settings(max_examples=50, deadline=None)  # fmt: skip
def test_any_header(value, name):
    try:
        response = asyncio.run(answer(json.dumps(NEARLY), "/v1/completions", {name: value}))
    except (ValueError, UnicodeError):
        return  # the client itself refuses to send it
    check(response)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"prompt":' + "[" * 40_000 + "]" * 40_000 + "}",
        '{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}",
        '{"prompt": "a", "temperature": NaN}',
        '{"prompt": "a", "temperature": 1e999}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "\ud800"}'.encode("utf-8", "surrogatepass"),
        b'{"prompt": "\xff"}',
        '{"prompt": "a", "prompt": 5}',
        '{"prompt": "a", "n": 1000000}',
        '{"prompt": [[]]}',
        '{"prompt": []}',
        '{"prompt": ""}',
        '{"prompt": "a", "stop": ["", "b"]}',
        '{"prompt": "a", "max_tokens": true}',
        '{"prompt": "a", "seed": 9223372036854775808}',
        '{"prompt": "a", "request_id": "a\\nb"}',
    ],
    ids=lambda content: str(content)[:40],
)
def test_known_tricks_are_refused(content):
    response = asyncio.run(answer(content, "/v1/completions"))
    check(response)
    assert response.status_code == 400


def test_text_of_all_of_unicode_comes_back():
    text = "".join(map(chr, [0, 1, 0x7F, 0xE9, 0x4E2D, 0x200D, 0xFFFD, 0x1F600, 0x10FFFF]))
    asked = {"prompt": text, "max_tokens": len(text.encode())}
    assert asyncio.run(answer(json.dumps(asked), "/v1/completions")).json()["choices"][0][
        "text"
    ] == text  # fmt: skip


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer é"])
def test_a_wrong_key_opens_nothing(header):
    for path in ("/v1/completions", "/v1/models", "/tokenize", "/sleep", "/openapi.json", "/none"):
        response = asyncio.run(
            answer(json.dumps(NEARLY), path, {"Authorization": header.encode("latin-1")})
        )
        check(response)
        assert response.status_code == 401
    for path in ("/health", "/metrics"):
        response = asyncio.run(answer(b"", path, {"Authorization": header.encode("latin-1")}))
        assert response.status_code == 405  # they are open, and no POST


def test_nothing_that_a_client_sends_is_logged_or_told_to_others(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)

    def broken(*arguments, **options):
        raise RuntimeError(f"the tokenizer choked on {arguments}")

    state = APP.state.server
    for content in (
        {"prompt": SECRET},
        {"prompt": SECRET, SECRET: 1},
        {"prompt": "a", "stop": [SECRET], "temperature": SECRET},
        {"prompt": "a", "user": SECRET},
        {"messages": [{"role": SECRET, "content": [{"type": "text", "text": SECRET}]}]},
    ):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            asyncio.run(answer(json.dumps(content), path, {"X-Request-Id": "mine"}))
    monkeypatch.setattr(state.body.tokenizer, "encode", broken)
    response = asyncio.run(answer(json.dumps({"prompt": SECRET}), "/v1/completions"))
    assert response.status_code == 400 and SECRET not in response.text
    monkeypatch.setattr(state.body, "check", broken)
    response = asyncio.run(answer(json.dumps({"prompt": [5]}), "/v1/completions"))
    assert response.status_code == 500 and "\n" not in response.text
    ours = [one for one in caplog.records if one.name.startswith(("lockstep", "uvicorn"))]
    assert ours  # the failure was logged, with its place
    assert not [one for one in ours if SECRET in one.getMessage() or one.exc_info]
    assert SECRET not in asyncio.run(answer(b"", "/metrics")).text
