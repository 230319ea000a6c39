"""The profile: a fitted cost model as a JSON file that says what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.core.errors import ConfigError, InputError
from engine.steplog.atomic import write_text
from sim.cost.profile_json import ProfileDocument, TermValue, terms_from_json, terms_to_json
from sim.cost.terms import HOST_TERMS, KINDS, STEP_TERMS, Graphs
from sim.cost.trust import Trust, trust_of_profile
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape

FORMAT = "lockstep-profile"
VERSION = 2
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
_PER_KIND = Meta(min_length=len(KINDS), max_length=len(KINDS))


@dataclass(frozen=True, slots=True)
class Target:
    """What a profile holds for; `model` are the shape's fields."""

    model: Mapping[str, Any]
    hardware: str
    dtype: str
    tp: int
    engine: str


@dataclass(frozen=True, slots=True)
class NoiseSource:
    """Relative errors of held-out predictions of one log, in step order, in blocks per kind.

    Blocks keep the slow drift of a machine's host speed. `kinds[k]` are the blocks of `KINDS[k]`;
    `mean` is the error of the log's total time.
    """

    name: str
    mean: float
    kinds: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of the recording process: one per so many scheduled entries, each so long.

    A pause lasts `ns_per_entry` for every entry that the run had scheduled up to then.
    """

    every_entries: Annotated[int, Meta(ge=1)]
    ns_per_entry: Annotated[float, Meta(ge=0, lt=1e12)]


@dataclass(frozen=True, slots=True)
class Tracking:
    """How a recorded run's past predicts its next step: see `sim.calibration.host_speed`.

    One number per entry of `KINDS`: how strongly a kind of step shows the host's speed, and how
    strongly it follows the speed that the steps before it showed.
    """

    shows: Annotated[tuple[Annotated[float, Meta(gt=0, lt=1e3)], ...], _PER_KIND]
    follows: Annotated[tuple[Annotated[float, Meta(ge=0, lt=1e3)], ...], _PER_KIND]


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted model: coefficients in ns per unit, the calibrated range, and the provenance."""

    target: Target
    graphs: Graphs
    step_ns: tuple[float, ...]
    host_ns: tuple[float, ...]
    limits: Mapping[str, int]
    noise: tuple[NoiseSource, ...]
    sources: tuple[Mapping[str, Any], ...]
    held_out: tuple[Mapping[str, Any], ...]
    pauses: Pauses | None = None
    tracking: Tracking | None = None
    lockstep_version: str = ""
    path: str = ""
    free_running: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_asynchronous(self) -> bool:
        """Whether the engine planned steps ahead: the terms of this kind know nothing of it."""
        return False

    @property
    def trust(self) -> Trust:
        """The range of the errors of free-running held-out simulations of its logs."""
        return trust_of_profile(self.target.engine, self.target.hardware, self.free_running)

    def check_fits(self, model: ModelShape, hardware: Hardware, tp: int) -> None:
        """Raises InputError where the profile was made for another model, dtype, TP or GPU."""
        check_target(self.target, self.path, model, hardware, tp)

    def fits(self, model: ModelShape, hardware: Hardware, tp: int) -> bool:
        """Whether `check_fits` passes."""
        return fits_target(self.target, model, hardware, tp)


def check_target(target: Target, path: str, model: ModelShape, hardware: Hardware, tp: int) -> None:
    """Raises InputError where a target is another model, dtype, TP or GPU."""
    dtype_bytes = DTYPES.get(target.dtype)
    shape = shape_fields(model)
    differing = [key for key, value in shape.items() if target.model.get(key) != value]
    checks = (
        ("model", target.model.get("name"), model.name, bool(differing) or _is_mixture(model)),
        ("dtype", target.dtype, f"{model.dtype_bytes} bytes", dtype_bytes != model.dtype_bytes),
        ("format", "16-bit gated decoders", "quantised or other ones", not model.is_plain),
        ("hardware", target.hardware, hardware.name, target.hardware != hardware.name),
        ("tp", target.tp, tp, target.tp != tp),
    )
    for what, made_for, wanted, wrong in checks:
        if wrong:
            raise InputError(f"{path or 'profile'}: made for {what} {made_for}, not {wanted}")


def fits_target(target: Target, model: ModelShape, hardware: Hardware, tp: int) -> bool:
    """Whether `check_target` passes."""
    try:
        check_target(target, "", model, hardware, tp)
    except InputError:
        return False
    return True


def shape_fields(model: ModelShape) -> dict[str, Any]:
    """What must be equal for a profile to hold: the shape without name, limits and dtype."""
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
             "intermediate_size", "vocab_size", "tied_embeddings")  # fmt: skip
    return {name: getattr(model, name) for name in names}


