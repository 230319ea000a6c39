"""Whole models: teacher-forced logits of the engine under the three-way, gap and KL rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.layers.weights import WeightSlice
from engine.models.decoder import Decoder
from engine.options import EngineOptions
from golden.cases import ForcedSequence
from golden.compare import LogitComparison, LogitStats, Rules
from golden.forced import GREEDY, ForcedRunner, Observed
from golden.reference import attention_of, cast, hf_logits
from golden.routes import ForcedRoutes, Routes, ScoreErrors, recorded, routers, score_violations

COMPARED_ROWS = 256  # rows of logits that are judged at a time
Defect = Callable[[ForcedRunner], None]

# Measured shares of positions whose gap is too small to judge; the bounds leave some room. Random
# weights give flat logits and 16-bit rounding is coarse, so there the token rule carries little
# and the logits rules carry the test.
MAX_CLOSE_SHARE = {torch.float32: 0.02, torch.float16: 0.2, torch.bfloat16: 0.7}
# Machine precision leaves no room for KL in float32.
MAX_KL_MEAN = {torch.float32: 1e-8, torch.float16: 0.0025, torch.bfloat16: 0.0025}


def rules_for(dtype: torch.dtype, max_close_share: float | None = None) -> Rules:
    """The bounds of one dtype."""
    share = MAX_CLOSE_SHARE[dtype] if max_close_share is None else max_close_share
    return Rules(max_kl_mean=MAX_KL_MEAN[dtype], max_close_share=share)


@dataclass(slots=True)
class Reference:
    """HF's logits of some sequences: float32 truth, and a yardstick per 16-bit dtype."""

    sequences: Sequence[ForcedSequence]
    truth: dict[str, Tensor] = field(default_factory=dict)
    yardsticks: dict[torch.dtype, dict[str, Tensor]] = field(default_factory=dict)
    others: dict[torch.dtype, list[dict[str, Tensor]]] = field(default_factory=dict)
    routes: dict[str, Routes] = field(default_factory=dict)  # of the truth; empty if dense
    score_errors: dict[torch.dtype, ScoreErrors] = field(default_factory=dict)

    def add_truth(self, model: nn.Module) -> None:
        """Computes the truth with a float32 model."""
        for item in self.sequences:
            with recorded(model) as routes:
                self.truth[item.name] = hf_logits(model, item.tokens)
            if routers(model):
                self.routes[item.name] = routes

    def add_yardstick(self, model: nn.Module, attentions: Sequence[str] = ()) -> None:
        """Computes the yardstick with a model in the dtype under test.

        `attentions` are further implementations of attention in HF, whose errors count beside
        those of the model's own.
        """
        dtype = next(model.parameters()).dtype
        if dtype == torch.float32:
            return
        self.score_errors[dtype] = ScoreErrors()
        self.yardsticks[dtype] = self._logits(model, self.score_errors[dtype])
        self.others[dtype] = []
        for attention in attentions:
            with attention_of(model, attention):
                self.others[dtype].append(self._logits(model))

    def _logits(self, model: nn.Module, errors: ScoreErrors | None = None) -> dict[str, Tensor]:
        logits: dict[str, Tensor] = {}
        for item in self.sequences:
            truth = self.routes.get(item.name)
            with recorded(model, truth) as found:
                logits[item.name] = hf_logits(model, item.tokens)
            if errors is not None and truth is not None:
                errors.add(found.probabilities, truth.probabilities)
        return logits

    def hf_own_c(self, dtype: torch.dtype) -> float | None:
        """The observed c of HF's other implementations against its first; None without any.

        Says how far HF itself strays from one yardstick at its worst position.
        """
        found = []
        for other in self.others.get(dtype, ()):
            comparison = LogitComparison(dtype)
            for name, logits in other.items():
                for start in range(0, len(logits), COMPARED_ROWS):
                    stop = min(start + COMPARED_ROWS, len(logits))
                    rows = torch.arange(start, stop, device=logits.device)
                    truth = self.truth[name].to(logits.device)[rows]
                    comparison.add(
                        name, rows, logits[rows], truth, self.yardstick(name, dtype, rows)
                    )
            stats = comparison.finish()
            found.append(max(stats.observed_c, stats.centred_c))
        return max(found, default=None)

    def yardstick(self, name: str, dtype: torch.dtype, rows: Tensor) -> Tensor | None:
        """Rows of the yardstick; None in float32, where truth and yardstick are one."""
        return None if dtype == torch.float32 else self.yardsticks[dtype][name][rows]

    def other_yardsticks(self, name: str, dtype: torch.dtype, rows: Tensor) -> list[Tensor]:
        """The same rows by HF's other implementations."""
        return [other[name][rows] for other in self.others.get(dtype, ())]


