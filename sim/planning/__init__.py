"""Capacity planning: from a workload and an SLO to a deployment.

Owns studies, their search and their answers. Imports `sim.run` and the rooms below it; no command.
"""
