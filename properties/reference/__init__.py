"""Naive models of the kernel: lists and linear scans, written from the policies' description."""

from properties.reference.blocks import ReferenceBlock, ReferencePool
from properties.reference.scheduler import ReferenceScheduler
from properties.reference.sequence import ReferencePlan, ReferenceSequence

__all__ = [
    "ReferenceBlock",
    "ReferencePlan",
    "ReferencePool",
    "ReferenceScheduler",
    "ReferenceSequence",
]
