"""Recorded and free-running figures of asynchronous runs side by side, as the client saw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from sim.calibration.pipeline_evaluate import (
    PipelineFold,
    evaluate_pipeline,
    pipeline_fold_json,
)
from sim.calibration.pipeline_fit import PipelineFit
from sim.calibration.pipeline_free import (
    percent_errors,
    predicted_figures,
    recorded_figures,
)
from sim.calibration.pipeline_samples import PipelineSamples
from sim.cost.pipeline_profile import PipelineProfile
from sim.report.page import page
from sim.report.tables import html_table, number

HEADER = ("", "recorded", "free-running", "error")


@dataclass(frozen=True, slots=True)
class PipelineComparison:
    """One validated asynchronous run."""

    name: str
    held_out: bool
    sources: tuple[str, ...]
    fold: PipelineFold
    recorded: dict[str, float]
    predicted: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Predicted against recorded figures in percent."""
        return percent_errors(self.predicted, self.recorded)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        errors = self.errors
        return {
            "run": self.name,
            "held_out": self.held_out,
            "scheduling": "asynchronous",
            "profile_sources": list(self.sources),
            "step_times": pipeline_fold_json(self.fold),
            "metrics": [
                {
                    "key": key,
                    "recorded": self.recorded[key],
                    "free_running": self.predicted[key],
                    "free_running_error_percent": errors[key],
                }
                for key in self.recorded
            ],
        }


def compare_pipeline(
    log: PipelineSamples, profile: PipelineProfile, held_out: bool
) -> PipelineComparison:
    """Predicts a run from its arrivals and lengths, by the mean over hosts that drift."""
    fit = PipelineFit(np.array(profile.decode_ns), np.array(profile.prompt_ns), profile.host)
    return PipelineComparison(
        name=log.name,
        held_out=held_out,
        sources=tuple(str(source["name"]) for source in profile.sources),
        fold=evaluate_pipeline(log, fit, profile.graphs),
        recorded=recorded_figures(log),
        predicted=predicted_figures(log, profile),
    )


def pipeline_notes(comparison: PipelineComparison) -> list[str]:
    """What a reader must know before the figures."""
    how = "held out: fitted to" if comparison.held_out else "profile made from"
    lines = [f"asynchronous scheduling; {how} {', '.join(comparison.sources)}"]
    for label, error in (
        ("pure decode periods", comparison.fold.decode),
        ("device time of steps with prompts", comparison.fold.prompt),
        ("prefill episodes", comparison.fold.episode),
    ):
        if error is not None:
            lines.append(
                f"{label}: mean absolute error {error.mape:.2f} %, mean {error.bias:+.2f} %"
                f" ({error.num_steps:,})"
            )
    lines.append(f"busy time in total: {comparison.fold.busy:+.2f} %")
    return lines


def pipeline_rows(comparison: PipelineComparison) -> list[list[str]]:
    """The figures as texts."""
    errors = comparison.errors
    return [
        [
            key,
            number(comparison.recorded[key]),
            number(comparison.predicted[key]),
            f"{errors[key]:+.2f} %",
        ]
        for key in comparison.recorded
    ]


def render_pipelines(comparisons: Sequence[PipelineComparison]) -> str:
    """The whole page."""
    sections = {}
    for one in comparisons:
        items = "".join(f"<li>{escape(line)}</li>" for line in pipeline_notes(one))
        sections[one.name] = f"<ul>{items}</ul>" + html_table([*HEADER], pipeline_rows(one))
    return page(
        "Predicted against recorded asynchronous runs",
        "Free-running: the simulator fed arrivals and lengths only, averaged over drifting hosts.",
        sections,
    )
