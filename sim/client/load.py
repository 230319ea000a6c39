"""The open loop: each request is sent when it is due, whatever has become of those before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from engine.core.errors import InputError
from sim.client.prompts import PromptMaker
from sim.client.seen import NS_PER_S, Seen
from sim.client.stream import post
from sim.client.target import Target
from sim.workloads.table import Workload


async def model_of(base_url: str, api_key: str | None) -> str:
    """The first model that a server says it serves.

    Raises:
        InputError: it cannot be reached, or does not say.
    """
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with aiohttp.ClientSession(headers=_headers(api_key)) as session:
            timeout = aiohttp.ClientTimeout(total=30)
            async with session.get(url, timeout=timeout) as response:
                if response.status != 200:
                    raise InputError(f"{url}: HTTP {response.status}")
                return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise InputError(f"{url}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError(f"{url}: names no model; give --model") from None


class Load:
    """Sends a workload once; `run` returns what came of each row, in the order of rows."""

    def __init__(
        self,
        workload: Workload,
        target: Target,
        seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._workload, self._target = workload, target
        self._prompts = PromptMaker(target.vocab_size, seed)
        self._keeps_answers = not target.chat and workload.next_row is not None
        self._answers: dict[int, Sequence[int]] = {}
        self._on_progress = on_progress
        self._seen: dict[int, Seen] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        limit = target.max_concurrency
        self._places = asyncio.Semaphore(limit) if limit is not None else None
        self.begin_ns = 0

    async def run(self) -> list[Seen]:
        """Sends everything and waits for all answers."""
        workload = self._workload
        due = sorted(
            (time_ns, row) for row, time_ns in enumerate(workload.arrival_ns) if time_ns >= 0
        )
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
        headers = {"Content-Type": "application/json", **_headers(self._target.api_key)}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            self.begin_ns = time.perf_counter_ns()
            for time_ns, row in due:
                # The body is made before it is due, so that sending it takes no longer.
                body = self._body(row) if not self._keeps_answers else None
                await self._sleep_until(self.begin_ns + time_ns)
                self._start(session, row, self.begin_ns + time_ns, body)
            while self._tasks:
                await asyncio.wait(self._tasks)
        return [self._seen[row] for row in sorted(self._seen)]

    def _start(
        self, session: aiohttp.ClientSession, row: int, due_ns: int, body: bytes | None
    ) -> None:
        task = asyncio.create_task(self._one(session, row, due_ns, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(
        self, session: aiohttp.ClientSession, row: int, due_ns: int, body: bytes | None
    ) -> None:
        await self._sleep_until(due_ns)
        seen = self._seen[row] = Seen(row, due_ns)
        body = body or self._body(row)
        if self._places is not None:
            async with self._places:
                await post(session, self._target.url, body, seen, self._target.read_timeout_s)
        else:
            await post(session, self._target.url, body, seen, self._target.read_timeout_s)
        if self._keeps_answers:
            self._answers[row] = seen.token_ids
        if self._on_progress is not None:
            self._on_progress(len(self._seen) - len(self._tasks) + 1)
        workload, successor = self._workload, self._workload.successor(row)
        if successor >= 0 and (seen.is_whole or workload.sessions is None):
            think_ns = workload.think_ns[successor] if workload.think_ns else 0
            self._start(session, successor, time.perf_counter_ns() + think_ns, None)

    def _body(self, row: int) -> bytes:
        target, workload = self._target, self._workload
        request = workload.request(row)
        fields: dict[str, object] = {
            "model": target.model,
            "max_tokens": request.max_tokens,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignore_eos:
            fields["ignore_eos"] = True
        if request.priority:
            fields["priority"] = request.priority
        ids = self._prompts.ids(request.prompt, self._answers)
        if target.chat:
            words = " ".join(f"w{token_id % 1000}" for token_id in ids)
            fields["messages"] = [{"role": "user", "content": words}]
        else:
            fields["prompt"] = ids
            if self._keeps_answers:
                fields["return_token_ids"] = True
        return msgspec.json.encode({**fields, **target.extra_body})

    @staticmethod
    async def _sleep_until(time_ns: int) -> None:
        left_ns = time_ns - time.perf_counter_ns()
        if left_ns > 0:
            await asyncio.sleep(left_ns / NS_PER_S)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
