"""A model of the kernel in Promela, the language of the model checker Spin, and its way back.

Owns the model, the run of the checker and the replay of the model's calls on the kernel. Imports
`engine.core` only; part of the repository, not of the wheel.
"""
