"""The deterministic stand-in for a language model: what a KV slot holds and what gets sampled.

A slot's content is a 64-bit hash of *all* tokens up to its position (and of the extra keys), so
two slots are equal if and only if their whole prefixes are. The next token is computed from the
slots that a sequence reads through its block table: wrong KV gives wrong tokens (LAW-V1, LAW-E1).
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from engine.core.request import Request

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_MIXER = 0xBF58476D1CE4E5B9


def root_hash(extra_keys: tuple[tuple[str, str], ...]) -> int:
    """Content before position 0."""
    return crc32(repr(extra_keys).encode()) if extra_keys else 0x5851F42D4C957F2D


def extend_hash(prefix: int, token: int) -> int:
    """Content at a position, from the content before it and the token there."""
    mixed = ((prefix ^ (token + 0x632BE59B)) * _MULTIPLIER) & _MASK
    return mixed ^ (mixed >> 29)


def hash_chain(start: int, tokens: Iterable[int]) -> list[int]:
    """Contents of consecutive positions."""
    chain: list[int] = []
    for token in tokens:
        mixed = ((start ^ (token + 0x632BE59B)) * _MULTIPLIER) & _MASK
        start = mixed ^ (mixed >> 29)
        chain.append(start)
    return chain


def sample(content_sum: int, length: int, seed: int, vocabulary: int) -> int:
    """Next token of a sequence that reads `length` slots with this sum of contents.

    The sum depends on every slot that is read. Seed and position key the draw, not the step
    (LAW-E4).
    """
    mixed = ((content_sum + seed * 0x2545F491) ^ (length * 0x9E3779B1)) * _MIXER & _MASK
    return (mixed >> 33) % vocabulary


def sequential_outputs(
    request: Request, seed: int, vocabulary: int, max_model_len: int
) -> tuple[list[int], str]:
    """Outputs and finish reason of a request that runs alone and without a cache (LAW-E1)."""
    contents = hash_chain(root_hash(request.extra_keys), request.prompt)
    total, length, last = sum(contents), len(contents), contents[-1]
    stops, least = request.stop_token_ids, request.min_tokens
    most = min(request.max_tokens, max_model_len - length)
    outputs: list[int] = []
    while True:
        token = sample(total, length, seed, vocabulary)
        outputs.append(token)
        if token in stops and len(outputs) > least:
            return outputs, "stop"
        if len(outputs) >= most:
            return outputs, "length"
        last = extend_hash(last, token)
        total += last
        length += 1
