"""The endpoints: each reads its body, runs a call and writes the answer.

Imports the other files of `engine.server`; no body.
"""
