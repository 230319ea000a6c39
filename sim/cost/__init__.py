"""Cost models: how long a step takes, in integer nanoseconds.

Owns the features of a step and every model of its time. Imports `sim.specs` and the data types of
`engine.core`; knows no event and no server.
"""
