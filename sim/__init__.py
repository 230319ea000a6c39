"""The simulator: the shared kernel driven by simulated time (SimPy, integer nanoseconds).

Owns costs, workloads, servers, metrics and planning. Imports `engine.core` and `engine.steplog`,
never torch.
"""
