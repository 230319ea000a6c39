"""Searches for broken laws: random, state-machine and exhaustive, with failure files.

Owns how workloads are made, driven, shrunk and replayed. Imports the follower, the reference and
the planted defects; no law's registry.
"""
