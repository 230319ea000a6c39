"""The simulator: the shared kernel driven by simulated time (SimPy, integer nanoseconds)."""
