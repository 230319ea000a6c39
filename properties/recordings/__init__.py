"""Recorded decisions of other schedulers, and the kernel judged against them.

Imports `engine.core` only.
"""
