"""However requests are batched, chunked, cached or preempted, their tokens stay the same."""

from __future__ import annotations

import pytest
from llm_testing import greedy, make_prompts, one_by_one, start, tokens_of, write_tiny_model

from engine.cli import main as cli
from engine.core.policy_registry import POLICIES
from engine.requests.outputs import RequestOutput
from engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


PROMPTS = make_prompts(seed=1, count=10, shared=13)
# Greedy and seeded sampling side by side, with and without filters.
PARAMS = [
    greedy(max_tokens=5 + place)
    if place % 3
    else SamplingParams(
        temperature=0.9,
        seed=100 + place,
        max_tokens=9,
        ignore_eos=True,
        top_p=1.0 if place % 2 else 0.8,
        top_k=0 if place % 2 else 20,
    )
    for place in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def oracle(folder):
    return one_by_one(folder, PROMPTS, PARAMS)


SETTINGS = {
    "batch": {},
    "one row": dict(max_num_seqs=1),
    "small chunks": dict(max_num_batched_tokens=7),
    "budget below the batch": dict(max_num_batched_tokens=3),
    "tiny pool": dict(num_kvcache_blocks=20, max_model_len=80),
    "tiny pool, small chunks": dict(
        num_kvcache_blocks=20, max_model_len=80, max_num_batched_tokens=9
    ),
    "blocks of one token": dict(block_size=1, num_kvcache_blocks=80, max_model_len=80),
    "blocks of three tokens": dict(block_size=3, num_kvcache_blocks=27, max_model_len=80),
    "no cache": dict(enable_prefix_caching=False, num_kvcache_blocks=20, max_model_len=80),
    "long-prefill threshold": dict(long_prefill_token_threshold=5),
    "async": dict(async_scheduling=True),
    "async, tiny pool": dict(async_scheduling=True, num_kvcache_blocks=20, max_model_len=80),
    "async, small chunks": dict(async_scheduling=True, max_num_batched_tokens=7),
}


CELLS = {
    f"{name}-{policy}": (settings, policy)
    for name, settings in SETTINGS.items()
    for policy in POLICIES
    if (name, policy) != ("long-prefill threshold", "prefill_first")  # which has no threshold
}


@pytest.mark.parametrize(("settings", "policy"), CELLS.values(), ids=CELLS.keys())
def test_tokens_are_those_of_each_request_alone(folder, oracle, policy, settings, tmp_path):
    log = tmp_path / "steps.jsonl"
    options = {**settings, "policy": policy, "step_log": str(log), "debug": True}
    with start(folder, **options) as llm:
        for _ in range(2):  # the second time with a warm prefix cache
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert tokens_of(outputs) == oracle
            if "tiny pool" in str(settings):
                assert sum(output.metrics.num_preemptions for output in outputs) > 0
        cached = sum(output.metrics.num_cached_tokens for output in outputs)
        assert (cached > 0) == settings.get("enable_prefix_caching", True)
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
        assert not llm.has_unfinished_requests
    assert cli(["sim", "replay", str(log)]) == 0  # every decision is made again


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_hits_of_the_same_step_read_what_the_step_writes(folder, policy):
    shared = list(range(30, 54))  # six whole blocks
    prompts = [[*shared, 7, 8], [*shared, 9], [*shared, 10, 11, 12]]
    params = [greedy()] * 3
    with start(folder, policy=policy, max_num_batched_tokens=128) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    hits = [output.metrics.num_cached_tokens for output in outputs]
    assert hits == ([0, 24, 24] if policy == "mixed" else [0, 0, 0])
    assert tokens_of(outputs) == one_by_one(folder, prompts, params)


def test_outputs_come_in_the_order_of_the_prompts(folder):
    prompts = [[place + 1] for place in range(12)]
    params = [greedy(max_tokens=12 - place) for place in range(12)]
    with start(folder) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(12, 0, -1))
    assert all(isinstance(output, RequestOutput) and output.finished for output in outputs)


def test_a_seeded_request_is_alone_in_its_random_numbers(folder):  # BUG-C56
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    other = SamplingParams(temperature=1.0, seed=12, max_tokens=10, ignore_eos=True)
    with start(folder) as llm:
        alone = tokens_of(llm.generate([[5, 6]], seeded, use_tqdm=False))[0]
        with_unseeded = llm.generate([[5, 6]] * 3, [unseeded, seeded, unseeded], use_tqdm=False)
        with_seeded = llm.generate([[5, 6]] * 3, [other, seeded, other], use_tqdm=False)
    assert tokens_of(with_unseeded)[1] == tokens_of(with_seeded)[1] == alone
    assert tokens_of(with_seeded)[0] == tokens_of(with_seeded)[2] != alone
    # Unseeded requests have seeds of their own: two of them with one prompt differ.
    assert tokens_of(with_unseeded)[0] != tokens_of(with_unseeded)[2]


