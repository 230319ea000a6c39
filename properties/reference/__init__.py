"""Naive models of the kernel: lists and linear scans, written from the policies' description.

Owns a second opinion on every decision. Imports the data types of `engine.core`, and nothing of
the code that it is compared with.
"""

from properties.reference.naive_pool import ReferenceBlock, ReferencePool
from properties.reference.naive_scheduler import ReferenceScheduler
from properties.reference.naive_sequence import ReferencePlan, ReferenceSequence

__all__ = [
    "ReferenceBlock",
    "ReferencePlan",
    "ReferencePool",
    "ReferenceScheduler",
    "ReferenceSequence",
]
