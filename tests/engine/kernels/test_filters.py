"""The search for what top-k, top-p and min-p keep finds what sorting the vocabulary finds."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.kernels import filters
from engine.kernels.filters import fused_filter
from engine.kernels.race import fused_race
from engine.sampler import SamplingBatch, filter_logits, race

HALVES = [torch.bfloat16, torch.float16]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# (top_k, top_p, min_p) by row: each alone, together, off, and at the ends of their ranges.
SETTINGS = [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (10**6, 1.0, 0.0), (0, 0.5, 0.0),
    (0, 1e-6, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0), (20, 0.95, 0.0),
    (7, 0.6, 0.05), (50, 0.3, 0.5), (3, 0.999, 0.0), (0, 0.9, 0.01),
]  # fmt: skip


def filter_batch(num_rows, temperature):
    rows = [SETTINGS[i % len(SETTINGS)] for i in range(num_rows)]
    top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingBatch(
        temperatures=torch.full((num_rows,), temperature, device=DEVICE),
        seeds=torch.arange(num_rows, device=DEVICE),
        positions=torch.arange(num_rows, device=DEVICE) * 3,
        top_k=torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.tensor(top_p, device=DEVICE),
        min_p=torch.tensor(min_p, device=DEVICE),
    )


def kept_by(logits, batch):
    value, last = fused_filter(logits, batch.temperatures, batch.top_k, batch.top_p, batch.min_p)
    x, tokens = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    return (x > value[:, None]) | ((x == value[:, None]) & (tokens <= last[:, None]))


def agree(logits, batch):
    """Every row keeps the same prefix of its order, up to the rounding of a sum near p."""
    ours = kept_by(logits, batch) & (logits > float("-inf"))
    theirs = filter_logits(logits, batch) > float("-inf")
    for row in (ours != theirs).any(dim=1).nonzero()[:, 0].tolist():
        scaled = logits[row].float() / (batch.temperatures[row] or 1.0)
        swapped = scaled[ours[row] != theirs[row]]
        if ours[row].sum() == theirs[row].sum() and (swapped == swapped[0]).all():
            continue  # numbers that the division by the temperature makes equal
        probs = scaled.double().softmax(0)
        mass = probs[ours[row] & theirs[row]].sum().item()
        top_k = int(batch.top_k[row])
        if 0 < top_k < len(probs):
            mass /= probs.topk(top_k).values.sum().item()
        assert abs(mass - batch.top_p[row].item()) < 1e-5, (row, SETTINGS[row % len(SETTINGS)])
    return ours


def kinds(num_rows, vocab, generator):
    wide = torch.randn(num_rows, vocab, generator=generator) * 4
    yield "wide", wide
    yield "peaked", torch.where(torch.arange(vocab) == 3, 30.0, wide / 10)
    yield "flat", wide / 1000
    yield "ties", (wide / 2).round()
    yield "equal", torch.zeros(num_rows, vocab)
    yield "negative", -wide.abs() - 100
    banned = wide.clone()
    banned[:, ::3] = float("-inf")
    yield "banned", banned


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks to a row, few of which fit the room for candidates."""
    monkeypatch.setattr(filters, "_BLOCK", 128)
    monkeypatch.setattr(filters, "_MOST_CANDIDATES", 64)


@pytest.mark.parametrize("number", range(7))
def test_the_search_keeps_what_the_order_keeps(number, small_blocks):
    generator = torch.Generator().manual_seed(3)
    name, logits = list(kinds(len(SETTINGS), 150, generator))[number]
    temperature = 0.0 if name == "ties" else 0.6
    # The interpreter takes a second for each of the 32 bits of a float32.
    dtype = torch.float32 if name == "wide" else torch.float16
    agree(logits.to(DEVICE).to(dtype), filter_batch(len(SETTINGS), temperature))


def test_the_race_runs_among_what_is_kept(small_blocks):
    generator = torch.Generator().manual_seed(1)
    batch = filter_batch(len(SETTINGS), 0.7)
    columns = (batch.temperatures, batch.seeds, batch.positions)
    logits = dict(kinds(len(SETTINGS), 200, generator))["ties"].to(DEVICE).to(torch.float16)
    kept = fused_filter(logits, columns[0], batch.top_k, batch.top_p, batch.min_p)
    masked = logits.masked_fill(~kept_by(logits, batch), float("-inf"))
    assert torch.equal(fused_race(logits, *columns, kept), race(masked, *columns))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_the_search_over_a_whole_vocabulary(dtype):
    generator = torch.Generator().manual_seed(2)
    batch = filter_batch(len(SETTINGS) * 2, 0.6)
    for _, logits in kinds(len(SETTINGS) * 2, 151_936, generator):
        agree(logits.cuda().to(dtype), batch)
