"""How sure are `golden check` and its references? False alarms over seeds, and planted faults.

python benchmarks/golden_faults.py alarms --out FILE      # healthy engines, tiny models
python benchmarks/golden_faults.py faults MODEL --out FILE
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from engine.worker.device import device_name, installed_versions
from golden.cases import TINY_MODELS
from golden.check.check_plan import CheckPlan, engine_for
from golden.check.engine_runs import rows_of
from golden.check.model_check import CheckOutcome, compare_engine, make_setting, truth_for
from golden.check.run_judge import Judge
from golden.faults import FAULTS
from golden.forced import ForcedRunner
from golden.record import current_commit
from golden.reference import quiet_transformers, random_hf_model, save_model
from golden.stored.make_reference import make_reference
from golden.stored.reference_file import dtype_name
from golden.stored.stored_check import check_stored, seen_of
from golden.stored.stored_rules import StoredJudge

SEEDS = 50
DTYPES = ("float32", "bfloat16", "float16")


def quiet(_line):
    """No progress."""


def judge(folder, dtype, reference, truths):
    """(broken rules of check, largest error over bound, the same of the reference)."""
    engine = {"dtype": dtype, "device": "cpu"}
    plan = CheckPlan(str(folder), engine)
    setting = make_setting(plan)
    if dtype not in truths:
        truths[dtype] = truth_for(setting, quiet)[0]
    outcome = CheckOutcome(setting, [])
    compare_engine(plan, setting, truths[dtype], outcome, quiet)
    excess = max(case.stats.max_excess for case in outcome.cases if case.stats)
    found = {
        "check": [f"{case.name}: {case.detail}" for case in outcome.cases if not case.ok],
        "check_excess": excess,
    }
    if reference.about["is_mixture"] and dtype != "float32":
        return found
    stored = check_stored(plan, reference, quiet)
    found["reference"] = [f"{case.name}: {case.detail}" for case in stored.cases if not case.ok]
    found["reference_excess"] = max(stats.max_excess for stats in stored.stats.values())
    return found


def alarms():
    """One row per seed and dtype; families take turns."""
    rows = []
    for seed in range(SEEDS):
        case = TINY_MODELS[seed % len(TINY_MODELS)]
        with tempfile.TemporaryDirectory() as name:
            folder = save_model(random_hf_model(case, seed + 1000), Path(name) / "model")
            reference = make_reference(CheckPlan(str(folder), {"device": "cpu"}), 64, quiet)
            truths = {}
            for dtype in DTYPES:
                found = judge(folder, dtype, reference, truths)
                rows.append({"seed": seed, "model": case.name, "dtype": dtype, **found})
                print(seed, case.name, dtype, found, flush=True)
    return rows


def faults(folder, dtypes, prompts):
    """One row per fault and dtype, the healthy engine first.

    The engine runs the prompts as asked and once more from the prefix cache; both judges see both.
    """
    plan = CheckPlan(folder, {"device": "cpu"}, prompts, max_tokens=8)
    reference = make_reference(plan, 64, quiet)
    rows = []
    for dtype in dtypes:
        plan = CheckPlan(folder, {"device": "cpu", "dtype": dtype}, prompts, max_tokens=8)
        setting = make_setting(plan)
        truth = truth_for(setting, quiet)[0]
        for name, fault in [("none", None), *FAULTS.items()]:
            found = judge_twice(plan, setting, truth, reference, fault)
            rows.append({"fault": name, "dtype": dtype, **found})
            print(dtype, name, found, flush=True)
    return rows


def judge_twice(plan, setting, truth, reference, fault):
    """What check and reference say of one engine."""
    check = Judge(truth, setting.dtype)
    stored = StoredJudge(reference, dtype_name(setting.dtype))
    known = {item.name: item for item in reference.sequences}
    options = engine_for(plan, truth.sequences, needs_eager=False)
    with ForcedRunner(options, device="cpu") as runner:
        if fault is not None:
            fault(runner.runner)
        for _ in range(2):
            for rows in rows_of(runner, runner.run(truth.sequences)):
                check.add(rows)
                for seen in seen_of(rows, known[rows.sequence.name]):
                    stored.add(seen)
    ours, theirs = check.finish().stats, stored.finish()
    return {
        "check": list(ours.violations),
        "check_excess": ours.max_excess,
        "reference": list(theirs.violations),
        "reference_excess": theirs.max_excess,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("alarms", "faults"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet_transformers()
    started = time.perf_counter()
    if args.what == "alarms":
        rows = alarms()
    else:
        rows = faults(args.model, args.dtypes.split(","), args.prompts)
    record = {
        "command": f"python benchmarks/golden_faults.py {args.what}",
        "commit": current_commit(),
        "device": device_name(torch.device("cpu")),
        "versions": installed_versions(torch.device("cpu")) | {"python": platform.python_version()},
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    if args.what == "alarms":
        bad = [row for row in rows if row["check"] or row.get("reference")]
        record["false_alarms"] = len(bad)
        print(f"{len(bad)} false alarms in {len(rows)} runs")
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
