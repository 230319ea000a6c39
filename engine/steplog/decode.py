"""JSON form of step-log records, reading side: types, ranges and lengths are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from engine.core.config import KernelConfig
from engine.core.request import Request
from engine.steplog.fields import (
    Fields,
    Json,
    check_admission,
    check_blocks,
    check_chunk,
    check_count,
    check_counts,
    check_decode_block,
    check_finish,
    check_flag,
    check_ids,
    check_int,
    check_object,
    check_pair,
    check_prompt,
    check_request_id,
    check_text,
    short,
    tuple_of,
)
from engine.steplog.records import (
    FORMAT_NAME,
    FORMAT_VERSION,
    OMITTABLE,
    WRITERS,
    AbortRecord,
    AddRecord,
    DecodeStretch,
    LogHeader,
    Record,
    StepRecord,
)


def header_from_json(line: Json) -> LogHeader:
    """Inverse of `header_to_json`.

    Raises:
        ValueError: not a header of this format and version, or a field is wrong.
    """
    if line.get("type") != "header" or line.get("format") != FORMAT_NAME:
        raise ValueError("not a Lockstep step log")
    if line.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"log format version {line.get('version')!r}: this Lockstep reads {FORMAT_VERSION}"
        )
    line = {name: line[name] for name in line if name not in ("type", "format", "version")}
    take = Fields(line)
    header = LogHeader(
        writer=take.take("writer", _word_of(WRITERS)),
        kernel=take.take("kernel", _kernel),
        options=take.take("options", check_object, {}),
        model=take.take("model", check_object, {}),
        hardware=take.take("hardware", check_object, {}),
        seed=take.take("seed", lambda value: None if value is None else check_int(value), None),
        num_replicas=take.take("replicas", check_count, 1),
        outputs_in_adds=take.take("outputs_in_adds", check_flag, False),
        omits=take.take("omits", tuple_of(_word_of(OMITTABLE)), ()),
        lockstep_version=take.take("lockstep", check_text, ""),
    )
    take.end()
    return header


def _word_of(words: tuple[str, ...]) -> Callable[[object], str]:
    def checked(value: object) -> str:
        if value not in words:
            raise ValueError(f"{short(value)} is none of {', '.join(words)}")
        return str(value)

    return checked


def _kernel(value: object) -> KernelConfig:
    options = check_object(value)
    known = {field.name for field in fields(KernelConfig)}
    for name in options:
        if name not in known:
            raise ValueError(f"unknown kernel option {name!r}")
    return KernelConfig(**options)  # type: ignore[arg-type]  # it checks its own values


def record_from_json(line: Json) -> Record:
    """Inverse of `record_to_json`; `line` is used up.

    Raises:
        ValueError: unknown type, or a field is wrong.
    """
    kind = line.pop("type", None)
    build = _BUILDERS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise ValueError(f"record type {short(kind)} is unknown")
    take = Fields(line)
    record = build(take)
    take.end()
    return record


def _build_add(take: Fields) -> AddRecord:
    arrival_ns = take.take("arrival", check_int)
    request = Request(
        request_id=take.take("id", check_request_id),
        prompt=take.take("prompt", check_prompt),
        max_tokens=take.take("max_tokens", check_count),
        stop_token_ids=frozenset(take.take("stop", tuple_of(check_int), ())),
        min_tokens=take.take("min_tokens", check_count, 0),
        extra_keys=take.take("extra_keys", tuple_of(check_pair), ()),
        priority=take.take("priority", check_int, 0),
    )
    return AddRecord(
        request=request,
        arrival_ns=arrival_ns,
        added_ns=take.take("added", check_int, arrival_ns),
        outputs=take.take("outputs", check_prompt, None),
        open_plans=take.take("open", check_count, 0),
        replica=take.take("replica", check_count, 0),
    )


def _build_abort(take: Fields) -> AbortRecord:
    return AbortRecord(
        request_id=take.take("id", check_request_id),
        time_ns=take.take("time", check_int),
        open_plans=take.take("open", check_count, 0),
        replica=take.take("replica", check_count, 0),
    )


def _build_step(take: Fields) -> StepRecord:
    record = StepRecord(
        step=take.take("step", check_count),
        start_ns=take.take("start", check_int),
        duration_ns=take.take("duration", check_count),
        decode_ids=take.take("ids", tuple_of(check_request_id), ()),
        decode_positions=take.take("positions", check_counts, ()),
        chunks=take.take("chunks", tuple_of(check_chunk), ()),
        preempted=take.take("preempted", tuple_of(check_request_id), ()),
        admitted=take.take("admitted", tuple_of(check_admission), ()),
        new_blocks=take.take("blocks", tuple_of(check_blocks), ()),
        num_free_blocks=take.take("free", check_count),
        num_running=take.take("running", check_count),
        num_waiting=take.take("waiting", check_count),
        token_ids=take.take("tokens", check_ids, None),
        sampled=take.take("sampled", tuple_of(check_request_id), None),
        finished=take.take("finished", tuple_of(check_finish), ()),
        discarded=take.take("discarded", check_flag, False),
        host_ns=take.take("host", check_count, None),
        device_ns=take.take("device", check_count, None),
        graph_bucket=take.take("bucket", check_count, None),
        open_plans=take.take("open", check_count, 0),
        replica=take.take("replica", check_count, 0),
    )
    if len(record.decode_ids) != len(record.decode_positions):
        raise ValueError("fields 'ids' and 'positions' differ in length")
    rows = [chunk.row for chunk in record.chunks]
    if rows != sorted(set(rows)) or (rows and rows[-1] >= len(record.decode_ids) + len(rows)):
        raise ValueError("field 'chunks': rows are not ascending places of the batch")
    if record.token_ids is not None and len(record.token_ids) != len(record.sampled_ids):
        raise ValueError("field 'tokens' has not one token for each sampled request")
    return record


def _build_stretch(take: Fields) -> DecodeStretch:
    durations_ns = take.take("durations", check_counts)
    ids = take.take("ids", tuple_of(check_request_id))
    record = DecodeStretch(
        first_step=take.take("step", check_count),
        start_ns=take.take("start", check_int),
        durations_ns=durations_ns,
        gaps_ns=take.take("gaps", tuple_of(check_int), (0,) * len(durations_ns)),
        decode_ids=ids,
        positions=take.take("positions", check_counts),
        new_blocks=take.take("blocks", tuple_of(check_decode_block), ()),
        num_free_blocks=take.take("free", check_count),
        num_running=take.take("running", check_count),
        num_waiting=take.take("waiting", check_count),
        token_ids=take.take("tokens", tuple_of(check_ids), None),
        finished=take.take("finished", tuple_of(check_finish), ()),
        host_ns=take.take("host", check_counts, None),
        device_ns=take.take("device", check_counts, None),
        graph_bucket=take.take("bucket", check_count, None),
        open_plans=take.take("open", check_count, 0),
        replica=take.take("replica", check_count, 0),
    )
    _check_stretch(record)
    return record


def _check_stretch(record: DecodeStretch) -> None:
    steps, rows = record.num_steps, len(record.decode_ids)
    if not steps or not rows:
        raise ValueError("a decode stretch has no steps or no rows")
    per_step = (("gaps", record.gaps_ns), ("host", record.host_ns), ("device", record.device_ns))
    for name, column in per_step:
        if column is not None and len(column) != steps:
            raise ValueError(f"field {name!r} has {len(column)} items for {steps} steps")
    if len(record.positions) != rows:
        raise ValueError("fields 'ids' and 'positions' differ in length")
    if record.token_ids is not None and (
        len(record.token_ids) != rows or any(len(row) != steps for row in record.token_ids)
    ):
        raise ValueError(f"field 'tokens' is not {rows} rows of {steps} tokens")
    offsets = [offset for offset, _, _ in record.new_blocks]
    if offsets != sorted(offsets) or (offsets and offsets[-1] >= steps):
        raise ValueError("field 'blocks': offsets are not ascending steps of the stretch")
    if not {request_id for _, request_id, _ in record.new_blocks} <= set(record.decode_ids):
        raise ValueError("field 'blocks' names a request that is no row")


_BUILDERS: dict[str, Callable[[Fields], Record]] = {
    "add": _build_add,
    "abort": _build_abort,
    "step": _build_step,
    "decode": _build_stretch,
}
