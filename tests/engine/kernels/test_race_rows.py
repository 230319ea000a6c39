"""Drawing in place is drawing with gathered columns and scattering the winners."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.kernels.race import RaceRows, fused_race_rows
from engine.sampler import race


@pytest.mark.parametrize("vocab", [50, 5000])
def test_winners_go_to_their_rows_and_slots(vocab):
    torch.manual_seed(vocab)
    num_slots, num_rows = 6, 4
    logits = torch.randn(num_rows, vocab, device=DEVICE) * 3
    slots = torch.tensor([4, 0, 5, 2], device=DEVICE)
    temperatures = torch.tensor([0.0, 9.0, 0.7, 9.0, 1.3, 0.0], device=DEVICE)
    seeds = torch.arange(num_slots, device=DEVICE) * 77 - 100
    positions = torch.tensor([3, 90, 0, 12], device=DEVICE)
    last_tokens = torch.full((num_slots,), -7, device=DEVICE)
    sampled = torch.full((num_rows,), -9, device=DEVICE)

    rows = RaceRows(slots, positions, temperatures, seeds, last_tokens, sampled)
    fused_race_rows(logits, rows)

    expected = race(logits, temperatures[slots], seeds[slots], positions + 1)
    assert torch.equal(sampled, expected)
    assert torch.equal(last_tokens[slots], expected)
    others = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert (last_tokens[others] == -7).all()


@pytest.mark.parametrize("vocab", [50, 5000])
def test_a_row_of_nan_says_so_and_leaves_a_token_that_can_be_read(vocab):
    logits = torch.zeros(2, vocab, device=DEVICE)
    logits[1] = float("nan")
    integers = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    last_tokens, sampled = integers.clone() - 7, integers.clone()
    slots = torch.tensor([1, 0], device=DEVICE)
    temperatures = torch.tensor([0.7, 0.0], device=DEVICE)
    fused_race_rows(logits, RaceRows(slots, integers, temperatures, integers, last_tokens, sampled))
    assert sampled[1] == -1
    assert sampled[0] >= 0
    assert last_tokens.tolist() == [0, sampled[0].item()]
