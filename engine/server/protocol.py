"""What a body is: the interface between the HTTP front end and whatever computes tokens.

The engine's `AsyncLLM` and the simulator's twin implement `Body`. All times are nanoseconds of
`time.perf_counter_ns`, which all processes of one host share. The front end makes the text: a body
sees and gives token ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine.server.delta_stream import DeltaStream
from engine.server.messages import GenerateRequest, StepStats
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front end must know of the served model."""

    model: str  # the name as it was given
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    num_engines: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    body: str = "engine"
    is_paced: bool = False  # whether its steps follow the wall clock, and `lag_ns` has a meaning
    facts: Mapping[str, str] = field(default_factory=dict)  # of `vllm:cache_config_info`


class BodyState(StrEnum):
    """What a body can do right now."""

    STARTING = "starting"
    READY = "ready"
    SLEEPING = "sleeping"
    DEAD = "dead"


class Body(Protocol):
    """Computes tokens. All calls come from the front end's event loop and return at once."""

    info: ModelInfo
    tokenizer: Tokenizer | None
    # Set by the front end before `start`.
    on_step: Callable[[StepStats], None] | None

    @property
    def state(self) -> BodyState:
        """What it can do right now."""

    @property
    def failure(self) -> str | None:
        """Why it is dead, in one line."""

    async def start(self) -> None:
        """Gets ready to serve; `info` and `tokenizer` hold from here on.

        The server listens after it. `state` may be STARTING for a while yet, with requests refused.

        Raises:
            LockstepError: it cannot.
        """

    def check(self, request: GenerateRequest) -> None:
        """Refuses what can never run; nothing has changed.

        Raises:
            ConfigError, InputError, RequestRejected: what is wrong, and the limit.
        """

    def generate(self, request: GenerateRequest) -> DeltaStream:
        """Begins a request that `check` has accepted."""

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown ids are those that have just ended. No delta follows."""

    async def wait_for_death(self) -> None:
        """Returns when the body has died, and never else."""

    async def sleep(self, level: int = 1) -> None:
        """Gives memory back until `wake`; requests wait meanwhile."""

    async def wake(self) -> None:
        """Undoes `sleep`."""

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False if that is impossible now."""

    async def close(self) -> None:
        """Ends everything that runs, completes logs and frees what it holds; idempotent."""
