"""The models that are known by name."""

from __future__ import annotations

from dataclasses import fields

from sim.specs.shape import ModelShape, MoeShape


def _shape(
    name: str, layers: int, hidden: int, heads: tuple[int, int, int], mlp: int, vocab: int,
    tied: bool, max_position: int,
) -> ModelShape:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    return ModelShape(
        name, layers, hidden, num_heads, num_kv_heads, head_dim, mlp, vocab, tied, max_position
    )


def _moe(
    dense: ModelShape, num_experts: int, experts_per_token: int, moe_intermediate_size: int
) -> MoeShape:
    """The shape of `dense` with experts in every layer."""
    return MoeShape(
        *(getattr(dense, field.name) for field in fields(ModelShape)),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        moe_intermediate_size=moe_intermediate_size,
    )


# Each row restates the model's published config.json.
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape("qwen3-0.6b", 28, 1024, (16, 8, 128), 3072, 151936, True, 40960),
        _shape("qwen3-1.7b", 28, 2048, (16, 8, 128), 6144, 151936, True, 40960),
        _shape("qwen3-4b", 36, 2560, (32, 8, 128), 9728, 151936, True, 40960),
        _shape("qwen3-8b", 36, 4096, (32, 8, 128), 12288, 151936, False, 40960),
        _shape("qwen3-14b", 40, 5120, (40, 8, 128), 17408, 151936, False, 40960),
        _shape("qwen3-32b", 64, 5120, (64, 8, 128), 25600, 151936, False, 40960),
        _shape("qwen2.5-0.5b", 24, 896, (14, 2, 64), 4864, 151936, True, 32768),
        _shape("qwen2.5-1.5b", 28, 1536, (12, 2, 128), 8960, 151936, True, 32768),
        _shape("qwen2.5-3b", 36, 2048, (16, 2, 128), 11008, 151936, True, 32768),
        _shape("qwen2.5-7b", 28, 3584, (28, 4, 128), 18944, 152064, False, 32768),
        _shape("qwen2.5-14b", 48, 5120, (40, 8, 128), 13824, 152064, False, 32768),
        _shape("qwen2.5-32b", 64, 5120, (40, 8, 128), 27648, 152064, False, 32768),
        _shape("qwen2.5-72b", 80, 8192, (64, 8, 128), 29568, 152064, False, 32768),
        _shape("llama-2-7b", 32, 4096, (32, 32, 128), 11008, 32000, False, 4096),
        _shape("llama-3-8b", 32, 4096, (32, 8, 128), 14336, 128256, False, 8192),
        _shape("llama-3-70b", 80, 8192, (64, 8, 128), 28672, 128256, False, 8192),
        _shape("llama-3.1-8b", 32, 4096, (32, 8, 128), 14336, 128256, False, 131072),
        _shape("llama-3.1-70b", 80, 8192, (64, 8, 128), 28672, 128256, False, 131072),
        _shape("llama-3.2-1b", 16, 2048, (32, 8, 64), 8192, 128256, True, 131072),
        _shape("llama-3.2-3b", 28, 3072, (24, 8, 128), 8192, 128256, True, 131072),
        _shape("mistral-7b", 32, 4096, (32, 8, 128), 14336, 32768, False, 32768),
        _shape("smollm2-135m", 30, 576, (9, 3, 64), 1536, 49152, True, 8192),
        _shape("smollm2-360m", 32, 960, (15, 5, 64), 2560, 49152, True, 8192),
        _shape("smollm2-1.7b", 24, 2048, (32, 32, 64), 8192, 49152, True, 8192),
        _moe(
            _shape("qwen3-30b-a3b", 48, 2048, (32, 4, 128), 6144, 151936, False, 40960),
            128, 8, 768,
        ),
        _moe(
            _shape("qwen3-235b-a22b", 94, 4096, (64, 4, 128), 12288, 151936, False, 40960),
            128, 8, 1536,
        ),
        _moe(
            _shape("mixtral-8x7b", 32, 4096, (32, 8, 128), 14336, 32000, False, 32768),
            8, 2, 14336,
        ),
    )
}  # fmt: skip