def _is_mixture(model: ModelShape) -> bool:
    return model.is_mixture


def check_dense(model: ModelShape) -> None:
    """Raises ConfigError for a mixture of experts: no term of a profile depends on its experts."""
    if _is_mixture(model):
        raise ConfigError(
            "model", model.name, "profiles are of dense models; `calibrate-requests` takes mixtures"
        )
    if not model.is_plain:
        raise ConfigError(
            "model",
            model.name,
            "profiles are of 16-bit decoders with gated MLPs and full attention",
        )


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a profile; the file appears complete or not at all."""
    text = json.dumps(to_json(profile), indent=1, allow_nan=False) + "\n"
    write_text(path, text)


def load_profile(path: Path | str) -> Profile:
    """Reads a profile.

    Raises:
        InputError: not a profile, another version, or a damaged one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, path: str) -> Profile:
    """A profile from its JSON text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not complete JSON, so no profile ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: not a Lockstep profile")
    if document.get("version") != VERSION:
        raise InputError(
            f"{path}: profile version {document.get('version')!r}: this Lockstep reads {VERSION}"
        )
    try:
        return _from_json(document, path)
    except ValueError as error:
        raise InputError(f"{path}: damaged profile ({error})") from None


def shipped_profiles() -> list[Profile]:
    """The profiles that come with the package, by file name."""
    folder = resources.files("sim") / "data"
    found = []
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".json"):
            text = entry.read_text(encoding="utf-8")
            if json.loads(text).get("format") == FORMAT:
                found.append(parse_profile(text, f"sim/data/{entry.name}"))
    return found


def to_json(profile: Profile) -> dict[str, Any]:
    """The document of a profile."""
    target = profile.target
    return {
        "format": FORMAT,
        "version": VERSION,
        "lockstep": profile.lockstep_version,
        "model": dict(target.model),
        "hardware": target.hardware,
        "dtype": target.dtype,
        "tp": target.tp,
        "engine": target.engine,
        "sources": [dict(source) for source in profile.sources],
        "graphs": {"sizes": list(profile.graphs.sizes), "mixed_up_to": profile.graphs.mixed_up_to},
        "step_terms": terms_to_json(STEP_TERMS, profile.step_ns),
        "host_terms": terms_to_json(HOST_TERMS, profile.host_ns),
        "calibrated_up_to": dict(profile.limits),
        "held_out": [dict(fold) for fold in profile.held_out],
        "free_running_percent": [dict(fold) for fold in profile.free_running],
        "pauses_of_the_recording": _optional(profile.pauses),
        "tracking": _optional(profile.tracking),
        "noise": [
            {
                "log": source.name,
                "mean": round(source.mean, 6),
                # Parts in 10,000 and one text per block keep the file small.
                "blocks": [
                    [" ".join(str(round(1e4 * error)) for error in block) for block in blocks]
                    for blocks in source.kinds
                ],
            }
            for source in profile.noise
        ],
    }


def _optional(part: Pauses | Tracking | None) -> dict[str, Any] | None:
    return None if part is None else asdict(part)


class _Noise(msgspec.Struct):
    log: str
    mean: float
    blocks: Annotated[tuple[tuple[str, ...], ...], _PER_KIND]


class _Document(ProfileDocument, kw_only=True):
    step_terms: tuple[TermValue, ...]
    host_terms: tuple[TermValue, ...]
    noise: tuple[_Noise, ...]
    pauses_of_the_recording: Pauses | None = None
    tracking: Tracking | None = None


def _from_json(document: object, path: str) -> Profile:
    found = msgspec.convert(document, _Document)
    return Profile(
        target=Target(found.model, found.hardware, found.dtype, found.tp, found.engine),
        graphs=found.graphs.graphs(),
        step_ns=terms_from_json(STEP_TERMS, found.step_terms),
        host_ns=terms_from_json(HOST_TERMS, found.host_terms),
        limits=msgspec.structs.asdict(found.calibrated_up_to),
        noise=tuple([_noise_from_json(source) for source in found.noise]),
        sources=found.sources,
        held_out=found.held_out,
        pauses=found.pauses_of_the_recording,
        tracking=found.tracking,
        free_running=found.free_running_percent,
        lockstep_version=found.lockstep,
        path=path,
    )


def _noise_from_json(source: _Noise) -> NoiseSource:
    kinds = tuple(
        tuple(tuple(int(part) / 1e4 for part in block.split()) for block in blocks)
        for blocks in source.blocks
    )
    if any(error <= -1 for kind in kinds for block in kind for error in block):
        raise ValueError("noise makes a step take no time")
    return NoiseSource(source.log, source.mean, kinds)


def check_dtype(dtype: str) -> str:
    """The name of a dtype that profiles know.

    Raises:
        ConfigError: another one.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    return dtype
