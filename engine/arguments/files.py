"""Checks of the files that a verb is to write, before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import ConfigError


def check_writable(name: str, path: Path | None, suffix: str = "") -> None:
    """Refuses a file that could not be written; None, which is no file, passes.

    Raises:
        ConfigError: it is a folder or a link, lies in none, or has another suffix.
    """
    if path is None:
        return
    if suffix and path.suffix != suffix:
        raise ConfigError(name, str(path), f"the file's name ends with {suffix}")
    if path.is_symlink():
        raise ConfigError(name, str(path), "is a symbolic link, which is not replaced")
    if path.is_dir():
        raise ConfigError(name, str(path), "is a folder; a file is written")
    if not path.parent.is_dir():
        raise ConfigError(name, str(path), "its directory does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(name, str(path), "cannot be written (permission denied)")


def check_folder(name: str, path: Path | None) -> None:
    """Refuses a folder that could not be made or is a file; None passes.

    Raises:
        ConfigError: a file lies in the way.
    """
    if path is None:
        return
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise ConfigError(name, str(path), f"{part} exists and is not a directory")
            if not os.access(part, os.W_OK):
                raise ConfigError(name, str(path), "cannot be written (permission denied)")
            return
