"""Mutation testing of the kernel: how much of it could be wrong without anybody noticing."""
