"""Laws of whole simulated runs: relations between runs, timed checks, anomalies.

The only room of `properties` that imports `sim`, with the laws that name it.
"""
