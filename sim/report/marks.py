"""Charts of a plan as inline SVG: lines with marked points, limits, and a Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sim.report.svg import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, grid

Points = Sequence[tuple[float, float]]
Bar = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Marks:
    """One named set of points; `line` joins them. Without a colour it takes the next one.

    `bars` are intervals of the points: horizontal or vertical lines between two places. The line
    goes from left to right, or from point to point as they come if they are not `ordered`. `rings`
    are places with a ring and their name beside it.
    """

    name: str
    points: Points
    line: bool = True
    colour: str | None = None
    bars: Sequence[Bar] = ()
    rings: Sequence[tuple[str, tuple[float, float]]] = ()
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Guide:
    """A dashed line from one point to another, with a name."""

    name: str
    start: tuple[float, float]
    end: tuple[float, float]


def marked_chart(
    marks: Sequence[Marks],
    x_label: str,
    y_label: str,
    guides: Sequence[Guide] = (),
    y_top: float | None = None,
    x_low: float = 0.0,
) -> str:
    """An SVG chart; points above `y_top` are drawn at its edge."""
    points = [point for one in marks for point in one.points]
    points += [end for one in marks for bar in one.bars for end in bar]
    if not points:
        return '<p class="empty">nothing to plot</p>'
    x_high = max(x for x, _ in points) * 1.04 or 1.0
    top = y_top if y_top is not None else max(y for _, y in points) * 1.08 or 1.0
    x_axis = Axis(min(x_low, x_high / 2), x_high, LEFT, WIDTH - RIGHT, False)
    y_axis = Axis(0.0, top, HEIGHT - BOTTOM, TOP, False)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(y_label)} against {escape(x_label)}">'
    ]
    parts += grid(x_axis, y_axis, x_label, y_label)
    parts += [_guide(guide, x_axis, y_axis) for guide in guides]
    for index, one in enumerate(marks):
        colour = _colour(one, index)
        drawn = sorted(one.points) if one.ordered else one.points
        places = [(x_axis.place(x), y_axis.place(min(y, top))) for x, y in drawn]
        parts += [_bar(bar, x_axis, y_axis, colour) for bar in one.bars]
        if one.line and places:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts += [_ring(name, place, x_axis, y_axis, colour) for name, place in one.rings]
    parts.append("</svg>")
    if len(marks) > 1:
        parts.append(_legend(marks))
    return "".join(parts)


def _bar(bar: Bar, x_axis: Axis, y_axis: Axis, colour: str) -> str:
    (x1, y1), (x2, y2) = ((x_axis.place(x), y_axis.place(min(y, y_axis.high))) for x, y in bar)
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        ' stroke-width="3" stroke-opacity=".4"/>'
    )


def _ring(name: str, place: tuple[float, float], x_axis: Axis, y_axis: Axis, colour: str) -> str:
    x, y = x_axis.place(place[0]), y_axis.place(min(place[1], y_axis.high))
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="{colour}" stroke-width="2"/>'
        f'<text x="{x - 10:.1f}" y="{max(y - 9, TOP + 10):.1f}" class="end">{escape(name)}</text>'
    )


def _colour(marks: Marks, index: int) -> str:
    return marks.colour or COLOURS[index % len(COLOURS)]


def _legend(marks: Sequence[Marks]) -> str:
    items = [
        f'<span><i style="background:{_colour(one, index)}"></i>{escape(one.name)}</span>'
        for index, one in enumerate(marks)
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def pareto_front(points: Points) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _guide(guide: Guide, x_axis: Axis, y_axis: Axis) -> str:
    (x1, y1), (x2, y2) = (
        (
            x_axis.place(min(x, x_axis.high)),
            y_axis.place(min(y, y_axis.high)),
        )
        for x, y in (guide.start, guide.end)
    )
    # The label stands inside the plot, at the right end and above the line.
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor"'
        ' stroke-width="1.2" stroke-dasharray="5 4"/>'
        f'<text x="{x2 - 4:.1f}" y="{max(y2 - 5, TOP + 10):.1f}" class="end">'
        f"{escape(guide.name)}</text>"
    )
