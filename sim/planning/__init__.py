"""Capacity planning: from a workload and an SLO to a deployment."""
