"""A patient client of one server: every failure becomes one line that says what to do."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from engine.core.errors import ConfigError, InputError

MOST_TRIES = 6
LONGEST_PAUSE_S = 30.0
KEY_VARIABLE = "OPENAI_API_KEY"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOO_MANY, _OVERLOADED = 429, (500, 502, 503, 504)


class EndpointProblem(InputError):
    """The server did not give what is needed; the message says what to do."""


class Refused(EndpointProblem):
    """The server refused this request as it is."""


@dataclass(frozen=True, slots=True)
class Client:
    """One server. `sleep` waits between tries."""

    url: str
    timeout_s: float
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", self.url, "must be http://HOST:PORT or https://HOST")

    def models(self) -> list[str]:
        """Names of the models that are served."""
        answer = self._ask("/v1/models", None)
        data = answer.get("data")
        names = [str(item.get("id")) for item in data] if isinstance(data, list) else []
        if not names:
            raise EndpointProblem(f"{self.url}: lists no model at /v1/models: give --served-model")
        return names

    def complete(self, body: Mapping[str, object]) -> dict[str, Any]:
        """The answer of `/v1/completions`.

        Raises:
            Refused: the request is not one that this server takes.
            EndpointProblem: anything else that is wrong.
        """
        return self._ask("/v1/completions", body)

    def _ask(self, path: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        for number in range(MOST_TRIES):
            try:
                return self._once(path, body)
            except urllib.error.HTTPError as error:
                with error:
                    pause = self._pause_after(error, number)
                    if pause is None or number + 1 == MOST_TRIES:
                        raise self._problem(error, path) from None
                self.sleep(pause)
            except TimeoutError:
                raise self._late() from None
            except urllib.error.URLError as error:
                if isinstance(error.reason, TimeoutError):
                    raise self._late() from None
                raise EndpointProblem(
                    f"{self.url}: no server answers ({error.reason}): is it running, and is the "
                    "port right?"
                ) from None
            except (OSError, HTTPException) as error:
                raise EndpointProblem(
                    f"{self.url}: the server broke off its answer ({type(error).__name__}): look "
                    "into its log"
                ) from None
        raise AssertionError("the last try returns or raises")

    def _once(self, path: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(KEY_VARIABLE)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address(path), data, headers)
        with self._opener().open(request, timeout=self.timeout_s) as response:
            text = response.read()
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise EndpointProblem(
                f"{self.url}: {path} does not answer with a JSON object: is this a server with "
                "OpenAI's endpoints?"
            )
        return answer

    def _address(self, path: str) -> str:
        root = self.url.rstrip("/")
        return root + path.removeprefix("/v1") if root.endswith("/v1") else root + path

    def _opener(self) -> urllib.request.OpenerDirector:
        if urlsplit(self.url).hostname in _LOOPBACK:
            return urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return urllib.request.build_opener()

    def _pause_after(self, error: urllib.error.HTTPError, number: int) -> float | None:
        """How long to wait before the next try; None if there is no use in one."""
        if error.code == _TOO_MANY or error.code in _OVERLOADED:
            asked = error.headers.get("Retry-After", "")
            try:
                wanted = float(asked)
            except ValueError:
                wanted = 0.5 * 2**number
            return None if wanted > LONGEST_PAUSE_S else max(0.0, wanted)
        return None

    def _late(self) -> EndpointProblem:
        return EndpointProblem(
            f"{self.url}: no answer within {self.timeout_s:g} s: raise --timeout-s or lower "
            "--concurrency"
        )

    def _problem(self, error: urllib.error.HTTPError, path: str) -> EndpointProblem:
        code, text = error.code, _message(error)
        if code == _TOO_MANY:
            after = error.headers.get("Retry-After")
            wait = f", Retry-After {after}" if after else ""
            return EndpointProblem(
                f"{self.url}: limits the rate (429{wait}): lower --concurrency, or raise the "
                "limit of this key"
            )
        if code in (401, 403):
            return EndpointProblem(
                f"{self.url}: wants a key ({code}): set the environment variable {KEY_VARIABLE}"
            )
        if code in (404, 405):
            return EndpointProblem(
                f"{self.url}: has no {path} or no such model ({code}: {text}): give the server's "
                "root as --url, and --served-model"
            )
        if code in _OVERLOADED:
            return EndpointProblem(f"{self.url}: fails ({code}: {text}): look into its log")
        return Refused(f"{self.url}: refuses a request ({code}: {text})")


def _message(error: urllib.error.HTTPError) -> str:
    """What the body says, in one short line."""
    try:
        text = error.read(4096).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            text = str(inner.get("message", inner.get("detail", text)))
    return " ".join(text.split())[:300]
