"""One simulated run from options to results: deployment, run, intervals, written files.

Imports every room below it (`cluster`, `cost`, `metrics`, `specs`, `workloads`); no command.
"""
