"""The allow-list's decoders with multi-head latent attention: DeepSeek and what follows it."""

from __future__ import annotations

from sim.specs.family import ATTENTION_BIASES, Experts, Family, sizes

_ROUTED = Experts(
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    shared_count="n_shared_experts", layers="after first",
)  # fmt: skip

_V3 = Family(
    sizes(
        128, 128, 129280, 4096, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_shared_experts=1, n_routed_experts=256,
        num_experts_per_tok=8, first_k_dense_replace=3, moe_intermediate_size=2048,
    ),
    latent=True,
    experts=_ROUTED,
    **ATTENTION_BIASES,
)  # fmt: skip

LATENT_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        sizes(
            32, None, 102400, 2048, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
            qk_nope_head_dim=128, v_head_dim=128, n_shared_experts=2, n_routed_experts=64,
            first_k_dense_replace=0, moe_intermediate_size=1407,
        ),
        latent=True,
        mlp_bias="mlp_bias",
        experts=_ROUTED,
        **ATTENTION_BIASES,
    ),
    "deepseek_v3": _V3,
    # Kimi brings code of its own that is DeepSeek-V3's.
    "kimi_k2": _V3,
    "minicpm3": Family(
        sizes(
            40, 40, 73448, 32768, True, kv_lora_rank=256, q_lora_rank=768, qk_rope_head_dim=32,
            qk_nope_head_dim=64,
        ),
        latent=True,
        mlp_bias="mlp_bias",
        **ATTENTION_BIASES,
    ),
}  # fmt: skip
