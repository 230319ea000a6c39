"""The kernel's frozen configuration and the one place where it is validated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from engine.core.errors import ConfigError
from engine.core.policy_registry import POLICIES, policy_class

# The least and most of every whole number; whoever takes these options reads their limits here.
# Block ids are 32-bit integers on a device.
LIMITS: dict[str, tuple[int, int | None]] = {
    "num_blocks": (1, 2**31 - 1),
    "max_model_len": (2, None),
    "block_size": (1, None),
    "max_num_seqs": (1, None),
    "max_num_batched_tokens": (1, None),
    "hash_bits": (1, 64),
    "long_prefill_token_threshold": (0, None),
    "watermark_blocks": (0, None),
    "max_num_active_seqs": (0, None),
    "prefill_schedule_interval": (1, None),
    "host_blocks": (0, 2**31 - 2),
}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Sizes, limits and policy options of one scheduler.

    `num_blocks` counts usable blocks with ids from 0. The options between `hash_bits` and
    `reject_impossible` belong to the policies that name them in `Policy.options`.

    Raises:
        ConfigError: a value is impossible, or an option belongs to another policy (LAW-C2).
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "mixed"
    enable_prefix_caching: bool = True
    # Bits of the block hash that are used; fewer only to test that hits never rest on the hash.
    hash_bits: int = 64
    # Longest chunk of one prompt in a step, 0 = no limit.
    long_prefill_token_threshold: int = 0
    # Blocks that admission leaves free while something runs.
    watermark_blocks: int = 0
    # Admission looks at the whole sequence and not only at its first chunk.
    reserve_full_prompt: bool = True
    # prefill_first hardening: sequences that hold blocks are bounded by max_num_seqs.
    bound_holders: bool = True
    # prefill_first hardening: decode steps keep within max_num_batched_tokens.
    bound_decode_tokens: bool = True
    # prefill_first hardening: a sequence also ends at max_model_len.
    bound_model_len: bool = True
    # Hardening: refuse at add() what can never run (LAW-C1).
    reject_impossible: bool = True
    # One plan may stay uncommitted while the next is made.
    async_scheduling: bool = False
    # The threshold grows to a fair share of the budget (vLLM 0.33, P-R2).
    long_prefill_token_threshold_adaptive: bool = False
    # The threshold also holds while there is one request only (vLLM up to 0.32, P-R1).
    threshold_when_alone: bool = False
    # Bounds running sequences instead of max_num_seqs; 0 = no bound of its own (P-R3).
    max_num_active_seqs: int = 0
    # Steps from one that carries prefill to the next one that may (P-R4).
    prefill_schedule_interval: int = 1
    # Blocks of host memory that keep what the pool evicts; 0 = no host tier.
    host_blocks: int = 0

    def to_json(self) -> dict[str, object]:
        """The options by name; those that came with vLLM 0.33's rules only where they are set."""
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in _ONLY_WHERE_SET or value != defaults[name]
        }

    def __post_init__(self) -> None:
        for option, (least, most) in LIMITS.items():
            _require_int(option, getattr(self, option), least, most)  # LAW-C2
        for option in _FLAGS:
            if not isinstance(getattr(self, option), bool):
                raise ConfigError(option, getattr(self, option), "must be true or false")
        if self.max_num_active_seqs > self.max_num_seqs:
            raise ConfigError(
                "max_num_active_seqs",
                self.max_num_active_seqs,
                f"must be at most max_num_seqs={self.max_num_seqs}",
            )
        if self.host_blocks and not self.enable_prefix_caching:
            raise ConfigError("host_blocks", self.host_blocks, "needs enable_prefix_caching")
        if self.policy not in POLICIES:
            raise ConfigError("policy", self.policy, f"must be one of {', '.join(POLICIES)}")
        for option, (default, owners) in policy_options().items():
            if getattr(self, option) != default and self.policy not in owners:
                raise ConfigError(
                    option,
                    getattr(self, option),
                    f"belongs to policy {' and '.join(owners)}, not to {self.policy}",
                )


_ONLY_WHERE_SET = (
    "long_prefill_token_threshold_adaptive",
    "threshold_when_alone",
    "max_num_active_seqs",
    "prefill_schedule_interval",
    "host_blocks",
)
_FLAGS = (
    "enable_prefix_caching",
    "reserve_full_prompt",
    "bound_holders",
    "bound_decode_tokens",
    "bound_model_len",
    "reject_impossible",
    "async_scheduling",
    "long_prefill_token_threshold_adaptive",
    "threshold_when_alone",
)


@cache
def policy_options() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Options that not all policies have: their default, and the policies that have them."""
    defaults = {field.name: field.default for field in fields(KernelConfig)}
    owners: dict[str, tuple[str, ...]] = {}
    for name in POLICIES:
        for option in sorted(policy_class(name).options):
            owners[option] = (*owners.get(option, ()), name)
    return {option: (defaults[option], names) for option, names in owners.items()}


def _require_int(option: str, value: object, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(option, value, "must be an integer")
    if value < least:
        raise ConfigError(option, value, f"must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(option, value, f"must be at most {most}")
