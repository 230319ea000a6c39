"""Data sheets: model shapes, GPUs, and how many KV blocks fit.

Owns parameter, byte and capacity arithmetic. Imports `engine.core.errors` only.
"""
