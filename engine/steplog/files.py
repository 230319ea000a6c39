"""Files of the step log: atomic writing, line-wise reading, gzip by name."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from engine.core.errors import InputError


class AtomicTextFile:
    """A text file, gzipped if its name says so, that gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self.lines = 0
        try:
            raw: IO[bytes] = open(self._partial, "wb")  # noqa: SIM115  # closed at commit
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None
        self._raw = raw
        # A fixed name and time make equal logs equal files.
        self._file: IO[bytes] = raw
        if path.name.endswith(".gz"):
            self._file = cast(IO[bytes], gzip.GzipFile("", "wb", 6, raw, mtime=0))

    def write_line(self, line: str) -> None:
        """Writes one line; the newline is added."""
        self._file.write(line.encode() + b"\n")
        self.lines += 1

    def commit(self) -> None:
        """Completes the file under its name."""
        self._close()
        os.replace(self._partial, self._path)

    def discard(self) -> None:
        """Removes what was written."""
        self._close()
        self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not self._raw:
            self._file.close()
        self._raw.close()


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
