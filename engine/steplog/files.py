"""Reads files line by line, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from engine.core.errors import InputError


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a text file, gzipped or not.

    Raises:
        InputError: the file cannot be read or its gzip stream is damaged.
    """
    try:
        with _open(path) as file:
            number = 0
            try:
                for line in file:
                    number += 1
                    yield line
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise InputError(f"{path}:{number + 1}: damaged gzip file ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def _open(path: Path) -> IO[bytes]:
    with open(path, "rb") as probe:
        is_gzip = probe.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if is_gzip else open(path, "rb")
