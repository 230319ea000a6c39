"""`/metrics`: vLLM's names, labels and buckets, in Prometheus' text format.

Imports `prometheus_client` and the messages of `engine.server`.
"""

from engine.server.metrics.server_metrics import RequestTimes, ServerMetrics

__all__ = ["RequestTimes", "ServerMetrics"]
