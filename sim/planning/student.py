"""Quantiles of Student's t for whole degrees of freedom, without scipy, which is an extra."""

from __future__ import annotations

import math


def student_quantile(confidence: float, freedom: int) -> float:
    """The value that |t| stays below with probability `confidence`, at 1, 2, ... degrees."""
    assert 0 < confidence < 1 and freedom >= 1
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = (low + high) / 2
        if _inside(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(high)


def _inside(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) tan(angle)), a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom == 1:
        return 2 * angle / math.pi
    is_odd = freedom % 2
    term = total = cosine if is_odd else 1.0
    for step in range(2 + is_odd, freedom - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
