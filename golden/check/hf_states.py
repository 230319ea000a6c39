"""What HF Transformers computes from a model folder: truth in float32, yardstick in the dtype.

Kept are hidden states and the head, not logits: those of a long text over a large vocabulary would
be larger than the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from golden.cases import ForcedSequence
from golden.check.check_prompts import CheckPrompt
from golden.reference import plain_attention
from golden.routes import Routes, ScoreErrors, recorded, routers

# Positions whose states are kept after every layer.
LAYERED_POSITIONS = 512
# Further runs of HF in the dtype under test, each with other inputs within rounding.
NUM_NUDGES = 3


@dataclass(slots=True)
class Side:
    """One computation of all sequences: final hidden states, and states after each layer."""

    head: nn.Module
    dtype: torch.dtype
    hidden: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, list[Tensor]] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, name: str, rows: Tensor) -> Tensor:
        """Logits [n, vocab] of some positions."""
        with plain_attention(self.dtype):
            logits: Tensor = self.head(self.hidden[name][rows])
        return logits


@dataclass(slots=True)
class Truth:
    """Sequences with what HF says of them; `yardsticks` are empty in float32, the first is H."""

    sequences: tuple[ForcedSequence, ...]
    layered: tuple[str, ...]  # sequences whose states are kept after each layer
    truth: Side
    yardsticks: list[Side] = field(default_factory=list)
    routes: dict[str, Routes] = field(default_factory=dict)
    score_errors: ScoreErrors = field(default_factory=ScoreErrors)

    def add_yardstick(self, model: nn.Module) -> list[Side]:
        """Computes HF in the dtype under test, as it is and with inputs moved by a rounding step.

        Where a text makes a model chaotic one run of HF is no yardstick: it errs by little at one
        position and by much at the next, as chance has it. The largest of several errors is one.
        """
        sides = [self._side(model, self.score_errors, self.layered)]
        for seed in range(NUM_NUDGES):
            with nudged(model, seed):
                sides.append(self._side(model))
        self.yardsticks += sides
        return sides

    def _side(
        self, model: nn.Module, errors: ScoreErrors | None = None, layered: Sequence[str] = ()
    ) -> Side:
        side = Side(_head_of(model), next(model.parameters()).dtype)
        for item in self.sequences:
            truth = self.routes.get(item.name)
            with recorded(model, truth) as found:
                run_hf(model, item, side, item.name in layered)
            if errors is not None and truth is not None:
                errors.add(found.probabilities, truth.probabilities)
        return side


@contextmanager
def nudged(model: Any, seed: int) -> Iterator[None]:  # noqa: ANN401 (untyped library)
    """Moves every number of the embedded tokens by up to one unit in its last place."""

    def move(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(output.shape, generator=generator).to(output.device) * 2 - 1
        moved = output.float() * (1 + drawn * torch.finfo(output.dtype).eps)
        return moved.to(output.dtype)

    handle = model.model.embed_tokens.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _head_of(model: nn.Module) -> nn.Module:
    """A head of its own, since the model is cast to the next dtype in place."""
    head = model.lm_head
    assert isinstance(head, nn.Linear)
    kept = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
    kept.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    return kept


def make_truth(
    model: nn.Module, prompts: Sequence[CheckPrompt], max_tokens: int, generates: bool = True
) -> Truth:
    """The float32 model's greedy continuation of each prompt, and its states for all of it.

    Without `generates` the last tokens of each prompt take the place of a continuation.
    """
    sequences = tuple(
        _continued(model, item, max_tokens) if generates else _split(item, max_tokens)
        for item in prompts
    )
    truth = Truth(
        sequences, layered_names(sequences), Side(_head_of(model), next(model.parameters()).dtype)
    )
    for item in sequences:
        with recorded(model) as routes:
            run_hf(model, item, truth.truth, item.name in truth.layered)
        if routers(model):
            truth.routes[item.name] = routes
    return truth


def layered_names(sequences: Sequence[ForcedSequence]) -> tuple[str, ...]:
    """The first sequences of more than one token that fit into `LAYERED_POSITIONS`."""
    names, total = [], 0
    for item in sequences:
        if 1 < item.num_logits <= LAYERED_POSITIONS - total:
            names.append(item.name)
            total += item.num_logits
    return tuple(names)


def _split(prompt: CheckPrompt, max_tokens: int) -> ForcedSequence:
    ids = prompt.token_ids
    keep = max(1, len(ids) - max_tokens)
    forced = ids[keep:] or ids[-1:]
    return ForcedSequence(prompt.name, ids[:keep], forced)


@torch.inference_mode()
def _continued(model: Any, prompt: CheckPrompt, max_tokens: int) -> ForcedSequence:  # noqa: ANN401
    """Greedy tokens of HF with its own cache; no token ends the text."""
    import transformers

    device = next(model.parameters()).device
    inputs = torch.tensor([prompt.token_ids], dtype=torch.int64, device=device)
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # renamed in Transformers 5
    cache = {name: transformers.DynamicCache(config=model.config)}
    forced = []
    with plain_attention(next(model.parameters()).dtype):
        for _ in range(max_tokens):
            out = model(input_ids=inputs, use_cache=True, logits_to_keep=1, **cache)
            inputs = out.logits[:, -1:].argmax(-1)
            forced.append(int(inputs))
    return ForcedSequence(prompt.name, prompt.token_ids, tuple(forced))


@torch.inference_mode()
def run_hf(model: Any, item: ForcedSequence, side: Side, layered: bool) -> None:  # noqa: ANN401
    """One teacher-forced forward; the last token is not read, since nothing follows it."""
    device = next(model.parameters()).device
    ids = torch.tensor([item.tokens[:-1]], dtype=torch.int64, device=device)
    states: list[Tensor] = []
    with plain_attention(side.dtype), _layer_states(model, states if layered else None):
        out = model.model(input_ids=ids, use_cache=False)
    side.hidden[item.name] = out.last_hidden_state[0]
    if layered:
        side.layers[item.name] = states


@contextmanager
def _layer_states(model: Any, states: list[Tensor] | None) -> Iterator[None]:  # noqa: ANN401
    """Collects the residual stream after each layer, in float32."""
    hooks = []
    if states is not None:

        def keep(_module: nn.Module, _inputs: object, output: Any) -> None:  # noqa: ANN401
            state = output[0] if isinstance(output, tuple) else output
            states.append(state[0].float())

        hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
