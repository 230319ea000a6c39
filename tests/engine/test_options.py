"""Options and sampling parameters are validated where they are made, before anything runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.core.errors import ConfigError
from engine.options import EngineOptions
from engine.sampling_params import SamplingParams, request_seed


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("kvcache_block_size", "block_size"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("enforce_eagerly", "enforce_eager"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_nearest(tmp_path, name, nearest):  # BUG-B32
    with pytest.raises(ConfigError, match=f"{name}=3: .*{nearest}"):
        EngineOptions.from_kwargs(str(tmp_path), **{name: 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "0.9"),
        ("max_num_seqs", 0),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 1),
        ("block_size", 0),
        ("num_kvcache_blocks", 0),
        ("kv_cache_memory_bytes", 0),
        ("tensor_parallel_size", 9),
        ("tensor_parallel_size", 0),
        ("seed", -1),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("policy", "fifo"),
        ("attention_backend", "fast"),
        ("load_format", "pickle"),
        ("enforce_eager", 1),
        ("async_scheduling", None),
        ("worker_timeout_s", 0),
    ],
)
def test_an_impossible_option_is_refused_by_name_and_value(tmp_path, name, value):
    with pytest.raises(ConfigError) as caught:
        EngineOptions.from_kwargs(str(tmp_path), **{name: value})
    assert caught.value.option == name


def test_the_model_must_be_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="model"):
        EngineOptions(model=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("seed", 1.0),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", 21),
        ("ignore_eos", "yes"),
    ],
)
def test_impossible_sampling_parameters_are_refused(name, value):  # BUG-B19, BUG-C10
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.option == name


def test_stop_strings_need_text():
    with pytest.raises(ConfigError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_parameters_are_normalised():
    params = SamplingParams(stop="a", stop_token_ids=[3, 4], top_k=-1)
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (3, 4)
    assert not params.filters_tokens
    assert SamplingParams(top_k=1).filters_tokens
    assert not SamplingParams(top_k=1, temperature=0).filters_tokens
    assert SamplingParams(temperature=1e-6).is_greedy


def test_request_seeds_differ_by_request_and_engine_seed():
    params = SamplingParams()
    seeds = {request_seed(params, engine, number) for engine in range(20) for number in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(SamplingParams(seed=7), 1, 2) == 7


def test_options_are_checked_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from engine import SamplingParams\n"
        "from engine.options import EngineOptions\n"
        "import engine.commands.options, engine.step.builder\n"
        "import engine.worker.command, engine.requests.prompts\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_priorities_decide_who_is_first_and_belong_to_their_policy(tmp_path):
    from llm_testing import greedy, make_prompts, start, write_tiny_model

    folder = write_tiny_model(tmp_path / "tiny")
    prompts, log = make_prompts(seed=2, count=6), tmp_path / "steps.jsonl"
    options = dict(policy="priority", max_num_seqs=2, step_log=str(log))
    with start(folder, **options) as llm:
        outputs = llm.generate(prompts, greedy(), use_tqdm=False, priority=[3, 3, 3, 0, 0, 1])
        firsts = [output.metrics.first_token_ns for output in outputs]
        assert max(firsts[3:]) < min(firsts[:3])
        for wrong in ([1], [0, 0, 0, 0, 0, "high"]):
            with pytest.raises(ConfigError, match=r"priority=.*must be 6 whole numbers"):
                llm.generate(prompts, greedy(), use_tqdm=False, priority=wrong)
    assert '"priority":3' in log.read_text()
    with start(folder) as llm, pytest.raises(ConfigError, match="belongs to policy priority"):
        llm.generate(prompts, greedy(), use_tqdm=False, priority=[0] * 6)
