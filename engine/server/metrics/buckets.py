"""Bucket bounds of the histograms: those of vLLM, which public dashboards expect."""

from __future__ import annotations

REQUEST_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
ITERATION_TOKENS = tuple(float(bound) for bound in (1, *(2**power for power in range(3, 15))))
REQUEST_PARAMS_N = (1.0, 2.0, 5.0, 10.0, 20.0)
REQUEST_NUM_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def token_counts(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the longest request."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > max_model_len:
                return tuple(bounds)
            bounds.append(float(digit * power))
        power *= 10
