"""Predicted against recorded runs: teacher-forced and free-running, side by side.

Owns the comparison and its page. Imports `sim.calibration`, `sim.cluster`, `sim.report` and the
step log.
"""
