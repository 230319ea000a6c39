"""The bodies of requests as pydantic models, and what is refused by name.

Imports `engine.server.messages` and `engine.core`; no route and no body.
"""
