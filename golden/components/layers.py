"""Norms, rotation, feed-forward, embedding and head against their HF counterparts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed.group import TpGroup
from engine.layers.embedding import OutputHead, VocabParallelEmbedding, VocabParallelWeight
from engine.layers.mlp import SwiGLU
from engine.layers.norm import RMSNorm
from engine.layers.rope import apply_rope, cos_sin_table, inverse_frequencies
from engine.layers.rope_config import RopeConfig, resolve_rope
from golden.cases import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, tiny_model
from golden.results import CaseResult, judged
from golden.vector_rules import ErrorStats, three_way

GROUP = "components"
ROPE_TYPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": LINEAR_ROPE,
    "llama3": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    "yarn": {**YARN_ROPE, "original_max_position_embeddings": 5120},
}
ROPE_POSITIONS = 20_000
# A frequency may differ by two units in the last place, since the formulas round in other orders.
FREQUENCY_RTOL = 2.5e-7


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where and in which form a component runs."""

    device: torch.device
    dtype: torch.dtype
    fused: bool = False

    @property
    def label(self) -> str:
        """Short form for case names."""
        fused = ", fused" if self.fused else ""
        return f"{str(self.dtype).removeprefix('torch.')}{fused}"


def normal(shape: tuple[int, ...], seed: int, place: Place, scale: float = 1.0) -> Tensor:
    """Random values that are exact in the dtype under test."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * scale
    return values.to(place.dtype).to(place.device)


def component_result(name: str, place: Place, stats: ErrorStats, *more: str) -> CaseResult:
    """One row of the report for a component."""
    return judged(
        GROUP,
        f"{name} ({place.label})",
        [*stats.violations, *more],
        observed_c=stats.observed_c,
        max_error=stats.max_error,
        pooled_ratio=stats.pooled_ratio,
    )


def in_fp32(module: nn.Module) -> nn.Module:
    """A float32 copy with the same weights: the truth beside the yardstick."""
    return copy.deepcopy(module).float()


@torch.no_grad()
def norm_results(place: Place) -> Iterator[CaseResult]:
    """RMSNorm alone and with the residual; inputs untouched, residual exact."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for size in (16, 64, 1024):
        hf = Qwen3RMSNorm(size, eps=1e-6).to(place.device)
        hf.weight.copy_(normal((size,), 1, place).abs() + 0.5)
        hf = hf.to(place.dtype)
        norm = RMSNorm(size, 1e-6, place.dtype, place.device, place.fused)
        norm.weight.copy_(hf.weight)
        x, residual = normal((37, size), 2, place, 3.0), normal((37, size), 3, place, 3.0)
        before = x.clone(), residual.clone()
        alone = norm(x)
        assert isinstance(alone, Tensor)
        stats = three_way(alone, in_fp32(hf)(x.float()), hf(x), place.dtype)
        out, total = norm.add(x, residual)
        assert isinstance(out, Tensor)
        problems = []
        if not torch.equal(total, before[0] + before[1]):
            problems.append("the residual is not x + residual exactly")
        if not (torch.equal(x, before[0]) and torch.equal(residual, before[1])):
            problems.append("an input was written to")
        yield component_result(f"rms norm {size}", place, stats, *problems)
        fused = three_way(out, in_fp32(hf)(total.float()), hf(total), place.dtype)
        yield component_result(f"rms norm {size} of a sum", place, fused)


def rope_results(place: Place, theta_factor: float = 1.0) -> Iterator[CaseResult]:
    """Frequencies and tables of every scaling type up to position 20,000, then the rotation."""
    for rope_type, params in ROPE_TYPES.items():
        hf, config = _rope_pair(params)
        config = dataclasses.replace(config, theta=config.theta * theta_factor)
        yield _rope_table_result(rope_type, hf.to(place.device), config, place)
        yield _rotation_result(rope_type, hf, config, place)


def _rope_pair(params: dict[str, object]) -> tuple[Any, RopeConfig]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {
        **tiny_model("llama-gqa").settings,
        "head_dim": 64,
        "max_position_embeddings": 20_480,
        "rope_parameters": params,
    }
    config = LlamaConfig(**settings)
    return LlamaRotaryEmbedding(config), resolve_rope(config.to_dict())


