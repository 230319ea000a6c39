"""The engine's parts, one by one, against HF's modules on random weights.

Owns one file per kind of part. Imports `engine.layers`, `engine.attention`, `engine.sampler` and
the rules of `golden.compare`; no model, no scheduler.
"""
