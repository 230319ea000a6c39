"""One run of the engine against the truth: rules, greedy paths, perplexity, errors by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from golden.cases import ForcedSequence
from golden.check.hf_states import Side, Truth
from golden.compare import LogitComparison, LogitStats, PositionErrors, Rules
from golden.models import COMPARED_ROWS, MAX_KL_MEAN

# HF's own divergence in 16 bits, of which the engine may have twice as much.
KL_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Rows:
    """What a run computed of one sequence; a position that was computed twice has two rows."""

    sequence: ForcedSequence
    positions: Sequence[int]
    logits: Callable[[slice], Tensor]
    drawn: Mapping[int, int]  # position -> token the engine drew


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which the engine's greedy text leaves HF's, and why it may."""

    prompt: str
    output: int  # tokens that are equal before it
    truth_token: int
    engine_token: int
    margin: float  # how far HF in float32 holds its token above the engine's
    top_gap: float  # and above its second best
    engine_error: float  # largest error of the engine's logits there
    hf_error: float  # the same of HF in the dtype under test
    engine_margin: float  # how far the engine holds its token above HF's
    hf_diverges: bool  # whether HF in the dtype under test takes another token there too

    def explain(self) -> str:
        """One line for people."""
        line = (
            f"{self.prompt}: after {self.output} equal tokens HF takes {self.truth_token}, the "
            f"engine {self.engine_token}: HF's margin is {self.margin:.3g}, the error there "
            f"{self.engine_error:.3g}"
        )
        if self.hf_error:
            also = "takes another too" if self.hf_diverges else "keeps it"
            line += f" (HF in the dtype {self.hf_error:.3g}, and {also})"
        return line


@dataclass(slots=True)
class Perplexity:
    """Over the prompts' own tokens, one after the other."""

    loss: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, who: str, logits: Tensor, following: Tensor) -> None:
        """Adds the loss of one side at some positions."""
        loss = functional.cross_entropy(
            logits.float(), following.to(logits.device), reduction="sum"
        )
        self.loss[who] = self.loss.get(who, 0.0) + float(loss)

    def of(self, who: str) -> float | None:
        """e to the mean loss; None where it was not computed."""
        if who not in self.loss or not self.count:
            return None
        return math.exp(min(self.loss[who] / self.count, 700.0))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one run came to."""

    stats: LogitStats
    divergences: tuple[Divergence, ...]
    equal_tokens: int  # greedy tokens before the first divergence, over all prompts
    greedy_tokens: int
    perplexity: dict[str, float | None]
    errors: list[PositionErrors]


def rules_of(dtype: torch.dtype, has_yardstick: bool) -> Rules:
    """The bounds for somebody's own model: how many gaps are clear is its own affair."""
    ratio = KL_RATIO if has_yardstick else 0.0
    return Rules(max_kl_mean=MAX_KL_MEAN[dtype], max_close_share=1.0, kl_ratio=ratio)


class Judge:
    """Judges the rows of a run piece by piece."""

    def __init__(self, truth: Truth, dtype: torch.dtype) -> None:
        self._truth = truth
        self._comparison = LogitComparison(dtype, rules_of(dtype, bool(truth.yardsticks)))
        self._divergences: dict[str, Divergence] = {}
        self._equal = self._greedy = 0
        self._perplexity = Perplexity()

    @torch.inference_mode()
    def add(self, rows: Rows) -> None:
        """All positions of one sequence."""
        for start in range(0, len(rows.positions), COMPARED_ROWS):
            part = slice(start, start + COMPARED_ROWS)
            self._add_piece(rows, rows.positions[part], rows.logits(part))
        self._follow(rows)

    def _add_piece(self, rows: Rows, positions: Sequence[int], engine: Tensor) -> None:
        name, sequence = rows.sequence.name, rows.sequence
        place = self._truth.truth.hidden[name].device
        index = torch.tensor(positions, device=place)
        engine = engine.to(place)
        truth = self._truth.truth.logits(name, index)
        sides = [side.logits(name, index) for side in self._truth.yardsticks]
        best = engine.argmax(dim=-1).tolist()
        drawn = [rows.drawn.get(p, token) for p, token in zip(positions, best, strict=True)]
        self._comparison.add(
            name,
            index,
            engine,
            truth,
            sides[0] if sides else None,
            torch.tensor(drawn, device=place),
            sides[1:],
        )
        self._note(sequence, positions, drawn, engine, truth, sides)
        inside = [k for k, p in enumerate(positions) if p + 1 < len(sequence.prompt)]
        if inside:
            following = torch.tensor([sequence.tokens[positions[k] + 1] for k in inside])
            self._perplexity.count += len(inside)
            self._perplexity.add("engine", engine[inside], following)
            self._perplexity.add("truth", truth[inside], following)
            if sides:
                self._perplexity.add("yardstick", sides[0][inside], following)

    def _note(
        self,
        sequence: ForcedSequence,
        positions: Sequence[int],
        drawn: Sequence[int],
        engine: Tensor,
        truth: Tensor,
        sides: Sequence[Tensor],
    ) -> None:
        """Keeps the first decoded position at which the engine takes another token."""
        best = truth.argmax(dim=-1).tolist()
        for row, (position, token) in enumerate(zip(positions, drawn, strict=True)):
            output = position + 1 - len(sequence.prompt)
            known = self._divergences.get(sequence.name)
            if output < 0 or token == best[row] or (known and known.output <= output):
                continue
            e, r = engine[row].float(), truth[row].float()
            h = sides[0][row].float() if sides else r
            top = r.topk(2).values
            self._divergences[sequence.name] = Divergence(
                prompt=sequence.name,
                output=output,
                truth_token=best[row],
                engine_token=token,
                margin=float(r[best[row]] - r[token]),
                top_gap=float(top[0] - top[1]),
                engine_error=float((e - r).abs().max()),
                hf_error=float((h - r).abs().max()),
                engine_margin=float(e[token] - e[best[row]]),
                hf_diverges=int(h.argmax()) != best[row],
            )

    def _follow(self, rows: Rows) -> None:
        found = self._divergences.get(rows.sequence.name)
        outputs = len(rows.sequence.forced)
        self._greedy += outputs
        self._equal += outputs if found is None else found.output

    def finish(self) -> Judgement:
        """Judges everything added so far."""
        named = {who: self._perplexity.of(who) for who in ("engine", "truth", "yardstick")}
        return Judgement(
            self._comparison.finish(),
            tuple(self._divergences.values()),
            self._equal,
            self._greedy,
            named,
            self._comparison.errors(),
        )


def latest_logits(rows: Rows) -> dict[int, Tensor]:
    """Logits of a sequence by position, each as it was computed last."""
    logits = rows.logits(slice(0, len(rows.positions)))
    return dict(zip(rows.positions, logits.float().cpu(), strict=True))


def side_errors(side: Side, truth: Side) -> list[tuple[float, float]]:
    """(root mean square error, that of the truth's states) after each layer."""
    if not side.layers:
        return []
    num_layers = len(next(iter(side.layers.values())))
    found = []
    for layer in range(num_layers):
        wrong = size = 0.0
        count = 0
        for name, states in side.layers.items():
            wanted = truth.layers[name][layer]
            wrong += float((states[layer].to(wanted.device) - wanted).double().square().sum())
            size += float(wanted.double().square().sum())
            count += wanted.numel()
        found.append((math.sqrt(wrong / count), math.sqrt(size / count)))
    return found
