"""Cost models fitted to recorded steps: samples, fit, held-out errors, report.

Owns fitting; a fitted model in use is `sim.cost.calibrated`. Imports `sim.cost`, `sim.run` and
`sim.report`; no command, no planning.
"""
