"""Mutation testing of the kernel: how much of it could be wrong without anybody noticing.

Owns the run of mutmut, the choice of killing tests and the list of justified survivors. Imports
any room of `properties`; part of the repository, not of the wheel.
"""
