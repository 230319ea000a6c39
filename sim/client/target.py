"""The server that is asked, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and how it is asked.

    With `chat` prompts are words and go to the chat endpoint; else they are token ids.
    """

    base_url: str
    model: str
    vocab_size: int = 32_000
    api_key: str | None = None
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    max_concurrency: int | None = None
    read_timeout_s: float = 600.0
    extra_body: Mapping[str, object] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where requests go."""
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        return self.base_url.rstrip("/") + path
