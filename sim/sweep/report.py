"""The page of a sweep: throughput-latency curves with intervals and knees, and the table."""

from __future__ import annotations

from html import escape

from sim.report.marks import Bar, Marks, marked_chart
from sim.report.page import figures, page
from sim.report.svg import COLOURS
from sim.report.tables import html_table
from sim.sweep.knee import LATENCY, THROUGHPUT
from sim.sweep.points import CONFIDENCE, Curve, shown
from sim.sweep.result import Sweep, knee_lines, table_of

# Overload would stretch the axis without telling anything: so many times the knee's latency.
_ABOVE_KNEE = 5.0
_AGAINST_THROUGHPUT = (
    (LATENCY, "mean latency, ms"),
    ("p99_ttft_ms", "p99 TTFT, ms"),
    ("p99_tpot_ms", "p99 TPOT, ms"),
)
_AGAINST_AXIS = (
    (THROUGHPUT, "output tokens/s"),
    ("request_goodput", "requests/s within all limits"),
    ("mean_ttft_ms", "mean TTFT, ms"),
    ("mean_tpot_ms", "mean TPOT, ms"),
)


def render_sweep(sweep: Sweep) -> str:
    """The whole page."""
    varied = ", ".join(axis.name for axis in sweep.axes)
    lead = f"{len(sweep.points)} points, {len(sweep.seeds)} seeds each; varied: {varied}"
    knees = "".join(f"<p><strong>{escape(line)}</strong></p>" for line in knee_lines(sweep))
    header, rows = table_of(sweep)
    left_out = [[sweep.name_of(one), one.error] for one in sweep.points if one.error is not None]
    sections = {
        "Knee": knees,
        "Latency against throughput": figures(_throughput_charts(sweep)),
        f"Figures against {sweep.along.name}": figures(_axis_charts(sweep)),
        "Points": _intervals_note(sweep) + html_table(header, rows),
        "Left out": html_table(("point", "reason"), left_out, kind="text") if left_out else "",
        "How this sweep was made": f"<p>Repeat it with</p><pre>{escape(sweep.command)}</pre>",
    }
    return page("sweep", lead, {name: text for name, text in sections.items() if text})


def _intervals_note(sweep: Sweep) -> str:
    text = "Of an unstable point more work came than was served: its latencies grow with the run."
    if len(sweep.seeds) > 1:
        text = f"± and bars: {CONFIDENCE:.0%} intervals of the mean over the seeds. {text}"
    return f"<p>{text}</p>"


def _shown(sweep: Sweep) -> list[Curve]:
    return sweep.curves[: len(COLOURS)]


def _throughput_charts(sweep: Sweep) -> dict[str, str]:
    charts = {}
    for figure, label in _AGAINST_THROUGHPUT:
        marks, tops = [], []
        for curve in _shown(sweep):
            one = _marks(curve, THROUGHPUT, figure, sweep)
            marks.append(one)
            tops += [_ABOVE_KNEE * y for _, (_, y) in one.rings]
        highest = max((y for one in marks for _, y in one.points), default=1.0)
        top = min([1.08 * highest, *([max(tops)] if tops else [])])
        charts[f"{label} against throughput"] = marked_chart(
            marks, "output tokens/s", label, y_top=top
        )
    return charts


def _marks(curve: Curve, x_name: str, y_name: str, sweep: Sweep) -> Marks:
    """Points in the order of the sweep: beyond saturation a curve may turn back."""
    points: list[tuple[float, float]] = []
    bars: list[Bar] = []
    rings = []
    knee, along = sweep.knees.get(curve.name), sweep.along
    for point in curve.points:
        x, y = point.estimate(x_name), point.estimate(y_name)
        if x is None or y is None:
            continue
        points.append((x.mean, y.mean))
        if knee is not None and point is knee.point:
            # Knees of many curves may lie together: the first ring names what all of them are.
            where = f"knee, {along.name}={shown(point.setting[along.name])}"
            rings.append((where if curve is sweep.curves[0] else "", points[-1]))
        if x.low is not None and x.high is not None:
            bars.append(((x.low, y.mean), (x.high, y.mean)))
        if y.low is not None and y.high is not None:
            bars.append(((x.mean, y.low), (x.mean, y.high)))
    name = curve.name or along.name
    return Marks(name, points, along.is_number, bars=bars, rings=rings, ordered=False)


def _axis_charts(sweep: Sweep) -> dict[str, str]:
    along = sweep.along
    charts: dict[str, str] = {}
    if not along.is_number:
        return charts
    for figure, label in _AGAINST_AXIS:
        marks = []
        for curve in _shown(sweep):
            points: list[tuple[float, float]] = []
            bars: list[Bar] = []
            for point in curve.points:
                x, y = float(str(point.setting[along.name])), point.estimate(figure)
                if y is None:
                    continue
                points.append((x, y.mean))
                if y.low is not None and y.high is not None:
                    bars.append(((x, y.low), (x, y.high)))
            marks.append(Marks(curve.name or along.name, points, bars=bars))
        if any(one.points for one in marks):
            charts[f"{label} against {along.name}"] = marked_chart(marks, along.name, label)
    return charts
