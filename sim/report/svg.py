"""Line charts as inline SVG, so that a report is one file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f5fa8", "#c8501e", "#2a7f45", "#7a4fa3", "#8a6d1b", "#0f7f8c", "#a8325e", "#555555")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 16, 46
_MAX_POINTS = 600
Limits = Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One named line."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    y_max: float | None = None,
    steps: bool = False,
    x_limits: Limits = (),
    y_limits: Limits = (),
) -> str:
    """An SVG element; with `log_x` points at or below 0 are left out.

    Limits are named values, drawn as dashed lines; the axes reach them.
    """
    drawn = [_thinned(one, log_x) for one in series]
    drawn = [one for one in drawn if one.xs]
    if not drawn:
        return '<p class="empty">nothing to plot</p>'
    x_low = min(min(one.xs) for one in drawn) if log_x else 0.0
    x_high = max([max(one.xs) for one in drawn] + [1.05 * value for _, value in x_limits])
    if x_high <= x_low:
        x_high = x_low * 2 if log_x else x_low + 1
    highest = max([max(one.ys) for one in drawn] + [value for _, value in y_limits])
    top = y_max or highest * 1.05 or 1.0
    x_axis = Axis(x_low, x_high, LEFT, WIDTH - RIGHT, log_x)
    y_axis = Axis(0.0, top, HEIGHT - BOTTOM, TOP, False)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(y_label)} against {escape(x_label)}">'
    ]
    parts += grid(x_axis, y_axis, x_label, y_label)
    for index, one in enumerate(drawn):
        points = _path(one, x_axis, y_axis, steps)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    parts += [_upright_limit(name, x_axis.place(value)) for name, value in x_limits]
    parts += [_level_limit(name, y_axis.place(value)) for name, value in y_limits]
    parts.append("</svg>")
    if len(drawn) > 1:
        parts.append(legend([one.name for one in drawn]))
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` on the pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        """Pixel of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values on the axis."""
        if self.log:
            return self._log_ticks()
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        for factor in (1, 2, 5, 10):
            if (self.high - self.low) / (step * factor) <= 6:
                step *= factor
                break
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1,) if high - low > 3 else (1, 2, 5)
        ticks = [f * 10.0**power for power in range(low, high + 1) for f in factors]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def grid(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> list[str]:
    """SVG parts of both axes: lines, numbers and labels."""
    parts = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in x_axis.ticks():
        x = f"{x_axis.place(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" class="mid">{_short(tick)}</text>')
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{_short(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" class="mid">{escape(x_label)}</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {height}) rotate(-90)" class="mid">{escape(y_label)}</text>'
    )
    return parts


_DASHES = 'stroke="currentColor" stroke-width="1.2" stroke-dasharray="5 4"'


def _upright_limit(name: str, x: float) -> str:
    """A dashed line from bottom to top, its name beside it."""
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" {_DASHES}/>'
        f'<text transform="translate({x - 5:.1f} {HEIGHT - BOTTOM - 8}) rotate(-90)">'
        f"{escape(name)}</text>"
    )


def _level_limit(name: str, y: float) -> str:
    """A dashed line from left to right, its name above it."""
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {_DASHES}/>'
        f'<text x="{LEFT + 6}" y="{max(y - 5, TOP + 10):.1f}">{escape(name)}</text>'
    )


def _path(series: Series, x_axis: Axis, y_axis: Axis, steps: bool) -> str:
    parts = []
    before = 0.0
    for index, (x, y) in enumerate(zip(series.xs, series.ys, strict=True)):
        px, py = x_axis.place(x), y_axis.place(y)
        if not index:
            parts.append(f"M{px:.1f} {py:.1f}")
        elif steps:
            parts.append(f"L{px:.1f} {before:.1f}L{px:.1f} {py:.1f}")
        else:
            parts.append(f"L{px:.1f} {py:.1f}")
        before = py
    return "".join(parts)


def _thinned(series: Series, log_x: bool) -> Series:
    """At most about `_MAX_POINTS` points, the last one among them."""
    points = list(zip(series.xs, series.ys, strict=True))
    if log_x:
        points = [point for point in points if point[0] > 0]
    stride = max(1, len(points) // _MAX_POINTS)
    kept = points[::stride]
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return Series(series.name, [x for x, _ in kept], [y for _, y in kept])


def legend(names: Sequence[str]) -> str:
    """HTML of a legend in the order of `COLOURS`."""
    items = [
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def _short(value: float) -> str:
    if value == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"
