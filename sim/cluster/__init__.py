"""The SimPy processes: servers that each own a kernel, fleets, routers and the clock.

Owns events and their order. Imports `engine.core`, `engine.steplog`, `sim.cost`,
`sim.metrics`, `sim.workloads`; knows no file, no option and no report.
"""
