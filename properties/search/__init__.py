"""Searches for broken laws: random, state-machine and exhaustive, with failure files.

Owns how workloads are made and driven. Imports laws' checks in `properties.follower`.
"""
