"""The step log: one JSON-lines form for the engine, the simulator and imported recordings.

Owns its records, codec, reader, writer, diff, Perfetto export and replay through a kernel.
Imports `engine.core` only; `engine.steplog.api` is the door for everybody else.
"""
