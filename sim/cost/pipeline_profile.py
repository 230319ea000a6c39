"""The profile of an asynchronous engine: device and host as a JSON file with its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from engine.core.errors import InputError
from sim.cost.device_terms import DECODE_TERMS, PROMPT_TERMS
from sim.cost.pipeline import HostTerms
from sim.cost.profile import Target, check_target, fits_target
from sim.cost.profile_json import ProfileDocument, TermValue, terms_from_json, terms_to_json
from sim.cost.terms import Graphs
from sim.cost.trust import Trust, trust_of_profile
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape

FORMAT = "lockstep-pipeline-profile"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Drift:
    """How launches vary: their slow part is correlated over `memory_ms`."""

    memory_ms: float
    slow_share: float


@dataclass(frozen=True, slots=True)
class PipelineProfile:
    """Coefficients in ns per unit, the host's terms, the calibrated range, and the provenance.

    `run_errors` are by how much the busy time of each log was off under a fit to the others,
    `free_running` by how many percent mean TTFT and TPOT were, simulated from the arrivals alone.
    """

    target: Target
    graphs: Graphs
    decode_ns: tuple[float, ...]
    prompt_ns: tuple[float, ...]
    host: HostTerms
    drift: Drift
    limits: Mapping[str, int]
    sources: tuple[Mapping[str, Any], ...]
    held_out: tuple[Mapping[str, Any], ...]
    run_errors: tuple[float, ...] = ()
    free_running: tuple[Mapping[str, Any], ...] = ()
    lockstep_version: str = ""
    path: str = ""

    @property
    def is_asynchronous(self) -> bool:
        """What the engine was doing: it always is."""
        return True

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


def pipeline_to_json(profile: PipelineProfile) -> dict[str, Any]:
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
        "scheduling": "asynchronous",
        "sources": [dict(source) for source in profile.sources],
        "graphs": {"sizes": list(profile.graphs.sizes), "mixed_up_to": profile.graphs.mixed_up_to},
        "decode_terms": terms_to_json(DECODE_TERMS, profile.decode_ns),
        "prompt_terms": terms_to_json(PROMPT_TERMS, profile.prompt_ns),
        "host_ns": {name: round(value, 3) for name, value in asdict(profile.host).items()},
        "drift": asdict(profile.drift),
        "calibrated_up_to": dict(profile.limits),
        "held_out": [dict(fold) for fold in profile.held_out],
        "free_running_percent": [dict(fold) for fold in profile.free_running],
        "run_errors": [round(error, 5) for error in profile.run_errors],
    }


def pipeline_from_json(document: Mapping[str, Any], path: str) -> PipelineProfile:
    """A profile from its document.

    Raises:
        InputError: another version, or damaged.
    """
    if document.get("version") != VERSION:
        raise InputError(
            f"{path}: profile version {document.get('version')!r}: this Lockstep reads {VERSION}"
        )
    try:
        return _from_json(document, path)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged profile ({error})") from None


class _Document(ProfileDocument, kw_only=True):
    decode_terms: tuple[TermValue, ...]
    prompt_terms: tuple[TermValue, ...]
    host_ns: dict[str, float]
    drift: Drift
    run_errors: tuple[float, ...]


def _from_json(document: object, path: str) -> PipelineProfile:
    found = msgspec.convert(document, _Document)
    return PipelineProfile(
        target=Target(found.model, found.hardware, found.dtype, found.tp, found.engine),
        graphs=found.graphs.graphs(),
        decode_ns=terms_from_json(DECODE_TERMS, found.decode_terms),
        prompt_ns=terms_from_json(PROMPT_TERMS, found.prompt_terms),
        host=HostTerms(**found.host_ns),
        drift=found.drift,
        limits=msgspec.structs.asdict(found.calibrated_up_to),
        sources=found.sources,
        held_out=found.held_out,
        run_errors=found.run_errors,
        free_running=found.free_running_percent,
        lockstep_version=found.lockstep,
        path=path,
    )
