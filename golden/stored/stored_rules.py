"""The golden rules on log-probabilities, of which only some may be known.

Per position, over the tokens whose log-probability is known on both sides:

    max|E - R| <= c * h + slack, and where all are known, the mean over all positions at most 1.5
    times that of HF's plain run,

where h is the largest error of HF in the dtype over the same tokens (of several runs whose inputs
differ within rounding), or its median over the sequence if that is larger, and slack is two
units in the last place of the largest logit. In float32 there is no yardstick, and slack is twice
the bound on logits, since a log-probability is the difference of two of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from golden.compare import FP32_ATOL, FP32_RTOL, FREE_DISAGREEMENT, MAX_POOLED_RATIO, Rules
from golden.models import MAX_KL_MEAN
from golden.stored.reference_file import StoredReference, StoredSequence, Yardstick

KL_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What somebody said of one sequence; NaN stands for what was not said.

    `rows` are positions. `tops` [n, k] are log-probabilities of the reference's likeliest tokens,
    `tokens` [n] those of the tokens that follow, and `drawn` the likeliest tokens by position; they
    are a greedy text of their own if it `follows`.
    """

    name: str
    rows: Tensor
    tops: Tensor
    tokens: Tensor
    drawn: dict[int, int] = field(default_factory=dict)
    follows: bool = True


def said(values: Tensor) -> Tensor:
    """Log-probabilities as they were computed: one that is no number was said, and is wrong."""
    return torch.nan_to_num(values, nan=-math.inf, posinf=math.inf, neginf=-math.inf)


@dataclass(frozen=True, slots=True)
class StoredStats:
    """What a comparison with a reference came to; None where a rule could not be judged."""

    num_positions: int
    num_values: int
    observed_c: float | None
    pooled_ratio: float | None
    max_error: float
    max_excess: float
    kl_mean: float | None
    agreement: float | None
    num_tokens: int
    close_share: float
    equal_tokens: int
    greedy_tokens: int
    perplexity: float | None
    reference_perplexity: float | None
    divergences: tuple[str, ...]
    violations: tuple[str, ...]
    judged: tuple[str, ...]  # names of the rules that there was enough for

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations


@dataclass(slots=True)
class _Columns:
    """Per position, over all sequences."""

    labels: list[str] = field(default_factory=list)
    error: list[Tensor] = field(default_factory=list)
    allowed: list[Tensor] = field(default_factory=list)
    slack: list[Tensor] = field(default_factory=list)
    h: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    hf_mean: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    hf_kl: list[Tensor] = field(default_factory=list)
    finite: list[Tensor] = field(default_factory=list)
    num_values: int = 0


