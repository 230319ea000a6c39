"""Model shapes, data sheets and the size of the KV pool."""

import json
import random
from dataclasses import fields

import pytest
from sim_testing import deployment

from engine.core import ConfigError, InputError
from sim.run.deployment import build
from sim.specs.hardware import HARDWARE, hardware_named
from sim.specs.kv_pool import blocks_per_sequence, size_kv_pool
from sim.specs.models import MODELS, MoeShape, model_named


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19),
     ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("qwen2.5-7b", 7.62), ("llama3-8b", 8.03),
     ("llama3-70b", 70.55), ("mistral-7b", 7.25), ("smollm2-135m", 0.1345),
     ("qwen3-30b-a3b", 30.53), ("qwen3-235b-a22b", 235.09), ("mixtral-8x7b", 46.70)],
)  # fmt: skip
def test_parameters_match_the_published_counts(name, billions):
    assert model_named(name).num_params / 1e9 == pytest.approx(billions, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.35), ("qwen3-235b-a22b", 22.19), ("mixtral-8x7b", 12.88)],
)  # fmt: skip
def test_activated_parameters_match_the_published_counts(name, billions):
    shape = model_named(name)
    embeddings = 2 * shape.head_params
    activated = shape.body_params + shape.token_routed_params + embeddings
    assert activated / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_mixture_is_the_textbook_sum_of_its_parts():
    shape = model_named("qwen3-30b-a3b")
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    assert shape.body_params == 48 * (attention + 2048 * 128)
    assert shape.routed_params == 48 * 128 * 3 * 2048 * 768
    assert shape.token_routed_params * 16 == shape.routed_params
    assert shape.kv_bytes_per_token() == 2 * 48 * 4 * 128 * 2
    assert shape.num_params == shape.body_params + shape.routed_params + 2 * 151936 * 2048


def test_uniform_routing_uses_as_many_experts_as_drawing_them_does():
    shape = model_named("qwen3-30b-a3b")
    assert shape.routed_share(0) == 0.0
    assert shape.routed_share(1) == pytest.approx(8 / 128)
    draw = random.Random(7)
    for num_tokens in (2, 16, 100):
        drawn = [
            len({expert for _ in range(num_tokens) for expert in draw.sample(range(128), 8)})
            for _ in range(2000)
        ]
        mean = sum(drawn) / len(drawn) / 128
        assert shape.routed_share(num_tokens) == pytest.approx(mean, rel=0.01)
    assert shape.routed_share(100_000) == 1.0


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


def test_replicas_that_share_experts_have_more_room_for_kv():
    shape, sheet = model_named("qwen3-30b-a3b"), hardware_named("rtxpro6000")
    alone, shared = size_kv_pool(shape, sheet), size_kv_pool(shape, sheet, expert_ranks=2)
    assert alone.weight_bytes - shared.weight_bytes == shape.routed_params
    assert alone.weight_bytes == shape.weight_bytes
    # vLLM had 37,819 blocks per replica with 0.92 of the memory.
    ours = size_kv_pool(shape, sheet, expert_ranks=2, utilisation=0.92, max_num_seqs=128)
    assert ours.num_blocks == pytest.approx(37_819, rel=0.03)


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
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
    "tie_word_embeddings": True, "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip


def test_a_config_json_gives_the_shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    shape = model_named(str(tmp_path))
    assert (shape.head_dim, shape.num_kv_heads, shape.dtype_bytes) == (16, 2, 2)
    assert model_named(str(tmp_path), "float32").dtype_bytes == 4
    assert shape.num_params == 2 * (64 * 16 * 12 + 3 * 64 * 128) + 6400
    assert model_named(str(path)).num_layers == 2


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("change", "expert_size", "shared_size"),
    [({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": []}, 32, 0),
     ({"model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 96}, 32, 96),
     ({"model_type": "mixtral", "num_local_experts": 8}, 128, 0)],
)  # fmt: skip
def test_a_config_json_of_a_mixture_gives_the_shape(tmp_path, change, expert_size, shared_size):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **EXPERTS, **change}))
    shape = model_named(str(path))
    assert isinstance(shape, MoeShape)
    assert shape.routed_params == 2 * 8 * 3 * 64 * expert_size
    assert shape.body_params == 2 * (64 * 16 * 12 + 64 * 8 + 3 * 64 * shared_size)


def test_a_dense_shape_says_nothing_about_experts():
    """Its fields stand in step logs and summaries, which did not change."""
    names = [field.name for field in fields(model_named("qwen3-8b"))]
    assert names[-1] == "dtype_bytes" and not [name for name in names if "expert" in name]


@pytest.mark.parametrize(
    ("change", "part"),
    [({"hidden_size": "x"}, "hidden_size='x'"), ({"vocab_size": None}, "vocab_size=None"),
     ({"num_experts": 8}, "mixtures"), ({"torch_dtype": "int4"}, "torch_dtype='int4'"),
     ({"n_routed_experts": 64, "model_type": "deepseek_v3"}, "model_type='deepseek_v3'"),
     ({"num_local_experts": 8, "model_type": "mixtral", "num_experts_per_tok": "x"},
      "num_experts_per_tok='x'"),
     ({"num_local_experts": 8, "model_type": "mixtral", "num_experts_per_tok": 9}, "=9: there"),
     ({"num_local_experts": 8, "model_type": "mixtral", "num_experts_per_tok": 0}, "=0: must"),
     ({"num_experts": 8, "model_type": "qwen3_moe", "moe_intermediate_size": "x"},
      "moe_intermediate_size='x'"),
     ({"model_type": None}, "model_type is missing"), ({"model_type": "lama"}, "near it are llama"),
     ({"model_type": "mamba"}, "keeps a state"), ({"model_type": "bert"}, "is an encoder"),
     ({"num_hidden_layers": None}, "num_hidden_layers=None"),
     ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is known, but")],
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
     {"gpu_memory_utilization": 1.5, "num_kv_blocks": None}, {"max_model_len": 1},
     {"expert_parallel": True}, {"model": "mixtral-8x7b", "expert_parallel": True, "replicas": 3},
     {"model": "mixtral-8x7b", "expert_parallel": True, "cost": "constant:5"},
     {"cost": "roofline:nothing.json"}],
)  # fmt: skip
def test_impossible_deployments_are_refused(changes):
    with pytest.raises((ConfigError, InputError)):
        build(deployment(**changes), 0)


def test_the_context_limit_is_what_model_and_pool_allow():
    small = build(deployment(num_kv_blocks=100, max_model_len=None), 0)
    large = build(deployment(num_kv_blocks=100_000, max_model_len=None), 0)
    assert small.kernel.max_model_len == 1600
    assert large.kernel.max_model_len == 8192
