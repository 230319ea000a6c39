"""The shape of a decoder that was counted matrix by matrix: quantised, ungated, windowed, mixed."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.specs.architecture import ATTENTION, EXPERT, FULL, MLP, ROUTER, Architecture
from sim.specs.quantization import WIDE
from sim.specs.shape import ModelShape, MoeShape

# Families whose plain fields say it all; their shapes are those that profiles were made for.
_PLAIN_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Counts:
    """Weights and bytes of a whole model, in its served format."""

    body_params: int
    body_bytes: int
    routed_params: int
    routed_bytes: int
    token_routed_params: int
    head_bytes: int
    num_params: int
    weight_bytes: int
    mlp_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedShape(MoeShape):
    """A decoder whose weights do not follow from the plain fields.

    `num_experts` is 0 in a dense model. `narrow` is the share of the layers' weights whose products
    are computed in `low_arithmetic`; `shortest_window` is None without sliding windows.
    """

    counts: Counts
    kv_dtype_bytes: int
    low_arithmetic: str = WIDE
    narrow: float = 0.0
    shortest_window: int | None = None
    quantization: str = "none"
    tp_widths: tuple[int, ...] = field(default=())

    @property
    def is_plain(self) -> bool:
        """Never: profiles and fits were made for plain shapes."""
        return False

    @property
    def body_params(self) -> int:
        """Matrix weights that every token passes."""
        return self.counts.body_params

    @property
    def body_bytes(self) -> int:
        """Memory of the weights that every token passes."""
        return self.counts.body_bytes

    @property
    def routed_params(self) -> int:
        """Weights of all experts that a router chooses from."""
        return self.counts.routed_params

    @property
    def routed_bytes(self) -> int:
        """Memory of all experts that a router chooses from."""
        return self.counts.routed_bytes

    @property
    def token_routed_params(self) -> int:
        """Weights of the experts that one token is routed to."""
        return self.counts.token_routed_params

    @property
    def token_routed_bytes(self) -> int:
        """Memory of the experts that one token is routed to."""
        if not self.num_experts:
            return 0
        return self.routed_bytes * self.experts_per_token // self.num_experts

    @property
    def head_bytes(self) -> int:
        """Memory of the output projection."""
        return self.counts.head_bytes

    @property
    def num_params(self) -> int:
        """All weights."""
        return self.counts.num_params

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights over all ranks."""
        return self.counts.weight_bytes

    @property
    def mlp_width(self) -> int:
        """Inner activations of one token in its widest MLP."""
        return self.counts.mlp_width

    @property
    def arithmetic(self) -> str:
        """What the quantised matrix products are computed in."""
        return self.low_arithmetic

    @property
    def narrow_share(self) -> float:
        """Share of the layers' weights whose products are computed in `arithmetic`."""
        return self.narrow

    @property
    def window(self) -> int | None:
        """Tokens of the shortest sliding window."""
        return self.shortest_window

    def routed_share(self, num_tokens: int) -> float:
        """Expected share of the routed experts that `num_tokens` tokens use, chosen uniformly."""
        if not self.num_experts:
            return 0.0
        unused: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return 1.0 - unused

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """KV memory of one token on one rank."""
        heads = self.kv_heads_per_rank(tp)
        return 2 * self.num_layers * heads * self.head_dim * self.kv_dtype_bytes

    def _mlp_widths(self) -> tuple[int, ...]:
        return self.tp_widths


def shape_of(built: Architecture, dtype_bytes: int, kv_dtype_bytes: int) -> ModelShape:
    """What the costs of an architecture depend on, served in these formats.

    The caller has checked that `not_modelled` is empty.
    """
    dense = (
        built.name, len(built.layers), built.hidden_size, built.num_heads, built.num_kv_heads,
        built.head_dim, built.intermediate_size, built.vocab_size, built.tied_embeddings,
        built.max_position, dtype_bytes,
    )  # fmt: skip
    shared, expert = _width(built, MLP), _width(built, EXPERT)
    if _is_plain(built, dtype_bytes, kv_dtype_bytes):
        if not built.num_experts:
            return ModelShape(*dense)
        return MoeShape(
            *dense,
            num_experts=built.num_experts,
            experts_per_token=built.experts_per_token,
            moe_intermediate_size=expert,
            shared_intermediate_size=shared,
        )
    windows = [layer.window for layer in built.layers if layer.window is not None]
    return CountedShape(
        *dense,
        num_experts=built.num_experts,
        experts_per_token=built.experts_per_token,
        moe_intermediate_size=expert,
        shared_intermediate_size=shared,
        counts=_counts(built, dtype_bytes, shared, expert),
        kv_dtype_bytes=kv_dtype_bytes,
        low_arithmetic=built.quantization.arithmetic,
        narrow=_narrow_share(built),
        shortest_window=min(windows, default=None),
        quantization=built.quantization.method,
        tp_widths=tuple(sorted(_tp_widths(built))),
    )


def _is_plain(built: Architecture, dtype_bytes: int, kv_dtype_bytes: int) -> bool:
    if not built.gated or built.quantization.method != "none" or kv_dtype_bytes != dtype_bytes:
        return False
    if any(layer.attention != FULL for layer in built.layers) or built.other_params:
        return False
    if not built.num_experts:
        return True
    routed = all(layer.params(EXPERT) for layer in built.layers)
    return routed and built.model_type in _PLAIN_MIXTURES


def _counts(built: Architecture, dtype_bytes: int, shared: int, expert: int) -> Counts:
    return Counts(
        body_params=built.body_params,
        body_bytes=built.matrix_bytes(dtype_bytes, ATTENTION, MLP, ROUTER),
        routed_params=built.routed_params,
        routed_bytes=built.matrix_bytes(dtype_bytes, EXPERT),
        token_routed_params=built.token_routed_params,
        head_bytes=built.head_bytes(dtype_bytes),
        num_params=built.num_params,
        weight_bytes=built.weight_bytes(dtype_bytes),
        mlp_width=max(shared, shared + built.experts_per_token * expert),
    )


def _narrow_share(built: Architecture) -> float:
    if built.quantization.arithmetic == WIDE:
        return 0.0
    roles = (ATTENTION, MLP, ROUTER, EXPERT)
    total = sum(layer.params(*roles) for layer in built.layers)
    return built.quantized_params(*roles) / total


def _width(built: Architecture, role: str) -> int:
    """Inner size of the widest MLP of that role."""
    return max(
        (
            matrix.inputs
            for layer in built.layers
            for matrix in layer.matrices
            if matrix.role == role and matrix.name.endswith("down_proj")
        ),
        default=0,
    )


def _tp_widths(built: Architecture) -> set[int]:
    return {
        matrix.inputs
        for layer in built.layers
        for matrix in layer.matrices
        if matrix.role in (MLP, EXPERT) and matrix.name.endswith("down_proj")
    }
