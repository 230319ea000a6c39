"""Watches a scheduler from outside, step by step, and says which law it breaks."""

from properties.follower.follower import SUSPENDED_IF_ASYNC, SUSPENDED_IF_PERTURBED, Follower
from properties.follower.run_sums import Ledger

__all__ = ["SUSPENDED_IF_ASYNC", "SUSPENDED_IF_PERTURBED", "Follower", "Ledger"]
