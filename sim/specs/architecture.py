"""A decoder as its matrices, layer by layer: exact counts of weights and KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sim.specs.quantization import UNQUANTIZED, Quantization

# What a layer's matrices are for; only experts are read as far as tokens are routed to them.
ATTENTION, MLP, EXPERT, ROUTER = "attention", "mlp", "expert", "router"
# What a layer's tokens attend to.
FULL, SLIDING, CHUNKED, LATENT = "full", "sliding-window", "chunked", "multi-head latent"
LINEAR_STATE, NO_ATTENTION = "linear (a state)", "none"


@dataclass(frozen=True, slots=True)
class Matrix:
    """`copies` equal linear projections; `name` is the module's within its layer."""

    name: str
    inputs: int
    outputs: int
    role: str
    copies: int = 1
    bias: bool = False

    @property
    def params(self) -> int:
        """Weights without biases."""
        return self.copies * self.inputs * self.outputs

    @property
    def bias_params(self) -> int:
        """Biases."""
        return self.copies * self.outputs if self.bias else 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `vector_params` are its norms and all else that is no matrix.

    `kv_values` are the values that one token keeps in the KV cache, over all heads.
    """

    matrices: tuple[Matrix, ...]
    vector_params: int
    attention: str
    kv_values: int
    window: int | None = None

    def params(self, *roles: str) -> int:
        """Matrix weights of these roles."""
        return sum(matrix.params for matrix in self.matrices if matrix.role in roles)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole model.

    `experts_per_token` of `num_experts` take part for one token. `other_params` are weights
    outside the layers that are neither embedding, output head nor final norm. `not_modelled`
    names what the simulator's costs leave out; it is empty where they hold.
    """

    name: str
    model_type: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    tied_embeddings: bool
    stored_dtype: str
    positions: str
    gated: bool = True
    head_bias: bool = False
    embedding_params: int = 0  # beside the token embedding: learned positions
    norm_params: int = 0  # outside the layers
    other_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    quantization: Quantization = UNQUANTIZED
    not_modelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_params(self) -> int:
        """All weights."""
        return sum(self._layer_params()) + self._outside_params

    @property
    def active_params(self) -> int:
        """Weights that take part for one token, embedding included."""
        return self.num_params - self.routed_params + self.token_routed_params

    @property
    def routed_params(self) -> int:
        """Matrix weights of all experts."""
        return sum(layer.params(EXPERT) for layer in self.layers)

    @property
    def token_routed_params(self) -> int:
        """Matrix weights of the experts that one token is routed to."""
        return self.routed_params * self.experts_per_token // max(1, self.num_experts)

    @property
    def body_params(self) -> int:
        """Matrix weights of the layers that every token passes."""
        return sum(layer.params(ATTENTION, MLP, ROUTER) for layer in self.layers)

    @property
    def head_params(self) -> int:
        """Weights of the output projection."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_values_per_token(self) -> int:
        """Values of one token in the KV cache, over all layers; windows are left out of account."""
        return sum(layer.kv_values for layer in self.layers)

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Memory of all weights; what is not quantised has `dtype_bytes`."""
        vectors = sum(
            layer.vector_params + sum(matrix.bias_params for matrix in layer.matrices)
            for layer in self.layers
        )
        outside = self._outside_params
        head = 0
        if not self.tied_embeddings:
            outside -= self.head_params
            head = self._matrix_bytes("lm_head", self._head, dtype_bytes)
        matrices = self.matrix_bytes(dtype_bytes, ATTENTION, MLP, ROUTER, EXPERT)
        return (vectors + outside) * dtype_bytes + matrices + head

    def matrix_bytes(self, dtype_bytes: int, *roles: str) -> int:
        """Memory of the layers' matrices of these roles."""
        return sum(
            self._matrix_bytes(name, matrix, dtype_bytes)
            for name, matrix in self.named_matrices()
            if matrix.role in roles
        )

    def head_bytes(self, dtype_bytes: int) -> int:
        """Memory that the output projection reads."""
        if self.tied_embeddings:
            return self.head_params * dtype_bytes
        return self._matrix_bytes("lm_head", self._head, dtype_bytes)

    def quantized_params(self, *roles: str) -> int:
        """Matrix weights of these roles that are not 16 bit."""
        return sum(
            matrix.params
            for name, matrix in self.named_matrices()
            if matrix.role in roles and self.quantization.applies(name, matrix.role)
        )

    def named_matrices(self) -> Iterator[tuple[str, Matrix]]:
        """The layers' matrices by module name."""
        for index, layer in enumerate(self.layers):
            for matrix in layer.matrices:
                yield f"model.layers.{index}.{matrix.name}", matrix

    @property
    def _head(self) -> Matrix:
        return Matrix("lm_head", self.hidden_size, self.vocab_size, "head")

    def _matrix_bytes(self, name: str, matrix: Matrix, dtype_bytes: int) -> int:
        if not self.quantization.applies(name, matrix.role):
            return matrix.params * dtype_bytes
        return matrix.copies * self.quantization.matrix_bytes(matrix.inputs, matrix.outputs)

    def _layer_params(self) -> Iterator[int]:
        for layer in self.layers:
            matrices = sum(matrix.params + matrix.bias_params for matrix in layer.matrices)
            yield matrices + layer.vector_params

    @property
    def _outside_params(self) -> int:
        """Embeddings, head, and what stands between and beside the layers."""
        embeddings = self.head_params * (1 if self.tied_embeddings else 2) + self.embedding_params
        bias = self.vocab_size if self.head_bias else 0
        return embeddings + bias + self.norm_params + self.other_params
