"""The folder `docs/` of a source tree, which an installed package does not have."""

from __future__ import annotations

from pathlib import Path

from engine.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def docs_folder(root: Path = ROOT) -> Path:
    """Where generated documents are kept.

    Raises:
        ConfigError: the package is installed, so nothing may be written beside it.
    """
    if not (root / "pyproject.toml").is_file() or not (root / "docs").is_dir():
        raise ConfigError(
            "write", True, "works in a source tree only; print the document and keep it yourself"
        )
    return root / "docs"
