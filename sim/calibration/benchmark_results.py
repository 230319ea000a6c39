"""Results of public load generators as recorded requests: `vllm bench serve` and AIPerf."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.core.errors import InputError

_BENCH_KEYS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")


def requests_of_bench(where: str, text: str) -> list[dict[str, float]] | None:
    """The requests of a `vllm bench serve --save-result --save-detailed` file; None for others.

    Failed requests, which have no tokens, are left out.

    Raises:
        InputError: it lacks the columns of `--save-detailed`, or they do not fit together.
    """
    try:
        document = json.loads(text)
    except ValueError:
        return None
    if not isinstance(document, dict) or "request_throughput" not in document:
        return None
    columns = [document.get(key) for key in _BENCH_KEYS]
    for key, column in zip(_BENCH_KEYS, columns, strict=True):
        if not isinstance(column, list):
            raise InputError(f"{where}: {key} is missing: save it with --save-detailed")
    counts = {len(column) for column in columns if isinstance(column, list)}
    if len(counts) != 1:
        raise InputError(f"{where}: {', '.join(_BENCH_KEYS)} are of different lengths")
    rows = []
    try:
        for prompt, outputs, start, ttft, gaps in zip(*columns, strict=True):
            if outputs < 1 or ttft <= 0:
                continue
            first = start + ttft
            rows.append(_row(prompt, outputs, start, first, first + sum(gaps)))
    except TypeError:
        raise InputError(f"{where}: {', '.join(_BENCH_KEYS)} must hold numbers") from None
    return rows


def request_of_aiperf(where: str, entry: Mapping[str, Any]) -> dict[str, float] | None:
    """The request of one line of an AIPerf `profile_export.jsonl`; None for one that failed.

    Raises:
        InputError: it was not streamed, so that nobody saw its first token.
    """
    metadata, metrics = entry["metadata"], entry.get("metrics") or {}
    if entry.get("error") or metadata.get("was_cancelled"):
        return None
    if not isinstance(metrics, dict) or "time_to_first_token" not in metrics:
        raise InputError(f"{where}: time_to_first_token is missing: benchmark with --streaming")
    try:
        start = metadata["request_start_ns"] / 1e9
        first = start + metrics["time_to_first_token"]["value"] / 1e3
        last = start + metrics["request_latency"]["value"] / 1e3
        lengths = [metrics[f"{name}_sequence_length"]["value"] for name in ("input", "output")]
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: {error}: is missing or no number") from None
    return _row(lengths[0], lengths[1], start, first, last)


def is_aiperf(entry: Mapping[str, Any]) -> bool:
    """Whether a line of JSON is one of AIPerf's."""
    return isinstance(entry.get("metadata"), dict) and "request_start_ns" in entry["metadata"]


def _row(
    prompt: float, outputs: float, start: float, first: float, last: float
) -> dict[str, float]:
    return {
        "prompt_tokens": prompt,
        "output_tokens": outputs,
        "queued_ts": start,
        "first_token_ts": first,
        "last_token_ts": last,
    }
