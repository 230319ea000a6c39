"""Reads the keys of a Hugging Face config.json; what is absent is what the config class says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import InputError

# Larger sizes are slips of the pen.
_MOST, _MOST_LAYERS = 1 << 31, 10_000
# A config that lacks one of these describes nothing; a nested text_config leaves out defaults.
ESSENTIAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def load_config(path: Path) -> dict[str, Any]:
    """The JSON object of a config file.

    Raises:
        InputError: unreadable, or no object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: must hold a JSON object")
    return config


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one config with the defaults and other key names of its config class.

    `where` opens the messages. `nested` is true for a `text_config`, whose file leaves out all
    that equals the class's default.
    """

    where: str
    raw: Mapping[str, Any]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    nested: bool = False

    def name(self, key: str) -> str:
        """What the file calls a key."""
        alias = self.aliases.get(key, key)
        return key if alias not in self.raw and key in self.raw else alias

    def get(self, key: str) -> object:
        """The value of a key, else the class's default, else None."""
        name = self.name(key)
        if name in self.raw:
            return self.raw[name]
        if key in ESSENTIAL and not self.nested:
            return None
        return self.defaults.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; null stands for `default` where there is one."""
        value = self.get(key)
        if value is None:
            value = default
        return self._at_least(key, value, 1)

    def count(self, key: str, default: int = 0) -> int:
        """An integer from 0 on; null and absent stand for `default`."""
        value = self.get(key)
        return self._at_least(key, default if value is None else value, 0)

    def optional(self, key: str) -> int | None:
        """A positive integer, or None where the file or the class says null."""
        value = self.get(key)
        return None if value is None else self._at_least(key, value, 1)

    def flag(self, value: bool | str) -> bool:
        """A fixed truth, or that of the key."""
        return bool(self.get(value)) if isinstance(value, str) else value

    def names(self, key: str, length: int) -> list[str] | None:
        """A list of `length` strings, or None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        found = [part for part in value if isinstance(part, str)] if isinstance(value, list) else []
        if not isinstance(value, list) or len(found) != len(value) or len(found) != length:
            raise InputError(f"{self.where}: {key}: must be a list of {length} names")
        return found

    def indices(self, key: str) -> list[int]:
        """A list of integers, empty where there is none."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(part, int) for part in value):
            raise InputError(f"{self.where}: {key}={str(value)[:60]}: must be a list of integers")
        return list(value)

    def _at_least(self, key: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least else "an integer from 0 on"
            raise InputError(f"{self.where}: {self.name(key)}={value!r}: must be {kind}")
        most = _MOST_LAYERS if key in ("num_hidden_layers", "depth") else _MOST
        if value > most:
            raise InputError(f"{self.where}: {self.name(key)}={value:.3g}: must be at most {most}")
        return value
