"""Random options, arrivals and aborts: each request says what it says alone, and all replays."""

from __future__ import annotations

import random

import pytest
from llm_testing import EOS_ID, VOCAB_SIZE, one_by_one, start, tokens_of, write_tiny_model

from engine.cli import main as cli
from engine.sampling_params import SamplingParams

NUM_REQUESTS = 14
HEAD = [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def random_request(rng, number):
    body = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
    prompt = (HEAD if rng.random() < 0.5 else []) + body
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        seed=number,
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 1.0, 0.7]),
        max_tokens=rng.randint(1, 20),
        min_tokens=rng.choice([0, 0, 1]),
        # Some ends are not known in advance: any of many ids stops.
        stop_token_ids=rng.choice([(), tuple(range(0, VOCAB_SIZE, 9))]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 1]),
    )
    return prompt, params


@pytest.fixture(scope="module")
def requests(folder):
    rng = random.Random(0)
    made = [random_request(rng, number) for number in range(60)]
    alone = one_by_one(folder, [prompt for prompt, _ in made], [params for _, params in made])
    return [(prompt, params, tokens) for (prompt, params), tokens in zip(made, alone, strict=True)]


@pytest.mark.parametrize("seed", range(16))
def test_random_runs(folder, requests, tmp_path, seed):
    rng = random.Random(seed)
    log = tmp_path / "steps.jsonl.gz"
    block_size = rng.choice([1, 2, 4, 16])
    options = dict(
        block_size=block_size,
        max_model_len=64,
        num_kvcache_blocks=-(-rng.choice([64, 80, 300]) // block_size),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        policy=rng.choice(["mixed", "prefill_first"]),
        enable_prefix_caching=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.5,
        step_log=str(log),
    )
    threshold = rng.choice([0, 0, 6])
    if options["policy"] == "mixed":
        options["long_prefill_token_threshold"] = threshold
    chosen = rng.sample(requests, NUM_REQUESTS)
    expected, aborted, outputs = {}, set(), []
    with start(folder, **options) as llm:
        while chosen or llm.has_unfinished_requests:
            if chosen and rng.random() < 0.4:
                prompt, params, tokens = chosen.pop()
                [request_id] = llm.add_requests([prompt], params)
                expected[request_id] = tokens
            if rng.random() < 0.05 and expected:
                victim = rng.choice(list(expected))
                output = llm.abort(victim)
                if output is not None and output.outputs[0].finish_reason == "abort":
                    aborted.add(victim)
                    outputs.append(output)
                elif output is not None:
                    outputs.append(output)
            outputs += llm.step()
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
    assert sorted(output.request_id for output in outputs) == sorted(expected)
    for output, tokens in zip(outputs, tokens_of(outputs), strict=True):
        alone = expected[output.request_id]
        if output.request_id in aborted:
            assert tokens == alone[: len(tokens)]
        else:
            assert tokens == alone
        completion = output.outputs[0]
        assert completion.logprobs is None or len(completion.logprobs) == len(tokens)
        if completion.finish_reason == "stop":
            assert completion.stop_reason is not None or tokens[-1] == EOS_ID
    assert cli(["sim", "replay", str(log)]) == 0
