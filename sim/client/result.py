"""A result in the keys of `vllm bench serve --save-result --save-detailed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from sim.client.seen import NS_PER_S, Seen, gaps_s
from sim.client.target import Target

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")


def bench_result(
    seen: Sequence[Seen],
    target: Target,
    begin_ns: int,
    prompt_lens: Sequence[int],
    slos_ms: Mapping[str, float],
) -> dict[str, object]:
    """The whole result; failed requests have no tokens and stand in no mean.

    `client_late_ms_*` say how long after its time a request was sent: large values mean that the
    client, not the server, was measured.
    """
    whole = [one for one in seen if one.is_whole]
    end_ns = max((one.token_ns[-1] for one in whole), default=begin_ns)
    duration_s = (end_ns - begin_ns) / NS_PER_S
    inputs = [one.prompt_tokens or prompt_lens[one.row] for one in seen]
    outputs = [one.output_tokens or len(one.token_ns) if one.is_whole else 0 for one in seen]
    ttfts = [(one.token_ns[0] - one.start_ns) / NS_PER_S if one.is_whole else 0.0 for one in seen]
    itls = [gaps_s(one.token_ns) if one.is_whole else [] for one in seen]
    values = latencies_ms(whole)
    good = sum(_meets(values, index, slos_ms) for index in range(len(whole)))
    total_out = sum(outputs)
    found: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if target.chat else "openai",
        "backend": "openai-chat" if target.chat else "openai",
        "model_id": target.model,
        "num_prompts": len(seen),
        "max_concurrency": target.max_concurrency,
        "duration": duration_s,
        "completed": len(whole),
        "failed": len(seen) - len(whole),
        "total_input_tokens": sum(inputs),
        "total_output_tokens": total_out,
        "request_throughput": _per(len(whole), duration_s),
        "request_goodput": _per(good, duration_s) if slos_ms else None,
        "output_throughput": _per(total_out, duration_s),
        "total_token_throughput": _per(total_out + sum(inputs), duration_s),
        "total_cached_tokens": sum(one.cached_tokens for one in seen),
        "input_lens": inputs,
        "output_lens": outputs,
        "start_times": [one.start_ns / NS_PER_S for one in seen],
        "ttfts": ttfts,
        "itls": itls,
        "errors": [one.error or "" for one in seen],
    }
    pooled = {
        "ttft": values["ttft"],
        "tpot": [value for value, one in zip(values["tpot"], whole, strict=True) if _has_gaps(one)],
        "itl": [gap * 1e3 for gaps in itls for gap in gaps],
        "e2el": values["e2el"],
    }
    for name in METRICS:
        found.update(_figures(name, pooled[name]))
    late = [(one.start_ns - one.due_ns) / 1e6 for one in seen]
    found["client_late_ms_mean"] = float(np.mean(late)) if late else 0.0
    found["client_late_ms_max"] = max(late, default=0.0)
    return found


def latencies_ms(whole: Sequence[Seen]) -> dict[str, list[float]]:
    """TTFT, TPOT and end-to-end latency of each; one token alone has a TPOT of 0."""
    ttft = [(one.token_ns[0] - one.start_ns) / 1e6 for one in whole]
    e2el = [(one.token_ns[-1] - one.start_ns) / 1e6 for one in whole]
    counts = [one.output_tokens or len(one.token_ns) for one in whole]
    tpot = [
        (end - first) / (count - 1) if count > 1 else 0.0
        for first, end, count in zip(ttft, e2el, counts, strict=True)
    ]
    return {"ttft": ttft, "tpot": tpot, "e2el": e2el}


def _meets(values: Mapping[str, list[float]], index: int, slos_ms: Mapping[str, float]) -> bool:
    return all(values[name][index] <= limit for name, limit in slos_ms.items() if name in values)


def _has_gaps(one: Seen) -> bool:
    return (one.output_tokens or len(one.token_ns)) > 1


def _figures(name: str, values: Sequence[float]) -> dict[str, object]:
    """Mean, median, deviation and percentiles under vLLM's names."""
    array = np.asarray(values, dtype=float)
    if not array.size:
        array = np.zeros(1)
    found: dict[str, object] = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    for percent in PERCENTILES:
        found[f"p{percent}_{name}_ms"] = float(np.percentile(array, percent))
    return found


def _per(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
