"""Teacher-forced routing: the truth's choice of experts, given to whoever computes in 16 bits.

Which experts a token visits is a choice like the next token: where two scores are close, rounding
decides, and what follows is another computation. So truth, yardstick and engine take the experts
that HF takes in float32, each with weights from its own scores, and the scores are judged apart.
In float32 nothing is forced: there the engine must choose as HF does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.layers.moe import SparseMoe
from golden.compare import MAX_POOLED_RATIO

if TYPE_CHECKING:
    from golden.forced import ForcedRunner


@dataclass(slots=True)
class Routes:
    """Of one sequence, by sparse layer: experts [n, top_k] and probabilities [n, experts]."""

    experts: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)


def routers(model: nn.Module) -> list[nn.Module]:
    """HF's routers, layer by layer."""
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


@contextmanager
def recorded(model: nn.Module, forced: Routes | None = None) -> Iterator[Routes]:
    """Notes what HF's routers say in one forward, and makes them choose as in `forced`."""
    routes = Routes()
    hooks = []
    for layer, router in enumerate(routers(model)):

        def hook(router: Any, _inputs: object, output: Any, layer: int = layer) -> Any:  # noqa: ANN401
            logits, _, experts = output
            probabilities = torch.softmax(logits.float(), dim=-1)
            routes.probabilities.append(probabilities)
            if forced is None:
                routes.experts.append(experts)
                return output
            chosen = forced.experts[layer].to(experts.device)
            weights = _weights(probabilities, chosen, getattr(router, "norm_topk_prob", True))
            # Qwen rounds the weights to the model's dtype, Mixtral does not.
            return logits, weights.to(output[1].dtype), chosen

        hooks.append(router.register_forward_hook(hook))
    try:
        yield routes
    finally:
        for handle in hooks:
            handle.remove()


def _weights(probabilities: Tensor, chosen: Tensor, renormalised: bool) -> Tensor:
    weights = probabilities.gather(-1, chosen.long())
    return weights / weights.sum(-1, keepdim=True) if renormalised else weights


@dataclass(slots=True)
class ScoreErrors:
    """One side's errors in the probabilities, over all tokens, layers and experts."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """The mean error."""
        return self.total / max(1, self.count)

    def add(self, found: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
        """Adds the errors of some rows."""
        for mine, wanted in zip(found, truth, strict=True):
            self.count += wanted.numel()
            self.total += float((mine.float().cpu() - wanted.float().cpu()).abs().sum())


class ForcedRoutes:
    """Makes an engine's sparse layers take the truth's experts, and compares the scores."""

    def __init__(self, runner: ForcedRunner, truth: dict[str, Routes]) -> None:
        self.errors = ScoreErrors()
        self._runner, self._truth = runner, truth
        layers = (getattr(layer, "mlp", None) for layer in runner.model.layers)
        for number, block in enumerate(m for m in layers if isinstance(m, SparseMoe)):
            self._force(block, number)

    def _force(self, block: SparseMoe, number: int) -> None:
        def choose(x: Tensor) -> tuple[Tensor, Tensor]:
            rows = self._runner.step_rows
            assert len(rows) == x.shape[0], "forced routing knows no padded rows"
            logits = functional.linear(x.float(), block.router.float())
            probabilities = torch.softmax(logits, dim=-1)
            truths = [self._truth[name] for name, _ in rows]
            chosen = torch.stack(
                [t.experts[number][p] for t, (_, p) in zip(truths, rows, strict=True)]
            ).to(x.device)
            wanted = [t.probabilities[number][p] for t, (_, p) in zip(truths, rows, strict=True)]
            self.errors.add([probabilities], [torch.stack(wanted)])
            weights = _weights(probabilities, chosen, block.moe.renormalised)
            return weights, chosen.to(torch.int32)

        block.choose = choose  # type: ignore[method-assign]


def score_violations(engine: ScoreErrors, yardstick: ScoreErrors) -> list[str]:
    """What the rule on the routers' scores says: pooled errors, as for logits."""
    allowed = MAX_POOLED_RATIO * yardstick.mean
    if engine.mean <= allowed:
        return []
    return [f"mean error of the routers' scores {engine.mean:.3g}, allowed are {allowed:.3g}"]
