"""The digital twin: the simulator's replicas in real time, as a body behind the HTTP server.

Owns the pacing of simulated time by the wall clock, made-up answers, and faults on demand. Imports
`sim.run`, `sim.cluster`, and of the engine `engine.server`'s interface and `engine.text`.
"""
