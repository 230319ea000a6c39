"""Shapes of decoder models, dense or mixtures of experts: bytes and FLOPs follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ConfigError
from sim.specs.quantization import WIDE


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

    @property
    def body_bytes(self) -> int:
        """Memory of the weights that every token passes."""
        return self.body_params * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Memory of the output projection."""
        return self.head_params * self.dtype_bytes

    @property
    def routed_bytes(self) -> int:
        """Memory of all experts that a router chooses from."""
        return self.routed_params * self.dtype_bytes

    @property
    def token_routed_bytes(self) -> int:
        """Memory of the experts that one token is routed to."""
        return self.token_routed_params * self.dtype_bytes

    @property
    def is_mixture(self) -> bool:
        """Whether a router chooses experts."""
        return False

    @property
    def is_plain(self) -> bool:
        """Whether the fields say it all: gated MLPs, full attention, all in the dtype."""
        return True

    @property
    def arithmetic(self) -> str:
        """What the quantised matrix products are computed in."""
        return WIDE

    @property
    def narrow_share(self) -> float:
        """Share of the layers' weights whose products are computed in `arithmetic`."""
        return 0.0

    @property
    def window(self) -> int | None:
        """Tokens of the shortest sliding window; costs hold as far as no context exceeds it."""
        return None

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
    def is_mixture(self) -> bool:
        """Whether a router chooses experts."""
        return self.num_experts > 0

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
