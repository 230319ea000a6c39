"""Triton kernels of paged attention."""
