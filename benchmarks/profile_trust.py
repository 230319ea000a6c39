"""Writes the free-running errors of a held-out validation into a profile, whose runs state them.

    python benchmarks/profile_trust.py VALIDATION.json PROFILE.json

VALIDATION is what `lockstep sim validate LOGS --held-out --replicates N --out` wrote; asynchronous
profiles get theirs from `lockstep sim calibrate` itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

KEYS = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "throughput": "output_throughput"}


def main() -> None:
    """Rewrites the profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("validation", type=Path)
    parser.add_argument("profile", type=Path)
    arguments = parser.parse_args()
    runs = json.loads(arguments.validation.read_text(encoding="utf-8"))["runs"]
    assert all(run["held_out"] for run in runs), "only held-out errors say how far off a run is"
    document = json.loads(arguments.profile.read_text(encoding="utf-8"))
    document["free_running_percent"] = [errors_of(run) for run in runs]
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    arguments.profile.write_text(text, encoding="utf-8")


def errors_of(run: dict) -> dict[str, object]:
    """The median errors of one run's replicates."""
    rows = {row["key"]: row for row in run["metrics"]}
    errors = {name: rows[key]["noisy_median_error_percent"] for name, key in KEYS.items()}
    return {"log": run["run"], **{name: round(error, 2) for name, error in errors.items()}}


if __name__ == "__main__":
    main()
