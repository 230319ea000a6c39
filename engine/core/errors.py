"""Typed errors of the whole project: what a user can cause, and what only a bug can cause."""

from __future__ import annotations


class LockstepError(Exception):
    """Root of every error that Lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """An option has an impossible value.

    `option`, `value` and `limit` are also part of the message.
    """

    def __init__(self, option: str, value: object, limit: str) -> None:
        super().__init__(f"{option}={value!r}: {limit}")
        self.option = option
        self.value = value
        self.limit = limit

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.option, self.value, self.limit)


class InputError(LockstepError, ValueError):
    """A file or another input of the user is wrong; the message is one line that names where."""


class RequestRejected(LockstepError, ValueError):
    """A request that can never run was refused before any state changed.

    `reason` is a stable word (`prompt_empty`, `prompt_too_long`, `pool_too_small`, `max_tokens`,
    `min_tokens`, `duplicate_id`); the message names the limit and the number that broke it.
    """

    def __init__(self, request_id: object, reason: str, detail: str) -> None:
        super().__init__(f"request {request_id!r} rejected ({reason}): {detail}")
        self.request_id = request_id
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RequestRejected], tuple[object, str, str]]:
        return type(self), (self.request_id, self.reason, self.detail)


class KernelBug(LockstepError, AssertionError):
    """A law of the kernel is broken: our bug, never the caller's."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"LAW-{law} broken: {detail}")
        self.law = law
        self.detail = detail

    def __reduce__(self) -> tuple[type[KernelBug], tuple[str, str]]:
        return type(self), (self.law, self.detail)
