"""The folder that a server puts its step log into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.core.errors import ConfigError

STEP_LOG_NAME = "steps.jsonl"


@contextlib.contextmanager
def log_folder(folder: str | None) -> Iterator[None]:
    """Makes the folder where it is missing, and takes it back where nothing came into it."""
    if folder is None or Path(folder).exists():
        yield
        return
    Path(folder).mkdir(parents=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def log_file(folder: str | None) -> str | None:
    """The step log in its folder.

    Raises:
        ConfigError: there is a log already, or something else that is no folder.
    """
    if folder is None:
        return None
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError("step_log", folder, "is a file; a folder is needed")
    log = path / STEP_LOG_NAME
    if log.exists():
        raise ConfigError("step_log", folder, f"holds {STEP_LOG_NAME} already")
    return str(log)
