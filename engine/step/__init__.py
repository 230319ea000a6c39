"""One step of the real engine: plan to command, launch, collect, commit, log.

Owns the loop and the translation of plans. Imports `engine.core`, `engine.steplog`,
`engine.requests` and the executor's interface in `engine.worker`.
"""
