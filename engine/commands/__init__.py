"""The engine's verbs: generate, bench, log and model; arguments in, exit code out.

Owns argument parsing and printing. Imports the facade `engine.llm` and whatever a verb shows;
nothing imports a command but `engine.cli`, by name.
"""
