"""The table of options and the one parser of all verbs.

Every option has its name, type, limits, help and aliases here once; the engine's keyword
arguments, the command lines and the studies of the simulator read them. Imports `engine.core`.
"""
