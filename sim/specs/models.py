"""Shapes of decoder models, dense or mixtures of experts: bytes and FLOPs follow from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a dense decoder with gated MLP depends on."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    max_position: int
    dtype_bytes: int = 2

    @property
    def attention_params(self) -> int:
        """Matrix weights of one layer's attention."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def layer_params(self) -> int:
        """Matrix weights of one dense layer; norms and biases are below a thousandth of them."""
        return self.attention_params + 3 * self.hidden_size * self.intermediate_size

    @property
    def body_params(self) -> int:
        """Matrix weights that every token passes."""
        return self.num_layers * self.layer_params

    @property
    def routed_params(self) -> int:
        """Weights of all experts that a router chooses from; none in a dense model."""
        return 0

    @property
    def token_routed_params(self) -> int:
        """Weights of the experts that one token is routed to."""
        return 0

    @property
    def mlp_width(self) -> int:
        """Inner activations of one token in its widest MLP."""
        return self.intermediate_size

    def routed_share(self, num_tokens: int) -> float:
        """Expected share of the routed experts that `num_tokens` tokens use."""
        return 0.0

    @property
    def head_params(self) -> int:
        """Weights of the output projection, which only sampled tokens pass."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights, embedding included."""
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        return self.body_params + self.routed_params + embeddings

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights over all ranks."""
        return self.num_params * self.dtype_bytes

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads of one rank; heads are replicated where ranks outnumber them."""
        return max(1, self.num_kv_heads // tp)

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """KV memory of one token on one rank."""
        return 2 * self.num_layers * self.kv_heads_per_rank(tp) * self.head_dim * self.dtype_bytes

    def valid_tp_sizes(self, limit: int = 64) -> list[int]:
        """Tensor parallel sizes that divide heads and MLP, and fit the KV heads."""
        return [tp for tp in range(1, limit + 1) if self._tp_fits(tp)]

    def _tp_fits(self, tp: int) -> bool:
        kv_fits = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        mlps_fit = all(width % tp == 0 for width in self._mlp_widths())
        return self.num_heads % tp == 0 and mlps_fit and kv_fits

    def _mlp_widths(self) -> tuple[int, ...]:
        """Inner sizes of the MLPs, which tensor parallel ranks share out."""
        return (self.intermediate_size,)

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError where the model cannot be split over `tp` ranks."""
        if tp < 1 or not self._tp_fits(tp):
            sizes = ", ".join(str(size) for size in self.valid_tp_sizes())
            raise ConfigError("tp", tp, f"{self.name} can be split over {sizes} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape(ModelShape):
    """A decoder that routes each token to `experts_per_token` experts in every layer.

    `intermediate_size` has no meaning here; `shared_intermediate_size` is the inner size of what
    every token passes besides. The router has `num_experts` outputs per layer.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0

    @property
    def body_params(self) -> int:
        """Matrix weights that every token passes: attention, routers and shared MLPs."""
        mlp = self.hidden_size * (3 * self.shared_intermediate_size + self.num_experts)
        return self.num_layers * (self.attention_params + mlp)

    @property
    def routed_params(self) -> int:
        """Weights of all experts that a router chooses from."""
        return self.num_layers * self.num_experts * self._expert_params

    @property
    def token_routed_params(self) -> int:
        """Weights of the experts that one token is routed to."""
        return self.num_layers * self.experts_per_token * self._expert_params

    @property
    def mlp_width(self) -> int:
        """Inner activations of one token in an MLP, over all its experts."""
        return self.experts_per_token * self.moe_intermediate_size + self.shared_intermediate_size

    def routed_share(self, num_tokens: int) -> float:
        """Expected share of the routed experts that `num_tokens` tokens use, chosen uniformly."""
        unused: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return 1.0 - unused

    @property
    def _expert_params(self) -> int:
        return 3 * self.hidden_size * self.moe_intermediate_size

    def _mlp_widths(self) -> tuple[int, ...]:
        return (self.moe_intermediate_size, self.shared_intermediate_size)


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

_ALIASES = {
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "llama2-7b": "llama-2-7b",
}


# Families of mixtures of experts by model_type, and the key that counts their experts.
MOE_TYPES = {
    "qwen3_moe": "num_experts",
    "qwen2_moe": "num_experts",
    "mixtral": "num_local_experts",
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_named(name: str) -> ModelShape:
    """The shape of a built-in name, or of a config.json (or the folder that holds one).

    Raises:
        ConfigError: neither.
        InputError: the file is not a config of a known kind of decoder.
    """
    key = name.lower()
    for owner in ("qwen/", "meta-llama/", "mistralai/"):
        key = key.removeprefix(owner)
    shape = MODELS.get(_ALIASES.get(key, key))
    if shape is not None:
        return shape
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_config(path)
    raise ConfigError(
        "model", name, f"must be a path to a config.json or one of {', '.join(MODELS)}"
    )


def read_config(path: Path) -> ModelShape:
    """The shape in a Hugging Face `config.json`; of mixtures of experts those in `MOE_TYPES`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: must hold a JSON object")
    num_heads = _positive(path, config, "num_attention_heads")
    hidden_size = _positive(path, config, "hidden_size")
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{path}: torch_dtype={dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    tied_default = config.get("model_type") in {"gemma", "gemma2", "gemma3"}
    dense = ModelShape(
        name=str(config.get("_name_or_path") or path.parent.name or path.name),
        num_layers=_positive(path, config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_positive(path, config, "num_key_value_heads", num_heads),
        head_dim=_positive(path, config, "head_dim", hidden_size // num_heads),
        intermediate_size=_positive(path, config, "intermediate_size"),
        vocab_size=_positive(path, config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", tied_default)),
        max_position=_positive(path, config, "max_position_embeddings", 2048),
        dtype_bytes=DTYPE_BYTES[dtype],
    )
    return _with_experts(path, config, dense)


def _with_experts(path: Path, config: dict[str, Any], dense: ModelShape) -> ModelShape:
    """The shape with the experts that the config names; the dense shape where it names none."""
    named = [key for key in _EXPERT_COUNTS if config.get(key)]
    if not named:
        return dense
    kind = config.get("model_type")
    if kind not in MOE_TYPES:
        raise InputError(
            f"{path}: {named[0]}={config[named[0]]!r} with model_type={kind!r}: of mixtures of"
            f" experts only {', '.join(MOE_TYPES)} are modelled"
        )
    num_experts = _positive(path, config, MOE_TYPES[kind])
    experts_per_token = _positive(path, config, "num_experts_per_tok")
    if experts_per_token > num_experts:
        raise InputError(
            f"{path}: num_experts_per_tok={experts_per_token}: there are {num_experts} experts"
        )
    if kind == "mixtral":
        return _moe(dense, num_experts, experts_per_token, dense.intermediate_size)
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InputError(f"{path}: only models with experts in every layer are modelled")
    moe = _moe(
        dense, num_experts, experts_per_token, _positive(path, config, "moe_intermediate_size")
    )
    if kind == "qwen2_moe":
        return replace(
            moe, shared_intermediate_size=_positive(path, config, "shared_expert_intermediate_size")
        )
    return moe


def _positive(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{path}: {key}={value!r}: must be a positive integer")
    return value