def full_reference(
    model: nn.Module, sequences: Sequence[ForcedSequence], dtypes: Sequence[torch.dtype]
) -> Reference:
    """Truth and yardsticks of a float32 model, which ends up in the last dtype."""
    reference = Reference(sequences)
    reference.add_truth(model)
    for dtype in dtypes:
        reference.add_yardstick(cast(model, dtype))
    return reference


def compare_outputs(
    runner: ForcedRunner,
    observed: Mapping[str, Observed],
    reference: Reference,
    dtype: torch.dtype,
    rules: Rules | None = None,
) -> LogitStats:
    """Judges every position that a run computed, decoded positions by the token drawn there."""
    comparison = LogitComparison(dtype, rules or rules_for(dtype))
    for name, item in observed.items():
        hidden = item.hidden()
        for start in range(0, len(item.positions), COMPARED_ROWS):
            stop = start + COMPARED_ROWS
            logits = runner.logits(hidden[start:stop])
            rows = torch.tensor(item.positions[start:stop], device=logits.device)
            best = logits.argmax(dim=-1).tolist()
            drawn = [
                item.drawn.get(position, token)
                for position, token in zip(item.positions[start:stop], best, strict=True)
            ]
            comparison.add(
                name,
                rows,
                logits,
                reference.truth[name].to(logits.device)[rows],
                reference.yardstick(name, dtype, rows),
                torch.tensor(drawn, device=logits.device),
                reference.other_yardsticks(name, dtype, rows),
            )
    return comparison.finish()


def engine_options(
    folder: Path, dtype: torch.dtype, device: str, **changes: object
) -> EngineOptions:
    """Options under which prompts are chunked, batched and share their prefixes."""
    settings: dict[str, object] = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "attention_backend": "torch",
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        **changes,
    }
    return EngineOptions.from_kwargs(str(folder), **settings)


def run_model(
    options: EngineOptions,
    reference: Reference,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    weights: Mapping[str, Tensor] | None = None,
    defect: Defect | None = None,
    rules: Rules | None = None,
) -> tuple[LogitStats, dict[str, Observed]]:
    """Starts an engine rank, runs all sequences of the reference and judges them.

    `weights` (HF names) replace those of the folder; `defect` plants a fault, for the canaries.
    """
    with ForcedRunner(options, device=device) as runner:
        if weights is not None:
            copy_weights(runner.model, weights)
        if defect is not None:
            defect(runner)
        forced = None
        if reference.routes and dtype != torch.float32:
            forced = ForcedRoutes(runner, reference.routes)
        observed = runner.run(reference.sequences, GREEDY)
        stats = compare_outputs(runner, observed, reference, dtype, rules)
        if forced is not None:
            broken = score_violations(forced.errors, reference.score_errors[dtype])
            stats = replace(stats, violations=(*stats.violations, *broken))
        return stats, observed


@torch.no_grad()
def copy_weights(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Fills a model from memory by the very slices that the loader uses."""
    for item in model.weight_slices():
        item.target.copy_(sliced(item, weights[item.name]))


def sliced(item: WeightSlice, full: Tensor) -> Tensor:
    """The part of a full tensor that a slice stands for."""
    return full.narrow(item.dim, item.start, item.target.shape[item.dim])


def shards_of(
    models: Sequence[Decoder],
) -> Iterator[tuple[str, tuple[int, ...], list[WeightSlice]]]:
    """(name, full shape, slices by rank) of every tensor of models of all ranks."""
    by_rank = [{item.name: item for item in model.weight_slices()} for model in models]
    for name, item in by_rank[0].items():
        yield name, item.full_shape, [slices[name] for slices in by_rank]
