"""Integer sizes of launches; Triton's own helpers cost microseconds per call on the host."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n, for n >= 1."""
    return 1 << (n - 1).bit_length()
