"""Paged attention: one signature, three backends, and the choice among them.

Owns how queries meet the paged KV cache. Imports torch and `engine.kernels`, no model.
"""
