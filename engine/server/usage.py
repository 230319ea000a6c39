"""The `usage` of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.server.call import Choice


def usage(choices: Sequence[Choice], n: int) -> dict[str, object]:
    """Tokens of a call so far; the prompt of `n` choices counts once."""
    prompts = sum(len(choice.request.prompt_token_ids) for choice in choices[::n])
    outputs = sum(choice.text.num_tokens for choice in choices)
    cached = sum(choice.times.num_cached_tokens for choice in choices[::n])
    return {
        "prompt_tokens": prompts,
        "total_tokens": prompts + outputs,
        "completion_tokens": outputs,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
