"""A run of a sweep: the command line of a `sim run`, and the key that its result is kept under."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError, LockstepError
from sim.commands.run import parser_of_run, run_of
from sim.planning.cache import JsonCache, code_digest, content_digest
from sim.sweep.points import RunFigures, figures_of


@dataclass(frozen=True, slots=True)
class SweepRun:
    """The words of a `sim run`, its seed among them."""

    words: tuple[str, ...]
    seed: int


class SweepRunner:
    """Carries out runs of a sweep in one process."""

    def run(self, task: SweepRun) -> RunFigures:
        """The run's figures; whatever goes wrong inside is reported in them."""
        try:
            arguments = parser_of_run().parse(task.words)
            return figures_of(run_of(arguments, notes=False).summary, task.seed)
        except (ConfigError, InputError) as error:
            return RunFigures(task.seed, error=" ".join(str(error).split()))
        except (LockstepError, MemoryError, AssertionError) as error:
            return self.failed(task, " ".join(f"{type(error).__name__}: {error}".split()))

    def failed(self, task: SweepRun, text: str) -> RunFigures:
        """The result of a run that broke off for a reason that is not its options'."""
        return RunFigures(task.seed, error=text, crashed=True)


class SweepCache:
    """Results by everything that decides them: code, options, and the content of named files."""

    def __init__(self, folder: Path) -> None:
        self._files = JsonCache(folder)
        self._digests: dict[Path, str] = {}

    def key(self, task: SweepRun) -> str:
        """Name of a run's content."""
        arguments = vars(parser_of_run().parse(task.words))
        values = {
            name: value for name, value in arguments.items() if name not in ("given", "options")
        }
        files = {
            text: self._digest(path) for value in values.values() for text, path in _named(value)
        }
        given = sorted(arguments["given"])
        return content_digest(["sweep", code_digest(), values, given, files])

    def get(self, key: str) -> RunFigures | None:
        """The result of an earlier run."""
        document = self._files.load(key)
        try:
            return None if document is None else RunFigures(**document)
        except TypeError:
            return None

    def put(self, key: str, result: RunFigures) -> None:
        """Keeps a result; failures are not kept, so that a later sweep tries again."""
        if result.error is None:
            document: dict[str, Any] = asdict(result)
            self._files.store(key, document)

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            digest = hashlib.sha256()
            for file in _files(path):
                digest.update(file.name.encode() + b"\0")
                digest.update(file.read_bytes())
            self._digests[path] = digest.hexdigest()
        return self._digests[path]


def _named(value: object) -> Iterable[tuple[str, Path]]:
    """The files and folders that an option's value names, as itself or after its first colon."""
    if not isinstance(value, str | Path):
        return
    text = str(value)
    for part in {text, text.partition(":")[2]} - {""}:
        path = Path(part)
        try:
            if path.exists():
                yield part, path
        except OSError:  # a name that is too long is no file
            continue


def _files(path: Path) -> list[Path]:
    """What a file or folder holds; of a model's folder only what the simulator reads."""
    if path.is_file():
        return [path]
    if (path / "config.json").is_file():
        return [path / "config.json"]
    return sorted(file for file in path.rglob("*") if file.is_file())
