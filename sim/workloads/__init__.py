"""Workloads: trace readers and generators, all as one table of requests.

Owns arrivals, lengths and the token ids that traces imply. Imports `engine.core` and numpy only.
"""
