"""The allow-list's mixtures of experts with plain attention."""

from __future__ import annotations

from sim.specs.family import ATTENTION_BIASES, Experts, Family, sizes

_LOCAL = ("num_local_experts", "num_experts_per_tok", "intermediate_size")

MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        sizes(32, 8, 32000, 131072, num_local_experts=8, num_experts_per_tok=2),
        {"num_local_experts": "num_local_experts"},
        window="all",
        experts=Experts(*_LOCAL),
    ),
    "qwen2_moe": Family(
        sizes(
            16, 16, 151936, 32768, sliding_window=4096, max_window_layers=28, qkv_bias=True,
            num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, decoder_sparse_step=1,
        ),
        qkv_bias="qkv_bias",
        window="late",
        window_if="use_sliding_window",
        experts=Experts(
            "num_experts", "num_experts_per_tok", "moe_intermediate_size",
            shared_width="shared_expert_intermediate_size", shared_gate=True, layers="sparse step",
        ),
    ),
    "qwen3_moe": Family(
        sizes(
            32, 4, 151936, 32768, sliding_window=4096, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, decoder_sparse_step=1,
        ),
        qk_norm="head",
        window="all",
        window_if="use_sliding_window",
        experts=Experts(
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", layers="sparse step"
        ),
        **ATTENTION_BIASES,
    ),
    "olmoe": Family(
        sizes(16, None, 50304, 4096, num_experts=64, num_experts_per_tok=8),
        qk_norm="width",
        experts=Experts("num_experts", "num_experts_per_tok", "intermediate_size"),
        **ATTENTION_BIASES,
    ),
    "phimoe": Family(
        sizes(32, 8, 32064, 131072, num_local_experts=16, num_experts_per_tok=2),
        head_bias="lm_head_bias",
        norm_width=2,
        window="all",
        experts=Experts(*_LOCAL),
        **ATTENTION_BIASES,
    ),
    "gpt_oss": Family(
        sizes(
            64, 8, 201088, 131072, head_dim=64, sliding_window=128, attention_bias=True,
            num_local_experts=128, num_experts_per_tok=4,
        ),
        window="pattern",
        window_every=2,
        sinks=True,
        experts=Experts(*_LOCAL, router_bias=True, expert_bias=True),
        **ATTENTION_BIASES,
    ),
    "glm4_moe": Family(
        sizes(
            96, 8, 151552, 131072, moe_intermediate_size=1408, num_experts_per_tok=8,
            n_shared_experts=1, n_routed_experts=128, first_k_dense_replace=1,
        ),
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        experts=Experts(
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
            shared_count="n_shared_experts", layers="after first",
        ),
    ),
    "dots1": Family(
        sizes(32, 32, 152064, 2048, sliding_window=4096, max_window_layers=62),
        qk_norm="head",
        window="late",
        experts=Experts(
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
            shared_count="n_shared_experts", layers="after first",
        ),
        **ATTENTION_BIASES,
    ),
    "ernie4_5_moe": Family(
        sizes(
            20, 4, 103424, 131072, True, moe_intermediate_size=1536, moe_k=6, moe_num_experts=64,
            moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
            moe_layer_interval=1,
        ),
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        experts=Experts(
            "moe_num_experts", "moe_k", "moe_intermediate_size",
            shared_count="moe_num_shared_experts", router_bias=True, layers="range",
        ),
    ),
    "granitemoe": Family(
        sizes(32, None, 32000, 2048, num_local_experts=8, num_experts_per_tok=2),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        experts=Experts(*_LOCAL),
    ),
    "granitemoeshared": Family(
        sizes(32, None, 32000, 2048, num_local_experts=8, num_experts_per_tok=2),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        experts=Experts(*_LOCAL, shared_width="shared_intermediate_size"),
    ),
    "minimax_m2": Family(
        sizes(
            48, 8, 200064, 196608, head_dim=128, num_local_experts=256, num_experts_per_tok=8
        ),
        qk_norm="width",
        experts=Experts(*_LOCAL),
    ),
}  # fmt: skip
