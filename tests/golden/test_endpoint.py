"""`golden endpoint`: healthy servers pass in every dialect, faults are seen from outside."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from engine.cli import main
from golden.endpoint.dialect import OPENAI_TOP, find_dialect
from golden.endpoint.http_client import Client, EndpointProblem
from golden.endpoint.levels import EndpointPlan, check_endpoint
from golden.faults import FAULTS
from tests.golden.conftest import quiet
from tests.golden.fake_server import MODEL, Server, engine, served, wait
from tests.places import REPOSITORY

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def llm(model_folder):
    with engine(model_folder) as made:
        yield made


def check(url, reference, dtype="float32", levels=(1,), repeats=1, timeout_s=20.0):
    client = Client(url, timeout_s, sleep=lambda _seconds: None)
    plan = EndpointPlan(client, None, dtype, levels, repeats)
    return check_endpoint(plan, reference, quiet)


def test_a_healthy_server_passes_at_every_load_and_every_time(llm, reference):
    with served(Server(llm)) as url:
        outcome = check(url, reference, levels=(1, 4), repeats=2)
    assert outcome.passed and outcome.model == MODEL
    assert [result.name for result in outcome.results] == [
        "1 at a time, pass 1", "1 at a time, pass 2", "4 at a time, pass 1", "4 at a time, pass 2",
    ]  # fmt: skip
    stats = outcome.results[0].stats
    assert stats.judged == ("log-probabilities", "KL divergence", "greedy tokens")
    assert stats.equal_tokens == stats.greedy_tokens == 40
    assert all(result.num_other_texts == 0 for result in outcome.results)


DIALECTS = [
    ({}, "prompt_logprobs with 20 tokens each", 3),
    ({"has_prompt_logprobs": False}, "echo with logprobs by token id", 3),
    ({"has_prompt_logprobs": False, "names_ids": False}, "echo with logprobs by token id", 1),
    ({"has_logprobs": False}, "token ids", 1),
]


@pytest.mark.parametrize(("what", "dialect", "num_rules"), DIALECTS)
def test_every_dialect_is_found_and_says_what_it_can_judge(
    llm, reference, what, dialect, num_rules
):
    with served(Server(llm, **what)) as url:
        outcome = check(url, reference)
    assert outcome.passed and outcome.dialect.name == dialect
    assert len(outcome.results[0].stats.judged) == num_rules


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_seen_from_outside(model_folder, reference, name):
    with engine(model_folder, FAULTS[name]) as llm, served(Server(llm)) as url:
        outcome = check(url, reference, repeats=2)
    assert not outcome.passed
    assert any(result.stats.violations for result in outcome.results)


def test_answers_that_depend_on_the_load_or_on_chance_are_reported(llm, reference):
    server = Server(llm)
    under_way = []

    def mix_up(number, body):
        under_way.append(number)
        time.sleep(0.02)
        crowded = len(under_way) > 1
        if crowded and body["max_tokens"] > 2:
            body["prompt"] = body["prompt"][::-1]  # somebody else's
        under_way.remove(number)

    server.breakage = mix_up
    with served(server) as url:
        outcome = check(url, reference, levels=(1, 4))
    alone, crowded = outcome.results
    assert alone.stats.passed and not crowded.stats.passed
    assert crowded.num_other_texts > 0


# Bad servers -----------------------------------------------------------------------------------


def refuse(status, headers=None, body=None):
    return lambda _number, _body: (status, headers or {}, body or {"error": {"message": "no"}})


BAD = [
    (refuse(429, {"Retry-After": "1"}), r"limits the rate \(429, Retry-After 1\): lower"),
    (refuse(429, {"Retry-After": "3600"}), r"limits the rate \(429, Retry-After 3600\)"),
    (refuse(401), "wants a key .401.: set the environment variable OPENAI_API_KEY"),
    (refuse(404), "has no /v1/completions or no such model"),
    (refuse(503), "fails .503: no.: look into its log"),
    (refuse(400), "neither log-probabilities nor token ids.*refuses a request .400: no"),
    (refuse(200, body=b"<html>"), "does not answer with a JSON object"),
    (refuse(200, body={"object": "x"}), "neither log-probabilities nor token ids"),
    (wait(0.6), "no answer within 0.3 s: raise --timeout-s"),
]


@pytest.mark.parametrize(("breakage", "message"), BAD)
def test_a_bad_server_is_one_line_that_says_what_to_do(llm, reference, breakage, message):
    server = Server(llm)
    server.breakage = breakage
    with served(server) as url, pytest.raises(EndpointProblem, match=message) as caught:
        check(url, reference, timeout_s=0.3 if breakage is BAD[-1][0] else 20.0)
    assert "\n" not in str(caught.value)


def test_a_rate_limit_is_waited_for(llm, reference):
    server = Server(llm)
    server.breakage = lambda number, _body: (
        (429, {"Retry-After": "0"}, {}) if number % 2 == 0 else None
    )
    with served(server) as url:
        assert check(url, reference).passed


def test_servers_without_log_probabilities_or_ids_are_refused(llm, reference):
    message = "start the server with log-probabilities"
    server = Server(llm, has_logprobs=False, names_ids=False)
    with served(server) as url, pytest.raises(EndpointProblem, match=message):
        check(url, reference)


def test_a_port_where_nobody_listens_is_named(reference):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointProblem, match="no server answers"):
        check(f"http://127.0.0.1:{port}", reference)


def test_a_prompt_that_the_server_refuses_is_named_and_the_others_judged(llm, reference):
    server = Server(llm)
    server.breakage = lambda _number, body: (
        (400, {}, {"error": {"message": "too long"}}) if len(body["prompt"]) > 70 else None
    )
    with served(server) as url:
        outcome = check(url, reference)
    assert outcome.passed and "long:" in outcome.refused[0] and "too long" in outcome.refused[0]


def test_the_verb_prints_what_was_judged(llm, reference_file, tmp_path, capsys):
    out = tmp_path / "e.json"
    with served(Server(llm)) as url:
        words = ("golden", "endpoint", "--url", url, "--reference", reference_file,
                 "--concurrency", 1, 3, "--repeats", 1, "--out", out)  # fmt: skip
        assert main([*map(str, words)]) == 0
    text = capsys.readouterr().out
    assert "judged: log-probabilities, KL divergence, greedy tokens" in text
    assert "under another load:" in text
    assert len(json.loads(out.read_text())["endpoint"]["passes"]) == 2


# Real servers ------------------------------------------------------------------------------------


def start(folder, *words):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "engine", "serve", "--model", folder, "--port", port, *words]
    process = subprocess.Popen(
        [*map(str, command)], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    url = f"http://127.0.0.1:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(600):
        try:
            with opener.open(f"{url}/health", timeout=1):
                return process, url
        except OSError:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
    raise AssertionError("the server did not start")


def stop(process):
    process.terminate()
    process.communicate(timeout=30)


def test_our_own_server_passes(model_folder, reference):
    process, url = start(model_folder, "--device", "cpu", "--dtype", "float32")
    try:
        outcome = check(url, reference, levels=(1, 8), timeout_s=60)
    finally:
        stop(process)
    assert outcome.passed
    assert outcome.dialect.name == "prompt_logprobs with 20 tokens each"


def test_the_twin_fails_as_it_must(model_folder, reference):
    words = ("--body", "sim", "--cost", "constant:1", "--hardware", "H100")
    process, url = start(model_folder, *words)
    try:
        outcome = check(url, reference, timeout_s=60)
    finally:
        stop(process)
    assert not outcome.passed and outcome.results[0].stats.equal_tokens < 5


@pytest.mark.parametrize("case", ["prompt_logprobs", "echo"])
def test_answers_in_the_shape_of_vllm_are_read(reference, case):
    """The answers were written by vLLM 0.33.0's own classes of the protocol."""
    exchange = json.loads((DATA / "vllm_0.33.0_exchange.json").read_text())

    class Recorded:
        def answer(self, body):
            kind = "prompt_logprobs" if "prompt_logprobs" in body else None
            kind = "echo" if body.get("echo") else kind or "text"
            if kind != case and kind == "prompt_logprobs":
                return 400, {}, {"error": {"message": "not here", "type": "BadRequestError"}}
            for one in exchange:
                same = one["prompt"] == body["prompt"] and one["kind"] == kind
                if same and one["max_tokens"] == body["max_tokens"]:
                    return 200, {}, one["answer"]
            return 400, {}, {"error": {"message": "not recorded", "type": "BadRequestError"}}

    with served(Recorded()) as url:
        client = Client(url, 20.0)
        probe = min(reference.sequences, key=lambda item: len(item.sequence.prompt))
        found = find_dialect(client, MODEL, probe.sequence.prompt)
        assert found.name.startswith(case) and found.fields["logprobs"] >= OPENAI_TOP
        outcome = check(url, reference)
    assert outcome.passed
    # Two of the four prompts were recorded; the others are refused by name.
    assert {text.split(":")[0] for text in outcome.refused} == {"long", "shared"}
    assert outcome.results[0].stats.num_values > 200
