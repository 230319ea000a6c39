"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from engine.server.schemas.fields import LARGEST_INT64, SamplingFields, TokenId, wrong

MOST_PROMPTS = 1024


class CompletionRequest(SamplingFields):
    """A text to continue, or several, or their token ids."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_INT64)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False

    @model_validator(mode="after")
    def _check_lengths(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "max_tokens=0: must be at least 1 unless echo is true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt or many, as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt
