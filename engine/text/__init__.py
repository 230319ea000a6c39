"""Tokens and text: what a tokenizer must offer, how one is loaded, and text that grows by tokens.

Knows no request and no engine. Imports nothing of the project but `engine.core.errors`;
transformers only when a tokenizer is loaded.
"""
