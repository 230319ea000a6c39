"""An output folder that appears whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from engine.core.errors import ConfigError


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a scratch folder beside `out` that becomes `out` if the block succeeds.

    `out` must not exist, or be an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("--out", str(out), "exists already and is not an empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield scratch
        if out.exists():
            out.rmdir()
        scratch.rename(out)
        out.chmod(0o755)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that HF accepts and that others may read."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)
