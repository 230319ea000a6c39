"""Planted defects: subclasses of the real kernel, each caught by the law that it breaks.

Owns wrong kernels and perturbed ones. Imports `engine.core` only, so that any suite can use them.
"""

from properties.defects import asynchrony, by_priority, decisions, fairness, pipeline
from properties.defects import endings as lifecycle
from properties.defects import prefix_cache as cache
from properties.defects import tables as blocks
from properties.defects.planting import Mutant, Planted

MUTANTS: tuple[Mutant, ...] = (
    blocks.MUTANTS
    + cache.MUTANTS
    + decisions.MUTANTS
    + lifecycle.MUTANTS
    + fairness.MUTANTS
    + asynchrony.MUTANTS
    + by_priority.MUTANTS
    + pipeline.MUTANTS
)

__all__ = ["MUTANTS", "Mutant", "Planted"]
