"""What all routes of one server share: its body, its options, who is in, and its numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from engine.core.errors import LockstepError
from engine.server.choice_text import TextRules
from engine.server.errors import ApiError, of_lockstep
from engine.server.messages import GenerateRequest
from engine.server.metrics import ServerMetrics
from engine.server.options import ServerOptions
from engine.server.protocol import Body, BodyState
from engine.server.schemas.fields import SamplingFields
from engine.text.detokenize import byte_token_ids

RETRY_AFTER = {"Retry-After": "1"}


class ServerState:
    """One server. Everything happens on one event loop."""

    def __init__(self, body: Body, options: ServerOptions) -> None:
        self.body, self.options = body, options
        self.model_names = options.served_model_name or (body.info.model,)
        self.created = int(time.time())
        self.byte_ids = byte_token_ids(body.tokenizer)
        self.metrics = ServerMetrics(body.info, self.model_names[0])
        self.is_draining = False
        self.num_open = 0  # sequences that were accepted and have not ended
        self._idle = asyncio.Event()
        self._idle.set()
        body.on_step = self.metrics.step

    @property
    def max_open(self) -> int:
        """The most sequences at a time."""
        info = self.body.info
        return info.max_num_seqs * info.num_engines + self.options.max_queue

    def check_model(self, name: str | None) -> str:
        """The name under which an answer goes out; refuses a model that is not served."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            shown = name if len(name) <= 100 else f"{name[:97]}..."
            raise ApiError(404, f"the model {shown!r} does not exist here", "model")
        return name

    def admit(self, requests: Sequence[GenerateRequest]) -> None:
        """Takes the requests of one call, or refuses them all; `release` gives their places back.

        Raises:
            ApiError: 503 where there is no place or no body, 400 where one can never run.
        """
        self.check_available()
        count = len(requests)
        for request in requests:
            self._check_length(request)
            try:
                self.body.check(request)
            except LockstepError as error:
                raise of_lockstep(error) from error
        if self.num_open + count > self.max_open:
            self.metrics.refused("max_num_queued_reqs", count)
            raise ApiError(503, "the queue is full, try again later", headers=RETRY_AFTER)
        self.num_open += count
        self._idle.clear()

    def _check_length(self, request: GenerateRequest) -> None:
        """Refuses what the kernel would silently cut short at the model's limit."""
        limit, length = self.body.info.max_model_len, len(request.prompt_token_ids)
        if request.max_tokens is not None and length < limit < length + request.max_tokens:
            raise ApiError(
                400,
                f"{length} prompt tokens and max_tokens={request.max_tokens} are more than "
                f"max_model_len={limit}",
                "max_tokens",
            )

    def check_count(self, count: int) -> None:
        """Refuses a call with more sequences than can ever be open, before any of its work."""
        if count > self.max_open:
            raise ApiError(400, f"{count} sequences in one request, {self.max_open} can be open")

    def release(self, count: int) -> None:
        """Gives places back."""
        self.num_open -= count
        if not self.num_open:
            self._idle.set()

    def check_available(self) -> None:
        """Refuses with 503 where nothing new can be taken."""
        if self.is_draining:
            headers = {**RETRY_AFTER, "Connection": "close"}
            raise ApiError(503, "the server is shutting down", headers=headers)
        if self.body.state is BodyState.STARTING:
            raise ApiError(503, "the model is being loaded", headers=RETRY_AFTER)
        if self.body.state is BodyState.DEAD:
            raise ApiError(503, "the engine is dead")

    async def wait_until_idle(self) -> None:
        """Returns when no accepted sequence is left."""
        await self._idle.wait()

    def text_rules(self, fields: SamplingFields) -> TextRules:
        """How the ids of a call become text."""
        return TextRules(
            self.body.tokenizer,
            self.byte_ids,
            fields.stops,
            fields.min_tokens,
            fields.skip_special_tokens is not False,
            fields.include_stop_str_in_output,
        )
