"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.server.errors import ApiError
from engine.server.logprobs import token_text
from engine.server.prompts import encode_chat, encode_prompts, needed
from engine.server.routes.reading import read
from engine.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from engine.server.state import ServerState


async def tokenize(request: Request) -> Response:
    """The ids of a text or of a conversation."""
    state: ServerState = request.app.state.server
    asked = await read(request, TokenizeRequest)
    state.check_model(asked.model)
    tokenizer = state.body.tokenizer
    if asked.messages is not None:
        adds = asked.add_special_tokens is True
        encoded = await encode_chat(
            tokenizer,
            asked.messages,
            asked.add_generation_prompt,
            asked.continue_final_message,
            adds,
        )
    else:
        adds = asked.add_special_tokens is not False
        (encoded,) = await encode_prompts(tokenizer, [asked.prompt or ""], adds)
    ids = encoded.token_ids
    strings = [token_text(tokenizer, one) for one in ids] if asked.return_token_strs else None
    answer = {
        "count": len(ids),
        "max_model_len": state.body.info.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of ids."""
    state: ServerState = request.app.state.server
    asked = await read(request, DetokenizeRequest)
    state.check_model(asked.model)
    tokenizer = needed(state.body.tokenizer)
    vocab_size = state.body.info.vocab_size
    if asked.tokens and max(asked.tokens) >= vocab_size:
        raise ApiError(400, f"a token id is outside the vocabulary 0..{vocab_size - 1}", "tokens")
    try:
        text = await asyncio.to_thread(tokenizer.decode, asked.tokens, skip_special_tokens=False)
    except Exception as error:  # a tokenizer is foreign code
        raise ApiError(400, "these tokens have no text", "tokens") from error
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
