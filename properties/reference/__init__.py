"""Naive models of the kernel: lists and linear scans, written from the policies' description."""

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
