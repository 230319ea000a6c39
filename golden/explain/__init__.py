"""Small experiments for learners: each prints what it does, step by step, in seconds on a CPU.

Owns text for people and nothing that a suite needs. Imports `engine` only.
"""
