"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from engine.server.schemas.fields import Message, RequestFields, TokenId, wrong


class TokenizeRequest(RequestFields):
    """A text or a conversation to turn into ids."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check_one_is_given(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(RequestFields):
    """Ids to turn into text."""

    tokens: Annotated[list[TokenId], Field(max_length=10_000_000)]