def test_the_engine_seed_decides_unseeded_requests(folder):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    found = []
    for seed in (0, 0, 1):
        with start(folder, seed=seed) as llm:
            found.append(tokens_of(llm.generate([[5, 6]], params, use_tqdm=False)))
    assert found[0] == found[1] != found[2]


def test_max_model_len_ends_with_reason_length(folder):  # BUG-B21, BUG-C10
    with start(folder, max_model_len=20) as llm:
        outputs = llm.generate([[1] * 19, [1] * 12], greedy(max_tokens=50), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 8]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_max_tokens_none_runs_to_max_model_len(folder):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    with start(folder, max_model_len=20) as llm:
        output = llm.generate([[1] * 4], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 16


def test_logprobs_hold_the_sampled_token_and_the_best(folder):
    params = [greedy(max_tokens=4, logprobs=3), greedy(max_tokens=4), greedy(4, logprobs=0)]
    with start(folder) as llm:
        outputs = llm.generate([[3, 4, 5]] * 3, params, use_tqdm=False)
    first, second, third = (output.outputs[0] for output in outputs)
    assert second.logprobs is None
    assert [len(entry) for entry in third.logprobs] == [1, 1, 1, 1]
    for token_id, entry in zip(first.token_ids, first.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token_id].rank == 1
        values = [item.logprob for item in entry.values()]
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0


def test_metrics_are_ordered_in_time(folder):
    with start(folder, max_num_seqs=2) as llm:
        outputs = llm.generate(make_prompts(seed=2, count=6), greedy(), use_tqdm=False)
    for output in outputs:
        metrics = output.metrics
        times = (
            metrics.arrival_ns,
            metrics.first_scheduled_ns,
            metrics.first_token_ns,
            metrics.finished_ns,
        )
        assert list(times) == sorted(times)
        assert 0 <= metrics.queue_ms <= metrics.ttft_ms <= metrics.e2e_ms


def test_streams_yield_growing_outputs_and_end_like_generate(folder):
    with start(folder) as llm:
        expected = tokens_of(llm.generate([[5, 6], [7]], greedy(6), use_tqdm=False))
        seen = {0: [], 1: []}
        ids = []
        for output in llm.stream([[5, 6], [7]], greedy(6)):
            if output.request_id not in ids:
                ids.append(output.request_id)
            seen[ids.index(output.request_id)].append(output)
    for place, outputs in seen.items():
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == [1, 2, 3, 4, 5, 6]
        assert list(outputs[-1].outputs[0].token_ids) == expected[place]
        assert [output.finished for output in outputs] == [False] * 5 + [True]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abandoned_stream_is_aborted(folder, asynchronous):
    with start(folder, async_scheduling=asynchronous) as llm:
        stream = llm.stream([[5, 6]], greedy(100))
        next(stream)
        stream.close()
        assert not llm.has_unfinished_requests
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_works_in_every_state_and_replays(folder, asynchronous, tmp_path):
    log = tmp_path / "steps.jsonl"
    options = dict(max_num_seqs=2, async_scheduling=asynchronous, step_log=str(log))
    with start(folder, **options) as llm:
        alone = tokens_of(llm.generate([[9, 8]], greedy(12), use_tqdm=False))[0]
        running, kept, waiting = llm.add_requests([[5, 6], [9, 8], [7]], greedy(12))
        for _ in range(3):
            llm.step()
        stopped = llm.abort(running)
        assert stopped.outputs[0].finish_reason == "abort"
        assert 2 <= len(stopped.outputs[0].token_ids) <= 4
        assert list(llm.abort(waiting).outputs[0].token_ids) == []
        assert llm.abort(running) is None
        outputs = []
        while llm.has_unfinished_requests:
            outputs += llm.step()
        assert [output.request_id for output in outputs] == [kept]
        assert tokens_of(outputs) == [alone]
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
    assert cli(["sim", "replay", str(log)]) == 0


def test_requests_added_step_by_step_survive_a_generate_call(folder):
    with start(folder) as llm:
        [own] = llm.add_requests([[5, 6]], greedy(3))
        assert len(llm.generate([[7]], greedy(10), use_tqdm=False)) == 1
        assert [output.request_id for output in llm.step()] == [own]
