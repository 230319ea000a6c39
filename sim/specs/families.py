"""The allow-list: decoders of one attention and one MLP per layer, by `model_type`.

Each row restates the config class and the modules of Hugging Face Transformers; a test builds
every one of them and compares.
"""

from __future__ import annotations

from dataclasses import replace

from sim.specs.families_latent import LATENT_FAMILIES
from sim.specs.families_moe import MIXTURES
from sim.specs.family import ATTENTION_BIASES, Biases, Family, Norms, sizes

_BIASED: Biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_LAYER_NORM: Norms = {"norm_width": 2}

DENSE: dict[str, Family] = {
    "llama": Family(sizes(32, None, 32000, 2048), mlp_bias="mlp_bias", **ATTENTION_BIASES),
    "mistral": Family(sizes(32, 8, 32000, 131072, sliding_window=4096), window="all"),
    "ministral": Family(sizes(32, 8, 32000, 131072, sliding_window=4096), window="all"),
    "ministral3": Family(sizes(32, 8, 131072, 262144, head_dim=128), window="all"),
    "qwen2": Family(
        sizes(32, 32, 151936, 32768, sliding_window=4096, max_window_layers=28),
        qkv_bias=True,
        window="late",
        window_if="use_sliding_window",
    ),
    "qwen3": Family(
        sizes(32, 32, 151936, 32768, head_dim=128, sliding_window=4096, max_window_layers=28),
        qk_norm="head",
        window="late",
        window_if="use_sliding_window",
        **ATTENTION_BIASES,
    ),
    "phi3": Family(sizes(32, None, 32064, 4096), window="all"),
    "phi": Family(
        sizes(32, None, 51200, 2048),
        gated=False,
        norms=1,
        head_bias=True,
        qk_norm="head",
        qk_norm_if="qk_layernorm",
        qk_norm_width=2,
        **_BIASED,
        **_LAYER_NORM,
    ),
    "gemma": Family(sizes(16, 16, 256000, 8192, True, head_dim=256), **ATTENTION_BIASES),
    "gemma2": Family(
        sizes(8, 4, 256000, 8192, True, head_dim=256, sliding_window=4096),
        norms=4,
        window="pattern",
        window_every=2,
        **ATTENTION_BIASES,
    ),
    "gemma3_text": Family(
        sizes(8, 4, 262208, 131072, True, head_dim=256, sliding_window=4096),
        norms=4,
        qk_norm="head",
        window="pattern",
        window_every=6,
        **ATTENTION_BIASES,
    ),
    "olmo": Family(sizes(32, None, 50304, 2048), norm_width=0, **ATTENTION_BIASES),
    "olmo2": Family(sizes(32, None, 50304, 2048), qk_norm="width", **ATTENTION_BIASES),
    "olmo3": Family(
        sizes(32, None, 50304, 2048, sliding_window=4096),
        qk_norm="width",
        window="pattern",
        window_every=4,
        **ATTENTION_BIASES,
    ),
    "glm": Family(
        sizes(32, 2, 151552, 131072, head_dim=128, attention_bias=True),
        qkv_bias="attention_bias",
    ),
    "glm4": Family(
        sizes(32, 2, 151552, 131072, head_dim=128, attention_bias=True),
        qkv_bias="attention_bias",
        norms=4,
    ),
    "granite": Family(sizes(32, None, 32000, 2048), mlp_bias="mlp_bias", **ATTENTION_BIASES),
    "starcoder2": Family(
        sizes(24, 2, 49152, 4096, True, use_bias=True),
        gated=False,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        window="all",
        **_LAYER_NORM,
    ),
    "stablelm": Family(
        sizes(32, 32, 50304, 4096),
        qkv_bias="use_qkv_bias",
        qk_norm="heads",
        qk_norm_if="qk_layernorm",
        **_LAYER_NORM,
    ),
    "cohere": Family(
        sizes(64, None, 256000, 8192, True),
        norms=1,
        qk_norm="heads",
        qk_norm_if="use_qk_norm",
        **ATTENTION_BIASES,
    ),
    "cohere2": Family(
        sizes(64, None, 256000, 8192, True, sliding_window=4096),
        norms=1,
        window="pattern",
        window_every=4,
        **ATTENTION_BIASES,
    ),
    "smollm3": Family(
        sizes(16, 4, 128256, 32768, True),
        mlp_bias="mlp_bias",
        window="pattern",
        window_every=4,
        window_if="use_sliding_window",
        **ATTENTION_BIASES,
    ),
    "seed_oss": Family(
        sizes(80, 8, 155136, 524288, head_dim=128, attention_bias=True),
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "exaone4": Family(
        sizes(32, 32, 102400, 2048, sliding_window=4096, sliding_window_pattern=4),
        qk_norm="head",
        window="pattern",
        window_every=4,
    ),
    "helium": Family(
        sizes(20, 20, 48000, 4096, head_dim=128), mlp_bias="mlp_bias", qkv_bias="attention_bias"
    ),
    "internlm3": Family(
        sizes(32, 2, 128512, 32768, head_dim=128),
        {"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        qkv_bias="attention_bias",
        out_bias="mlp_bias",
        mlp_bias="mlp_bias",
    ),
    "arcee": Family(
        sizes(32, None, 32000, 4096), gated=False, mlp_bias="mlp_bias", **ATTENTION_BIASES
    ),
    "apertus": Family(
        sizes(32, None, 131072, 65536),
        gated=False,
        qk_norm="head",
        extra_layer_params=2,
        **ATTENTION_BIASES,
    ),
    "nemotron": Family(
        sizes(48, None, 256000, 4096),
        gated=False,
        mlp_bias="mlp_bias",
        **ATTENTION_BIASES,
        **_LAYER_NORM,
    ),
    "ernie4_5": Family(
        sizes(16, 2, 103424, 131072, True, head_dim=128),
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "hunyuan_v1_dense": Family(
        sizes(32, None, 290943, 2048), qk_norm="head", **ATTENTION_BIASES
    ),
    "gpt_neox": Family(
        sizes(64, None, 50432, 2048, attention_bias=True),
        grouped=False,
        gated=False,
        mlp_bias=True,
        **ATTENTION_BIASES,
        **_LAYER_NORM,
    ),
    "gpt2": Family(
        sizes(12, None, 50257, 1024, True),
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
        grouped=False,
        gated=False,
        learned_positions=0,
        positions="learned",
        **_BIASED,
        **_LAYER_NORM,
    ),
    "opt": Family(
        sizes(12, None, 50272, 2048, True, enable_bias=True),
        {"intermediate_size": "ffn_dim"},
        grouped=False,
        gated=False,
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_bias="enable_bias",
        learned_positions=2,
        positions="learned",
        **_LAYER_NORM,
    ),
}  # fmt: skip

FAMILIES: dict[str, Family] = {**DENSE, **MIXTURES, **LATENT_FAMILIES}

# The language models within models that also see: the same layers, other defaults.
VISION_TEXTS: dict[str, Family] = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"),
        replace(
            DENSE["qwen2"],
            defaults=sizes(64, 8, 152064, 32768, sliding_window=4096, max_window_layers=80),
        ),
    ),
    "qwen3_vl_text": replace(
        DENSE["qwen3"], window="", defaults=sizes(32, 32, 151936, 128000, head_dim=128)
    ),
    "qwen3_vl_moe_text": replace(
        MIXTURES["qwen3_moe"],
        window="",
        defaults=sizes(
            16, 16, 151936, 128000, True, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, decoder_sparse_step=1,
        ),
    ),
}  # fmt: skip
