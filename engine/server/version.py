"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """As `lockstep --version` says it."""
    try:
        return version("lockstep-llm")
    except PackageNotFoundError:
        return "unknown"
