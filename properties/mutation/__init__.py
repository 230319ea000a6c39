"""Mutation testing of kernel and facade: how much could be wrong without anybody noticing.

Owns the changes, the forking loop, the choice of killing tests and the list of justified
survivors. Imports any room of `properties`; part of the repository, not of the wheel.
"""
