"""What the simulator leaves out or refuses, by name."""

from __future__ import annotations

from sim.specs.architecture import CHUNKED, LATENT, LINEAR_STATE, Architecture
from sim.specs.quantization import FP4

_ENCODER = "is an encoder, which generates no text token by token"
_SEQ2SEQ = "has an encoder beside its decoder; decoders alone are modelled"
_STATE = "keeps a state in place of a KV cache, which is not modelled"
_HYBRID = "mixes attention with layers that keep a state (hybrid), which is not modelled"
_SHARED_KV = "shares KV between layers and has per-layer embeddings, which is not modelled"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("albert", "bert", "camembert", "clip", "deberta", "deberta-v2", "distilbert", "electra",
         "ernie", "mpnet", "modernbert", "nomic_bert", "roberta", "siglip", "xlm-roberta"),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("bart", "mbart", "mt5", "marian", "pegasus", "t5", "t5gemma", "umt5", "whisper"),
        _SEQ2SEQ,
    ),
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "rwkv7", "xlstm"), _STATE
    ),
    **dict.fromkeys(
        ("bamba", "bailing_hybrid", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
         "lfm2_moe", "minimax", "minimax_text_01", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
         "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "zamba", "zamba2"),
        _HYBRID,
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _SHARED_KV),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
        "selects the keys that it attends to (sparse attention), which is not modelled",
    ),
    "longcat_flash": "has two attentions a layer and experts that compute nothing, not modelled",
    "mllama": "attends to images in layers of its own (cross attention), which is not modelled",
}  # fmt: skip


def unmodelled(architecture: Architecture) -> tuple[str, ...]:
    """What the costs of a simulated run would leave out, whatever its options."""
    kinds = {layer.attention for layer in architecture.layers}
    found = []
    if LATENT in kinds:
        found.append("multi-head latent attention (its costs; the memory of its KV is counted)")
    if CHUNKED in kinds:
        found.append("chunked attention")
    if LINEAR_STATE in kinds:
        found.append("layers that keep a state (mamba, linear attention)")
    if architecture.quantization.arithmetic == FP4:
        found.append("arithmetic in 4 bits")
    return tuple(found)
