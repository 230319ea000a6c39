"""Profiles of both kinds of scheduling: reading any, and finding the shipped one that holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from engine.core.errors import InputError
from sim.cost.pipeline_profile import FORMAT as PIPELINE_FORMAT
from sim.cost.pipeline_profile import PipelineProfile, pipeline_from_json
from sim.cost.profile import FORMAT, Profile, parse_profile
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape

AnyProfile = Profile | PipelineProfile


def load_any_profile(path: Path | str) -> AnyProfile:
    """Reads a profile of either kind.

    Raises:
        InputError: not a profile, another version, or a damaged one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    return _parsed(text, str(path))


def shipped() -> Iterator[AnyProfile]:
    """The profiles that come with the package, by file name."""
    folder = resources.files("sim") / "data"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".json"):
            text = entry.read_text(encoding="utf-8")
            if json.loads(text).get("format") in (FORMAT, PIPELINE_FORMAT):
                yield _parsed(text, f"sim/data/{entry.name}")


def find_profile(
    model: ModelShape,
    hardware: Hardware,
    tp: int,
    is_asynchronous: bool = False,
    engine: str | None = None,
) -> AnyProfile | None:
    """The shipped profile that fits, of that scheduling and of an engine that begins so.

    Without an engine vLLM's goes before others.
    """
    fitting = [
        one
        for one in shipped()
        if one.is_asynchronous == is_asynchronous
        and one.fits(model, hardware, tp)
        and one.target.engine.startswith(engine or "")
    ]
    fitting.sort(key=lambda one: not one.target.engine.startswith("vllm"))
    return fitting[0] if fitting else None


def _parsed(text: str, path: str) -> AnyProfile:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and document.get("format") == PIPELINE_FORMAT:
        return pipeline_from_json(document, path)
    return parse_profile(text, path)
