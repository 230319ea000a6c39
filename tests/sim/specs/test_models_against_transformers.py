"""The allow-list against the classes that it restates, built on the meta device."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.specs.families import FAMILIES, VISION_TEXTS
from sim.specs.read_model import architecture_of
from sim.specs.vision import VISION_TYPES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Known by another name there: their checkpoints bring code of their own.
SAME_CODE = {"kimi_k2": "deepseek_v3"}
# Keys that a row of the allow-list needs in a certain form.
FIXED = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "nemotron": {"num_key_value_heads": 2},
}
WINDOWED = ("sliding_window", 16)


def hf_type(model_type: str) -> str:
    return SAME_CODE.get(model_type, model_type)


def defaults_of(model_type: str) -> dict[str, object]:
    """The defaults of a config class."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[hf_type(model_type)]
    return {field.name: field.default for field in dataclasses.fields(kind)}


@st.composite
def configs(draw: st.DrawFn, model_type: str) -> dict[str, object]:
    """A small random config; keys that the class gives a default are left out at times."""
    family, known = FAMILIES[model_type], defaults_of(model_type)
    heads = draw(st.sampled_from([2, 4, 6]))
    head_dim = draw(st.sampled_from([8, 16]))
    layers = draw(st.integers(1, 5))
    config: dict[str, object] = {
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": draw(st.integers(50, 300)),
        "intermediate_size": draw(st.integers(1, 40)) * 4,
        "max_position_embeddings": draw(st.sampled_from([32, 64])),
    }
    if family.grouped:
        config["num_key_value_heads"] = draw(st.sampled_from([1, 2, heads]))
    if "head_dim" in known and not family.latent and model_type != "helium":
        config["head_dim"] = draw(st.sampled_from([8, 16, 32]))
    elif model_type == "helium":
        config["head_dim"] = head_dim
    if draw(st.booleans()) or not family.defaults["tie_word_embeddings"]:
        config["tie_word_embeddings"] = draw(st.booleans())
    flags = ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "qk_layernorm",
             "use_qk_norm", "attention_out_bias", "lm_head_bias", "bias", "enable_bias",
             "use_sliding_window")  # fmt: skip
    for flag in flags:
        if flag in known and draw(st.booleans()):
            config[flag] = draw(st.booleans())
    if "sliding_window" in known and draw(st.booleans()):
        config["sliding_window"] = draw(st.sampled_from([8, 16]))
    config.update(draw(mixtures(model_type, layers, known)) if family.experts else {})
    if family.latent:
        config.update(draw(latents()))
        config["num_key_value_heads"] = heads
    config.update(FIXED.get(model_type, {}))
    if model_type == "internlm3":  # its class refuses two different ones
        config["attention_bias"] = config["mlp_bias"] = config.pop("bias", False)
        config.pop("qkv_bias", None)
    return {family.aliases.get(key, key): value for key, value in config.items()}


@st.composite
def mixtures(
    draw: st.DrawFn, model_type: str, layers: int, known: dict[str, object]
) -> dict[str, object]:
    """Sizes of experts, and which layers have them."""
    experts = FAMILIES[model_type].experts
    assert experts is not None
    chosen: dict[str, object] = {
        experts.count: draw(st.sampled_from([4, 6])),
        experts.per_token: draw(st.integers(1, 3)),
    }
    if experts.width != "intermediate_size":
        chosen[experts.width] = draw(st.integers(1, 10)) * 4
    if experts.shared_count:
        chosen[experts.shared_count] = draw(st.integers(1, 2))
    if experts.shared_width:
        chosen[experts.shared_width] = draw(st.integers(1, 10)) * 4
    if "first_k_dense_replace" in known:
        chosen["first_k_dense_replace"] = draw(st.integers(0, layers))
    if "decoder_sparse_step" in known:
        chosen["decoder_sparse_step"] = draw(st.integers(1, 2))
        chosen["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=2))
    if "moe_layer_start_index" in known:
        chosen["moe_layer_start_index"] = draw(st.integers(0, layers))
        chosen["moe_layer_end_index"] = draw(st.sampled_from([-1, layers - 1]))
        chosen["moe_layer_interval"] = draw(st.integers(1, 2))
    return chosen


@st.composite
def latents(draw: st.DrawFn) -> dict[str, object]:
    """Ranks of a latent attention."""
    return {
        "kv_lora_rank": draw(st.sampled_from([8, 16])),
        "q_lora_rank": draw(st.sampled_from([None, 12])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 8])),
        "qk_nope_head_dim": draw(st.sampled_from([4, 8])),
        "v_head_dim": draw(st.sampled_from([8, 12])),
    }


def built_model(model_type: str, config: dict[str, object]) -> "torch.nn.Module":
    """The model of a config without its numbers."""
    made = transformers.AutoConfig.for_model(hf_type(model_type), **config, pad_token_id=None)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def num_params(model: "torch.nn.Module") -> int:
    """Distinct parameters: tied ones once."""
    return sum({id(part): part.numel() for part in model.parameters()}.values())


