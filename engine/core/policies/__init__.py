"""The scheduling policies, one file each.

A policy owns its rules (order, admission, chunks, victim, time of registration, free order) and
the facts that others ask of it. It imports the kernel's parts below the scheduler; the scheduler
and the configuration reach it by name, through `engine.core.policy_registry`.
"""
