# ruff: noqa: ANN401 (vLLM is not there where this is checked)
"""A scheduler for vLLM that records what it decides, when, and what came of it.

    vllm serve MODEL --scheduler-cls engine.steplog.vllm_recorder.RecordingScheduler

It is vLLM's own scheduler, the asynchronous one where vLLM would take that, with a line of JSON
written for every call. `LOCKSTEP_RECORD` names the file (default: `vllm-record-PID.jsonl` in the
working directory). Lines are flushed once a second and at shutdown, so a killed server leaves a
readable file. vLLM is imported only when it asks for the class.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.core.errors import ConfigError
from engine.steplog.vllm_log import RunLogWriter

OLDEST, NEWEST = (0, 25), (0, 33)
_OPTIONS = (
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_active_seqs",
    "prefill_schedule_interval",
)


class RecordingScheduler:
    """What `--scheduler-cls` names; calling it makes a recording scheduler.

    Raises:
        ConfigError: this vLLM is not among those whose scheduler is known.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A subclass of the scheduler that vLLM would have taken."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        check_version(_installed_version())
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        is_async = bool(vllm_config.scheduler_config.async_scheduling)
        return recording(AsyncScheduler if is_async else Scheduler)(*args, **kwargs)


def _installed_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def check_version(installed: str) -> None:
    """Refuses a vLLM whose scheduler was not looked at."""
    parts = installed.split(".")
    known = len(parts) > 1 and all(part.isdigit() for part in parts[:2])
    if not known or not OLDEST <= (int(parts[0]), int(parts[1])) <= NEWEST:
        raise ConfigError(
            "vllm", installed, f"must be {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )


@cache
def recording(base: type[Any]) -> type[Any]:
    """`base`, a scheduler of vLLM, with a record of its calls."""
    return type(f"Recording{base.__name__}", (Recorder, base), {})


class Recorder:
    """Goes before a scheduler of vLLM: calls it, and notes what can be seen from outside."""

    # Of the scheduler.
    running: Any
    requests: Any
    finished_req_ids: Any
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = os.environ.get("LOCKSTEP_RECORD") or f"vllm-record-{os.getpid()}.jsonl"
        self._record = RunLogWriter(path, _config_of(self))
        self._recorded: dict[str, Any] = {}  # live requests by id
        self._has_seat: set[str] = set()
        self._steps: dict[int, int] = {}  # of scheduled outputs that are not applied yet

    def add_request(self, request: Any) -> None:
        """Notes the request; its prompt is known by the hashes of its blocks."""
        super().add_request(request)  # type: ignore[misc]
        self._recorded[request.request_id] = request
        self._record.added(
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            request.arrival_time,
            list(getattr(request, "block_hashes", ())),
            getattr(request, "priority", 0),
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Notes a step that computes or preempts something; others change nothing."""
        start_ns = time.monotonic_ns()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        end_ns = time.monotonic_ns()
        if output.num_scheduled_tokens or output.preempted_req_ids:
            self._note_step(start_ns, end_ns, output)
        return output

    def _note_step(self, start_ns: int, end_ns: int, output: Any) -> None:
        entries = output.num_scheduled_tokens
        preempted = list(output.preempted_req_ids or ())
        self._has_seat.difference_update(preempted)
        # Who had no seat before was admitted, and what it did not compute it hit.
        admitted = {
            name: self._recorded[name].num_computed_tokens - count
            for name, count in entries.items()
            if name not in self._has_seat
        }
        self._has_seat.update(admitted)
        self._steps[id(output)] = self._record.scheduled(
            start_ns,
            end_ns,
            entries,
            admitted,
            preempted,
            (len(self.running), _num_waiting(self)),
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
        )

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes when a result was booked, and who ended by it."""
        before = set(self.finished_req_ids)
        start_ns = time.monotonic_ns()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        end_ns = time.monotonic_ns()
        step = self._steps.pop(id(scheduler_output), None)
        ended = [self._ended(name) for name in self.finished_req_ids - before]
        if step is not None:
            self._record.updated(step, start_ns, end_ns, ended)
        return outputs

    def _ended(self, name: str) -> tuple[str, str, int, list[Any]]:
        request = self._recorded.pop(name)
        self._has_seat.discard(name)
        reason = "stop" if request.status.name == "FINISHED_STOPPED" else "length"
        hashes = list(getattr(request, "block_hashes", ()))
        return name, reason, request.num_output_tokens, hashes

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes requests that their clients gave up."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        asked = list(self._recorded if names is None else names)
        result = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        gone = [name for name in asked if name in self._recorded and name not in self.requests]
        if gone:
            self._record.aborted([self._ended(name) for name in gone])
        return result

    def shutdown(self) -> None:
        """Completes the file."""
        self._record.close()
        super().shutdown()  # type: ignore[misc]


def _num_waiting(scheduler: Any) -> int:
    """Requests without a seat, in whichever queues this version keeps them."""
    queues: Iterable[Any] = (
        getattr(scheduler, name, ())
        for name in ("waiting", "skipped_waiting", "kv_holding_waiting")
    )
    return sum(len(queue) for queue in queues)


def _config_of(scheduler: Any) -> dict[str, object]:
    """What decides the scheduler's decisions, in vLLM's words."""
    vllm_config = scheduler.vllm_config
    options, cache_config = vllm_config.scheduler_config, vllm_config.cache_config
    model = getattr(vllm_config, "model_config", None)
    found: dict[str, object] = {
        "engine": f"vllm {_installed_version()}",
        "num_gpu_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "block_size": cache_config.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": scheduler.max_model_len,
        "enable_prefix_caching": bool(cache_config.enable_prefix_caching),
        "async_scheduling": bool(options.async_scheduling),
        "policy": str(getattr(options.policy, "value", options.policy)),
        "watermark": float(getattr(cache_config, "watermark", 0.0) or 0.0),
        "model": getattr(model, "model", None),
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
    }
    for name in _OPTIONS:
        value = getattr(options, name, None)
        if value is not None:
            found[name] = value
    return found
