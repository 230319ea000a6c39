"""The file of a reference: token ids, likeliest tokens with log-probabilities, HF's own errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

from engine.core.errors import InputError
from golden.cases import ForcedSequence

FORMAT = "lockstep-reference-1"
TOP = 64
MOST_BYTES_PER_POSITION = 2048


@dataclass(frozen=True, slots=True)
class Yardstick:
    """HF in one 16-bit dtype against float32, at the columns of a reference's positions."""

    error: Tensor  # [n, k] largest of several runs' errors
    token_error: Tensor  # [n] the same for the token that follows
    mean_error: Tensor  # [n] of the plain run, over the columns
    kl: Tensor  # [n]
    agrees: Tensor  # [n] whether its best token is the truth's


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """One sequence; row p speaks of what follows position p."""

    sequence: ForcedSequence
    top_ids: Tensor  # [n, k] int64, likeliest first
    top_logprobs: Tensor  # [n, k]
    logsumexp: Tensor  # [n]
    token_logprobs: Tensor  # [n] of the token that follows
    yardsticks: dict[str, Yardstick]

    @property
    def name(self) -> str:
        """The prompt's name."""
        return self.sequence.name

    @property
    def num_positions(self) -> int:
        """Rows."""
        return self.top_ids.shape[0]


@dataclass(frozen=True, slots=True)
class StoredReference:
    """A truth in a file. `about` says of which model, how it was made, and with what."""

    sequences: tuple[StoredSequence, ...]
    about: dict[str, Any]
    where: str = "the reference"

    @property
    def forced(self) -> tuple[ForcedSequence, ...]:
        """The token sequences alone."""
        return tuple(item.sequence for item in self.sequences)

    @property
    def prompts(self) -> dict[str, list[int]]:
        """Token ids of the prompts by name."""
        return {item.name: list(item.sequence.prompt) for item in self.sequences}

    @property
    def token_ids(self) -> list[list[int]]:
        """Prompt and continuation of each sequence, in order: what an engine must read."""
        return [list(item.sequence.tokens) for item in self.sequences]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """16-bit dtypes that have a yardstick."""
        return tuple(self.about["yardsticks"])

    @property
    def num_positions(self) -> int:
        """Rows of all sequences."""
        return sum(item.num_positions for item in self.sequences)


def write_reference(reference: StoredReference, path: Path) -> int:
    """Writes the file whole or not at all; returns its bytes."""
    tensors = dict(_tensors(reference))
    about = {**reference.about, "names": [item.name for item in reference.sequences]}
    about["digest"] = _digest(tensors)
    scratch = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, scratch, metadata={"lockstep": json.dumps({"format": FORMAT, **about})})
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path.stat().st_size


def _tensors(reference: StoredReference) -> Iterator[tuple[str, Tensor]]:
    items = reference.sequences
    lengths = [[len(i.sequence.prompt), len(i.sequence.forced)] for i in items]
    tokens = [token for i in items for token in i.sequence.tokens]
    yield "lengths", torch.tensor(lengths, dtype=torch.int32)
    yield "token_ids", torch.tensor(tokens, dtype=torch.int32)
    yield "top_ids", torch.cat([i.top_ids for i in items]).int()
    for name in ("top_logprobs", "logsumexp", "token_logprobs"):
        yield name, torch.cat([getattr(i, name) for i in items]).float()
    for dtype in items[0].yardsticks:
        for name in Yardstick.__slots__:
            parts = [getattr(i.yardsticks[dtype], name) for i in items]
            whole = torch.cat(parts)
            yield f"{dtype}.{name}", whole if whole.dtype == torch.bool else whole.float()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_reference(path: Path) -> StoredReference:
    """The reference in a file.

    Raises:
        InputError: it is cut short, damaged, or no reference.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such reference; golden record writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({_first(error)}): copy it again, or write it "
            "again with golden record"
        ) from None
    try:
        about = json.loads(metadata.get("lockstep", ""))
    except json.JSONDecodeError:
        about = {}
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{path}: not a reference of golden record (format {FORMAT})")
    if about.get("digest") != _digest(tensors):
        raise InputError(f"{path}: its numbers are not those that were written: copy it again")
    return StoredReference(tuple(_sequences(about, tensors)), about, str(path))


def check_dtype(reference: StoredReference, dtype: str) -> None:
    """Refuses a dtype that the reference cannot judge.

    Raises:
        InputError: there is no yardstick for it, or experts may be chosen by rounding in it.
    """
    if dtype == "float32":
        return
    if dtype not in reference.dtypes:
        known = ", ".join(("float32", *reference.dtypes))
        raise InputError(f"{reference.where}: has no yardstick for {dtype}; it has {known}")
    if reference.about["is_mixture"]:
        raise InputError(
            f"{reference.where}: a mixture's choice of experts is not stored, so it judges float32 "
            "only (--dtype float32); golden check without --reference judges the other dtypes"
        )


def _first(error: Exception) -> str:
    return str(error).splitlines()[0]


def _sequences(about: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[StoredSequence]:
    token = row = 0
    for name, (prompt, forced) in zip(about["names"], tensors["lengths"].tolist(), strict=True):
        ids = tensors["token_ids"][token : token + prompt + forced].tolist()
        token += prompt + forced
        rows = slice(row, row + prompt + forced - 1)
        row = rows.stop
        yield StoredSequence(
            ForcedSequence(name, tuple(ids[:prompt]), tuple(ids[prompt:])),
            tensors["top_ids"][rows].long(),
            tensors["top_logprobs"][rows],
            tensors["logsumexp"][rows],
            tensors["token_logprobs"][rows],
            {
                dtype: Yardstick(*(tensors[f"{dtype}.{k}"][rows] for k in Yardstick.__slots__))
                for dtype in about["yardsticks"]
            },
        )


def dtype_name(dtype: torch.dtype) -> str:
    """As users write it."""
    return str(dtype).removeprefix("torch.")
