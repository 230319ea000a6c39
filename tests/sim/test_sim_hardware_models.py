"""Model shapes, data sheets and the size of the KV pool."""

import json

import pytest
from sim_testing import deployment

from engine.core import ConfigError, InputError
from sim.hardware import HARDWARE, hardware_named
from sim.memory import blocks_per_sequence, size_kv_pool
from sim.models import MODELS, model_named
from sim.setup import build


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19),
     ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("qwen2.5-7b", 7.62), ("llama3-8b", 8.03),
     ("llama3-70b", 70.55), ("mistral-7b", 7.25), ("smollm2-135m", 0.1345)],
)  # fmt: skip
def test_parameters_match_the_published_counts(name, billions):
    assert model_named(name).num_params / 1e9 == pytest.approx(billions, rel=3e-3)


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_can_run_on_one_gpu_or_says_which_sizes_fit(name):
    shape = MODELS[name]
    shape.check_tp(1)
    with pytest.raises(ConfigError, match="1, "):
        shape.check_tp(7 if 7 not in shape.valid_tp_sizes() else 11)


def test_kv_memory_of_ranks_adds_up_c97():
    shape = model_named("llama3-70b")
    whole = shape.kv_bytes_per_token(1)
    assert whole == 2 * 80 * 8 * 128 * 2
    assert shape.kv_bytes_per_token(8) * 8 == whole
    # Sixteen ranks hold each of the eight KV heads twice.
    assert shape.kv_bytes_per_token(16) * 16 == 2 * whole


def test_a_sequence_needs_whole_blocks_c104():
    assert blocks_per_sequence(100, 16) == 7
    assert blocks_per_sequence(96, 16) == 6
    assert blocks_per_sequence(1, 16) == 1


@pytest.mark.parametrize(
    ("model", "hardware", "measured"),
    [("qwen3-8b", "h200", 49_668), ("llama-3.1-8b", "rtx4090", 2_588)],
)
def test_the_pool_is_within_one_percent_of_what_vllm_measured(model, hardware, measured):
    pool = size_kv_pool(model_named(model), hardware_named(hardware))
    assert pool.num_blocks == pytest.approx(measured, rel=0.01)


def test_the_pool_shrinks_with_everything_else_that_needs_memory():
    shape, sheet = model_named("qwen3-8b"), hardware_named("h100")
    base = size_kv_pool(shape, sheet).num_blocks
    assert size_kv_pool(shape, sheet, utilisation=0.8).num_blocks < base
    assert size_kv_pool(shape, sheet, max_num_batched_tokens=16384).num_blocks < base
    assert size_kv_pool(shape, sheet, block_size=32).num_blocks == pytest.approx(base / 2, abs=1)
    assert size_kv_pool(shape, sheet, tp=2).num_blocks > 2 * base


def test_a_model_that_does_not_fit_is_refused_with_the_figures():
    with pytest.raises(ConfigError, match=r"weights 141\.\d GB .* leave no KV block"):
        size_kv_pool(model_named("llama3-70b"), hardware_named("rtx4090"))


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="h200"):
        hardware_named("h300")
    with pytest.raises(ConfigError, match="qwen3-8b"):
        model_named("gpt-5")
    assert hardware_named("A100") is HARDWARE["a100-80gb"]


CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": True,
    "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip


def test_a_config_json_gives_the_shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    shape = model_named(str(tmp_path))
    assert (shape.head_dim, shape.num_kv_heads, shape.dtype_bytes) == (16, 2, 4)
    assert shape.num_params == 2 * (64 * 16 * 12 + 3 * 64 * 128) + 6400
    assert model_named(str(path)).num_layers == 2


@pytest.mark.parametrize(
    ("change", "part"),
    [({"hidden_size": "x"}, "hidden_size='x'"), ({"vocab_size": None}, "vocab_size=None"),
     ({"num_experts": 8}, "mixtures"), ({"torch_dtype": "int4"}, "torch_dtype='int4'")],
)  # fmt: skip
def test_a_wrong_config_json_is_named(tmp_path, change, part):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(InputError, match=r"config\.json") as caught:
        model_named(str(path))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"max_num_batched_tokens": 0}, {"max_num_seqs": 0}, {"block_size": 0}, {"num_kv_blocks": 0},
     {"policy": "fifo"}, {"model": "x"}, {"hardware": "x"}, {"tp": 2}, {"replicas": 0},
     {"cost": "magic"}, {"cost": "constant:x"}, {"cost": "constant:0"},
     {"gpu_memory_utilization": 1.5, "num_kv_blocks": None}, {"max_model_len": 1}],
)  # fmt: skip
def test_impossible_deployments_are_refused(changes):
    with pytest.raises(ConfigError):
        build(deployment(**changes), 0)


def test_the_context_limit_is_what_model_and_pool_allow():
    small = build(deployment(num_kv_blocks=100, max_model_len=None), 0)
    large = build(deployment(num_kv_blocks=100_000, max_model_len=None), 0)
    assert small.kernel.max_model_len == 1600
    assert large.kernel.max_model_len == 8192
