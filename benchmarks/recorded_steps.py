"""Step times of 8-bit models and mixtures on an H200 against what the simulator says of them.

    python3 benchmarks/gpu_fp8_moe.py --out DIR --only models --passes 3 --step-logs   # on the GPU
    python benchmarks/recorded_steps.py DIR/steps_*.jsonl.gz [--out RECORD.json]        # anywhere

Of each log the last pass is judged: by the roofline and the operator tables as they are, and by a
roofline whose parameters were fitted to the pass before it. Errors are of the summed times, and
medians of absolute errors of steps, in percent; the recorded time is the device's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from engine.core.errors import LockstepError
from engine.models.presets import PRESETS
from engine.steplog.api import StepRecord
from engine.steplog.vllm_recording import open_log
from sim.calibration.samples import record_features
from sim.cost.optable import OptableCost
from sim.cost.physics import Physics
from sim.cost.roofline import RooflineCost, RooflineOptions
from sim.run.deployment import build, deployment_with

WORKLOAD_REQUESTS = 256
KINDS = {"one decode": (1, 1), "2-64 decodes": (2, 64), "65-256 decodes": (65, 256)}
FREE = ("memory_efficiency", "compute_efficiency", "attention_compute_efficiency",
        "attention_memory_efficiency", "host_step_ns", "host_seq_ns")  # fmt: skip
START = RooflineOptions(attention_memory_efficiency=0.8)


def main() -> None:
    """Prints a table, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = {}
    for path in arguments.logs:
        record[path.name] = judge(path, arguments.hardware)
        for way, found in record[path.name]["errors_percent"].items():
            print(f"{path.name} {way}: {json.dumps(found)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def judge(path, hardware):
    """Errors of every way on the last pass of a log."""
    log = open_log(path)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-model-"))
    model, quantization, kv = named(path)
    raw = dict(PRESETS[model])
    if quantization:
        raw["quantization_config"] = {"quant_method": quantization, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(raw))
    given = {"model": str(folder), "hardware": hardware, "cost": "roofline", "max_model_len": 4096}
    built = build(deployment_with(given | ({"kv_cache_dtype": kv} if kv else {})), 0)
    shape, sheet = built.model, built.hardware
    *_, before, last = passes(log)
    options = fitted(before, shape, sheet)
    ways = {
        "roofline": RooflineCost(shape, sheet),
        "roofline fitted": RooflineCost(shape, sheet, 1, options),
    }
    try:
        ways["operator tables"] = OptableCost(Physics(shape, sheet, 1, None))
    except LockstepError as error:
        print(f"{path.name}: no operator tables: {error}")
    errors = {way: errors_of(cost, last) for way, cost in ways.items()}
    return {"steps": len(last), "fitted": options.given(), "errors_percent": errors}


def named(path):
    """Model, quantization and KV dtype in the name of a log of gpu_fp8_moe.py."""
    model, *rest = path.name.removeprefix("steps_").removesuffix(".jsonl.gz").split("_")
    return (model, *rest) if rest else (model, None, None)


def passes(log):
    """(features, device time) of each step, by pass of the workload; single requests are left."""
    found, current, live = [], [], 0
    ends = 0
    for item in log.expanded():
        if not isinstance(item, StepRecord):
            live += 1
            continue
        if item.device_ns is not None:
            current.append((record_features(item, log.header), item.device_ns))
        ends += len(item.finished)
        live -= len(item.finished)
        if live == 0:
            if ends == WORKLOAD_REQUESTS:
                found.append(current)
            current, ends = [], 0
    return found


def fitted(steps, shape, sheet):
    """Roofline parameters that bring the relative errors of some steps down."""
    times = np.array([time for _, time in steps], float)
    start = np.array([getattr(START, name) for name in FREE], float)

    def options_at(scaled):
        values = dict(zip(FREE, scaled * start, strict=True))
        values["host_step_ns"], values["host_seq_ns"] = (
            int(values["host_step_ns"]), int(values["host_seq_ns"]),
        )  # fmt: skip
        return replace(START, **values)

    def errors(scaled):
        cost = RooflineCost(shape, sheet, 1, options_at(scaled))
        told = np.array([cost.step_time_ns(features) for features, _ in steps])
        return (told / times - 1) * np.sqrt(times / times.mean())  # few long steps count as much

    most = [0.99 / value if name.endswith("efficiency") else 20.0
            for name, value in zip(FREE, start, strict=True)]  # fmt: skip
    found = least_squares(
        errors,
        np.ones(len(FREE)),
        bounds=(1e-3, most),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=0.01,
    )
    return options_at(found.x)


def errors_of(cost, steps):
    """Bias of the sum and median absolute error of the steps, in all and by kind."""
    features = [one for one, _ in steps]
    times = np.array([time for _, time in steps], float)
    told = np.array([cost.step_time_ns(one) for one in features], float)
    kinds = {"all": np.ones(len(steps), bool)}
    kinds["with prompts"] = np.array([bool(one.chunks) for one in features])
    for name, (least, most) in KINDS.items():
        kinds[name] = np.array(
            [not one.chunks and least <= one.num_decodes <= most for one in features]
        )
    return {
        name: {
            "steps": int(chosen.sum()),
            "sum": round(100 * (told[chosen].sum() / times[chosen].sum() - 1), 1),
            "median": round(100 * float(np.median(abs(told[chosen] / times[chosen] - 1))), 1),
        }
        for name, chosen in kinds.items()
        if chosen.any()
    }


if __name__ == "__main__":
    main()
