"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from engine.server.answering import Answer
from engine.server.call import Call, Choice
from engine.server.choice_text import Piece
from engine.server.logprobs import CompletionLogprobs, prompt_logprobs_json
from engine.server.messages import PlaceLogprobs
from engine.server.prompts import encode_prompts
from engine.server.requests import sequences
from engine.server.routes.reading import call_id, read
from engine.server.schemas.completion import CompletionRequest
from engine.server.state import ServerState
from engine.text.tokenizer import Tokenizer


async def completions(request: Request) -> Response:
    """Continues texts."""
    state: ServerState = request.app.state.server
    arrival_ns = time.perf_counter_ns()
    asked = await read(request, CompletionRequest)
    state.check_available()
    model = state.check_model(asked.model)
    tokenizer = state.body.tokenizer
    adds = asked.add_special_tokens is not False
    state.check_count(len(asked.prompts) * asked.n)
    prompts = await encode_prompts(tokenizer, asked.prompts, adds)
    answer_id = call_id(request, "cmpl", asked.request_id)
    of_prompt = asked.prompt_logprobs
    if of_prompt is None and asked.echo:
        of_prompt = asked.logprobs
    requests = sequences(
        answer_id,
        asked,
        prompts,
        arrival_ns,
        max_tokens=1 if asked.max_tokens == 0 else asked.max_tokens,
        logprobs=asked.logprobs,
        prompt_logprobs=of_prompt,
    )
    call = Call(state, requests, state.text_rules(asked), asked.n)
    answer = Answer(call, CompletionWriter(asked, tokenizer), asked, answer_id, model)
    return await answer.respond(request, state.options.client_timeout_s)


class CompletionWriter:
    """Writes the choices of a completion."""

    kind = stream_kind = "text_completion"

    def __init__(self, asked: CompletionRequest, tokenizer: Tokenizer | None) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._columns: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def first_events(self, choice: Choice) -> list[dict[str, object]]:
        """None: a completion begins with its text."""
        return []

    def event(self, choice: Choice, piece: Piece) -> dict[str, object] | None:
        """One choice of an event."""
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        text, token_ids, places = self._shown(choice, piece, is_first)
        if not (text or token_ids or piece.finish_reason):
            return None
        content = self._choice(choice, piece, text, token_ids, places)
        if self._asked.return_token_ids:
            content["token_ids"] = piece.token_ids
            if is_first:
                content["prompt_token_ids"] = [*choice.request.prompt_token_ids]
        if is_first and self._asked.prompt_logprobs is not None:
            content["prompt_logprobs"] = self._prompt_logprobs(choice)
        return content

    def whole(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """One choice of a whole answer."""
        content = self._choice(choice, piece, *self._shown(choice, piece, True))
        content["prompt_logprobs"] = self._prompt_logprobs(choice)
        if self._asked.return_token_ids:
            content["prompt_token_ids"] = [*choice.request.prompt_token_ids]
            content["token_ids"] = piece.token_ids
        return content

    def top_level(self, choices: list[Choice]) -> dict[str, object]:
        """What the body adds to the answer."""
        return choices[0].extra or {}

    def _shown(
        self, choice: Choice, piece: Piece, is_first: bool
    ) -> tuple[str, list[int], Sequence[PlaceLogprobs | None] | None]:
        """Text, ids and log probabilities, behind those of the prompt where they are echoed."""
        asked, request = self._asked, choice.request
        if not (asked.echo and is_first):
            return piece.text, piece.token_ids, piece.logprobs
        prompt = request.prompt_text
        if prompt is None:
            prompt = self._decode(request.prompt_token_ids)
        prompt_ids = [*request.prompt_token_ids]
        prompt_places = choice.prompt_logprobs
        if asked.max_tokens == 0:
            return prompt, prompt_ids, prompt_places
        places: Sequence[PlaceLogprobs | None] | None = None
        if asked.logprobs is not None and prompt_places is not None:
            places = [*prompt_places, *(piece.logprobs or [])]
        return prompt + piece.text, prompt_ids + piece.token_ids, places

    def _choice(
        self,
        choice: Choice,
        piece: Piece,
        text: str,
        token_ids: list[int],
        places: Sequence[PlaceLogprobs | None] | None,
    ) -> dict[str, object]:
        logprobs = None
        if self._asked.logprobs is not None and places is not None:
            columns = self._columns.get(choice.index)
            if columns is None:
                columns = CompletionLogprobs(self._tokenizer, self._asked.logprobs)
                self._columns[choice.index] = columns
            logprobs = columns.part(token_ids, places)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, object] | None] | None:
        return prompt_logprobs_json(self._tokenizer, choice.prompt_logprobs)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False)
