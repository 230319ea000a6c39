"""What a check is asked to do, and the engine options that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.core.errors import ConfigError
from engine.models.build import resolve_dtype
from engine.models.config import ModelConfig, load_model_config
from engine.options import EngineOptions
from engine.text.tokenizer import load_tokenizer
from engine.worker.device import resolve_device
from golden.cases import ForcedSequence
from golden.check.check_prompts import CheckPrompt, check_max_tokens, read_prompts, shipped_prompts
from golden.forced import ForcedRunner

Say = Callable[[str], None]
Defect = Callable[[ForcedRunner], None]
MAX_TOKENS = 24
# Short enough that long prompts come in chunks, long enough that a GPU is used.
BUDGET = 512
MOST_SEQS = 8


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """One check. `engine` holds options of the engine; `defect` plants a fault, for the tests."""

    model: str
    engine: dict[str, object] = field(default_factory=dict)
    prompts: Path | None = None
    max_tokens: int = MAX_TOKENS
    defect: Defect | None = None
    rank_defect: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A plan made concrete on this machine."""

    options: EngineOptions
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    has_tokenizer: bool
    prompts: tuple[CheckPrompt, ...]
    max_tokens: int

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return Path(self.options.model)

    @property
    def num_positions(self) -> int:
        """Positions that are computed once."""
        return sum(len(item.token_ids) + self.max_tokens - 1 for item in self.prompts)


def make_setting(plan: CheckPlan) -> Setting:
    """Reads the folder's headers and the prompts; nothing heavy is loaded.

    Raises:
        ConfigError, InputError: something cannot be checked.
    """
    options = EngineOptions.from_kwargs(plan.model, **plan.engine)
    config = load_model_config(options.model)
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    longest = config.max_position_embeddings
    check_max_tokens(plan.max_tokens, longest)
    room = longest - plan.max_tokens
    if plan.prompts is None:
        prompts = shipped_prompts(tokenizer, config.vocab_size, room)
    else:
        prompts = read_prompts(plan.prompts, tokenizer, config.vocab_size, room)
    return Setting(
        options=options,
        config=config,
        dtype=resolve_dtype(options.dtype, config),
        device=resolve_device(options, 0),
        has_tokenizer=tokenizer is not None,
        prompts=tuple(prompts),
        max_tokens=plan.max_tokens,
    )


def engine_for(
    plan: CheckPlan, sequences: Sequence[ForcedSequence], needs_eager: bool
) -> EngineOptions:
    """Options under which the sequences are batched, chunked and share their prefixes."""
    block_size = plan.engine.get("block_size", 16)
    if not isinstance(block_size, int):
        raise ConfigError("block_size", block_size, "must be a whole number")
    longest = max(len(item.tokens) for item in sequences)
    blocks = sorted((-(-(len(item.tokens) + 1) // block_size) for item in sequences), reverse=True)
    settings: dict[str, object] = {
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": MOST_SEQS,
        "max_model_len": longest + 1,
        # All prompts stay cached, so that a second run finds them.
        "num_kvcache_blocks": sum(blocks) + MOST_SEQS,
        **plan.engine,
    }
    if needs_eager:
        settings["enforce_eager"] = True
    return EngineOptions.from_kwargs(plan.model, **settings)


def kv_bytes_of(setting: Setting) -> int:
    """Size of the KV pool that `engine_for` asks for."""
    config = setting.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    size = setting.options.block_size
    blocks = sum(-(-(len(p.token_ids) + setting.max_tokens + 1) // size) for p in setting.prompts)
    return (blocks + MOST_SEQS) * size * per_token * setting.dtype.itemsize
