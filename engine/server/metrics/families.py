"""Accumulators for one family each: cheap to add to, read only when somebody scrapes.

`prometheus_client` writes the text; its own histograms take a lock and a dictionary look-up for
each observation, which at ten thousand tokens a second is time that the streams need.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Labels = tuple[str, ...]


class Value:
    """One number of a gauge or counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float) -> None:
        """Adds to it."""
        self.value += amount


class Buckets:
    """The observations of one label set of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Books `count` observations of one value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulated(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last one +Inf."""
        found, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return found


class Family:
    """A gauge or counter with its labels."""

    def __init__(self, kind: type, name: str, help: str, labels: Labels) -> None:
        self._kind, self._name, self._help, self._labels = kind, name, help, labels
        self._values: dict[Labels, Value] = {}

    def at(self, *labels: str) -> Value:
        """The number under these labels."""
        if labels not in self._values:
            assert len(labels) == len(self._labels)
            self._values[labels] = Value()
        return self._values[labels]

    def metric(self) -> Metric:
        """What a scrape sees."""
        family: GaugeMetricFamily | CounterMetricFamily = self._kind(
            self._name, self._help, labels=self._labels
        )
        for labels, value in self._values.items():
            family.add_metric(labels, value.value)
        return family


class HistogramFamily:
    """A histogram with its labels."""

    def __init__(self, name: str, help: str, labels: Labels, bounds: Sequence[float]) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._buckets: dict[Labels, Buckets] = {}

    def at(self, *labels: str) -> Buckets:
        """The observations under these labels."""
        if labels not in self._buckets:
            self._buckets[labels] = Buckets(self._bounds)
        return self._buckets[labels]

    def under(self, name: str, help: str) -> HistogramFamily:
        """The same observations under another name."""
        other = HistogramFamily(name, help, self._labels, self._bounds)
        other._buckets = self._buckets
        return other

    def metric(self) -> Metric:
        """What a scrape sees."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, buckets in self._buckets.items():
            family.add_metric(labels, buckets.cumulated(), buckets.total)
        return family


class Families:
    """All families of one server: a collector for `prometheus_client`'s registry."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._families: list[Family | HistogramFamily] = []

    def gauge(self, name: str, help: str, *more_labels: str) -> Family:
        """A new gauge; `name` is without its prefix."""
        return self._add(Family(GaugeMetricFamily, name, help, (*self._labels, *more_labels)))

    def counter(self, name: str, help: str, *more_labels: str) -> Family:
        """A new counter; `name` is without prefix and `_total`."""
        return self._add(Family(CounterMetricFamily, name, help, (*self._labels, *more_labels)))

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> HistogramFamily:
        """A new histogram."""
        family = HistogramFamily(name, help, self._labels, bounds)
        self._families.append(family)
        return family

    def alias(self, family: HistogramFamily, name: str, help: str) -> None:
        """A second name for a histogram."""
        self._families.append(family.under(name, help))

    def _add(self, family: Family) -> Family:
        self._families.append(family)
        return family

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at a scrape."""
        for family in self._families:
            yield family.metric()
