"""Workloads: trace readers and generators, all as one table of requests."""
