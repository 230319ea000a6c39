"""Layers of decoders; each has a torch reference, and fused Triton kernels on CUDA.

Owns parameters and how they are sharded. Imports torch, `engine.attention`, `engine.kernels` and
`engine.distributed`; knows no request and no checkpoint.
"""
