"""The calibration report of asynchronous logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from sim.cost.pipeline_profile import PipelineProfile, pipeline_to_json
from sim.report.page import page


def render_pipeline(profile: PipelineProfile, lines: Sequence[str]) -> str:
    """The whole page."""
    target = profile.target
    return page(
        f"Calibration of {target.model['name']} on {target.hardware}",
        f"Asynchronous scheduling: device and host as two clocks. Engine: {target.engine}",
        {
            "Errors and coefficients": f"<pre>{escape(chr(10).join(lines))}</pre>",
            "Profile": f"<pre>{escape(json.dumps(pipeline_to_json(profile), indent=1))}</pre>",
        },
    )
