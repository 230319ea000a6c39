"""Watches a scheduler from outside, step by step, and says which law it breaks.

Owns the picture of what the state must be, and the judging of each step. Imports the data types of
`engine.core` and the stand-in model of `properties.reference`; never a scheduler.
"""

from properties.follower.follower import (
    SUSPENDED_IF_PERTURBED,
    SUSPENDED_IF_PREFILL_FIRST,
    SUSPENDED_IF_PRIORITY,
    Follower,
)
from properties.follower.run_sums import Ledger

__all__ = [
    "SUSPENDED_IF_PERTURBED",
    "SUSPENDED_IF_PREFILL_FIRST",
    "SUSPENDED_IF_PRIORITY",
    "Follower",
    "Ledger",
]
