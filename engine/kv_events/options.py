"""What is published and where, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.core.errors import ConfigError
from engine.kv_events.block_hash import BlockHasher, block_hasher

_OPTION = "kv_events_config"


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `--kv-events-config`, with vLLM's defaults.

    Replica i publishes at the port of `endpoint` plus i, and replays at that of `replay_endpoint`
    plus i. The newest `buffer_steps` batches can be replayed.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True)
class KvEventsOptions:
    """What a publisher is made of; it is made where the scheduler lives."""

    config: KvEventsConfig
    algorithm: str = "sha256"

    def hasher(self) -> BlockHasher:
        """The hasher of this process."""
        return block_hasher(self.algorithm)


def kv_events_options(text: str | None, algorithm: str) -> KvEventsOptions | None:
    """The options as they were written; None if nothing is to be published.

    Raises:
        ConfigError: what is wrong; a package is missing.
    """
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(_OPTION, text[:60], f"is not its JSON: {error}") from None
    _check(config)
    if not config.is_on:
        return None
    options = KvEventsOptions(config, algorithm)
    options.hasher()
    try:
        import zmq  # noqa: F401
    except ImportError:
        limit = "needs pyzmq (pip install 'lockstep-llm[kv-events]')"
        raise ConfigError(_OPTION, "zmq", limit) from None
    return options


def _check(config: KvEventsConfig) -> None:
    if config.publisher not in (None, "zmq", "null"):
        raise ConfigError(f"{_OPTION}.publisher", config.publisher, "must be zmq or null")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        value = getattr(config, name)
        if not 1 <= value <= 2**30:
            raise ConfigError(f"{_OPTION}.{name}", value, f"must be from 1 to {2**30}")
    for name in ("endpoint", "replay_endpoint"):
        value = getattr(config, name)
        if value is not None:
            _check_endpoint(name, value)


def _check_endpoint(name: str, value: str) -> None:
    scheme, _, rest = value.partition("://")
    port = rest.rpartition(":")[2]
    is_tcp = scheme == "tcp" and port.isdecimal() and 1 <= int(port) <= 65_535
    if not is_tcp and not (scheme == "ipc" and rest):
        raise ConfigError(f"{_OPTION}.{name}", value, "must be tcp://HOST:PORT or ipc://PATH")


def endpoint_of(endpoint: str, rank: int) -> str:
    """The endpoint of a replica: the port is counted up; a path gets the number at its end."""
    if rank == 0:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if endpoint.startswith("tcp") else f"{endpoint}_dp{rank}"
