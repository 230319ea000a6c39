"""Laws of the kernel and the simulator, and the machinery that searches for violations."""
