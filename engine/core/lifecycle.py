"""How requests begin and end: what can never run, and which token is the last."""

from __future__ import annotations

from collections.abc import Collection, Container
from collections.abc import Sequence as Seq

from engine.core.config import KernelConfig
from engine.core.errors import RequestRejected
from engine.core.policy_registry import policy_class
from engine.core.request import Request, RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import OpenStep


def length_limit(config: KernelConfig, request: Request) -> int:
    """The number of tokens at which a request ends with reason `length`."""
    limit = len(request.prompt) + request.max_tokens
    if policy_class(config.policy).ends_at_max_model_len(config):
        return min(limit, config.max_model_len)
    return limit


def check_request(config: KernelConfig, request: Request, live: Container[RequestId]) -> None:
    """Refuses a request that can never run (LAW-C1).

    Raises:
        RequestRejected: with the limit and the number that breaks it.
    """
    name, length = request.request_id, len(request.prompt)
    if name in live:
        raise RequestRejected(name, "duplicate_id", "a live request has this id")
    if length < 1:
        raise RequestRejected(name, "prompt_empty", "the prompt has 0 tokens, at least 1 is needed")
    if request.max_tokens < 1:
        raise RequestRejected(
            name, "max_tokens", f"max_tokens={request.max_tokens}, at least 1 is needed"
        )
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise RequestRejected(
            name,
            "min_tokens",
            f"min_tokens={request.min_tokens} is not within 0..max_tokens={request.max_tokens}",
        )
    if not config.reject_impossible:
        return
    if length >= config.max_model_len:
        raise RequestRejected(
            name,
            "prompt_too_long",
            f"the prompt has {length} tokens, max_model_len={config.max_model_len} allows at most "
            f"{config.max_model_len - 1}",
        )
    written = length_limit(config, request) - 1  # the last sampled token is never written
    blocks = -(-written // config.block_size)
    usable = config.num_blocks
    if blocks > usable:
        raise RequestRejected(
            name,
            "pool_too_small",
            f"{written} tokens need {blocks} blocks of {config.block_size}, the pool has {usable}",
        )


class Ending:
    """Decides which requests a step's tokens end, and why (LAW-L6)."""

    def __init__(self, state: KernelState) -> None:
        self._state = state
        self._num_watched = 0

    def watch(self, sequence: Sequence) -> None:
        """Notes a new request."""
        self._num_watched += bool(sequence.request.stop_token_ids)

    def unwatch(self, sequence: Sequence) -> None:
        """Notes that a request ended."""
        self._num_watched -= bool(sequence.request.stop_token_ids)

    def may_stop(self) -> bool:
        """Whether any live request may end by a token."""
        return self._num_watched > 0

    def reasons(
        self,
        record: OpenStep,
        sampled: Seq[RequestId],
        token_ids: Seq[int],
        stopped: Collection[RequestId],
        aborted: Collection[RequestId],
    ) -> dict[RequestId, str]:
        """Id -> reason of those that end; a stop goes before a length, an abort before both."""
        live = self._state.sequences
        reasons = {s.request_id: "length" for s in record.ending if s.request_id in live}
        if self._num_watched:
            for request_id, token_id in zip(sampled, token_ids, strict=True):
                sequence = live.get(request_id)
                if sequence is not None and self._stops(sequence, token_id):
                    reasons[request_id] = "stop"
        for request_id in stopped:
            reasons[request_id] = "stop"
        for request_id in aborted:
            reasons[request_id] = "abort"
        return reasons

    def _stops(self, sequence: Sequence, token_id: int) -> bool:
        request = sequence.request
        if token_id not in request.stop_token_ids:
            return False
        if not request.min_tokens:
            return True
        self._state.decodes.sync_outputs(sequence)
        return len(sequence.output_token_ids) > request.min_tokens
