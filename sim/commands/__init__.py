"""The simulator's verbs: run, plan, validate, diff, calibrate; arguments in, exit code out.

Owns argument parsing. Imports all of `sim`; nothing imports a command but `engine.cli`, by name.
"""