def kv_values(model: "torch.nn.Module") -> int:
    """What one token keeps: the outputs of the K and V projections, or of the latent one."""
    total = 0
    for name, part in model.named_modules():
        last, rows = name.rpartition(".")[2], getattr(part, "weight", None)
        if last in ("k_proj", "v_proj", "kv_a_proj_with_mqa"):
            total += rows.shape[0]
        elif last == "qkv_proj":
            total += rows.shape[0] - o_inputs(model, name.rpartition(".")[0] + ".o_proj")
        elif last in ("query_key_value", "c_attn"):
            total += max(rows.shape) * 2 // 3
    return total


def o_inputs(model: "torch.nn.Module", name: str) -> int:
    """Width of the queries, which the output projection reads."""
    return int(model.get_submodule(name).weight.shape[1])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_and_kv_equal_those_of_the_built_model(model_type):
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(configs(model_type))
    def check(config: dict[str, object]) -> None:
        raw = {**config, "model_type": model_type, "torch_dtype": "bfloat16"}
        ours = architecture_of("config.json", "m", raw)
        model = built_model(model_type, config)
        assert ours.num_params == num_params(model), config
        assert ours.weight_bytes(2) == 2 * num_params(model)
        assert ours.weight_bytes(4) == 4 * num_params(model)
        assert ours.kv_values_per_token == kv_values(model), config

    check()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_class(model_type):
    """What a config leaves out is what its class says, and is never guessed."""
    known, family = defaults_of(model_type), FAMILIES[model_type]
    for key, value in family.defaults.items():
        name = family.aliases.get(key, key)
        if key in ("num_key_value_heads", "head_dim") and name not in known:
            assert value is None
        else:
            assert known[name] == value, key
    for key in ("head_dim", "sliding_window", "num_key_value_heads"):
        if known.get(key) is not None:
            assert family.defaults.get(key) == known[key] or not reads(family, key), key


def reads(family: object, key: str) -> bool:
    """Whether a row depends on that key."""
    if key == "sliding_window":
        return bool(family.window)  # type: ignore[attr-defined]
    return not (key == "head_dim" and family.latent)  # type: ignore[attr-defined]


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from("M*-E"), min_size=1, max_size=6), st.data())
def test_a_hybrid_of_one_mixer_a_layer_equals_the_built_model(letters, data):
    draw = data.draw
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    config = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": 64, "intermediate_size": 48, "mamba_num_heads": draw(st.sampled_from([4, 8])),
        "mamba_head_dim": 8, "n_groups": draw(st.sampled_from([1, 2])), "ssm_state_size": 16,
        "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20,
        "use_conv_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans()),
        "use_bias": draw(st.booleans()),
    }  # fmt: skip
    kinds = [names[letter] for letter in letters]
    model = built_model("nemotron_h", {**config, "layers_block_type": kinds})
    raw = {**config, "model_type": "nemotron_h", "hybrid_override_pattern": "".join(letters)}
    ours = architecture_of("config.json", "m", raw)
    # The correction of the router's choice is a buffer there and no weight.
    assert ours.num_params == num_params(model)
    assert ours.kv_values_per_token == kv_values(model)
    again = {**raw, "hybrid_override_pattern": None, "layers_block_type": kinds}
    assert architecture_of("config.json", "m", again).num_params == ours.num_params


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.sampled_from([16, 32]), st.integers(1, 3), st.sampled_from([4, 8]))
def test_gemma_3_counts_its_vision_tower(width, layers, patch):
    vision = {
        "hidden_size": width, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 2, "image_size": 32, "patch_size": patch, "vision_use_head": False,
    }  # fmt: skip
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "vocab_size": 80, "model_type": "gemma3_text",
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=dict(text), vision_config=dict(vision))
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    assert architecture_of("config.json", "m", raw).num_params == num_params(model)


TOWERS = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 64, "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
    "qwen3_vl_moe": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
    "mistral3": {
        "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "head_dim": 16, "image_size": 64, "model_type": "pixtral",
    },
}  # fmt: skip


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@pytest.mark.parametrize("model_type", TOWERS)
@given(st.sampled_from([7, 14]), st.booleans(), st.integers(1, 3))
def test_a_tower_and_its_language_model_equal_the_built_model(model_type, patch, tied, layers):
    vision = {**TOWERS[model_type], "patch_size": patch}
    text = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80,
            "head_dim": 16, "pad_token_id": None}  # fmt: skip
    text["model_type"] = f"{model_type}_text" if model_type != "mistral3" else "mistral"
    raw = {"model_type": model_type, "text_config": text, "vision_config": vision,
           "tie_word_embeddings": tied}  # fmt: skip
    made = transformers.AutoConfig.for_model(
        model_type, text_config=dict(text), vision_config=dict(vision), tie_word_embeddings=tied
    )
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(made)
    ours = architecture_of("config.json", "m", raw)
    assert ours.num_params == num_params(model)
    assert not ours.not_modelled and ours.notes


@pytest.mark.parametrize("model_type", VISION_TEXTS)
def test_defaults_of_language_models_that_see_are_those_of_the_class(model_type):
    known = defaults_of(model_type)
    for key, value in VISION_TEXTS[model_type].defaults.items():
        assert known.get(key, False) == value, key


def test_every_type_with_a_text_config_leads_to_a_known_language_model():
    assert set(VISION_TYPES.values()) <= set(FAMILIES)
