"""A finished sweep, as JSON data, as tables of points and of runs, and in words."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from engine.steplog.atomic import write_text
from engine.steplog.output_folder import OutputFolder, read_head, read_json
from sim.planning.cache import code_digest
from sim.report.page import is_page
from sim.report.tables import number
from sim.run.deployment import versions
from sim.sweep.grid import Axis
from sim.sweep.knee import Knee, knee_of
from sim.sweep.points import CONFIDENCE, FIGURES, Curve, Estimate, Point, curves_of, shown

POINTS, RUNS, DOCUMENT, REPORT = "sweep.csv", "runs.csv", "sweep.json", "report.html"
CACHE = "cache"
FORMAT, VERSION = "lockstep-sweep", 1
_TABLE = (
    ("tok/s out", "output_throughput"),
    ("req/s", "request_throughput"),
    ("goodput", "request_goodput"),
    ("mean TTFT", "mean_ttft_ms"),
    ("p99 TTFT", "p99_ttft_ms"),
    ("mean TPOT", "mean_tpot_ms"),
    ("p99 TPOT", "p99_tpot_ms"),
    ("mean E2EL", "mean_e2el_ms"),
)


@dataclass(frozen=True)
class Sweep:
    """All points in the order of the grid; `command` repeats it."""

    command: str
    axes: Sequence[Axis]
    seeds: Sequence[int]
    points: Sequence[Point]

    @property
    def along(self) -> Axis:
        """The axis that curves run along: a load, else a number, else the first."""
        loads = [axis for axis in self.axes if axis.is_load]
        numbers = [axis for axis in self.axes if axis.is_number]
        return [*loads, *numbers, *self.axes][0]

    @cached_property
    def curves(self) -> list[Curve]:
        """The points along that axis, one curve for each setting of the others."""
        others = [axis for axis in self.axes if axis is not self.along]
        return curves_of([self.along, *others], self.points)

    @cached_property
    def knees(self) -> dict[str, Knee]:
        """The knee of each curve that has one, by the curve's name."""
        if not self.along.is_load:
            return {}
        found = {curve.name: knee_of(curve, self.along.name) for curve in self.curves}
        return {name: knee for name, knee in found.items() if knee is not None}

    def name_of(self, point: Point) -> str:
        """A point's setting as words."""
        return " ".join(f"{name}={shown(value)}" for name, value in point.setting.items())


def sweep_folder(out: Path) -> OutputFolder:
    """The folder of a sweep's results, in which its cache may stand."""
    known = {DOCUMENT: _is_sweep, POINTS: _is_table, RUNS: _is_table, REPORT: is_page}
    return OutputFolder(out, known, last=DOCUMENT, shared=True)


def _is_sweep(path: Path) -> bool:
    document = read_json(path)
    return isinstance(document, dict) and document.get("format") == FORMAT


def _is_table(path: Path) -> bool:
    return b",output_throughput," in read_head(path).partition(b"\n")[0]


def write_tables(sweep: Sweep, folder: Path) -> None:
    """Writes the three files of data; no clock or path goes in, so reruns are equal."""
    write_text(folder / POINTS, _csv(_point_rows(sweep)))
    write_text(folder / RUNS, _csv(_run_rows(sweep)))
    text = json.dumps(sweep_document(sweep), indent=1, allow_nan=False) + "\n"
    write_text(folder / DOCUMENT, text)


def sweep_document(sweep: Sweep) -> dict[str, object]:
    """The sweep as JSON data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "command": sweep.command,
        "vary": {axis.name: [_plain(value) for value in axis.values] for axis in sweep.axes},
        "seeds": list(sweep.seeds),
        "confidence": CONFIDENCE,
        "points": [_point_document(point) for point in sweep.points],
        "knees": {name: _knee_document(knee) for name, knee in sweep.knees.items()},
        "code": code_digest(),
        "versions": versions(),
    }


def _point_document(point: Point) -> dict[str, object]:
    figures = {name: point.estimate(name) for name in FIGURES}
    return {
        "setting": _setting(point),
        "error": point.error,
        "unstable_runs": point.unstable,
        "figures": {name: one and asdict(one) for name, one in figures.items()},
    }


def _knee_document(knee: Knee) -> dict[str, object]:
    return {
        "setting": _setting(knee.point),
        "at_edge": knee.at_edge,
        "alike": [_setting(point) for point in knee.alike],
    }


def _setting(point: Point) -> dict[str, object]:
    return {name: _plain(value) for name, value in point.setting.items()}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


Row = Mapping[str, object]


def _point_rows(sweep: Sweep) -> list[Row]:
    knees = {id(knee.point) for knee in sweep.knees.values()}
    rows: list[Row] = []
    for point in sweep.points:
        row: dict[str, object] = dict(_setting(point))
        row |= {"seeds": len(point.runs), "unstable_runs": point.unstable}
        row |= {"knee": int(id(point) in knees), "error": point.error}
        for name in FIGURES:
            one = point.estimate(name)
            row[name] = one and one.mean
            row[f"{name}_low"], row[f"{name}_high"] = one and one.low, one and one.high
        rows.append(row)
    return rows


def _run_rows(sweep: Sweep) -> list[Row]:
    return [
        {
            **_setting(point),
            "seed": run.seed,
            "stable": int(run.stable),
            "rejected": run.rejected,
            "extrapolated_steps": run.extrapolated,
            "error": run.error,
            **{name: run.figures.get(name) for name in FIGURES},
        }
        for point in sweep.points
        for run in point.runs
    ]


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table_of(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table for people; a star marks a knee."""
    knees = {id(knee.point) for knee in sweep.knees.values()}
    header = [*(axis.name for axis in sweep.axes), *(name for name, _ in _TABLE), ""]
    rows = []
    for point in sweep.points:
        if point.error is not None:
            continue
        note = "knee" if id(point) in knees else ""
        note += f"{', ' if note else ''}unstable" if point.unstable else ""
        cells = [shown(value) for value in point.setting.values()]
        rows.append([*cells, *(_cell(point.estimate(key)) for _, key in _TABLE), note])
    return header, rows


def _cell(one: Estimate | None) -> str:
    if one is None:
        return "-"
    if one.low is None or one.high is None:
        return number(one.mean)
    return f"{number(one.mean)} ± {number(one.high - one.mean, 3)}"


def knee_lines(sweep: Sweep) -> list[str]:
    """What is known of the knee of each curve, in sentences."""
    lines = []
    for name, knee in sweep.knees.items():
        where = f"{name}: " if name else ""
        place = shown(knee.point.setting[sweep.along.name])
        text = (
            f"{where}knee at {sweep.along.name}={place}, where throughput over latency is highest"
        )
        if knee.at_edge:
            text += "; it is an end of the sweep, so the knee may lie outside"
        others = [shown(one.setting[sweep.along.name]) for one in knee.alike if one != knee.point]
        if others:
            text += f"; not told apart from it at {CONFIDENCE:.0%}: {', '.join(others)}"
        lines.append(text)
    return lines
