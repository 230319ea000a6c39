"""Scatter plots as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from sim.cost.work import Floats
from sim.report.svg import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, grid, legend

MAX_POINTS = 1500


def scatter_chart(
    series: Mapping[str, tuple[Floats, Floats]],
    x_label: str,
    y_label: str,
    y_range: tuple[float, float],
) -> str:
    """Points of several logs; those beyond `y_range` are drawn at its edge."""
    drawn = {name: (xs, ys) for name, (xs, ys) in series.items() if len(xs)}
    if not drawn:
        return '<p class="empty">nothing to plot</p>'
    highest = max(float(xs.max()) for xs, _ in drawn.values())
    x_axis = Axis(0.0, highest or 1.0, LEFT, WIDTH - RIGHT, False)
    y_axis = Axis(*y_range, HEIGHT - BOTTOM, TOP, False)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(y_label)} against {escape(x_label)}">'
    ]
    parts += grid(x_axis, y_axis, x_label, y_label)
    for index, (xs, ys) in enumerate(drawn.values()):
        colour = COLOURS[index % len(COLOURS)]
        dots = _dots(xs, ys, x_axis, y_axis)
        parts.append(
            f'<path d="{dots}" stroke="{colour}" stroke-width="2.4" stroke-linecap="round"'
            ' stroke-opacity=".45"/>'
        )
    parts.append("</svg>")
    parts.append(legend(list(drawn)))
    return "".join(parts)


def _dots(xs: Floats, ys: Floats, x_axis: Axis, y_axis: Axis) -> str:
    """A path of zero-length strokes, which round caps make dots."""
    chosen = np.unique(np.linspace(0, len(xs) - 1, min(MAX_POINTS, len(xs))).astype(int))
    clipped = np.clip(ys[chosen], y_axis.low, y_axis.high)
    return "".join(
        f"M{x_axis.place(x):.1f} {y_axis.place(y):.1f}h0"
        for x, y in zip(xs[chosen].tolist(), clipped.tolist(), strict=True)
    )
