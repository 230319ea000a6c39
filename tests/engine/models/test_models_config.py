"""A model's shape is resolved explicitly; what cannot be honoured is refused by name."""

import json

import pytest

from engine.core.errors import ConfigError
from engine.errors import UnsupportedModel
from engine.models.build import build_model, resolve_dtype
from engine.models.config import load_model_config, resolve_model_config
from engine.models.presets import PRESETS


def raw(**changes):
    config = {**PRESETS["tiny-qwen3"], **changes}
    return {key: value for key, value in config.items() if value != "absent"}


def resolve(**changes):
    return resolve_model_config(raw(**changes), ())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves(name):
    config = resolve_model_config(PRESETS[name], ())
    assert config.num_heads % config.num_kv_heads == 0


def test_dtype_is_read_under_both_names():
    """BUG-B38: older configs say torch_dtype, newer ones dtype, some neither."""
    assert resolve(torch_dtype="bfloat16").dtype == "bfloat16"
    assert resolve(dtype="float16").dtype == "float16"
    assert resolve(dtype="torch.float16", torch_dtype="float32").dtype == "float16"
    assert resolve().dtype == "float32"
    assert resolve(dtype=None, torch_dtype=None).dtype == "float32"
    with pytest.raises(UnsupportedModel, match="float8"):
        resolve(dtype="float8_e4m3fn")


def test_head_dim_is_never_left_open():
    """BUG-B38: null and absent mean different things per family, as in HF."""
    assert resolve(head_dim=None).head_dim == 8
    assert resolve(head_dim="absent").head_dim == 128
    llama = {**PRESETS["tiny-llama"], "head_dim": None}
    assert resolve_model_config(llama, ()).head_dim == 8
    del llama["head_dim"]
    assert resolve_model_config(llama, ()).head_dim == 8


def test_biases_follow_the_family():
    qwen2 = resolve_model_config(PRESETS["tiny-qwen2"], ())
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = resolve(attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    llama = resolve_model_config({**PRESETS["tiny-llama"], "mlp_bias": True}, ())
    assert (llama.qkv_bias, llama.mlp_bias) == (False, True)


def test_a_sliding_window_bounds_the_length():
    """Within the window, full attention is what the model computes; beyond it, it is not."""
    mistral = {**PRESETS["tiny-mistral"], "max_position_embeddings": 8192}
    assert resolve_model_config({**mistral, "sliding_window": 512}, ()).max_position_embeddings == (
        512
    )
    assert resolve_model_config(mistral, ()).max_position_embeddings == 8192
    del mistral["sliding_window"]  # HF's class default is 4096
    assert resolve_model_config(mistral, ()).max_position_embeddings == 4096
    assert resolve(sliding_window=64, use_sliding_window=False).max_position_embeddings == 1024
    assert resolve(sliding_window=64, use_sliding_window=True).max_position_embeddings == 64


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": "x"}, "token id 'x'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_unsupported_configs_are_refused_by_name(tmp_path, changes, word):
    (tmp_path / "config.json").write_text(json.dumps(raw(**changes)))
    with pytest.raises(UnsupportedModel, match=word) as caught:
        load_model_config(tmp_path)
    assert "config.json" in str(caught.value) or word in str(caught.value)


def test_eos_ids_are_the_union_of_all_sources(tmp_path):
    """BUG-C48: config, generation config and tokenizer may each name another id."""
    (tmp_path / "config.json").write_text(json.dumps(raw(eos_token_id=5)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    added = {"added_tokens": [{"content": "<end>", "id": 3}], "model": {"vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    assert load_model_config(tmp_path).eos_token_ids == (3, 5, 9)


@pytest.mark.parametrize("content", [None, "{", "[1]", "\udcff"])
def test_an_unreadable_config_is_an_input_error(tmp_path, content):
    if content is not None:
        path = tmp_path / "config.json"
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_model_config(tmp_path / "nowhere")


def test_the_run_dtype():
    import torch

    config = resolve(dtype="float16")
    assert resolve_dtype("auto", config) == torch.float16
    assert resolve_dtype("bfloat16", config) == torch.bfloat16
    assert resolve_dtype(torch.float32, config) == torch.float32
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", config)


def test_building_checks_tp_and_length():
    import torch
    from tp_testing import ThreadGroup, _Meeting

    from engine.attention.torch_backend import TorchAttention
    from engine.distributed.group import TpGroup

    backend = TorchAttention()
    group = ThreadGroup(0, _Meeting(3))
    with pytest.raises(ConfigError, match=r"valid sizes: \[1, 2, 4, 8\]"):
        build_model(resolve(), group, backend, torch.float32, "meta")
    with pytest.raises(ConfigError, match="1024 positions"):
        build_model(resolve(), TpGroup(), backend, torch.float32, "meta", max_position=2000)


@pytest.mark.parametrize(
    "scaling", [{"factor": 4.0}, {"factor": 2.0, "rope_theta": 1e4}, {"type": None, "factor": 4.0}]
)
def test_a_rope_scaling_without_a_type_is_refused(scaling):
    """Taken for unscaled, the model would lose its way beyond its first positions."""
    with pytest.raises(UnsupportedModel, match="rope_scaling has factor but no rope_type"):
        resolve(rope_scaling=scaling)
    assert resolve(rope_scaling={"rope_theta": 1e4}).rope.rope_type == "default"


def yarn(**rest):
    return resolve(rope_scaling={"rope_type": "yarn", "factor": 4.0, **rest})


def test_yarn_reaches_as_far_as_it_stretches():
    """As Qwen says it: max_position_embeddings stays what it was before."""
    assert yarn(original_max_position_embeddings=512).max_position_embeddings == 2048
    assert yarn().max_position_embeddings == 4096  # 4 x the config's 1024
    # As others say it: max_position_embeddings is what it becomes.
    assert yarn(original_max_position_embeddings=256).max_position_embeddings == 1024


def test_a_length_refusal_names_its_cause():
    assert "max_position_embeddings is 1024" in resolve().length_limit
    assert (
        "sliding_window is 64" in resolve(sliding_window=64, use_sliding_window=True).length_limit
    )
    assert "512 positions by 4 to 2048" in yarn(original_max_position_embeddings=512).length_limit
