"""Shapes of well-known models and tiny ones, in the form of HF's config.json."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _config(architecture: str, model_type: str, sizes: str, **rest: object) -> Config:
    """`sizes` is layers, hidden, intermediate, heads, KV heads, head dim, vocabulary."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocab = map(int, sizes.split())
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **rest,
    }


def _qwen3(sizes: str, **rest: object) -> Config:
    ids = {"bos_token_id": 151643, "eos_token_id": 151645} if "151936" in sizes else {}
    return _config("Qwen3ForCausalLM", "qwen3", sizes, **{**ids, **rest})


def _qwen2(sizes: str, **rest: object) -> Config:
    ids = {"bos_token_id": 151643, "eos_token_id": 151645} if "151936" in sizes else {}
    return _config(
        "Qwen2ForCausalLM",
        "qwen2",
        sizes,
        **{"max_position_embeddings": 32768, "use_sliding_window": False, **ids, **rest},
    )


def _llama(sizes: str, **rest: object) -> Config:
    return _config("LlamaForCausalLM", "llama", sizes, **rest)


def _moe(architecture: str, model_type: str, sizes: str, **rest: object) -> Config:
    """`sizes` ends with experts, experts per token and the size of one expert."""
    dense, experts = sizes.split()[:7], sizes.split()[7:]
    num_experts, chosen, width = map(int, experts)
    base = _config(architecture, model_type, " ".join(dense))
    count_key = "num_local_experts" if model_type == "mixtral" else "num_experts"
    sparse: Config = {count_key: num_experts, "num_experts_per_tok": chosen}
    if model_type != "mixtral":
        sparse |= {"moe_intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": []}
        sparse |= {"norm_topk_prob": True}
    return {**base, **sparse, **rest}


def _qwen3_moe(sizes: str, **rest: object) -> Config:
    ids = {"bos_token_id": 151643, "eos_token_id": 151645} if "151936" in sizes else {}
    return _moe("Qwen3MoeForCausalLM", "qwen3_moe", sizes, **{**ids, **rest})


def _mixtral(sizes: str, **rest: object) -> Config:
    return _moe("MixtralForCausalLM", "mixtral", sizes, sliding_window=None, **rest)


def _llama3_rope(factor: float) -> Config:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA3 = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
_TINY = {"max_position_embeddings": 1024, "rope_theta": 10000.0}

PRESETS: dict[str, Config] = {
    "qwen3-0.6b": _qwen3("28 1024 3072 16 8 128 151936", tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3("28 2048 6144 16 8 128 151936", tie_word_embeddings=True),
    "qwen3-4b": _qwen3("36 2560 9728 32 8 128 151936", tie_word_embeddings=True),
    "qwen3-8b": _qwen3("36 4096 12288 32 8 128 151936"),
    "qwen3-14b": _qwen3("40 5120 17408 40 8 128 151936"),
    "qwen3-32b": _qwen3("64 5120 25600 64 8 128 151936"),
    "qwen2.5-0.5b": _qwen2("24 896 4864 14 2 64 151936", tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2("28 3584 18944 28 4 128 152064"),
    "llama-3.2-1b": _llama(
        "16 2048 8192 32 8 64 128256",
        tie_word_embeddings=True,
        **{**_LLAMA3, "rope_scaling": _llama3_rope(32.0)},
    ),
    "llama-3.1-8b": _llama(
        "32 4096 14336 32 8 128 128256", **{**_LLAMA3, "rope_scaling": _llama3_rope(8.0)}
    ),
    "llama-3.1-70b": _llama(
        "80 8192 28672 64 8 128 128256", **{**_LLAMA3, "rope_scaling": _llama3_rope(8.0)}
    ),
    "mistral-7b": _config(
        "MistralForCausalLM",
        "mistral",
        "32 4096 14336 32 8 128 32768",
        max_position_embeddings=32768,
        sliding_window=None,
    ),
    "qwen3-30b-a3b": _qwen3_moe("48 2048 6144 32 4 128 151936 128 8 768"),
    "qwen3-235b-a22b": _qwen3_moe("94 4096 12288 64 4 128 151936 128 8 1536"),
    "mixtral-8x7b": _mixtral(
        "32 4096 14336 32 8 128 32000 8 2 14336", max_position_embeddings=32768, rms_norm_eps=1e-5
    ),
    "smollm2-135m": _llama(
        "30 576 1536 9 3 64 49152",
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
    ),
    "tiny-qwen3": _qwen3("2 64 128 8 4 16 259", **_TINY, tie_word_embeddings=True),
    "tiny-qwen2": _qwen2("2 64 128 8 4 8 259", **_TINY),
    "tiny-llama": _llama("2 64 128 8 4 8 259", **_TINY),
    "tiny-mistral": _config(
        "MistralForCausalLM", "mistral", "2 64 128 8 4 8 259", **_TINY, sliding_window=None
    ),
    "tiny-qwen3-moe": _qwen3_moe("2 64 128 8 4 16 259 8 2 32", **_TINY),
    "tiny-mixtral": _mixtral("2 64 96 8 4 8 259 4 2 96", **_TINY),
}