class StoredJudge:
    """Judges what somebody said against a reference, in one dtype."""

    def __init__(self, reference: StoredReference, dtype: str, rules: Rules | None = None) -> None:
        self._by_name = {item.name: item for item in reference.sequences}
        self._dtype = dtype
        self._eps = torch.finfo(getattr(torch, dtype)).eps
        self._c = (rules or Rules()).c
        self._columns = _Columns()
        self._divergences: list[str] = []
        self._broken_tokens: list[str] = []
        self._close = self._tokens = self._agreeing = self._free = self._hf_free = 0
        self._equal = self._greedy = 0
        self._loss: list[Tensor] = []
        self._reference_loss: list[Tensor] = []

    def add(self, seen: Seen) -> None:
        """One sequence."""
        stored = self._by_name[seen.name]
        rows = seen.rows
        top, logsumexp = stored.top_logprobs[rows].double(), stored.logsumexp[rows].double()
        largest = torch.maximum((top + logsumexp[:, None]).abs().amax(-1), logsumexp.abs())
        slack = self._slack(largest)
        allowed_all = self._allowed_everywhere(stored, slack, rows)
        self._add_values(seen, stored, top, slack)
        self._add_tokens(seen, stored, allowed_all)
        self._add_loss(seen, stored)

    def _slack(self, largest: Tensor) -> Tensor:
        if self._dtype == "float32":
            return 2 * (FP32_ATOL + FP32_RTOL * largest)
        return 2 * self._eps * largest

    def _yardstick(self, stored: StoredSequence) -> Yardstick | None:
        return stored.yardsticks.get(self._dtype)

    def _allowed_everywhere(self, stored: StoredSequence, slack: Tensor, rows: Tensor) -> Tensor:
        """The bound over all likeliest tokens, which decides how close is too close to judge."""
        yardstick = self._yardstick(stored)
        if yardstick is None:
            return slack
        every = yardstick.error.double().amax(-1)
        return self._c * every.clamp(min=float(every.median()))[rows] + slack

    def _add_values(self, seen: Seen, stored: StoredSequence, top: Tensor, slack: Tensor) -> None:
        values = torch.cat([seen.tops.double(), seen.tokens.double()[:, None]], dim=1)
        wanted = torch.cat([top, stored.token_logprobs[seen.rows].double()[:, None]], dim=1)
        # NaN is "not said"; an infinity was said, and is wrong.
        known = ~torch.isnan(values)
        some = known.any(-1)
        if not bool(some.any()):
            return
        columns = self._columns
        finite = torch.isfinite(values) | ~known
        values = torch.where(finite, values, torch.full_like(values, -1e30))
        error = torch.where(known, (values - wanted).abs(), torch.zeros_like(wanted))
        yardstick = self._yardstick(stored)
        if yardstick is None:
            h = torch.zeros_like(slack)
        else:
            errors = torch.cat([yardstick.error, yardstick.token_error[:, None]], dim=1).double()
            mine = torch.where(known, errors[seen.rows], torch.zeros_like(wanted))
            h = mine.amax(-1)
            h = h.clamp(min=float(h[some].median()))
            if bool(known[:, :-1].all()):  # the plain run's errors are stored over all columns
                columns.mean.append(error[:, :-1].mean(-1))
                columns.hf_mean.append(yardstick.mean_error[seen.rows].double())
        columns.labels += [f"{seen.name} position {int(row)}" for row in seen.rows[some].tolist()]
        columns.num_values += int(known.sum())
        columns.error.append(error.amax(-1)[some])
        columns.h.append(h[some])
        columns.slack.append(slack[some])
        columns.finite.append(finite.all(-1)[some])
        self._add_kl(seen, top, yardstick, known, values)

    def _add_kl(
        self,
        seen: Seen,
        top: Tensor,
        yardstick: Yardstick | None,
        known: Tensor,
        values: Tensor,
    ) -> None:
        """KL over the known tokens, all others taken as one: a lower bound of the whole."""
        told = known[:, :-1]
        some: Tensor = told.any(-1)
        if not bool(some.any()):
            return
        told, p, q = told[some], top[some], values[some, :-1]
        nothing = torch.zeros_like(p)
        kl = torch.where(told, p.exp() * (p - q), nothing).sum(-1)
        p_rest, q_rest = (
            (1 - torch.where(told, x.exp(), nothing).sum(-1)).clamp(min=1e-12) for x in (p, q)
        )
        self._columns.kl.append((kl + p_rest * (p_rest.log() - q_rest.log())).clamp(min=0))
        if yardstick is not None:
            self._columns.hf_kl.append(yardstick.kl[seen.rows][some].double())

    def _add_tokens(self, seen: Seen, stored: StoredSequence, allowed: Tensor) -> None:
        """The gap rule at every place where a greedy token is known, and the greedy path."""
        yardstick = self._yardstick(stored)
        places = {int(row): place for place, row in enumerate(seen.rows.tolist())}
        first = len(stored.sequence.prompt) - 1
        outputs = len(stored.sequence.forced)
        begins = seen.follows and any(position >= first for position in seen.drawn)
        left = outputs if begins else 0
        self._greedy += left
        equal = left
        for position, token in sorted(seen.drawn.items()):
            place = places[position]
            top = stored.top_logprobs[position]
            gap = float(top[0] - top[1]) if len(top) > 1 else math.inf
            limit = float(allowed[place])
            agrees = token == int(stored.top_ids[position, 0])
            self._tokens += 1
            self._agreeing += agrees
            close = gap <= 2 * limit
            self._close += close
            self._free += close and not agrees
            if yardstick is not None:
                self._hf_free += not bool(yardstick.agrees[position])
            if agrees:
                continue
            line = self._explain(stored, position, token, gap, limit)
            if not close:
                self._broken_tokens.append(line)
            if seen.follows and position >= first and position - first < equal:
                equal = position - first
                self._divergences.append(line)
        self._equal += equal

    def _explain(
        self, stored: StoredSequence, position: int, token: int, gap: float, limit: float
    ) -> str:
        ids = stored.top_ids[position].tolist()
        rank = ids.index(token) if token in ids else None
        where = f"position {position}"
        output = position + 1 - len(stored.sequence.prompt)
        if output >= 0:
            where = f"after {output} equal tokens" if output else "at the first token"
        margin = "more than the reference keeps"
        if rank is not None:
            top = stored.top_logprobs[position]
            margin = f"{float(top[0] - top[rank]):.3g}"
        return (
            f"{stored.name}: {where} the reference takes {ids[0]}, here {token}: its margin is "
            f"{margin} (gap {gap:.3g}, judged above {2 * limit:.3g})"
        )

    def _add_loss(self, seen: Seen, stored: StoredSequence) -> None:
        inside = (seen.rows + 1 < len(stored.sequence.prompt)) & ~torch.isnan(seen.tokens)
        self._loss.append(-seen.tokens[inside].double())
        self._reference_loss.append(-stored.token_logprobs[seen.rows][inside].double())

    def finish(self) -> StoredStats:
        """Judges everything added so far."""
        columns, exact = self._columns, self._dtype == "float32"
        violations: list[str] = []
        judged: list[str] = []
        observed_c = pooled = kl_mean = None
        largest = excess = 0.0
        if columns.labels:
            judged.append("log-probabilities")
            error, h, slack = (torch.cat(x) for x in (columns.error, columns.h, columns.slack))
            allowed = self._c * h + slack
            over = error > allowed
            largest, excess = float(error.max()), float((error / allowed).max())
            violations += _broken("not finite", ~torch.cat(columns.finite), columns.labels)
            violations += _broken("log-probability off", over, columns.labels, error, allowed)
            if not exact:
                needed = (error - slack) / h.clamp(min=1e-30)
                observed_c = max(0.0, float(needed.max()))
            if columns.hf_mean:
                hf_mean = float(torch.cat(columns.hf_mean).mean())
                pooled = float(torch.cat(columns.mean).mean()) / max(hf_mean, 1e-30)
                judged.append("pooled error")
                if pooled > MAX_POOLED_RATIO:
                    violations.append(f"pooled error ratio {pooled:.2f} > {MAX_POOLED_RATIO}")
        if columns.kl:
            judged.append("KL divergence")
            kl_mean = float(torch.cat(columns.kl).mean())
            limit = MAX_KL_MEAN[getattr(torch, self._dtype)]
            if columns.hf_kl:
                limit = max(limit, KL_RATIO * float(torch.cat(columns.hf_kl).mean()))
            if kl_mean > limit:
                violations.append(f"mean KL {kl_mean:.3g} > {limit:.3g}")
        if self._tokens:
            judged.append("greedy tokens")
            violations += self._token_violations()
        loss, wanted = torch.cat(self._loss), torch.cat(self._reference_loss)
        return StoredStats(
            num_positions=len(columns.labels),
            num_values=columns.num_values,
            observed_c=observed_c,
            pooled_ratio=pooled,
            max_error=largest,
            max_excess=excess,
            kl_mean=kl_mean,
            agreement=self._agreeing / self._tokens if self._tokens else None,
            num_tokens=self._tokens,
            close_share=self._close / max(1, self._tokens),
            equal_tokens=self._equal,
            greedy_tokens=self._greedy,
            perplexity=_perplexity(loss),
            reference_perplexity=_perplexity(wanted),
            divergences=tuple(self._divergences),
            violations=tuple(violations),
            judged=tuple(judged),
        )

    def _token_violations(self) -> list[str]:
        violations = []
        if self._broken_tokens:
            count, total = len(self._broken_tokens), self._tokens
            violations.append(
                f"other token despite a clear gap at {count} of {total} places, first "
                f"{self._broken_tokens[0]}"
            )
        free, hf_free = self._free / self._tokens, self._hf_free / self._tokens
        # A handful of places says nothing about a share.
        if self._free > 2 and free > max(FREE_DISAGREEMENT, 2 * hf_free):
            violations.append(f"{free:.1%} of tokens differ within the gap, HF's own {hf_free:.1%}")
        return violations


def _perplexity(loss: Tensor) -> float | None:
    return math.exp(min(float(loss.mean()), 700.0)) if loss.numel() else None


def _broken(
    what: str,
    where: Tensor,
    labels: Sequence[str],
    error: Tensor | None = None,
    allowed: Tensor | None = None,
) -> list[str]:
    places = where.nonzero()[:, 0].tolist()
    if not places:
        return []
    line = f"{what} at {len(places)} of {len(labels)} positions, first {labels[places[0]]}"
    if error is not None and allowed is not None:
        line += f" by {float(error[places[0]]):.3g}, allowed are {float(allowed[places[0]]):.3g}"
    return [line]
