"""Layers of dense decoders; each has a torch reference, and fused Triton kernels on CUDA."""
