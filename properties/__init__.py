"""Laws of the kernel and the simulator, and the machinery that searches for violations.

Owns what right means for a scheduler, without a tensor. Imports `engine.core`, `engine.steplog`
and, in the rooms that say so, `sim`; never torch.
"""
