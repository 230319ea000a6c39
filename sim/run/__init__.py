"""One simulated run from options to results: deployment, run, intervals, written files.

Owns the one place where names of options become objects. Imports every room below it
(`cluster`, `cost`, `metrics`, `specs`, `workloads`, `report`); no command.
"""
