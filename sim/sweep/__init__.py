"""Sweeps: what is varied, the figures of each point over seeds, curves, their knee, and reports.

Owns grids, points and their files; each run is a command's. Imports `sim.planning` and the rooms
below it; no command.
"""
