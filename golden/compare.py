"""The rules that tie the engine's logits to HF's: three-way, gap and KL.

Truth is HF in float32 (R), yardstick is HF in the dtype under test (H), E is the engine. All three
see the same token ids, so every position can be judged on its own:

    max|E - R| <= c * h + 2 * eps * max|R|, and the same for the mean,

where h is max|H - R| there, or its median over the sequence if that is larger: HF's error at one
position is one draw of chance, and where it happens to be tiny it is no yardstick. HF in the dtype
under test may be given several times, with other implementations of attention; then h is the
largest of their errors.

In real models most of the mean error is one shift of all logits of a position, which no softmax
sees and which differs by chance between E and H. So the rule is applied a second time to logits
without their mean, and there with the mean's own, smaller rounding. Knows no model and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Float32 has no yardstick below it: the engine must be this close to HF itself.
FP32_RTOL = 1e-5
FP32_ATOL = 1e-5
# Errors pooled over all positions average out chance, so their ratio is bounded more tightly.
MAX_POOLED_RATIO = 1.5
# Share of positions at which the engine may choose another token than HF in float32 although no
# gap forbids it, beside twice the share at which HF in the test dtype does so itself.
FREE_DISAGREEMENT = 0.05


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of one case.

    `c` multiplies HF's own error. `max_close_share` bounds the positions whose top-1/top-2 gap is
    too small to judge the token: above it the token rule would be vacuous. The mean KL may be
    `max_kl_mean`, or `kl_ratio` times that of HF in the test dtype where that is more.
    """

    c: float = 2.0
    max_kl_mean: float = 0.0025
    kl_ratio: float = 0.0
    max_close_share: float = 1.0


@dataclass(frozen=True, slots=True)
class LogitStats:
    """What a comparison came to; ratios are engine error over HF's error in the same dtype.

    `observed_c` is the smallest `c` under which every position would have passed.
    """

    num_positions: int
    observed_c: float
    centred_c: float  # the same without each position's shift
    strict_c: float  # the larger of both with HF's error there alone: no median, no other HF
    worst_ratio: float
    p99_ratio: float
    pooled_ratio: float  # mean error over all positions, engine over HF
    max_error: float
    max_excess: float
    kl_mean: float
    kl_p99: float
    hf_kl_mean: float
    hf_kl_p99: float
    agreement: float
    hf_agreement: float
    close_share: float
    gap_decided_share: float
    violations: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class _Columns:
    """Per-position results of one piece; float64 on the CPU, except the flags."""

    positions: Tensor
    error_max: Tensor
    error_mean: Tensor
    hf_error_max: Tensor
    hf_error_mean: Tensor
    slack: Tensor
    centred_error_max: Tensor
    centred_error_mean: Tensor
    centred_hf_error_max: Tensor
    centred_hf_error_mean: Tensor
    centred_slack_max: Tensor
    centred_slack_mean: Tensor
    # HF's errors again: at each position the largest of all its implementations.
    widest_hf_error_max: Tensor
    widest_hf_error_mean: Tensor
    widest_centred_hf_error_max: Tensor
    widest_centred_hf_error_mean: Tensor
    gap: Tensor
    kl: Tensor
    hf_kl: Tensor
    agrees: Tensor
    hf_agrees: Tensor
    finite: Tensor


@dataclass(frozen=True, slots=True)
class PositionErrors:
    """Largest errors of a piece of a sequence, for plots; all lists are equally long."""

    name: str
    positions: list[float]
    engine: list[float]
    hf: list[float]
    slack: list[float]
    kl: list[float]


