"""An output folder that appears whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from engine.core.errors import ConfigError
from engine.steplog.output_folder import OutputFolder


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a scratch folder beside `out` that becomes `out` if the block succeeds.

    `out` must not exist, or be an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("--out", str(out), "exists already and is not an empty folder")
    # A folder without its config is no model, so the config comes last.
    with OutputFolder(out, {}, last="config.json") as folder:
        yield folder.path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that HF accepts and that others may read."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)
