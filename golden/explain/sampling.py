"""Sampling: what a temperature does, and why an exponential race draws from the softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.sampler import exponential
from golden.components.sampling import draw

NUM_DRAWS = 50_000
TOKENS = ("the", "a", "one", "this", "blue", "zebra")


def explain() -> Iterator[str]:
    """The experiment, line by line."""
    logits = torch.tensor([3.0, 2.2, 1.0, 0.6, -0.5, -2.0])
    yield "Six tokens with the logits " + ", ".join(
        f"{token} {float(value):.1f}" for token, value in zip(TOKENS, logits, strict=True)
    )
    yield ""
    yield from _race_by_hand(logits)
    yield ""
    for temperature in (0.5, 1.0, 2.0):
        yield from _compare(logits, temperature)
        yield ""
    yield "Both ways come as near to the softmax as chance allows; the race needs one pass and"
    yield "no sum over the vocabulary, and its random numbers depend on seed and position only."


def _race_by_hand(logits: Tensor) -> Iterator[str]:
    yield "The race: token i finishes at E_i / p_i with E_i exponential; the first one is drawn."
    yield "The minimum of exponentials with rates p_i falls to i with probability p_i exactly."
    probs = torch.softmax(logits, dim=-1)
    times = exponential(torch.tensor([1]), torch.tensor([0]), len(TOKENS))[0] / probs
    for token, prob, time in zip(TOKENS, probs, times, strict=True):
        yield f"  {token:>5}: p {float(prob):.3f}, finishes at {float(time):8.2f}"
    yield f"  drawn for seed 1, position 0: {TOKENS[int(times.argmin())]}"


def _compare(logits: Tensor, temperature: float) -> Iterator[str]:
    exact = torch.softmax(logits.double() / temperature, dim=-1)
    race = draw(logits, NUM_DRAWS, temperature).double() / NUM_DRAWS
    generator = torch.Generator().manual_seed(3)
    picks = torch.multinomial(exact, NUM_DRAWS, replacement=True, generator=generator)
    multinomial = torch.bincount(picks, minlength=len(TOKENS)).double() / NUM_DRAWS
    yield f"Temperature {temperature}: logits divided by it, {NUM_DRAWS} draws."
    yield f"  {'token':>7} {'softmax':>9} {'race':>9} {'multinomial':>12}"
    for row, token in enumerate(TOKENS):
        yield (
            f"  {token:>7} {float(exact[row]):9.4f} {float(race[row]):9.4f} "
            f"{float(multinomial[row]):12.4f}"
        )
    yield (
        f"  total variation distance to the softmax: race {_distance(race, exact):.4f}, "
        f"multinomial {_distance(multinomial, exact):.4f}, "
        f"expected from chance about {_expected(exact):.4f}"
    )


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().sum() / 2)


def _expected(exact: Tensor) -> float:
    """Mean distance of an honest sampler: normal deviations of independent counts."""
    deviation = (exact * (1 - exact) / NUM_DRAWS).sqrt()
    return float((deviation * (2 / torch.pi) ** 0.5).sum() / 2)
