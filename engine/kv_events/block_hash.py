"""Hashes of blocks that equal vLLM's for the same tokens, algorithm and seed."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from engine.arguments.table import BLOCK_HASHES
from engine.core.errors import ConfigError
from engine.kv_events.wire import BlockHash

SEED_VARIABLE = "PYTHONHASHSEED"
INTEGERS_VARIABLE = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
_DEFAULT_SEED = "vllm-none-hash"
_MASK = (1 << 64) - 1

ExtraKeys = tuple[tuple[str, str], ...] | None


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """One algorithm with its seed; `none_hash` stands for the parent of a first block."""

    digest: Callable[[object], bytes]
    none_hash: bytes
    as_integers: bool

    def block(self, parent: bytes, token_ids: tuple[int, ...], extra_keys: ExtraKeys) -> bytes:
        """The digest of a block behind its parent's."""
        return self.digest((parent, token_ids, extra_keys))

    def external(self, digest: bytes) -> BlockHash:
        """The form in which a digest is published."""
        return int.from_bytes(digest, "big") & _MASK if self.as_integers else digest


def block_hasher(algorithm: str) -> BlockHasher:
    """The hasher of this process, by the environment variables that vLLM reads.

    Without PYTHONHASHSEED, SHA-256 has a fixed seed and xxHash a random one.

    Raises:
        ConfigError: no such algorithm, a package is missing, or a variable is wrong.
    """
    if algorithm not in BLOCK_HASHES:
        limit = f"must be one of {', '.join(BLOCK_HASHES)}"
        raise ConfigError("prefix_caching_hash_algo", algorithm, limit)
    encode = _canonical_cbor() if algorithm.endswith("_cbor") else _pickled
    hash_bytes = xxhash.xxh3_128_digest if algorithm.startswith("xxhash") else _sha256

    def digest(value: object) -> bytes:
        return hash_bytes(encode(value))

    seed = os.environ.get(SEED_VARIABLE)
    if seed is None:
        seed = os.urandom(32).hex() if algorithm.startswith("xxhash") else _DEFAULT_SEED
    return BlockHasher(digest, digest(seed), _as_integers())


def _as_integers() -> bool:
    written = os.environ.get(INTEGERS_VARIABLE, "1")
    if written not in ("0", "1"):
        raise ConfigError(INTEGERS_VARIABLE, written, "must be 0 or 1")
    return written == "1"


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _canonical_cbor() -> Callable[[object], bytes]:
    try:
        cbor2 = importlib.import_module("cbor2")
    except ImportError:
        limit = "needs cbor2 (pip install 'lockstep-llm[kv-events]')"
        raise ConfigError("prefix_caching_hash_algo", "*_cbor", limit) from None

    def encode(value: object) -> bytes:
        encoded: bytes = cbor2.dumps(value, canonical=True)
        return encoded

    return encode
