"""Weights into a model: from safetensors, every tensor accounted for, or random for speed runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import WeightError
from engine.layers.fp8 import FP8, FP8_MAX
from engine.layers.weights import Fp8Slice, HasWeights, WeightSlice, kv_scale_names
from engine.models.stacked_experts import StoredPlace, stored_places

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# A head that is tied to the embedding may be stored as well, but then it must be the same.
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS_COMPARED = 8192
_NAMES_SHOWN = 5
# Integers, in the words of torch.
_NAMES = {"BOOL": "bool", "U8": "uint8", **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)}}
DUMMY_FP8_STD = 64.0  # of what 8-bit matrices hold, before their scale


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read: tensors of the checkpoint, parameters' elements filled, files, skipped."""

    num_tensors: int
    num_elements: int
    num_files: int
    skipped: tuple[str, ...]


@torch.no_grad()
def load_weights(model: HasWeights, folder: str | Path) -> LoadReport:
    """Fill every parameter of `model` from the safetensors files of `folder`.

    Reads only this rank's slices. Raises WeightError before anything is copied if a tensor is
    missing, unknown or mis-shaped, and on an unreadable file.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        slices, places, skipped = _checked(model, checkpoint)
        for item in slices:
            checkpoint.copy(item, places[item.name])
        return LoadReport(
            num_tensors=len({place.name for place in places.values()}),
            num_elements=sum(item.target.numel() for item in slices),
            num_files=checkpoint.num_files,
            skipped=skipped,
        )


@torch.no_grad()
def init_dummy_weights(model: HasWeights, seed: int = 0, std: float = 0.02) -> None:
    """Random weights made on the model's own device, for speed runs without files.

    Norms are ones, biases zeros; the values depend on seed, name and shard, not on order.
    """
    for item in model.weight_slices():
        kind = weight_kind(item.name)
        if item.target.numel() == 0:
            continue
        if item.is_scale:
            item.target.fill_(std / DUMMY_FP8_STD)
        elif item.target.dtype == FP8:
            stored = isinstance(item, Fp8Slice)
            item.put(_dummy_matrix(item, seed, DUMMY_FP8_STD if stored else std))
        elif kind == "norm":
            item.target.fill_(1.0)
        elif kind == "bias":
            item.target.zero_()
        else:
            item.target.normal_(0.0, std, generator=_generator(item, seed))


def _generator(item: WeightSlice, seed: int) -> torch.Generator:
    generator = torch.Generator(device=item.target.device)
    return generator.manual_seed(tensor_seed(seed, f"{item.name}@{item.start}"))


def _dummy_matrix(item: WeightSlice, seed: int, std: float) -> Tensor:
    """What a checkpoint could hold for an 8-bit matrix."""
    matrix = torch.empty(item.target.shape, dtype=torch.bfloat16, device=item.target.device)
    return matrix.normal_(0.0, std, generator=_generator(item, seed)).clamp_(-FP8_MAX, FP8_MAX)


def weight_kind(name: str) -> str:
    """`norm`, `bias` or `matrix`, from the last components of a tensor's name."""
    parts = name.split(".")
    if parts[-1] == "bias":
        return "bias"
    return "norm" if parts[-2].endswith("norm") or parts[-2] == "norm" else "matrix"


def tensor_seed(seed: int, name: str) -> int:
    """A seed for one tensor that does not depend on the order of the tensors."""
    # 32 bits: torch's CPU generator ignores the higher ones.
    return zlib.crc32(f"{seed}/{name}".encode())


def load_kv_scales(folder: str | Path, num_layers: int) -> list[tuple[float, float]]:
    """Scales of keys and values by layer, 1 where the checkpoint holds none.

    Raises:
        WeightError: a scale is no positive number.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        scales = []
        for layer in range(num_layers):
            names = kv_scale_names(layer)
            half = len(names) // 2
            k, v = (
                next((checkpoint.number(name) for name in part if name in checkpoint.names), 1.0)
                for part in (names[:half], names[half:])
            )
            scales.append((k, v))
        return scales


@torch.no_grad()
def check_weights(model: HasWeights, folder: str | Path) -> None:
    """Raise what `load_weights` would, from headers and scales alone.

    The model may lie on the meta device, so a faulty checkpoint is refused before memory is taken.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        _checked(model, checkpoint)


def _checked(
    model: HasWeights, checkpoint: _Checkpoint
) -> tuple[list[WeightSlice], dict[str, StoredPlace], tuple[str, ...]]:
    """All slices, their places, and the names that nothing takes; raises on any fault."""
    slices = list(model.weight_slices())
    places, missing = stored_places(slices, checkpoint.names)
    skipped = _check_names(places, missing, model.ignored_weights(), checkpoint)
    if _HEAD in skipped and _EMBEDDING in checkpoint.names:
        checkpoint.check_tied_head()
    _check_stored(slices, places, checkpoint)
    return slices, places, skipped


def _check_stored(
    slices: Iterable[WeightSlice], places: Mapping[str, StoredPlace], checkpoint: _Checkpoint
) -> None:
    for item in slices:
        checkpoint.check_form(item, places[item.name])
    for item in slices:
        if item.is_scale:
            checkpoint.check_scale(places[item.name].name)


