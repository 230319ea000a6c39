"""Recorded decisions of other schedulers, and the kernel judged against them.

Owns the recordings' format and what sets one aside. Imports `engine.core` and `engine.steplog`
only.
"""
