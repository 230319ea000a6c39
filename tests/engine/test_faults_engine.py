"""Whatever goes wrong, the error says what, and the engine serves the next call."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from llm_testing import VOCAB_SIZE, greedy, start, tokens_of, write_tiny_model

from engine.cli import main as cli
from engine.core import audit
from engine.core.errors import ConfigError, InputError, RequestRejected
from engine.llm import EngineClosed
from engine.sampling_params import SamplingParams
from engine.step.loop import StepFailed
from engine.worker.kv_cache import OutOfMemoryAtStart


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(folder):
    with start(folder) as llm:
        return tokens_of(llm.generate([[1, 2], [3, 4]], greedy(), use_tqdm=False))


WRONG_CALLS = {
    "empty prompt": ([[1, 2], [3, 4], []], greedy(), RequestRejected, "prompt_empty"),
    "prompt of max_model_len": ([[1], [1] * 128], greedy(), RequestRejected, "128"),
    "unknown token id": ([[1], [VOCAB_SIZE]], greedy(), InputError, "prompt 1: token id 259"),
    "negative token id": ([[1], [-1]], greedy(), InputError, "token id -1"),
    "floats": ([[1], [0.5]], greedy(), InputError, "prompt 1: token ids must be integers"),
    "text without tokenizer": ([[1], "hi"], greedy(), InputError, "needs a tokenizer"),
    "wrong dict": ([[1], {"ids": [1]}], greedy(), InputError, "prompt_token_ids"),
    "no prompt at all": (7, greedy(), InputError, "int is neither"),
    "None": ([[1], None], greedy(), InputError, "NoneType"),
    "params of another type": ([[1]], {"temperature": 0}, ConfigError, "sampling_params"),
    "a bad object among params": ([[1], [2]], [greedy(), 3], ConfigError, "sampling_params"),
    "too few params": ([[1], [2]], [greedy()], ConfigError, "1 entries for 2 prompts"),
}


@pytest.mark.parametrize("case", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_a_wrong_call_is_refused_whole_and_the_next_one_works(
    folder, expected, case
):  # BUG-B20, BUG-C10
    prompts, params, error, message = case
    with start(folder) as llm:
        with pytest.raises(error, match=message):
            llm.generate(prompts, params, use_tqdm=False)
        assert not llm.has_unfinished_requests
        assert not llm.scheduler.has_work
        outputs = llm.generate([[1, 2], [3, 4]], greedy(), use_tqdm=False)
        assert tokens_of(outputs) == expected


def test_a_request_larger_than_the_pool_is_refused(folder, expected):  # BUG-B01, BUG-B02, BUG-C27
    with start(folder, num_kvcache_blocks=8, max_model_len=32) as llm:
        assert tokens_of(llm.generate([[1, 2], [3, 4]], greedy(), use_tqdm=False)) == expected
        with pytest.raises(RequestRejected):
            llm.generate([[1] * 33], greedy(), use_tqdm=False)
    with pytest.raises(ConfigError, match="max_model_len"):
        start(folder, num_kvcache_blocks=8, max_model_len=64)


def test_a_prompt_that_is_too_long_names_the_limit_that_counts(folder, tmp_path):
    def refusal(model, length, **options):
        options = {"max_model_len": None, "max_num_batched_tokens": 4096, **options}
        with start(model, **options) as llm, pytest.raises(RequestRejected) as caught:
            llm.generate([[1] * length], greedy(), use_tqdm=False)
        return str(caught.value)

    assert "max_position_embeddings is 1024" in refusal(folder, 1024)
    assert "option max_model_len" in refusal(folder, 128, max_model_len=128)
    assert "KV cache holds 64 tokens" in refusal(folder, 64, num_kvcache_blocks=16)
    window = dict(sliding_window=32, use_sliding_window=True)
    short = damaged(folder, tmp_path, lambda copy, config: config.update(window))
    assert "sliding_window is 32" in refusal(short, 40)
    with pytest.raises(ConfigError, match="sliding_window is 32"):
        start(short, max_model_len=64)


def test_nothing_to_do_is_no_error(folder):
    with start(folder) as llm:
        assert llm.generate([], greedy(), use_tqdm=False) == []


class Boom(Exception):
    """A failure inside the model."""


def fail_at(llm, step, part, exception=Boom):
    """Makes the runner raise in its n-th call of `launch` or `collect`."""
    runner = llm._executor.runner
    original = getattr(runner, part)
    calls = []

    def broken(*args):
        calls.append(1)
        if len(calls) == step:
            raise exception("planted")
        return original(*args)

    setattr(runner, part, broken)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("part", ["launch", "collect"])
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_a_failed_step_fails_its_requests_once_and_leaves_no_key(
    folder, tmp_path, policy, step, part, asynchronous
):
    prompts = [list(range(40)), list(range(30)), [7] * 20]
    with start(folder, policy=policy) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(), use_tqdm=False))
    log = tmp_path / "steps.jsonl"
    options = dict(policy=policy, async_scheduling=asynchronous, step_log=str(log))
    with start(folder, **options) as llm:
        fail_at(llm, step, part)
        with pytest.raises(StepFailed, match="planted") as caught:
            llm.generate(prompts, greedy(), use_tqdm=False)
        assert isinstance(caught.value.__cause__, Boom)
        assert not llm.has_unfinished_requests
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
        audit(llm.scheduler)
        # A key that points at KV which was never written would now change the tokens.
        poison(llm)
        assert tokens_of(llm.generate(prompts, greedy(), use_tqdm=False)) == expected
    assert cli(["sim", "replay", str(log)]) == 0


def poison(llm):
    """Fills what the failed step would have written: blocks without a key."""
    runner = llm._executor.runner
    pool = llm.scheduler.state.manager.pool
    for block_id in llm.scheduler.free_order():
        if pool.node_of(block_id) is None:
            runner._pool[:, :, block_id] = 1e4


def test_requests_outside_the_failed_step_go_on(folder):
    with start(folder, max_num_seqs=1) as llm:
        expected = tokens_of(llm.generate([[5, 6]], greedy(), use_tqdm=False))
        fail_at(llm, 2, "collect")
        first, second = llm.add_requests([[1, 2], [5, 6]], greedy())
        with pytest.raises(StepFailed):
            while True:
                llm.step()
        outputs = []
        while llm.has_unfinished_requests:
            outputs += llm.step()
        assert [output.request_id for output in outputs] == [first, second]
        assert outputs[0].outputs[0].finish_reason == "error"
        assert tokens_of(outputs[1:]) == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_leaves_the_engine_clean(folder, expected, asynchronous):
    with start(folder, async_scheduling=asynchronous) as llm:
        fail_at(llm, 3, "collect", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3, 4]], greedy(), use_tqdm=False)
        assert not llm.has_unfinished_requests
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
        outputs = llm.generate([[1, 2], [3, 4]], greedy(), use_tqdm=False)
        assert tokens_of(outputs) == expected


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_whose_logits_are_nan_ends_with_an_error_and_alone(
    folder, expected, tmp_path, asynchronous, size
):
    """An fp16 overflow ends so; the token 0 that an argmax gives would look like an answer."""
    from safetensors.torch import load_file, save_file

    def spoil(copy, config):
        config["tie_word_embeddings"] = False
        [file] = copy.glob("*.safetensors")
        weights = load_file(file)
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
        weights["model.embed_tokens.weight"][200] = float("nan")
        save_file(weights, copy / "model.safetensors")
        if file.name != "model.safetensors":
            file.unlink()
            (copy / "model.safetensors.index.json").unlink()

    prompts = [[1, 2], [5, 200, 6], [3, 4], [200]]
    params = [greedy(), greedy(stop=()), greedy(), greedy(logprobs=1)]
    model = damaged(folder, tmp_path, spoil)
    options = dict(async_scheduling=asynchronous, tensor_parallel_size=size)
    log = tmp_path / "steps.jsonl"
    with start(model, step_log=str(log), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert tokens_of(outputs) == [expected[0], [], expected[1], []]
        for output in (outputs[1], outputs[3]):
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].error == "the model's logits are NaN"
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
    assert cli(["sim", "replay", str(log)]) == 0


def damaged(folder, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    change(copy, config)
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def truncate(copy, config):
    file = next(copy.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "truncated weights": (truncate, "safetensors"),
    "unknown architecture": (
        lambda copy, config: config.update(architectures=["Mamba"]),
        "Mamba",
    ),
    "unknown rope type": (
        lambda copy, config: config.update(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        "spiral",
    ),
    "another width": (lambda copy, config: config.update(intermediate_size=64), "shape"),
    "another depth": (lambda copy, config: config.update(num_hidden_layers=3), "layers.2"),
    "fewer layers": (lambda copy, config: config.update(num_hidden_layers=1), "layers.1"),
    "no config": (lambda copy, config: config.clear(), "architectures"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_model_folder_is_a_typed_error(folder, tmp_path, damage):
    change, message = damage
    with pytest.raises(InputError, match=message):
        start(damaged(folder, tmp_path, change))


def test_the_command_line_reports_input_errors_in_one_line(folder, tmp_path, capsys):
    broken = damaged(folder, tmp_path, DAMAGES["unknown architecture"][0])
    assert cli(["generate", "--model", broken, "--prompt", "hi"]) == 2
    assert cli(["generate", "--model", str(tmp_path / "none"), "--prompt", "hi"]) == 2
    assert cli(["generate", "--model", folder, "--prompt", "hi"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 3


def test_too_small_a_budget_at_start_names_the_numbers(folder):
    with pytest.raises(OutOfMemoryAtStart, match="kv_cache_memory_bytes=100"):
        start(folder, kv_cache_memory_bytes=100)
    with pytest.raises(ConfigError, match=r"max_model_len=128: .* blocks of 4"):
        start(folder, kv_cache_memory_bytes=20_000)


def test_close_is_idempotent_and_final(folder, tmp_path):  # BUG-B31
    log = tmp_path / "steps.jsonl"
    llm = start(folder, step_log=str(log))
    llm.generate([[1]], greedy(), use_tqdm=False)
    llm.close()
    llm.close()
    assert log.exists()
    for use in (llm.step, lambda: llm.generate([[1]], greedy()), lambda: llm.abort(0)):
        with pytest.raises(EngineClosed):
            use()


def test_a_failed_start_leaves_no_log(folder, tmp_path):
    log = tmp_path / "steps.jsonl"
    with pytest.raises(ConfigError):
        start(folder, num_kvcache_blocks=4, step_log=str(log))
    assert list(tmp_path.iterdir()) == []


def test_engines_in_one_process_do_not_disturb_each_other(folder, expected):
    with start(folder, block_size=4) as first, start(folder, block_size=8, seed=3) as second:
        first.add_requests([[1, 2], [3, 4]], greedy())
        first.step()
        assert tokens_of(second.generate([[1, 2], [3, 4]], greedy(), use_tqdm=False)) == expected
        outputs = []
        while first.has_unfinished_requests:
            outputs += first.step()
        assert tokens_of(outputs) == expected


def test_the_host_cost_of_a_step_is_in_the_log(folder, tmp_path):
    log = Path(tmp_path) / "steps.jsonl"
    with start(folder, step_log=str(log)) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record for record in records if record["type"] in ("step", "decode")]
    assert steps
    for record in steps:
        assert "host" in record
        # The step that finds every row at its limit launches nothing.
        assert ("device" in record) == ("ids" in record or "chunks" in record)
    header = records[0]
    assert header["options"]["max_num_seqs"] == 8
    assert header["model"]["num_layers"] == 2
    assert header["hardware"]["attention_backend"] == "torch"
