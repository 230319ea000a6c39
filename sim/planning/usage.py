"""What a run used of its servers, and which resource limits a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.cluster.prefill_decode import DecodeServer
from sim.cluster.server import Server
from sim.metrics.requests import Ledger

_FULL = 0.98
_OFTEN = 0.05
_BUSY = 0.9


def usage_of(servers: Sequence[Server], ledger: Ledger, end_ns: int) -> dict[str, float]:
    """Shares from 0 to 1, and counts per request, over all servers of a run.

    `mfu` and `mbu` are of busy time and data-sheet peaks; `budget` is the fill of steps with
    prompt tokens, `seqs_full` the share of steps at `max_num_seqs`, `busiest` the busy share of
    the busiest server.
    """
    stats = [server.stats for server in servers]
    busy_ns = [one.busy_ns for one in stats]
    flops = sum(one.decode.flops + one.prefill.flops for one in stats)
    num_bytes = sum(one.decode.num_bytes + one.prefill.num_bytes for one in stats)
    peak_flops = sum(one.physics.hardware.flops_per_s * one.busy_ns / 1e9 for one in stats)
    peak_bytes = sum(one.physics.hardware.memory_bytes_per_s * one.busy_ns / 1e9 for one in stats)
    prefill_ns = sum(one.prefill.busy_ns for one in stats)
    steps, full, prompt_tokens, room = 0, 0, 0, 0
    for server, one in zip(servers, stats, strict=True):
        config = server.scheduler.config
        steps += one.num_steps
        full += sum(
            count for batch, count in one.batch_steps.items() if batch >= config.max_num_seqs
        )
        if not isinstance(server, DecodeServer):
            prompt_tokens += one.prefill.num_tokens
            room += one.prefill.num_steps * config.max_num_batched_tokens
    started = sum(1 for time in ledger.first_scheduled_ns if time >= 0)
    return {
        "busy": _ratio(sum(busy_ns), end_ns * len(stats)),
        "busiest": _ratio(max(busy_ns), end_ns),
        "mfu": _ratio(flops, peak_flops),
        "mbu": _ratio(num_bytes, peak_bytes),
        "steps_with_prompts": _ratio(prefill_ns, sum(busy_ns)),
        "budget": _ratio(prompt_tokens, room),
        "seqs_full": _ratio(full, steps),
        "kv_mean": _ratio(
            sum(one.kv_block_ns for one in stats), sum(one.num_blocks for one in stats) * end_ns
        ),
        "kv_peak": max(one.kv_peak_blocks / one.num_blocks for one in stats),
        "preemptions": _ratio(sum(ledger.preemptions), started),
        "hit_rate": _ratio(
            sum(one.first_hit_tokens for one in stats),
            sum(one.first_queried_tokens for one in stats),
        ),
    }


def bottleneck(usage: Mapping[str, float]) -> tuple[str, str]:
    """The limiting resource in one word (kv, sequences, compute, bandwidth, queue), and why."""
    if usage["preemptions"] > 0.01 or usage["kv_peak"] >= _FULL:
        return "kv", (
            f"KV pool {usage['kv_peak']:.0%} full at its peak,"
            f" {usage['preemptions']:.3f} preemptions per request"
        )
    if usage["seqs_full"] > _OFTEN:
        return "sequences", f"{usage['seqs_full']:.0%} of the steps at max_num_seqs"
    if usage["busiest"] < _BUSY:
        return "queue", (
            f"the busiest server works {usage['busiest']:.0%} of the time, so bursts decide"
        )
    figures = f"MFU {usage['mfu']:.0%}, MBU {usage['mbu']:.0%} of busy time"
    return ("compute" if usage["mfu"] >= usage["mbu"] else "bandwidth"), figures


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
