"""Options of the real engine: names users know from vLLM and nano-vLLM, validated in one place.

Nothing here imports torch, so a wrong option is reported before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from engine.arguments.option import resolve_names
from engine.arguments.table import TABLE
from engine.core.errors import ConfigError
from engine.hub.folders import is_hub_id, model_folder

# The ranks of one engine are processes of one host.
MOST_RANKS = 8
_KV_DTYPES = ("auto", "fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything a user can set about one engine; what is None is derived from the model.

    `num_kvcache_blocks` overrides the sizing of the KV pool, `kv_cache_memory_bytes` replaces the
    measured budget by a fixed one (per rank). `quantization="fp8"` quantises a 16-bit checkpoint
    while loading; one that is stored in 8-bit floats runs as it is. `kv_cache_dtype="fp8"` halves
    the KV cache. `step_log` is the path of the JSON-lines log.
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
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    load_format: str = "safetensors"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "mixed"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    async_scheduling: bool = True
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
        """Builds options from keyword arguments under any of their names; unknown ones are an
        error (BUG-B32). Models and tokenizers may be hub ids, which become folders here.
        """
        known = [field.name for field in fields(cls)]
        named = resolve_names(TABLE, options, known)
        if is_hub_id(str(model)):  # nothing is fetched for options that are wrong
            for name, value in named.items():
                TABLE[name].check(value)
        tokenizer = named.get("tokenizer")
        if tokenizer is not None:
            folder = model_folder(str(tokenizer), weights=False, option="tokenizer")
            named["tokenizer"] = str(folder)
        needs_weights = named.get("load_format") != "dummy"
        folder = model_folder(str(model), weights=needs_weights, tokenizer=tokenizer is None)
        return cls(model=str(folder), **named)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            TABLE[field.name].check(value)
        if self.tensor_parallel_size > MOST_RANKS:
            limit = f"must be at most {MOST_RANKS}, the GPUs of one host"
            raise ConfigError("tensor_parallel_size", self.tensor_parallel_size, limit)
        if self.kv_cache_dtype not in _KV_DTYPES:
            limit = f"the engine takes {', '.join(_KV_DTYPES)}; the others can only be simulated"
            raise ConfigError("kv_cache_dtype", self.kv_cache_dtype, limit)
        if not Path(self.model).is_dir():
            raise ConfigError("model", self.model, "must be a folder in Hugging Face format")


def require_int(option: str, value: object, least: int, most: int | None = None) -> None:
    """Raises ConfigError unless `value` is an integer within the limits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(option, value, "must be an integer")
    if value < least:
        raise ConfigError(option, value, f"must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(option, value, f"must be at most {most}")
