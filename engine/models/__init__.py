"""Decoder models, their configuration and their weights.

Owns shapes, presets and the loading of checkpoints. Imports `engine.layers` and what lies below
it; knows no request.
"""
