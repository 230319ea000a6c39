"""The one way to write a file: it appears whole under its name, or not at all.

What stands under the name already is replaced only if it is a regular file: a link would lose
what it names, and a device or a folder is somebody's mistake.
"""

from __future__ import annotations

import gzip
import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, cast

from engine.core.errors import InputError


class AtomicTextFile:
    """A text file, gzipped if its name says so, that gets its name when it is complete.

    Raises:
        InputError: it cannot be written there; also at `commit`, where nothing was replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0
        check_replaceable(path)
        try:
            self._partial, raw = _open_partial(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from None
        self._raw = raw
        # A fixed name and time make equal logs equal files.
        self._file: IO[bytes] = raw
        if path.name.endswith(".gz"):
            self._file = cast(IO[bytes], gzip.GzipFile("", "wb", 6, raw, mtime=0))

    def write_line(self, line: str) -> None:
        """Writes one line; the newline is added."""
        self.write(line.encode() + b"\n")
        self.lines += 1

    def write(self, data: bytes) -> None:
        """Writes some bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            raise cannot_write(self._path, error) from None

    def commit(self) -> None:
        """Completes the file under its name."""
        try:
            self._close()
            check_replaceable(self._path)
            os.replace(self._partial, self._path)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise cannot_write(self._path, error) from None
        except InputError:
            self._partial.unlink(missing_ok=True)
            raise

    def discard(self) -> None:
        """Removes what was written."""
        with suppress(OSError):  # a full disk may refuse what is still buffered
            self._close()
        self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        try:
            if self._file is not self._raw:
                self._file.close()
        finally:
            self._raw.close()


def write_text(path: Path, text: str) -> None:
    """Writes a whole text file in UTF-8.

    Raises:
        InputError: it cannot be written there; nothing has changed.
    """
    file = AtomicTextFile(path)
    try:
        file.write(text.encode())
    except BaseException:
        file.discard()
        raise
    file.commit()


def check_replaceable(path: Path) -> None:
    """Raises InputError if something stands at `path` that is not a regular file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(path, error) from None
    if stat.S_ISLNK(mode):
        raise InputError(f"{path}: is a symbolic link, which is not replaced; name another file")
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: is not a regular file and is not replaced")


def cannot_write(path: Path, error: OSError) -> InputError:
    """What a user is told about a path that cannot be written."""
    return InputError(f"{path}: cannot be written ({error.strerror or error})")


def _open_partial(folder: Path) -> tuple[Path, IO[bytes]]:
    """A new file in the folder, on the same file system as the name that it will get."""
    for serial in count():
        partial = folder / f".lockstep-{os.getpid()}-{serial}.partial"
        with suppress(FileExistsError):
            return partial, open(partial, "xb")
    raise AssertionError("names do not end")
