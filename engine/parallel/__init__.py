"""Tensor parallelism: the group that layers reduce over, and the launch of its ranks."""
