"""Golden suites: the engine's numbers against HF Transformers.

Owns rules of comparison, cases, references and records. Imports all of `engine` (the real runner,
step by step) and Transformers; nothing imports it but `engine.cli`, by name.
"""