def _rope_table_result(rope_type: str, hf: Any, config: RopeConfig, place: Place) -> CaseResult:  # noqa: ANN401
    positions = torch.arange(ROPE_POSITIONS, device=place.device)
    cos, sin = hf(torch.zeros(1, device=place.device), positions[None])
    half = cos.shape[-1] // 2
    truth = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    table = cos_sin_table(config, 2 * half, ROPE_POSITIONS, place.device)
    frequencies, scale = inverse_frequencies(config, 2 * half)
    true_frequencies = hf.inv_freq.to(frequencies)
    relative = float(((frequencies - true_frequencies) / true_frequencies).abs().max())
    # An error of a frequency grows with the position; cos and sin themselves round to 1e-6.
    angle_error = positions[:, None] * hf.inv_freq.to(place.device)[None] * FREQUENCY_RTOL
    allowed = (angle_error.repeat(1, 2) + 1e-6) * max(1.0, scale)
    problems = []
    if relative > FREQUENCY_RTOL:
        problems.append(f"a frequency is off by {relative:.2g} (relative)")
    worst = float(((table - truth).abs() / allowed).max())
    if worst > 1:
        problems.append(f"the table is off by {worst:.1f} times the bound")
    return judged(
        GROUP,
        f"rope {rope_type} table to {ROPE_POSITIONS} ({place.device.type})",
        problems,
        frequency_error=relative,
        max_error=float((table - truth).abs().max()),
    )


def _rotation_result(rope_type: str, hf: Any, config: RopeConfig, place: Place) -> CaseResult:  # noqa: ANN401
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.tensor([0, 1, 2, 15, 16, 777, 4096, 8191, 19_999], device=place.device)
    x = normal((len(positions), 4, 64), 5, place)
    heads = x.transpose(0, 1)[None]  # [1, heads, tokens, dim]

    def rotated(states: Tensor) -> Tensor:
        cos, sin = hf(states, positions[None])
        out: Tensor = apply_rotary_pos_emb(states, states, cos, sin)[0]
        return out[0].transpose(0, 1)

    table = cos_sin_table(config, 64, ROPE_POSITIONS, place.device)
    engine = apply_rope(x, table[positions])
    truth = rotated(heads.float())
    if place.dtype == torch.float32:
        # The table's own bound above is absolute in the angle; here it is checked per row.
        close = bool(((engine - truth).abs() <= 5e-3).all())
        stats = three_way(engine[:6], truth[:6], truth[:6], place.dtype)
        more = [] if close else ["rotation at far positions is off"]
        return component_result(f"rope {rope_type} rotation", place, stats, *more)
    stats = three_way(engine, truth, rotated(heads), place.dtype)
    return component_result(f"rope {rope_type} rotation", place, stats)


@torch.no_grad()
def mlp_results(place: Place) -> Iterator[CaseResult]:
    """SwiGLU with and without biases."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    for bias in (False, True):
        settings = {**tiny_model("llama-gqa").settings, "mlp_bias": bias}
        hf = LlamaMLP(LlamaConfig(**settings)).to(place.device)
        for seed, parameter in enumerate(hf.parameters()):
            parameter.copy_(normal(tuple(parameter.shape), seed, place, 0.15))
        hf = hf.to(place.dtype)
        hidden, intermediate = hf.hidden_size, hf.intermediate_size
        mlp = SwiGLU(hidden, intermediate, bias, TpGroup(), place.dtype, place.device, place.fused)
        state = hf.state_dict()
        for item in mlp.weight_slices(""):
            item.target.copy_(state[item.name])
        x = normal((29, hidden), 7, place, 2.0)
        stats = three_way(mlp(x), in_fp32(hf)(x.float()), hf(x), place.dtype)
        yield component_result(f"mlp{' with bias' if bias else ''}", place, stats)


@torch.no_grad()
def vocab_results(place: Place) -> Iterator[CaseResult]:
    """The embedding is exact; the head, tied or not, follows the rule and cuts its padding."""
    vocab, hidden = 151, 64
    weight = normal((vocab, hidden), 11, place, 0.3)
    ids = torch.tensor([0, 1, 75, 149, 150, 150], device=place.device)
    sizes = (vocab, hidden, TpGroup(), place.dtype, place.device)
    embedding = VocabParallelEmbedding(*sizes)
    embedding.weight[:vocab].copy_(weight)
    exact = torch.equal(embedding(ids), nn.functional.embedding(ids, weight))
    yield judged(
        GROUP, f"embedding ({place.label})", [] if exact else ["rows differ from the table"]
    )
    x = normal((33, hidden), 12, place)
    for name, table in (("tied", embedding), ("untied", VocabParallelWeight(*sizes))):
        if name == "untied":
            weight = normal((vocab, hidden), 13, place, 0.3)
            table.weight[:vocab].copy_(weight)
        logits = OutputHead(table)(x)
        width = [] if logits.shape[-1] == vocab else [f"{logits.shape[-1]} columns, not {vocab}"]
        truth = nn.functional.linear(x.float(), weight.float())
        stats = three_way(logits[:, :vocab], truth, nn.functional.linear(x, weight), place.dtype)
        yield component_result(f"head {name}", place, stats, *width)
