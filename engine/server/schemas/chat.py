"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from engine.server.schemas.fields import LARGEST_INT64, Message, SamplingFields, wrong

MOST_MESSAGES = 4096


class ChatRequest(SamplingFields):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INT64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_INT64)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs can only be given with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong(
                "continue_final_message",
                "continue_final_message and add_generation_prompt cannot both be true",
            )
        return self
