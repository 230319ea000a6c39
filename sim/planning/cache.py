"""Results on disk, named by everything that decides them, so that a killed study resumes."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import engine.core
from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from sim.planning.sampling import Source
from sim.planning.trial import Trial, TrialResult

# Parts of the package that shape no result.
_NOT_DECIDING = {"report", "commands", "executors", "outputs", "plan_report", "plan_files"}


@cache
def code_digest() -> str:
    """Digest of the simulator, the kernel, and the libraries whose arithmetic they use."""
    digest = hashlib.sha256()
    for name in ("numpy", "simpy", "xxhash"):
        digest.update(f"{name} {metadata.version(name)} ".encode())
    digest.update(platform.python_version().encode())
    for root in (Path(engine.core.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(root.rglob("*")):
            place = path.relative_to(root)
            if path.suffix not in (".py", ".json") or _NOT_DECIDING & {*place.parts, path.stem}:
                continue
            digest.update(place.as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def content_digest(value: object) -> str:
    """Digest of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class JsonCache:
    """One small file per result, by the digest of what decides it.

    A file that cannot be read counts as not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> dict[str, Any] | None:
        """The document of that key."""
        try:
            document = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def store(self, key: str, document: dict[str, Any]) -> None:
        """Keeps a document.

        Raises:
            InputError: the folder cannot be written.
        """
        path = self._path(key)
        try:
            # Made with the first result: a study that cannot run leaves no folder behind.
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._folder}: cannot be written ({error.strerror})") from None
        write_text(path, json.dumps(document, allow_nan=False))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key[:32]}.json"


class ResultCache:
    """The results of trials."""

    def __init__(self, folder: Path, source: Source) -> None:
        self._results = JsonCache(folder)
        spec = asdict(source.spec)
        spec["trace"] = source.digest  # the content counts, not where it lies
        self._context = content_digest([code_digest(), spec])
        self._files: dict[Path, str] = {}

    def key(self, trial: Trial) -> str:
        """Name of a trial's content: configuration, requests, rate, SLO, code."""
        document = asdict(trial)
        document["candidate"].pop("label")
        paths = self._named_files(trial)
        return content_digest([self._context, document, paths])

    def get(self, key: str) -> TrialResult | None:
        """The result of an earlier run of the same trial."""
        document = self._results.load(key)
        try:
            return None if document is None else TrialResult(**document)
        except TypeError:
            return None

    def put(self, key: str, result: TrialResult) -> None:
        """Keeps a result; failures are not kept, so that a later run tries again."""
        if result.error is None:
            self._results.store(key, plain(result))

    def _named_files(self, trial: Trial) -> dict[str, str]:
        """Digests of the files that a configuration names."""
        named = {}
        for group in trial.candidate.groups:
            deployment = group.deployment
            for text in (deployment.model, deployment.hardware, deployment.cost.partition(":")[2]):
                path = Path(text)
                path = path / "config.json" if path.is_dir() and text else path
                if text and path.is_file():
                    if path not in self._files:
                        self._files[path] = hashlib.sha256(path.read_bytes()).hexdigest()
                    named[text] = self._files[path]
        return named


def plain(result: TrialResult) -> dict[str, Any]:
    """A result as JSON data."""
    return {field.name: getattr(result, field.name) for field in fields(result)}
