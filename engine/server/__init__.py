"""The HTTP front end: OpenAI's endpoints, over any body that computes tokens.

Owns routes, schemas, errors, limits, metrics and the life of the server process; `protocol.py`
says what a body is. Imports `engine.text`, `engine.arguments` and `engine.core`, never torch and
no body.
"""
