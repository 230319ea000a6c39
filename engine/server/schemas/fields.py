"""Fields that completions and chats share, and fields that are refused, ignored or passed on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.arguments.suggest import did_you_mean

LEAST_INT64, LARGEST_INT64 = -(2**63), 2**63 - 1
MOST_CHOICES = 128
MOST_STOPS = 16
LONGEST_STOP = 1024

Int64 = Annotated[int, Field(ge=LEAST_INT64, le=LARGEST_INT64)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST_INT64)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]

# Fields that change nothing here; clients send them for the provider's own books.
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "session_id", "safety_identifier"),
        *("prompt_cache_key", "parallel_tool_calls", "include_reasoning"),
    }
)
# Fields of OpenAI's or vLLM's that are not offered: only the values that ask for nothing pass.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "logprob_token_ids": ([],),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "prompt_embeds": (),
    "documents": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
}
# Fields that some bodies know.
PASSED_ON = frozenset({"kv_transfer_params"})


def wrong(param: str, message: str) -> PydanticCustomError:
    """What a validator of a whole model raises; `param` is the field to blame."""
    return PydanticCustomError("field", "{message}", {"param": param, "message": message})


class Strict(BaseModel):
    """A part of a request with the fields of its model and no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class StreamOptions(Strict):
    """What a stream says beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class RequestFields(BaseModel):
    """What every request to a model may hold."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    model: str | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_offered(self) -> RequestFields:
        known = {*type(self).model_fields}
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or name in PASSED_ON or value is None:
                continue
            if name in NEUTRAL:
                if any(value == neutral for neutral in NEUTRAL[name]):
                    continue
                raise wrong(name, f"{name} is not supported by this server")
            shown = name if len(name) <= 60 and name.isprintable() else "(a long or odd name)"
            raise wrong(shown, f"unknown field {shown}{did_you_mean(name[:60], known)}")
        return self

    @property
    def passed_on(self) -> dict[str, Any]:
        """Fields for the body to judge."""
        extra = self.model_extra or {}
        return {name: extra[name] for name in PASSED_ON if extra.get(name) is not None}


class SamplingFields(RequestFields):
    """How tokens are drawn, and when an output ends."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_INT64)] = 0
    skip_special_tokens: bool | None = None
    priority: Int64 = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options can only be given with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


Role = Annotated[str, Field(min_length=1, max_length=64)]


class TextPart(Strict):
    """A part of a message's content; only text is offered."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; further fields are the chat template's affair."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    role: Role
    content: str | list[TextPart] | None = None
