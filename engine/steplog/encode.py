"""JSON form of step-log records, writing side: what each line of the file means.

An optional field that has its default is left out, so most lines stay short.
"""

from __future__ import annotations

import json

from engine.steplog.ids import encode_ids, encode_prompt
from engine.steplog.records import (
    FORMAT_NAME,
    FORMAT_VERSION,
    AddRecord,
    DecodeStretch,
    LogHeader,
    Record,
    StepRecord,
)

Json = dict[str, object]
dump_line = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def header_to_json(header: LogHeader) -> Json:
    """The first line of a log."""
    return {
        "type": "header",
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "lockstep": header.lockstep_version,
        "writer": header.writer,
        "kernel": header.kernel.to_json(),
        "options": dict(header.options),
        "model": dict(header.model),
        "hardware": dict(header.hardware),
        "seed": header.seed,
        "replicas": header.num_replicas,
        "outputs_in_adds": header.outputs_in_adds,
        "omits": list(header.omits),
    }


def record_to_json(record: Record) -> Json:
    """One record; zero-valued optional fields are left out."""
    if isinstance(record, DecodeStretch):
        return _stretch_to_json(record)
    if isinstance(record, StepRecord):
        return _step_to_json(record)
    if isinstance(record, AddRecord):
        return _add_to_json(record)
    line: Json = {"type": "abort", "id": record.request_id, "time": record.time_ns}
    return _with_place(line, record.open_plans, record.replica)


def _with_place(line: Json, open_plans: int, replica: int) -> Json:
    if open_plans:
        line["open"] = open_plans
    if replica:
        line["replica"] = replica
    return line


def _add_to_json(record: AddRecord) -> Json:
    request = record.request
    line: Json = {"type": "add", "id": request.request_id, "arrival": record.arrival_ns}
    if record.added_ns != record.arrival_ns:
        line["added"] = record.added_ns
    line["prompt"] = encode_prompt(request.prompt)
    line["max_tokens"] = request.max_tokens
    if request.stop_token_ids:
        line["stop"] = sorted(request.stop_token_ids)
    if request.min_tokens:
        line["min_tokens"] = request.min_tokens
    if request.priority:
        line["priority"] = request.priority
    if request.extra_keys:
        line["extra_keys"] = [list(pair) for pair in request.extra_keys]
    if record.outputs is not None:
        line["outputs"] = encode_prompt(record.outputs)
    return _with_place(line, record.open_plans, record.replica)


def _step_to_json(record: StepRecord) -> Json:
    line: Json = {
        "type": "step",
        "step": record.step,
        "start": record.start_ns,
        "duration": record.duration_ns,
    }
    if record.decode_ids:
        line["ids"] = list(record.decode_ids)
        line["positions"] = list(record.decode_positions)
    if record.chunks:
        line["chunks"] = [[*chunk[:4], int(chunk.samples)] for chunk in record.chunks]
    if record.preempted:
        line["preempted"] = list(record.preempted)
    if record.admitted:
        line["admitted"] = [[*entry[:5], int(entry.resumed)] for entry in record.admitted]
    if record.new_blocks:
        line["blocks"] = [
            [blocks.request_id, blocks.first_index, encode_ids(blocks.block_ids)]
            for blocks in record.new_blocks
        ]
    _put_counts(line, record)
    if record.token_ids is not None:
        line["tokens"] = encode_ids(record.token_ids)
    if record.sampled is not None:
        line["sampled"] = list(record.sampled)
    if record.discarded:
        line["discarded"] = True
    return _put_outcome(line, record)


def _stretch_to_json(record: DecodeStretch) -> Json:
    line: Json = {
        "type": "decode",
        "step": record.first_step,
        "start": record.start_ns,
        "durations": list(record.durations_ns),
    }
    if any(record.gaps_ns):
        line["gaps"] = list(record.gaps_ns)
    line["ids"] = list(record.decode_ids)
    line["positions"] = list(record.positions)
    if record.new_blocks:
        line["blocks"] = [list(block) for block in record.new_blocks]
    _put_counts(line, record)
    if record.token_ids is not None:
        line["tokens"] = [encode_ids(row) for row in record.token_ids]
    return _put_outcome(line, record)


def _put_counts(line: Json, record: StepRecord | DecodeStretch) -> None:
    line["free"] = record.num_free_blocks
    line["running"] = record.num_running
    line["waiting"] = record.num_waiting


def _put_outcome(line: Json, record: StepRecord | DecodeStretch) -> Json:
    if record.finished:
        line["finished"] = [list(finish) for finish in record.finished]
    for name, value in (("host", record.host_ns), ("device", record.device_ns)):
        if value is not None:
            line[name] = list(value) if isinstance(value, tuple) else value
    if record.graph_bucket is not None:
        line["bucket"] = record.graph_bucket
    return _with_place(line, record.open_plans, record.replica)