class LogitComparison:
    """Collects pieces of sequences and judges them together."""

    def __init__(self, dtype: torch.dtype, rules: Rules | None = None) -> None:
        self._dtype = dtype
        self._rules = rules or Rules()
        self._pieces: list[_Columns] = []
        self._names: list[str] = []

    def add(
        self,
        name: str,
        positions: Tensor,
        engine: Tensor,
        truth: Tensor,
        yardstick: Tensor | None,
        drawn: Tensor | None = None,
        others: Sequence[Tensor] = (),
    ) -> None:
        """Rows [n, vocab] of one sequence at `positions` [n]; no yardstick in float32.

        `drawn` are the engine's own greedy tokens; without it the argmax of its logits counts.
        `others` are further yardsticks.
        """
        e, r = engine.to(torch.float32, copy=True), truth.to(torch.float32, copy=True)
        h = (truth if yardstick is None else yardstick).to(torch.float32, copy=True)
        finite = torch.isfinite(e).all(dim=-1)
        e = torch.nan_to_num(e, nan=1e30, posinf=1e30, neginf=-1e30)
        top = r.topk(2, dim=-1)
        best = top.indices[:, 0]
        chosen = e.argmax(dim=-1) if drawn is None else drawn.to(e.device)
        kl, hf_kl = self._divergences(r, e, None if yardstick is None else h)
        hf_chosen = h.argmax(dim=-1)
        further = [other.to(torch.float32, copy=True) for other in others]
        errors = [*_errors(e, r), *_errors(h, r)]
        columns = [positions, *errors, rounding_slack(r, self._dtype)[0]]
        widest = _widest(errors[2:], further, r)
        for rows in (e, r, h, *further):
            rows -= rows.mean(dim=-1, keepdim=True)
        errors = [*_errors(e, r), *_errors(h, r)]
        columns += [*errors, *rounding_slack(r, self._dtype)]
        columns += [*widest, *_widest(errors[2:], further, r)]
        columns += [top.values[:, 0] - top.values[:, 1], kl, hf_kl]
        flags = (chosen == best, hf_chosen == best, finite)
        self._pieces.append(
            _Columns(*(c.double().cpu() for c in columns), *(f.cpu() for f in flags))
        )
        self._names.append(name)

    def _divergences(self, r: Tensor, e: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        # 16-bit divergences are far above float32 noise, and a vocabulary is large.
        wide = torch.float64 if self._dtype == torch.float32 else torch.float32
        p = torch.log_softmax(r.to(wide), dim=-1)
        kl = kl_divergence(p, torch.log_softmax(e.to(wide), dim=-1))
        if h is None:
            return kl, torch.zeros_like(kl)
        return kl, kl_divergence(p, torch.log_softmax(h.to(wide), dim=-1))

    def finish(self) -> LogitStats:
        """Judges everything added so far."""
        if not self._pieces:
            raise ValueError("nothing was compared")
        return _judge(self._names, self._pieces, self._rules)

    def errors(self) -> list[PositionErrors]:
        """Largest errors by position of everything added so far, piece by piece."""
        found = []
        for name, piece in zip(self._names, self._pieces, strict=True):
            columns = (piece.positions, piece.error_max, piece.hf_error_max, piece.slack, piece.kl)
            found.append(PositionErrors(name, *(column.tolist() for column in columns)))
        return found


def rounding_slack(truth: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What rounding alone may add to the largest and to the mean error of each row."""
    size = truth.abs()
    if dtype == torch.float32:
        return FP32_ATOL + FP32_RTOL * size.amax(-1), FP32_ATOL + FP32_RTOL * size.mean(-1)
    eps = 2 * torch.finfo(dtype).eps
    return eps * size.amax(-1), eps * size.mean(-1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats per row of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def _errors(x: Tensor, r: Tensor) -> list[Tensor]:
    """Largest and mean error per row."""
    error = (x - r).abs()
    return [error.amax(-1), error.mean(-1)]


def _widest(errors: list[Tensor], further: Sequence[Tensor], r: Tensor) -> list[Tensor]:
    """The errors, or those of a further yardstick where they are larger."""
    for h in further:
        errors = [torch.maximum(old, new) for old, new in zip(errors, _errors(h, r), strict=True)]
    return errors


def _judge(names: list[str], pieces: list[_Columns], rules: Rules) -> LogitStats:
    fields = _Columns.__slots__
    all_ = _Columns(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in fields))
    named = list(zip(names, pieces, strict=True))
    labels = [
        f"{name} position {int(position)}" for name, piece in named for position in piece.positions
    ]
    strict = all_
    all_ = _with_floors(strict, [name for name, piece in named for _ in piece.positions])
    excess = _excess(all_, rules.c)
    allowed_max = rules.c * all_.hf_error_max + all_.slack
    judged = all_.gap > 2 * allowed_max
    close_share = 1.0 - float(judged.double().mean())
    gap_decided = ~judged & ~all_.agrees
    hf_disagreement = 1.0 - float(all_.hf_agrees.double().mean())
    violations = [
        *_broken("logits are not finite", ~all_.finite, labels),
        *(
            violation
            for name, over in excess.items()
            for violation in _broken(f"{name} above bound", over > 1, labels)
        ),
        *_broken("other token despite a clear gap", judged & ~all_.agrees, labels),
    ]
    kl_mean = float(all_.kl.mean())
    hf_kl_mean = float(all_.hf_kl.mean())
    max_kl_mean = max(rules.max_kl_mean, rules.kl_ratio * hf_kl_mean)
    rules = replace(rules, max_kl_mean=max_kl_mean)
    gap_share = float(gap_decided.double().mean())
    pooled = _pooled_ratio(strict)
    violations += _broken_shares(rules, kl_mean, close_share, gap_share, hf_disagreement, pooled)
    ratio = strict.error_max / strict.hf_error_max.clamp(min=1e-30)
    has_yardstick = bool((all_.hf_error_max > 0).any())
    return LogitStats(
        num_positions=len(labels),
        observed_c=_needed_c(all_, "") if has_yardstick else 0.0,
        centred_c=_needed_c(all_, "centred_") if has_yardstick else 0.0,
        strict_c=max(_needed_c(strict, ""), _needed_c(strict, "centred_"))
        if has_yardstick
        else 0.0,
        worst_ratio=float(ratio.max()) if has_yardstick else 0.0,
        p99_ratio=float(ratio.quantile(0.99)) if has_yardstick else 0.0,
        pooled_ratio=pooled,
        max_error=float(all_.error_max.max()),
        max_excess=max(float(over.max()) for over in excess.values()),
        kl_mean=kl_mean,
        kl_p99=float(all_.kl.quantile(0.99)),
        hf_kl_mean=hf_kl_mean,
        hf_kl_p99=float(all_.hf_kl.quantile(0.99)),
        agreement=float(all_.agrees.double().mean()),
        hf_agreement=1.0 - hf_disagreement,
        close_share=close_share,
        gap_decided_share=gap_share,
        violations=tuple(violations),
    )


def _broken_shares(
    rules: Rules,
    kl_mean: float,
    close_share: float,
    gap_share: float,
    hf_disagreement: float,
    pooled: float,
) -> list[str]:
    """The rules that judge all positions together."""
    violations = []
    if kl_mean > rules.max_kl_mean:
        violations.append(f"mean KL {kl_mean:.3g} > {rules.max_kl_mean:.3g}")
    if close_share > rules.max_close_share:
        violations.append(
            f"token rule is vacuous: {close_share:.1%} of positions are too close to judge, "
            f"more than {rules.max_close_share:.1%}"
        )
    if gap_share > max(FREE_DISAGREEMENT, 2 * hf_disagreement):
        violations.append(
            f"{gap_share:.1%} of tokens differ within the gap, HF's own {hf_disagreement:.1%}"
        )
    if pooled > MAX_POOLED_RATIO:
        violations.append(f"pooled error ratio {pooled:.2f} > {MAX_POOLED_RATIO}")
    return violations


def _with_floors(all_: _Columns, sequences: list[str]) -> _Columns:
    """The yardsticks, each at least its median over the sequence that the position belongs to."""
    names = list(dict.fromkeys(sequences))
    owner = torch.tensor([names.index(name) for name in sequences])
    changed: dict[str, Tensor] = {}
    for column in ("hf_error_max", "hf_error_mean"):
        for form in (column, f"centred_{column}"):
            values = getattr(all_, f"widest_{form}").clone()
            for number in range(len(names)):
                mine = owner == number
                values[mine] = values[mine].clamp(min=float(values[mine].median()))
            changed[form] = values
    return replace(all_, **changed)


def _excess(all_: _Columns, c: float) -> dict[str, Tensor]:
    """Error over bound per position, for each form of the three-way rule."""
    yardstick = bool((all_.hf_error_max > 0).any())
    slack = all_.slack
    forms = {
        "largest error": (all_.error_max, all_.hf_error_max, slack),
        "mean error": (all_.error_mean, all_.hf_error_mean, slack),
    }
    if yardstick:
        forms["largest centred error"] = (
            all_.centred_error_max,
            all_.centred_hf_error_max,
            all_.centred_slack_max,
        )
        forms["mean centred error"] = (
            all_.centred_error_mean,
            all_.centred_hf_error_mean,
            all_.centred_slack_mean,
        )
    return {name: error / (c * hf + slack) for name, (error, hf, slack) in forms.items()}


def _needed_c(all_: _Columns, form: str) -> float:
    """The smallest `c` under which every position passes the rule in one form."""

    def column(name: str) -> Tensor:
        values = getattr(all_, name)
        assert isinstance(values, Tensor)
        return values

    slack_max = column(f"{form}slack_max" if form else "slack")
    slack_mean = column(f"{form}slack_mean" if form else "slack")
    largest = (column(f"{form}error_max") - slack_max) / column(f"{form}hf_error_max").clamp(1e-30)
    mean = (column(f"{form}error_mean") - slack_mean) / column(f"{form}hf_error_mean").clamp(1e-30)
    return max(0.0, float(torch.maximum(largest, mean).max()))


def _pooled_ratio(all_: _Columns) -> float:
    yardstick = float(all_.hf_error_mean.mean())
    return float(all_.error_mean.mean()) / yardstick if yardstick > 0 else 0.0


def _broken(what: str, where: Tensor, labels: list[str]) -> list[str]:
    places = where.nonzero()[:, 0].tolist()
    if not places:
        return []
    return [f"{what} at {len(places)} of {len(labels)} positions, first {labels[places[0]]}"]
