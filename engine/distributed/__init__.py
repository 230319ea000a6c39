"""Ranks that compute together: process groups and the one-kernel all-reduce.

Owns collectives. Imports torch and `engine.kernels`.
"""
