"""Options of the real engine: names users know from vLLM and nano-vLLM, validated in one place.

Nothing here imports torch, so a wrong option is reported before anything heavy is loaded.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path

from engine.core.config import POLICY_NAMES
from engine.core.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flash_attn")
LOAD_FORMATS = ("safetensors", "dummy")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything a user can set about one engine; what is None is derived from the model.

    `num_kvcache_blocks` overrides the sizing of the KV pool, `kv_cache_memory_bytes` replaces the
    measured budget by a fixed one (per rank). `step_log` is the path of the JSON-lines log.
    `debug` audits the kernel's state whenever a step has ended and none is under way.

    Raises:
        ConfigError: a value is impossible.
    """

    model: str
    tokenizer: str | None = None
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "safetensors"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "mixed"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    async_scheduling: bool = False
    block_size: int = 16
    num_kvcache_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    seed: int = 0
    step_log: str | None = None
    debug: bool = False
    worker_timeout_s: float = 600.0

    @classmethod
    def from_kwargs(cls, model: str, **options: object) -> EngineOptions:
        """Builds options from keyword arguments; an unknown name is an error (BUG-B32)."""
        valid = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in valid:
                raise ConfigError(
                    name, value, f"no such option; did you mean {_nearest(name, valid)!r}?"
                )
        return cls(model=str(model), **options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_integers()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be True or False")
        _require_number("gpu_memory_utilization", self.gpu_memory_utilization)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            limit = "must be above 0 and at most 1"
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, limit)
        _require_number("worker_timeout_s", self.worker_timeout_s)
        if self.worker_timeout_s <= 0:
            raise ConfigError("worker_timeout_s", self.worker_timeout_s, "must be above 0")
        if not Path(self.model).is_dir():
            raise ConfigError("model", self.model, "must be a folder in Hugging Face format")

    def _check_choices(self) -> None:
        for name, choices in (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("load_format", LOAD_FORMATS),
            ("attention_backend", ATTENTION_BACKENDS),
            ("policy", POLICY_NAMES),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(choices)}")

    def _check_integers(self) -> None:
        for name, least, most in (
            ("tensor_parallel_size", 1, 8),
            ("max_model_len", 2, None),
            ("max_num_seqs", 1, None),
            ("max_num_batched_tokens", 1, None),
            ("long_prefill_token_threshold", 0, None),
            ("watermark_blocks", 0, None),
            ("block_size", 1, None),
            ("num_kvcache_blocks", 1, None),
            ("kv_cache_memory_bytes", 1, None),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            require_int(name, value, least, most)


def _nearest(name: str, valid: list[str]) -> str:
    """The option that was probably meant: one that the name contains goes before a similar one."""
    contained = [option for option in valid if option in name and len(option) > 4]
    return max(contained, key=len, default=difflib.get_close_matches(name, valid, 1, 0.0)[0])


_FLAGS = (
    "enable_prefix_caching",
    "async_scheduling",
    "enforce_eager",
    "debug",
    "expert_parallel",
)
_MAY_BE_NONE = ("max_model_len", "num_kvcache_blocks", "kv_cache_memory_bytes")


def require_int(option: str, value: object, least: int, most: int | None = None) -> None:
    """Raises ConfigError unless `value` is an integer within the limits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(option, value, "must be an integer")
    if value < least:
        raise ConfigError(option, value, f"must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(option, value, f"must be at most {most}")


def _require_number(option: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(option, value, "must be a finite number")
