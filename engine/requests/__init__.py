"""Requests as a user sees them: prompts in, text and outputs out, progress between.

Owns prompt encoding, detokenising, the registry of live requests and `RequestOutput`.
Imports `engine.core`, options and sampling parameters; no model, no device.
"""
