"""One streamed completion, as a client sees it."""

from __future__ import annotations

import time

import aiohttp
import msgspec

from sim.client.seen import Seen


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_EVENTS = msgspec.json.Decoder(_Event)


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, seen: Seen, read_timeout_s: float
) -> None:
    """Sends a request and notes what comes; every failure ends in `seen.error`."""
    seen.start_ns = time.perf_counter_ns()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=read_timeout_s)
    try:
        async with session.post(url, data=body, timeout=timeout) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                seen.error = f"HTTP {response.status}: {_message(text)}"
                return
            await _read(response.content, seen)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    except msgspec.DecodeError as error:
        seen.error = f"an event is not what OpenAI's API promises: {error}"
    if seen.error is None and not seen.token_ns:
        seen.error = "the answer has no token"


async def _read(content: aiohttp.StreamReader, seen: Seen) -> None:
    rest = b""
    async for data in content.iter_any():
        now = time.perf_counter_ns()
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    _note(line[5:].strip(), now, seen)
    if seen.error is None and seen.finish_reason is None:
        seen.error = "the stream broke off"


def _note(data: bytes, now: int, seen: Seen) -> None:
    if data == b"[DONE]":
        return
    event = _EVENTS.decode(data)
    if bytes(event.error) not in (b"", b"null"):
        seen.error = _message(bytes(event.error).decode(errors="replace"))
        return
    usage = event.usage
    if usage is not None:
        seen.prompt_tokens, seen.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            seen.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    for choice in event.choices:
        text = choice.text if choice.delta is None else choice.delta.content
        if text or choice.token_ids or choice.finish_reason:
            seen.token_ns.append(now)
        if choice.token_ids:
            seen.token_ids.extend(choice.token_ids)
        if choice.finish_reason:
            seen.finish_reason = choice.finish_reason


def _message(text: str) -> str:
    """OpenAI's error in one line."""
    try:
        found = msgspec.json.decode(text)
        found = found.get("error", found)
        return str(found.get("message", text)) if isinstance(found, dict) else str(found)
    except (msgspec.DecodeError, AttributeError):
        return " ".join(text.split())
