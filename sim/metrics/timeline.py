"""Curves over time in a bounded number of bins, for plots."""

from __future__ import annotations

from array import array


class Timeline:
    """Time integral of some quantities per bin; bins double in width as the run grows."""

    def __init__(
        self, names: tuple[str, ...], num_bins: int = 512, width_ns: int = 1 << 20
    ) -> None:
        self.names = names
        self.num_bins = num_bins
        self.width_ns = width_ns
        self._areas = {name: array("d", [0.0]) * num_bins for name in names}

    def add(self, start_ns: int, end_ns: int, values: tuple[float, ...]) -> None:
        """Adds constant values from start to end."""
        while end_ns > self.width_ns * self.num_bins:
            self._double()
        width = self.width_ns
        for index in range(start_ns // width, -(-end_ns // width)):
            left, right = max(start_ns, index * width), min(end_ns, (index + 1) * width)
            for name, value in zip(self.names, values, strict=True):
                self._areas[name][index] += value * (right - left)

    def curve(self, name: str, end_ns: int) -> tuple[list[float], list[float]]:
        """Middle of each bin in seconds and the mean value there."""
        used = min(self.num_bins, -(-end_ns // self.width_ns))
        middles = [(index + 0.5) * self.width_ns / 1e9 for index in range(used)]
        return middles, [area / self.width_ns for area in self._areas[name][:used]]

    def _double(self) -> None:
        half = self.num_bins // 2
        for name, areas in self._areas.items():
            pairs = [areas[2 * index] + areas[2 * index + 1] for index in range(half)]
            self._areas[name] = array("d", pairs) + array("d", [0.0]) * (self.num_bins - half)
        self.width_ns *= 2
