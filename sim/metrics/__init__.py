"""What a run measures: per-request times, server counters, summaries and stability.

Owns definitions and key names of the figures. Imports `engine.core` and numpy only.
"""
