"""`/v1/chat/completions`."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from engine.server.answering import Answer
from engine.server.call import Call, Choice
from engine.server.choice_text import Piece
from engine.server.logprobs import chat_logprobs, prompt_logprobs_json
from engine.server.prompts import encode_chat
from engine.server.requests import sequences
from engine.server.routes.reading import call_id, read
from engine.server.schemas.chat import ChatRequest
from engine.server.state import ServerState
from engine.text.tokenizer import Tokenizer

ROLE = "assistant"


async def chat_completions(request: Request) -> Response:
    """Goes on with a conversation."""
    state: ServerState = request.app.state.server
    arrival_ns = time.perf_counter_ns()
    asked = await read(request, ChatRequest)
    state.check_available()
    model = state.check_model(asked.model)
    tokenizer = state.body.tokenizer
    state.check_count(asked.n)
    prompt = await encode_chat(
        tokenizer,
        asked.messages,
        asked.add_generation_prompt,
        asked.continue_final_message,
        asked.add_special_tokens is True,
    )
    answer_id = call_id(request, "chatcmpl", asked.request_id)
    limit = asked.max_completion_tokens
    requests = sequences(
        answer_id,
        asked,
        [prompt],
        arrival_ns,
        max_tokens=asked.max_tokens if limit is None else limit,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=asked.prompt_logprobs,
    )
    call = Call(state, requests, state.text_rules(asked), asked.n)
    answer = Answer(call, ChatWriter(asked, tokenizer), asked, answer_id, model)
    return await answer.respond(request, state.options.client_timeout_s)


class ChatWriter:
    """Writes the choices of a chat completion."""

    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, tokenizer: Tokenizer | None) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        last = asked.messages[-1]
        self._echoed = ""
        if asked.echo and last.role == ROLE:
            content = last.content or ""
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            self._echoed = content

    def first_events(self, choice: Choice) -> list[dict[str, object]]:
        """The role, and what is echoed."""
        delta = {"role": ROLE, "content": self._echoed}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def event(self, choice: Choice, piece: Piece) -> dict[str, object] | None:
        """One choice of an event."""
        logprobs = self._logprobs(piece)
        if not (piece.text or logprobs or piece.finish_reason or self._asked.return_token_ids):
            return None
        content: dict[str, object] = {
            "index": choice.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._asked.return_token_ids:
            content["token_ids"] = piece.token_ids
        return content

    def whole(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """One choice of a whole answer."""
        content: dict[str, object] = {
            "index": choice.index,
            "message": {"role": ROLE, "content": self._echoed + piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._asked.return_token_ids:
            content["token_ids"] = piece.token_ids
        return content

    def top_level(self, choices: list[Choice]) -> dict[str, object]:
        """What belongs to the prompt, and what the body adds to the answer."""
        first = choices[0]
        found: dict[str, object] = dict(first.extra or {})
        found["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, first.prompt_logprobs)
        if self._asked.return_token_ids:
            found["prompt_token_ids"] = [*first.request.prompt_token_ids]
        return found

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        if not self._asked.logprobs or piece.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, piece.logprobs, self._asked.top_logprobs or 0)
