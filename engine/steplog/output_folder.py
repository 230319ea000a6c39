"""A folder of results: its known files are replaced, everything else in it is left alone.

A folder that holds anything else is refused as a whole, unless its owner says that results may
stand among other files. Until everything is written, all stands in a scratch folder; a process that
is killed leaves foreign files as they were and results that are old, new or absent, never half.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType

from engine.core.errors import ConfigError
from engine.steplog.atomic import cannot_write

_SCRATCH = re.compile(r"\.lockstep-(\d+)-\d+\.partial")
# Tells by its content whether a file was written by this program.
Recognise = Callable[[Path], bool]


class OutputFolder:
    """Use it as a context and write into `path`; leaving it by an error writes nothing.

    `known` are the files that may be replaced, each with a test of its content; `last` of them is
    removed first and comes last, so that a folder with it is complete. With `shared` other things
    may stand in the folder; they are not touched.

    Raises:
        ConfigError: the target holds or is something else (`check`, and on entry).
        InputError: it cannot be written.
    """

    def __init__(
        self,
        target: Path,
        known: Mapping[str, Recognise],
        last: str = "",
        shared: bool = False,
    ) -> None:
        self.target, self.path = target, target
        self._known, self._last, self._shared = known, last, shared
        self._new_parents: list[Path] = []
        self._is_new = False

    def check(self) -> None:
        """Raises ConfigError for a target that must not be written to."""
        try:
            mode = self.target.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise self._refusal("is a symbolic link; name the folder itself")
            if not stat.S_ISDIR(mode):
                raise self._refusal("exists and is not a folder")
            for path in sorted(self.target.iterdir()):
                self._check_entry(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise cannot_write(self.target, error) from None

    def _check_entry(self, path: Path) -> None:
        mode, name = path.lstat().st_mode, path.name
        if name not in self._known and self._shared:
            return
        if _SCRATCH.fullmatch(name) and stat.S_ISDIR(mode):
            return self._check_scratch(path)
        if name not in self._known:
            raise self._refusal(f"holds {name}, which is no result; name a new or empty folder")
        if not stat.S_ISREG(mode):
            raise self._refusal(f"holds {name}, which is not a regular file")
        if not self._known[name](path):
            raise self._refusal(f"holds a {name} that this program did not write")

    def _check_scratch(self, path: Path) -> None:
        """What a killed process left: only what it could have written there."""
        for inside in path.iterdir():
            is_file = stat.S_ISREG(inside.lstat().st_mode)
            if not is_file or (inside.name not in self._known and not _is_partial(inside.name)):
                raise self._refusal(f"holds {path.name}/{inside.name}, which is no result")
        if _runs(path.name):
            raise self._refusal(f"is being written by another process ({path.name})")

    def _refusal(self, text: str) -> ConfigError:
        return ConfigError("out", str(self.target), text)

    def __enter__(self) -> OutputFolder:
        self.check()
        target = self.target
        try:
            self._is_new = not target.exists()
            self._new_parents = [parent for parent in target.parents if not parent.exists()]
            # Beside a new target, so that one rename shows it whole; else inside, which may be
            # a file system of its own.
            home = target.parent if self._is_new else target
            home.mkdir(parents=True, exist_ok=True)
            self.path = _make_scratch(home)
        except OSError as error:
            self._remove_new_parents()
            raise cannot_write(target, error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as problem:
            raise cannot_write(self.target, problem) from None
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
            self._remove_new_parents()

    def _publish(self) -> None:
        target, scratch = self.target, self.path
        if self._is_new and not target.exists():
            os.rename(scratch, target)
            return
        self._check_again()
        written = sorted(path.name for path in scratch.iterdir())
        stale = [name for name in self._known if name not in written]
        for name in (self._last, *stale):
            if name:
                (target / name).unlink(missing_ok=True)
        for name in sorted(written, key=lambda name: name == self._last):
            os.replace(scratch / name, target / name)
        for left in target.iterdir():
            if self._shared or left == scratch:
                continue
            if _SCRATCH.fullmatch(left.name) and not _runs(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def _check_again(self) -> None:
        """Refuses what has come into the folder since it was entered."""
        for path in sorted(self.target.iterdir()):
            if path != self.path:
                self._check_entry(path)

    def _remove_new_parents(self) -> None:
        for parent in self._new_parents:  # deepest first; those that are in use stay
            with suppress(OSError):
                parent.rmdir()


def read_head(path: Path) -> bytes:
    """The first bytes of a file, for a test of its content."""
    with path.open("rb") as file:
        return file.read(4096)


def read_json(path: Path) -> object:
    """A JSON file's content, None if it holds none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def _make_scratch(home: Path) -> Path:
    for serial in count():
        scratch = home / f".lockstep-{os.getpid()}-{serial}.partial"
        with suppress(FileExistsError):
            scratch.mkdir()
            return scratch
    raise AssertionError("names do not end")


def _is_partial(name: str) -> bool:
    return _SCRATCH.fullmatch(name) is not None


def _runs(name: str) -> bool:
    """Whether the process that a scratch name tells of, another one than this, is alive."""
    found = _SCRATCH.fullmatch(name)
    assert found is not None
    pid = int(found[1])
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