def _check_names(
    places: Mapping[str, StoredPlace],
    missing: Iterable[str],
    ignored: frozenset[str],
    checkpoint: _Checkpoint,
) -> tuple[str, ...]:
    missing = sorted(missing)
    if missing:
        raise WeightError(f"{checkpoint.folder}: no file holds the weight {_some(missing)}")
    unknown = checkpoint.names - {place.name for place in places.values()}
    extra = sorted(unknown - ignored)
    if extra:
        where = checkpoint.file_of(extra[0])
        raise WeightError(f"{where}: no parameter of the model takes the weight {_some(extra)}")
    return tuple(sorted(unknown))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


class _Checkpoint:
    """The open safetensors files of a folder and the place of every tensor in them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._handles: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        # As Hugging Face does: the one file with the standard name goes before everything else.
        single = folder / SINGLE_NAME
        indexed = {} if single.is_file() else _read_index(folder)
        files = set(indexed.values()) or ({single} if single.is_file() else _loose_files(folder))
        for path in sorted(files):
            handle = self._open(path, stack)
            for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
                if name in self._files:
                    raise WeightError(f"{path}: {name} is also stored in {self._files[name]}")
                self._files[name] = path
        for name, path in indexed.items():
            if self._files.get(name) != path:
                raise WeightError(f"{path}: the index places {name} here, but it is not there")
        self.names = frozenset(self._files)

    @property
    def num_files(self) -> int:
        return len(self._handles)

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def _open(self, path: Path, stack: ExitStack) -> Any:  # noqa: ANN401 (untyped library)
        if not path.is_file():
            raise WeightError(f"{path}: the index names this file, but it does not exist")
        try:
            self._handles[path] = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path}: not a whole safetensors file: {error}") from None
        return self._handles[path]

    def check_form(self, item: WeightSlice, place: StoredPlace) -> None:
        """Shape and dtype, from the file's header."""
        path = self._files[place.name]
        stored = self._handles[path].get_slice(place.name)
        shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
        fits = shape == place.shape if place.expert is not None else item.takes_shape(shape)
        if not fits:
            raise WeightError(
                f"{path}: {place.name} has shape {list(shape)}, the model needs {list(place.shape)}"
            )
        if not item.takes_dtype(dtype):
            raise WeightError(
                f"{path}: {place.name} is stored as {_NAMES.get(dtype, dtype)}, not {item.wanted}"
            )

    def number(self, name: str) -> float:
        """The value of a scale that is one number."""
        self.check_scale(name)
        value = self._handles[self._files[name]].get_tensor(name)
        if value.numel() != 1:
            raise WeightError(f"{self._files[name]}: {name} holds {value.numel()} numbers, not one")
        return float(value)

    def check_scale(self, name: str) -> None:
        """The values of a scale: one that is no positive number makes no sense."""
        path = self._files[name]
        try:
            scale = self._handles[path].get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path}: cannot read {name}: {error}") from None
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise WeightError(f"{path}: {name} holds a scale that is not a positive number")

    def check_tied_head(self) -> None:
        head, embedding = (
            self._handles[self._files[name]].get_slice(name) for name in (_HEAD, _EMBEDDING)
        )
        is_same = head.get_shape() == embedding.get_shape()
        for start in range(0, head.get_shape()[0] if is_same else 0, _ROWS_COMPARED):
            rows = slice(start, start + _ROWS_COMPARED)
            ours, theirs = head[rows], embedding[rows]
            is_same = is_same and torch.equal(ours.to(theirs.dtype), theirs)
        if not is_same:
            raise WeightError(
                f"{self._files[_HEAD]}: {_HEAD} differs from {_EMBEDDING} although config.json "
                "ties them; set tie_word_embeddings to false to use the stored head, or remove it"
            )

    def copy(self, item: WeightSlice, place: StoredPlace) -> None:
        if item.target.numel() == 0:
            return
        path = self._files[place.name]
        try:
            part = _read(self._handles[path].get_slice(place.name), item, place)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path}: cannot read {place.name}: {error}") from None
        item.put(part)


def _read(stored: Any, item: WeightSlice, place: StoredPlace) -> Tensor:  # noqa: ANN401
    """The slice's part of its stored tensor."""
    if not item.full_shape:
        return stored[...]
    if place.expert is None:
        kept = slice(item.start, item.stop)
        part: Tensor = stored[kept] if item.dim == 0 else stored[:, kept]
        return part
    first, num_rows = place.first_row, item.full_shape[0]
    if item.dim == 0:
        part = stored[place.expert, first + item.start : first + item.stop]
    else:
        part = stored[place.expert, first : first + num_rows, item.start : item.stop]
    return part


def _read_index(folder: Path) -> dict[str, Path]:
    """Tensor name to file, from the index of a sharded checkpoint; empty without one."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): folder / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{path}: not a safetensors index: {error!r}") from None


def _loose_files(folder: Path) -> set[Path]:
    """The weight files of a folder without an index: shards, or whatever else there is."""
    files = set(folder.glob("model-*-of-*.safetensors")) or set(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{folder}: holds no *.safetensors file")
    return files
