"""Typed access to a YAML document; every complaint names the file and the path of the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from engine.arguments.suggest import nearest, one_of
from engine.core.errors import ConfigError, InputError


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is read untyped
    """Refuses a key that stands twice, which YAML itself forbids and PyYAML lets pass."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ANN401
        """A mapping with distinct keys."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in mapping:
                mark = key_node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", mark)
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


class Node:
    """A value of the document and its key path."""

    def __init__(self, file: Path, path: str, value: object) -> None:
        self.file, self.path, self.value = file, path, value

    def error(self, message: str) -> InputError:
        """An error at this place."""
        where = f"{self.path}={_shown(self.value)}" if self.path else "the study"
        return InputError(f"{self.file}: {where}: {message}")

    @contextmanager
    def complaints(self) -> Iterator[None]:
        """What an option says against this value becomes an error at this place."""
        try:
            yield
        except ConfigError as error:
            raise self.error(error.limit) from None

    def keys(self, allowed: Iterable[str], required: Iterable[str] = ()) -> dict[str, Node]:
        """The entries of a mapping.

        Raises:
            InputError: not a mapping, an unknown key, or a required one is missing.
        """
        entries = self.mapping()
        names = list(allowed)
        for key, node in entries.items():
            if key not in names:
                near = nearest(key, names)
                hint = f"did you mean {near!r}?" if near else f"known: {', '.join(names)}"
                raise InputError(f"{self.file}: {node.path}: unknown key; {hint}")
        for key in required:
            if key not in entries:
                raise InputError(f"{self.file}: {self._below(key)}: is missing")
        return entries

    def mapping(self) -> dict[str, Node]:
        """The entries of a mapping with any text keys."""
        if not isinstance(self.value, dict):
            raise self.error("must be a mapping of keys to values")
        for key in self.value:
            if not isinstance(key, str):
                raise self.error(f"key {key!r} must be text")
        return {key: Node(self.file, self._below(key), value) for key, value in self.value.items()}

    def items(self) -> Iterator[Node]:
        """The items of a list; a single value is a list of one."""
        values = self.value if isinstance(self.value, list) else [self.value]
        for index, value in enumerate(values):
            path = f"{self.path}[{index}]" if isinstance(self.value, list) else self.path
            yield Node(self.file, path, value)

    def text(self) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self.error("must be text")
        return self.value

    def choice(self, choices: Iterable[str]) -> str:
        """One of some words."""
        words = list(choices)
        if self.value not in words:
            raise self.error(one_of(self.value, words))
        return str(self.value)

    def integer(self, least: int, most: int | None = None) -> int:
        """A whole number within bounds."""
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error("must be a whole number")
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise self.error(f"must be {bounds}")
        return value

    def number(self, above: float, most: float = math.inf, *, closed: bool = False) -> float:
        """A finite number above (`closed`: or at) a bound."""
        value = self.value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error("must be a number")
        low_enough = value <= most and math.isfinite(value)
        if not low_enough or value < above or (value == above and not closed):
            bound = f"{'at least' if closed else 'above'} {above:g}"
            bound += f" and at most {most:g}" if math.isfinite(most) else " and finite"
            raise self.error(f"must be {bound}")
        return float(value)

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def read_yaml(path: Path) -> Node:
    """The document of a file.

    Raises:
        InputError: unreadable, not YAML, or a key stands twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read ({reason})") from None
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise InputError(f"{path}{where}: {problem}") from None
    if value is None:
        raise InputError(f"{path}: is empty")
    return Node(path, "", value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
