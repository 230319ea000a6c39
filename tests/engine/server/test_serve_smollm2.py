"""SmolLM2 behind `lockstep serve`, asked by the openai client: what `LLM` says, over HTTP."""

import os
import re
import subprocess
import sys

import httpx
import openai
import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.places import REPOSITORY

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
CHAT = [{"role": "user", "content": "What is the capital of Italy?"}]


@pytest.fixture
def server(smollm2_server):
    return smollm2_server


@pytest.fixture(scope="module")
def client(smollm2_server):
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(smollm2_folder):
    """What the engine says without a server: by prompt, and for the chat."""
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
    options = {"device": "cpu", "num_kvcache_blocks": 256, "max_model_len": 512}
    with LLM(str(smollm2_folder), **options) as llm:
        outputs = llm.generate([*PROMPTS, CHAT], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def test_greedy_completions_are_those_of_the_engine(client, expected):
    for prompt, output in zip(PROMPTS, expected, strict=False):
        answer = client.completions.create(
            model="smollm2", prompt=prompt, temperature=0, max_tokens=16, logprobs=2
        )
        choice = answer.choices[0]
        assert choice.text == output.text
        assert choice.finish_reason == output.finish_reason
        wanted = [
            place[token_id].logprob
            for place, token_id in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert choice.logprobs.token_logprobs == pytest.approx(wanted, abs=1e-4)
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
        assert answer.usage.completion_tokens == len(output.token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(output.token_ids)


def test_a_list_of_prompts_and_ids_give_the_same_in_their_order(client, expected, server):
    answer = client.completions.create(
        model="smollm2", prompt=PROMPTS, temperature=0, max_tokens=16
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [one.text for one in expected[:3]]
    ids = [httpx.post(f"{server.url}/tokenize", json={"prompt": one}).json() for one in PROMPTS]
    answer = client.completions.create(
        model="smollm2", prompt=[one["tokens"] for one in ids], temperature=0, max_tokens=16
    )
    assert [choice.text for choice in answer.choices] == [one.text for one in expected[:3]]
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": ids[0]["tokens"]}).json()
    assert back == {"prompt": PROMPTS[0]}


def test_a_chat_and_its_stream_say_the_same_with_the_same_logprobs(client, expected):
    asked = dict(model="smollm2", messages=CHAT, temperature=0, max_completion_tokens=16)
    asked |= dict(logprobs=True, top_logprobs=2)
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected[3].text
    assert answer.choices[0].message.role == "assistant"
    whole = answer.choices[0].logprobs.content
    assert all(len(one.top_logprobs) == 2 for one in whole)
    chunks = [*client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )]  # fmt: skip
    texts = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(texts) == expected[3].text
    parts = [one.choices[0].logprobs for one in chunks if one.choices]
    streamed = [entry for part in parts if part for entry in part.content]
    assert [one.token for one in streamed] == [one.token for one in whole]
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert len({one.id for one in chunks}) == 1


def test_a_stop_string_cuts_the_text_streamed_or_not(client, expected):
    text = expected[0].text
    stop = text[5:8]
    asked = dict(model="smollm2", prompt=PROMPTS[0], temperature=0, max_tokens=16, stop=[stop])
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    chunks = [*client.completions.create(**asked, stream=True)]
    assert "".join(one.choices[0].text for one in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_echo_with_logprobs_gives_those_of_the_prompt_too(client):
    asked = dict(model="smollm2", prompt=PROMPTS[0], temperature=0, logprobs=1, echo=True)
    alone = client.completions.create(**asked, max_tokens=0).choices[0]
    assert alone.text == PROMPTS[0]
    longer = client.completions.create(**asked, max_tokens=2).choices[0]
    count = len(alone.logprobs.tokens)
    assert longer.text.startswith(PROMPTS[0]) and len(longer.logprobs.tokens) == count + 2
    assert longer.logprobs.token_logprobs[0] is None
    assert longer.logprobs.token_logprobs[1:count] == pytest.approx(
        alone.logprobs.token_logprobs[1:], abs=1e-4
    )
    assert longer.logprobs.text_offset[:3] == [0, 3, 11]
    assert longer.prompt_logprobs[0] is None and len(longer.prompt_logprobs) == count


def test_n_choices_of_a_seed_differ_and_come_again(client):
    asked = dict(model="smollm2", prompt="A", n=3, seed=7, temperature=1.5, max_tokens=8)
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len({*texts}) == 3
    assert [choice.text for choice in second.choices] == texts
    assert first.usage.prompt_tokens == 1 and first.usage.completion_tokens == 24
    chunks = [*client.completions.create(**asked, stream=True)]
    for index, text in enumerate(texts):
        parts = [one.choices[0].text for one in chunks if one.choices[0].index == index]
        assert "".join(parts) == text


def test_ends_are_governed_by_ignore_eos_min_tokens_and_stop_ids(client, expected):
    ids = list(expected[0].token_ids)
    stop = ids[3]
    extra = {"stop_token_ids": [stop], "return_token_ids": True}
    asked = dict(model="smollm2", prompt=PROMPTS[0], temperature=0, max_tokens=16)
    found = client.completions.create(**asked, extra_body=extra).choices[0]
    assert found.token_ids == ids[: ids.index(stop) + 1] and found.stop_reason == stop
    extra["min_tokens"] = 8
    found = client.completions.create(**asked, extra_body=extra).choices[0]
    assert len(found.token_ids) > 8


def test_errors_have_their_status_and_name_the_field(client, server):
    cases = [
        (dict(model="gpt-5", prompt="a"), openai.NotFoundError, "model"),
        (dict(model="smollm2", prompt="a", temperature=-1), openai.BadRequestError, "temperature"),
        (dict(model="smollm2", prompt="a", logit_bias={"5": 1}), openai.BadRequestError, "logit"),
        (dict(model="smollm2", prompt=[10**9]), openai.BadRequestError, "vocabulary"),
        (dict(model="smollm2", prompt="a " * 600), openai.BadRequestError, "at most 511"),
        (dict(model="smollm2", prompt="a", extra_body={"top_q": 1}), openai.BadRequestError,
         "did you mean"),
        (dict(model="smollm2", prompt="a", extra_body={"priority": 1}), openai.BadRequestError,
         "policy priority"),
    ]  # fmt: skip
    for asked, kind, word in cases:
        with pytest.raises(kind) as caught:
            client.completions.create(**asked)
        assert word in caught.value.message, caught.value.message
        assert caught.value.body["code"] == caught.value.status_code
    with pytest.raises(openai.BadRequestError, match=r"content\.0\.type"):
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": [{"type": "image_url"}]}]
        )
    assert client.models.list().data[0].id == "smollm2"


def test_the_request_id_of_the_client_comes_back(server):
    asked = {"prompt": "a", "max_tokens": 1}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=asked, headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"


# docs/server.md: every example runs and says what it should ------------------------------------

PAGE = (REPOSITORY / "docs/server.md").read_text()
# The subscriber of KV events is run by tests/engine/kv_events.
EXAMPLES = [
    found
    for found in re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, re.M | re.S)
    if "import zmq" not in found[1]
]
WORDS = [" Paris", '"usage"', '"tokens":[19556]', "Paris", ""]


def test_the_page_has_as_many_examples_as_are_checked():
    assert len(EXAMPLES) == len(WORDS)


@pytest.mark.parametrize("place", range(len(WORDS)))
def test_an_example_runs(smollm2_server, place):
    kind, text = EXAMPLES[place]
    text = text.replace("localhost:8000", smollm2_server.url.removeprefix("http://"))
    command = ["bash", "-e", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert WORDS[place] in done.stdout, done.stdout


def test_the_page_names_every_endpoint():
    from engine.server.app import _GETS, _POSTS

    for path in [one[0] for one in (*_POSTS, *_GETS)]:
        assert path.partition("{")[0].rstrip("/") in PAGE
