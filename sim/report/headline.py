"""What a report of a run opens with: what was run, the answer, and the command to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.metrics.run_summary import CostTrust, RunSummary
from sim.report.tables import number

# Step kinds of a calibrated model's errors, as people call them.
_KINDS = (("decode", "decode steps"), ("mixed", "steps with prompts"))


def gpus_text(replicas: int, tp: int, hardware: str) -> str:
    """As `8 x h100 (1 replica, TP 8)`: the GPUs come first, since they are paid for."""
    gpus = f"{replicas * tp} x {hardware}"
    if replicas * tp == 1:
        return gpus
    split = [f"{replicas} replica{'s' if replicas > 1 else ''}"]
    split += [f"TP {tp}"] if tp > 1 else []
    return f"{gpus} ({', '.join(split)})"


def cost_text(cost: Mapping[str, Any]) -> str:
    """Which cost model a run used, and what a calibrated one was made from."""
    if cost["name"] != "calibrated":
        return str(cost["name"])
    return f"calibrated on {len(cost['sources'])} logs of {cost['engine']}, {cost['hardware']}"


def _fold_rows(cost: Mapping[str, Any]) -> list[list[str]]:
    """How far off a fitted cost model was on logs that it was not fitted to."""
    folds = cost.get("held_out")
    if not folds:
        return []
    parts = []
    for key, label in _KINDS:
        errors = [fold["percent"][key]["mape"] for fold in folds if key in fold["percent"]]
        if errors:
            parts.append(f"{min(errors):.1f} to {max(errors):.1f} % of {label}")
    text = f"mean absolute {', '.join(parts)}, on {len(folds)} logs left out of the fit"
    return [["its error in step times", text]]


def lead_of(summary: RunSummary) -> str:
    """What was run, in one line."""
    made = summary.sim.provenance
    deployment = made.deployment
    gpus = gpus_text(
        _int(deployment["replicas"]), _int(deployment["tp"]), str(deployment["hardware"])
    )
    return (
        f"A simulated run: {deployment['model']} on {gpus}, {_rate_text(summary)},"
        f" policy {made.kernel['policy']}, {made.cost['name']} costs"
    )


def trust_rows(trust: CostTrust | None) -> list[list[str]]:
    """How far off the cost model was measured to be, and why `auto` took no better one."""
    if trust is None:
        return []
    rows = [["its error on other runs", trust.error_class]]
    return rows + [[f"not {kind}", why] for kind, why in trust.passed_over.items()]


def run_rows(summary: RunSummary) -> list[list[str]]:
    """What was run, as names and values."""
    made = summary.sim.provenance
    deployment, kernel, workload = made.deployment, made.kernel, made.workload
    replicas, tp = _int(deployment["replicas"]), _int(deployment["tp"])
    cost: Mapping[str, Any] = made.cost
    rows = [
        ["model", str(deployment["model"])],
        ["GPUs", gpus_text(replicas, tp, str(deployment["hardware"]))],
        ["workload", f"{workload['name']}, {number(workload['num_requests'])} requests"],
        ["rate", _rate_text(summary)],
        ["policy", str(kernel["policy"])],
    ]
    if replicas > 1:
        rows.append(["router", str(deployment["router"])])
    if deployment.get("prefill_replicas"):
        rows.append(["roles", _roles_text(deployment)])
    rows += [
        ["KV pool of each", f"{number(kernel['num_blocks'])} blocks of {kernel['block_size']}"],
        ["limits of a step", f"{number(kernel['max_num_seqs'])} sequences,"
         f" {number(kernel['max_num_batched_tokens'])} tokens"],
        ["cost model", cost_text(cost)],
        *_fold_rows(cost),
        *trust_rows(summary.sim.trust),
        ["seed", str(made.seed)],
    ]  # fmt: skip
    return rows


def _roles_text(deployment: Mapping[str, Any]) -> str:
    """How many servers do what, and how the KV gets from one kind to the other."""
    way = "layer by layer" if deployment["kv_transfer_layerwise"] else "as a whole"
    return (
        f"{deployment['prefill_replicas']} prefill, {deployment['decode_replicas']} decode; KV"
        f" {way} at {number(deployment['kv_transfer_gb_per_s'])} GB/s,"
        f" {number(deployment['kv_transfer_latency_us'])} us"
    )


def answer_rows(summary: RunSummary) -> list[list[str]]:
    """What the run says about the deployment: the service that it gives and what that takes."""
    deployment = summary.sim.provenance.deployment
    gpus = _int(deployment["replicas"]) * _int(deployment["tp"])
    rows = []
    if summary.request_goodput is not None:
        share = summary.request_goodput / summary.request_throughput
        rows.append([f"within the SLO ({slo_text(summary)})", f"{share:.1%} of requests"])
        rows.append(["goodput", f"{number(summary.request_goodput)} req/s"])
    if not summary.sim.stable:
        rows.append(["stable", "no: more work came than can be served"])
    hours = gpus / 3600 / summary.output_throughput * 1e6
    per_gpu = f"{number(summary.output_throughput / gpus)} output tok/s"
    rows += [
        ["throughput of a GPU", f"{per_gpu}, {number(summary.request_throughput / gpus)} req/s"],
        ["cost", f"{number(hours)} GPU hours per million output tokens"],
    ]
    return rows


def slo_text(summary: RunSummary) -> str:
    """The limits of the SLO."""
    limits = summary.sim.slo_ms.items()
    return ", ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in limits)


def replica_rows(summary: RunSummary) -> list[list[str]]:
    """One row per replica, columns as in `REPLICA_COLUMNS`."""
    return [
        [
            str(index),
            number(one.completed),
            number(one.num_steps),
            f"{one.utilisation:.1%}",
            f"{one.mean_kv_utilisation:.1%}",
            f"{one.peak_kv_utilisation:.1%}",
            number(one.computed_tokens),
        ]
        for index, one in enumerate(summary.sim.replicas)
    ]


REPLICA_COLUMNS: Sequence[str] = (
    "replica", "requests", "steps", "busy", "KV mean", "KV peak", "computed tokens",
)  # fmt: skip


def _rate_text(summary: RunSummary) -> str:
    """The rate that was asked for, where one was, and the one that was served."""
    served = f"{number(summary.request_throughput)} req/s served"
    asked = summary.sim.provenance.workload.get("rate")
    return served if asked is None else f"{asked:g} req/s asked, {served}"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
