"""The kernel's frozen configuration and the one place where it is validated."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ConfigError

POLICY_NAMES = ("mixed", "prefill_first")
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
}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Sizes, limits and policy options of one scheduler.

    `num_blocks` counts usable blocks with ids from 0. Every option from
    `long_prefill_token_threshold` on belongs to one policy or is a named hardening.

    Raises:
        ConfigError: a value is impossible (LAW-C2).
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
    # mixed: longest chunk of one prompt in a step, 0 = no limit.
    long_prefill_token_threshold: int = 0
    # mixed: blocks that admission leaves free while something runs.
    watermark_blocks: int = 0
    # mixed: admission looks at the whole sequence and not only at its first chunk.
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

    def __post_init__(self) -> None:
        for option, (least, most) in LIMITS.items():
            _require_int(option, getattr(self, option), least, most)  # LAW-C2
        if self.policy not in POLICY_NAMES:
            raise ConfigError("policy", self.policy, f"must be one of {', '.join(POLICY_NAMES)}")


def _require_int(option: str, value: object, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(option, value, "must be an integer")
    if value < least:
        raise ConfigError(option, value, f"must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(option, value, f"must be at most {most}")
