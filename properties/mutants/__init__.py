"""Planted defects: each is a subclass of the real kernel and must be caught by the law it breaks."""

from properties.mutants import blocks, decisions, lifecycle
from properties.mutants.planting import Mutant, Planted

MUTANTS: tuple[Mutant, ...] = blocks.MUTANTS + decisions.MUTANTS + lifecycle.MUTANTS

__all__ = ["MUTANTS", "Mutant", "Planted"]
