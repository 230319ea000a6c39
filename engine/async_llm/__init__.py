"""`AsyncLLM`: the engine as a body of the server, its loop in a process of its own.

Owns the messages between the two processes and both their ends. Imports `engine.llm` (in the
engine's process only), `engine.server.protocol` and `engine.sampling_params`.
"""
