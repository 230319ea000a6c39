"""The sampler: greedy is exact, draws follow the softmax, filters keep what they promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from engine.sampler import SamplingBatch, filter_logits, sample
from golden.results import CaseResult, judged

GROUP = "sampler"
NUM_DRAWS = 100_000
ALPHA = 1e-4  # chance that a correct sampler fails one chi-square test
CHUNK = 4096
NO_FILTERS: Mapping[str, float] = {}


def sampler_results(device: torch.device) -> Iterator[CaseResult]:
    """All sampler cases on one device."""
    yield _greedy(device)
    for temperature in (0.5, 1.0, 2.0):
        yield _distribution(device, f"temperature {temperature}", temperature, lambda p: p)
    yield _distribution(device, "top-k 5", 1.0, lambda p: _keep_top(p, 5), top_k=5)
    yield _distribution(device, "top-p 0.6", 1.0, lambda p: _keep_nucleus(p, 0.6), top_p=0.6)
    yield _distribution(device, "min-p 0.2", 1.0, lambda p: p * (p >= 0.2 * p.max()), min_p=0.2)
    yield _edge_cases(device)
    yield _independence(device)


def toy_logits(vocab_size: int, device: torch.device) -> Tensor:
    """Fixed uneven logits whose smallest probability still gets draws."""
    generator = torch.Generator().manual_seed(17)
    return (torch.randn(vocab_size, generator=generator) * 1.2).to(device)


def chi_square_limit(degrees: int) -> float:
    """Upper quantile of the chi-square distribution (Wilson and Hilferty's approximation)."""
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - 2 * ALPHA, dtype=torch.float64)))
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def _batch(
    device: torch.device,
    num_rows: int,
    temperature: float = 1.0,
    filters: Mapping[str, float] = NO_FILTERS,
    seed: int = 5,
    first_position: int = 0,
) -> SamplingBatch:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingBatch(
        temperatures=full(temperature, torch.float32),
        seeds=full(seed, torch.int64),
        positions=torch.arange(num_rows, device=device) + first_position,
        top_k=full(filters["top_k"], torch.int32) if "top_k" in filters else None,
        top_p=full(filters["top_p"], torch.float32) if "top_p" in filters else None,
        min_p=full(filters["min_p"], torch.float32) if "min_p" in filters else None,
    )


def draw(logits: Tensor, num_draws: int, temperature: float, **filters: float) -> Tensor:
    """Counts per token of independent draws: one seed, consecutive positions."""
    counts = torch.zeros(logits.numel(), dtype=torch.int64, device=logits.device)
    for start in range(0, num_draws, CHUNK):
        rows = min(CHUNK, num_draws - start)
        batch = _batch(logits.device, rows, temperature, filters, first_position=start)
        tokens = sample(logits.expand(rows, -1).contiguous(), batch)
        counts += torch.bincount(tokens, minlength=logits.numel())
    return counts.cpu()


def _greedy(device: torch.device) -> CaseResult:
    problems = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.stack([toy_logits(997, device).roll(shift) for shift in range(64)]).to(dtype)
        tokens = sample(logits, _batch(device, 64, temperature=0.0))
        best = logits.amax(-1)
        if not torch.equal(logits.gather(-1, tokens[:, None])[:, 0], best):
            problems.append(f"greedy misses the largest logit in {dtype}")
    return judged(GROUP, f"greedy ({device.type})", problems)


def _distribution(
    device: torch.device,
    name: str,
    temperature: float,
    keep: Callable[[Tensor], Tensor],
    **filters: float,
) -> CaseResult:
    logits = toy_logits(23, device)
    counts = draw(logits, NUM_DRAWS, temperature, **filters).double()
    probs = keep(torch.softmax(logits.double().cpu() / temperature, dim=-1))
    probs = probs / probs.sum()
    problems = []
    if int(counts[probs == 0].sum()):
        problems.append("a token that the filter removes was drawn")
    live = probs > 0
    expected = probs[live] * NUM_DRAWS
    statistic = float(((counts[live] - expected) ** 2 / expected).sum())
    limit = chi_square_limit(int(live.sum()) - 1)
    if statistic > limit:
        problems.append(f"chi-square {statistic:.1f} > {limit:.1f}")
    return judged(
        GROUP,
        f"{NUM_DRAWS} draws, {name} ({device.type})",
        problems,
        chi_square=statistic,
        limit=limit,
    )


def _keep_top(probs: Tensor, k: int) -> Tensor:
    return probs * (probs >= probs.topk(k).values[-1])


def _keep_nucleus(probs: Tensor, p: float) -> Tensor:
    ordered, order = probs.sort(descending=True)
    kept = ordered * ((ordered.cumsum(0) - ordered) < p)
    return torch.zeros_like(probs).scatter(0, order, kept)


def _edge_cases(device: torch.device) -> CaseResult:
    logits = toy_logits(23, device)[None]
    size = logits.shape[-1]

    def kept(**filters: float) -> int:
        return int(torch.isfinite(filter_logits(logits, _batch(device, 1, filters=filters))).sum())

    expected = {
        "top_k=1": (kept(top_k=1), 1),
        "top_k=0 is off": (kept(top_k=0), size),
        "top_k above the vocabulary": (kept(top_k=1000), size),
        "top_p=1 is off": (kept(top_p=1.0), size),
        "top_p near 0 keeps the best": (kept(top_p=1e-9), 1),
        "min_p=0 is off": (kept(min_p=0.0), size),
        "min_p=1 keeps the best": (kept(min_p=1.0), 1),
    }
    flat = torch.zeros(1, 8, device=device)
    ties = filter_logits(flat, _batch(device, 1, filters={"min_p": 1.0}))
    expected["min_p=1 keeps all that tie"] = (int(torch.isfinite(ties).sum()), 8)
    problems = [
        f"{name}: {count} tokens stay, not {want}"
        for name, (count, want) in expected.items()
        if count != want
    ]
    return judged(GROUP, f"edge cases of the filters ({device.type})", problems)


def _independence(device: torch.device) -> CaseResult:
    """A row's token depends on its logits, seed and position, not on its batch."""
    vocab, rows = 997, 33
    logits = torch.stack([toy_logits(vocab, device).roll(7 * row) for row in range(rows)])
    whole = _batch(device, rows)
    together = sample(logits, whole)
    problems = []
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    shuffled = SamplingBatch(whole.temperatures[order], whole.seeds[order], whole.positions[order])
    if not torch.equal(sample(logits[order], shuffled), together[order]):
        problems.append("another order of the rows changes tokens")
    for row in range(rows):
        one = slice(row, row + 1)
        alone = SamplingBatch(whole.temperatures[one], whole.seeds[one], whole.positions[one])
        if int(sample(logits[one], alone)[0]) != int(together[row]):
            problems.append(f"row {row} alone draws another token")
    other = sample(logits, _batch(device, rows, seed=6))
    if torch.equal(other, together):
        problems.append("another seed changes nothing")
    return judged(GROUP, f"seeded draws are independent of the batch ({device.type})", problems)
