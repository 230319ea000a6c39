"""Triton kernels of the layers; imported only where Triton is installed and a CUDA tensor asks."""
