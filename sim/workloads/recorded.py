"""The requests of a recorded run, to be sent again: a step log, or a recording of vLLM."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

from engine.core.errors import InputError
from engine.core.request import RequestId
from engine.core.tokens import Prompt
from engine.steplog.files import read_lines
from engine.steplog.records import FORMAT_NAME, AddRecord, DecodeStretch, StepRecord
from engine.steplog.vllm_log_reader import is_vllm_log
from engine.steplog.vllm_recording import is_recording, open_log
from sim.workloads.table import Workload


class PromptWorkload(Workload):
    """A workload with the prompts of a recording, token by token."""

    __slots__ = ("prompts",)

    prompts: tuple[Prompt, ...]

    def prompt(self, row: int) -> Prompt:
        """The recorded prompt of a row."""
        return self.prompts[row]


def is_recorded_run(path: Path) -> bool:
    """Whether the file holds a run and not a trace: its first line says so."""
    try:
        first = next(read_lines(path), b"")[:4096]
    except InputError:
        return False
    if FORMAT_NAME.encode() in first or is_vllm_log(first):
        return True
    # A recording is one object; the lines of a trace are objects too, but name no steps.
    return is_recording(path) and b'"config"' in first.replace(b" ", b"")


def read_recorded_run(path: Path, num_requests: int | None = None) -> Workload:
    """The requests that got a token, in order of arrival, with as many tokens as they got.

    Raises:
        InputError: it is damaged, or holds no request with a token.
    """
    adds: list[AddRecord] = []
    num_outputs: Counter[RequestId] = Counter()
    for record in open_log(path):
        if isinstance(record, AddRecord):
            adds.append(record)
        elif isinstance(record, DecodeStretch):
            for request_id in record.decode_ids:
                num_outputs[request_id] += record.num_steps
        elif isinstance(record, StepRecord) and not record.discarded:
            num_outputs.update(record.sampled_ids)
    chosen = sorted(
        (add for add in adds if num_outputs[add.request.request_id]), key=lambda one: one.arrival_ns
    )[:num_requests]
    if not chosen:
        raise InputError(f"{path}: no request in it got a token")
    begin_ns = chosen[0].arrival_ns
    priorities = array("q", [add.request.priority for add in chosen])
    workload = PromptWorkload(
        name=path.name,
        arrival_ns=array("q", [add.arrival_ns - begin_ns for add in chosen]),
        prompt_tokens=array("q", [len(add.request.prompt) for add in chosen]),
        output_tokens=array("q", [num_outputs[add.request.request_id] for add in chosen]),
        priorities=priorities if any(priorities) else None,
    )
    workload.prompts = tuple(add.request.prompt for add in chosen)
    left_out = len(adds) - sum(1 for add in adds if num_outputs[add.request.request_id])
    if left_out:
        workload.left_out["got no token"] = left_out
    return workload
