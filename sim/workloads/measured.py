"""Results of measuring tools as traces: vLLM's bench, AIPerf and GuideLLM, made flat."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from engine.core.errors import InputError
from sim.workloads.text import Row


def is_measured(row: Row) -> bool:
    """Whether a row (or the whole document) is a result of such a tool."""
    fields = row.fields
    return (
        {"input_lens", "output_lens"} <= set(fields)
        or {"metadata", "metrics"} <= set(fields)
        or isinstance(fields.get("benchmarks"), list)
    )


def measured_rows(path: Path, row: Row) -> Iterator[Row]:
    """The requests of a result, with a reason where one is no request to repeat.

    Raises:
        InputError: the result lacks what every such result has.
    """
    if "input_lens" in row.fields:
        yield from _vllm_bench(path, row)
    elif "metrics" in row.fields:
        yield _aiperf_record(path, row)
    else:
        yield from _guidellm(path, row)


def _vllm_bench(path: Path, row: Row) -> Iterator[Row]:
    """`vllm bench serve --save-result --save-detailed`: one list per column."""
    fields = row.fields
    inputs, outputs = _column(path, fields, "input_lens"), _column(path, fields, "output_lens")
    starts = _column(path, fields, "start_times") if fields.get("start_times") else None
    errors = fields.get("errors") or [""] * len(inputs)
    sizes = {len(inputs), len(outputs), len(errors), len(starts) if starts else len(inputs)}
    if len(sizes) != 1:
        raise InputError(f"{path}: input_lens, output_lens, start_times, errors differ in length")
    for index, error in enumerate(errors):
        flat = {"input_len": inputs[index], "output_len": outputs[index]}
        if starts:
            flat["start_time"] = starts[index]
        yield Row(index + 1, flat, "the request failed" if error else "")


def _aiperf_record(path: Path, row: Row) -> Row:
    """One line of AIPerf's `profile_export.jsonl`."""
    metadata, metrics = row.fields["metadata"], row.fields["metrics"]
    if not isinstance(metadata, dict) or not isinstance(metrics, dict):
        raise InputError(f"{path}:{row.line}: metadata and metrics must be objects")
    flat: dict[str, Any] = {"request_start_ns": metadata.get("request_start_ns")}
    for name in ("input_sequence_length", "output_sequence_length"):
        value = metrics.get(name)
        flat[name] = value.get("value") if isinstance(value, dict) else value
    flat["conversation_id"] = metadata.get("conversation_id")
    reason = ""
    if row.fields.get("error"):
        reason = "the request failed"
    elif metadata.get("was_cancelled"):
        reason = "the request was cancelled"
    elif metadata.get("benchmark_phase", "profiling") != "profiling":
        reason = "the request belongs to the warm-up"
    return Row(row.line, flat, reason)


def _list_of(path: Path, place: str, value: object) -> list[Any]:
    """A list, which may be left out."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{path}: {place}={value!r}: must be a list")
    return value


def _guidellm(path: Path, row: Row) -> Iterator[Row]:
    """GuideLLM's report; of several benchmarks the first."""
    benchmarks = _list_of(path, "benchmarks", row.fields["benchmarks"])
    first = benchmarks[0] if benchmarks else None
    requests = first.get("requests") if isinstance(first, dict) else None
    if not isinstance(requests, dict):
        raise InputError(f"{path}: benchmarks[0].requests is missing")
    number = 0
    for kind, reason in (
        ("successful", ""),
        ("errored", "the request failed"),
        ("incomplete", "the request did not end"),
    ):
        place = f"benchmarks[0].requests.{kind}"
        for request in _list_of(path, place, requests.get(kind)):
            number += 1
            if not isinstance(request, dict):
                raise InputError(f"{path}: {place}: must hold objects")
            start = request.get("request_start_time", request.get("start_time"))
            flat = {
                "guide_prompt_tokens": request.get("prompt_tokens"),
                "guide_output_tokens": request.get("output_tokens"),
                "request_start_time": start,
            }
            yield Row(number, flat, reason)
    for benchmark in benchmarks[1:]:
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        done = requests.get("successful") if isinstance(requests, dict) else None
        for _ in _list_of(path, "benchmarks[].requests.successful", done):
            number += 1
            yield Row(number, {}, "it belongs to another benchmark of the report than the first")


def _column(path: Path, fields: dict[str, Any], name: str) -> list[Any]:
    value = fields[name]
    if not isinstance(value, list):
        raise InputError(f"{path}: {name}: must be a list (was it saved with --save-detailed?)")
    return value


def latencies_of(path: Path, rows: Iterator[Row]) -> dict[str, float]:
    """Means of what a result measured, in ms, under vLLM's names; empty where it measured none."""
    sums: dict[str, list[float]] = {"ttft_ms": [], "itl_ms": [], "e2el_ms": []}
    for row in rows:
        fields = row.fields
        for value in _list_of(path, "ttfts", fields.get("ttfts")):
            sums["ttft_ms"].append(_number(value) * 1e3)
        for gaps in _list_of(path, "itls", fields.get("itls")):
            sums["itl_ms"].extend(_number(gap) * 1e3 for gap in _list_of(path, "itls[]", gaps))
        metrics = fields.get("metrics")
        if isinstance(metrics, dict):
            names = {"time_to_first_token": "ttft_ms", "inter_token_latency": "itl_ms",
                     "request_latency": "e2el_ms"}  # fmt: skip
            for name, ours in names.items():
                entry = metrics.get(name)
                if isinstance(entry, dict) and entry.get("unit", "ms") == "ms":
                    sums[ours].append(_number(entry.get("value")))
    return {f"mean_{name}": sum(all_) / len(all_) for name, all_ in sums.items() if all_}


def _number(value: object) -> float:
    plain = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    return float(str(value)) if plain else 0.0
