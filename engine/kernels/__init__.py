"""All Triton kernels, one idea per file; each has a plain torch twin beside its caller.

Owns launch shapes and nothing else. Imports torch and Triton, no other room of the engine.
"""
