"""Planted defects: subclasses of the real kernel, each caught by the law that it breaks."""

from properties.mutants import blocks, cache, decisions, lifecycle
from properties.mutants.planting import Mutant, Planted

MUTANTS: tuple[Mutant, ...] = blocks.MUTANTS + cache.MUTANTS + decisions.MUTANTS + lifecycle.MUTANTS

__all__ = ["MUTANTS", "Mutant", "Planted"]
