"""Options of the server itself, the same over every body."""

from __future__ import annotations

import argparse
import os
from dataclasses import MISSING, dataclass, fields

from engine.arguments.parser import VerbParser
from engine.kv_events.options import KvEventsOptions, kv_events_options

API_KEY_VARIABLE = "LOCKSTEP_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server listens, whom it lets in, and its limits.

    `max_queue` bounds the requests beyond those that can run at a time; `max_body_bytes` a request;
    `client_timeout_s` how long a client may take over sending a request or reading an answer;
    `drain_timeout_s` how long accepted requests may take after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 16_000_000
    max_connections: int = 8192
    client_timeout_s: float = 60.0
    drain_timeout_s: float = 600.0
    log_requests: bool = False
    kv_events_config: str | None = None
    prefix_caching_hash_algo: str = "sha256"

    def kv_events(self) -> KvEventsOptions | None:
        """What a body is to publish.

        Raises:
            ConfigError: what is wrong with `kv_events_config`, or a package is missing.
        """
        return kv_events_options(self.kv_events_config, self.prefix_caching_hash_algo)


def add_server_options(parser: VerbParser) -> None:
    """Adds a flag for each of them."""
    group = parser.add_argument_group("server options")
    for field in fields(ServerOptions):
        default = None if field.default in (MISSING, ()) else field.default
        parser.option(field.name, default, group=group)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The options as they were written; without `--api-key`, the key of the environment."""
    values = {field.name: getattr(args, field.name) for field in fields(ServerOptions)}
    values["api_key"] = values["api_key"] or os.environ.get(API_KEY_VARIABLE, "").split()
    for name in ("api_key", "served_model_name"):
        values[name] = tuple(values[name] or ())
    return ServerOptions(**values)
