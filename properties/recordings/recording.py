"""Recorded scheduler decisions of real systems: reading the files and running their workloads.

The format is one JSON object per line: a configuration, requests with their arrival steps and
known outputs, and the decisions of every step. Workload ids that begin with `n` are of nano-vLLM
(policy `prefill_first`), those with `v` of vLLM V1 (policy `mixed`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from engine.core.config import KernelConfig
from engine.core.errors import ConfigError, InputError, RequestRejected
from engine.core.plan import StepOutcome, StepPlan
from engine.core.request import Request, RequestId
from engine.core.tokens import Prompt
from engine.steplog.files import read_lines

Step = dict[str, Any]
SYSTEMS = {"n": ("nano-vLLM", "prefill_first"), "v": ("vLLM V1", "mixed")}


class ReplayedScheduler(Protocol):
    """What a replay asks of a scheduler."""

    @property
    def has_work(self) -> bool: ...  # noqa: D102
    @property
    def num_free_blocks(self) -> int: ...  # noqa: D102
    def add(self, request: Request) -> None: ...  # noqa: D102
    def schedule(self) -> StepPlan: ...  # noqa: D102
    def commit(self, plan: StepPlan, token_ids: list[int]) -> StepOutcome: ...  # noqa: D102
    def waiting_ids(self) -> list[RequestId]: ...  # noqa: D102
    def running_ids(self) -> list[RequestId]: ...  # noqa: D102
    def free_order(self) -> list[int]: ...  # noqa: D102
    def output_token_ids(self, request_id: RequestId) -> Seq[int]: ...  # noqa: D102


SchedulerOf = Callable[[KernelConfig], ReplayedScheduler]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request with the step it arrives before and the outputs that it will get."""

    request: Request
    arrival_step: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of a recording; `steps` is empty for a workload that cannot finish."""

    name: str
    group: str  # the family, or the way in which the workload is impossible
    policy: str
    config: dict[str, Any]
    requests: tuple[RecordedRequest, ...]
    steps: tuple[Step, ...]
    # Of a recording made before vLLM 0.33 (P-R1); the files do not say which version made them.
    threshold_when_alone: bool = False

    @property
    def is_recording(self) -> bool:
        """False if only the outcome was recorded, because the workload is impossible."""
        return bool(self.steps)

    @property
    def first_block_id(self) -> int:
        """vLLM never hands out its block 0."""
        return 0 if self.policy == "prefill_first" else 1

    @property
    def is_async(self) -> bool:
        """Whether each step is a call that may schedule one step and apply another."""
        return bool(self.steps) and "scheduled" in self.steps[0]

    def kernel_config(self, hardened: bool = False) -> KernelConfig:
        """The kernel's configuration; unhardened, it decides what the recorded system does.

        Raises:
            ConfigError: the workload is impossible for the kernel.
        """
        config = self.config
        common = partial(
            KernelConfig,
            num_blocks=config["num_blocks"] - self.first_block_id,
            max_model_len=config["max_model_len"],
            block_size=config["block_size"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            policy=self.policy,
            enable_prefix_caching=config.get("enable_prefix_caching", True),
            reject_impossible=hardened,
            async_scheduling=self.is_async,
        )
        if self.policy == "prefill_first":
            return common(
                bound_holders=hardened, bound_decode_tokens=hardened, bound_model_len=hardened
            )
        return common(
            long_prefill_token_threshold_adaptive=config.get("threshold_adaptive", False),
            threshold_when_alone=self.threshold_when_alone,
            max_num_active_seqs=config.get("max_num_active_seqs", 0),
            prefill_schedule_interval=config.get("prefill_schedule_interval", 1),
            long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
            watermark_blocks=int(config.get("watermark", 0.0) * config["num_blocks"]),
            reserve_full_prompt=config.get("reserve_full_prompt", True),
        )


def read_workloads(path: Path) -> Iterator[Workload]:
    """The workloads of one file, in file order.

    Raises:
        InputError: the file or a line is not of this format.
    """
    number = 0
    for number, text in enumerate(read_lines(path), start=1):
        try:
            yield _parse(json.loads(text))
        except ConfigError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{path}:{number}: not a recorded workload ({what})") from None
    if not number:
        raise InputError(f"{path}: empty file, no recorded workload")


def _parse(line: dict[str, Any]) -> Workload:
    name = line["id"]
    if not isinstance(name, str) or name[:1] not in SYSTEMS:
        raise ValueError(f"id {name!r} begins with neither n nor v")
    steps = line.get("steps", ())
    if not steps and "outcome" not in line:
        raise KeyError("steps")
    for step in steps:
        for key in ("step", "batch", "preempted", "finished", "new_blocks"):
            step[key]
    config = line["config"]
    for key in ("num_blocks", "max_model_len", "block_size", "max_num_seqs"):
        if type(config[key]) is not int:
            raise ValueError(f"{key}={config[key]!r} is not an integer")
    return Workload(
        name=name,
        group=line["family"] if steps else line["kind"],
        policy=config.get("policy", SYSTEMS[name[0]][1]),
        config=config,
        requests=_requests(line["requests"], config.get("policy") == "priority"),
        steps=tuple(steps),
    )


def _requests(entries: list[dict[str, Any]], by_text: bool) -> tuple[RecordedRequest, ...]:
    """The requests in the order in which they are added.

    vLLM's priority queue orders requests of one arrival by their ids as text.
    """
    if by_text:
        entries = sorted(entries, key=lambda entry: (entry["arrival_step"], str(entry["id"])))
    return tuple(_request(entry) for entry in entries)


def _request(entry: dict[str, Any]) -> RecordedRequest:
    stops = set(entry.get("stop_token_ids") or ())
    if not entry["ignore_eos"]:
        stops.add(entry["eos"])
    request = Request(
        entry["id"],
        Prompt(entry["prompt"]),
        entry["max_tokens"],
        frozenset(stops),
        priority=entry.get("priority", 0),
        arrival=entry["arrival_step"],
    )
    return RecordedRequest(request, entry["arrival_step"], tuple(entry["outputs"]))


def run_workload(
    workload: Workload,
    scheduler: ReplayedScheduler,
    rejections: list[RequestRejected] | None = None,
) -> Iterator[Step]:
    """The scheduler's decisions in the form of the recording, step by step, without end in sight.

    A step holds the small workloads' queues and free order too. The recorded clock is followed:
    requests arrive before the decision of their step, and idle steps are skipped. Rejected
    requests are noted in `rejections` if it is given.
    """
    arrivals = list(reversed(workload.requests))
    outputs = {item.request.request_id: iter(item.outputs) for item in workload.requests}
    clock = 0
    while True:
        while arrivals and arrivals[-1].arrival_step <= clock:
            try:
                scheduler.add(arrivals.pop().request)
            except RequestRejected as error:
                if rejections is None:
                    raise
                rejections.append(error)
        if scheduler.has_work:
            plan = scheduler.schedule()
            decided = decision_fields(plan, workload.first_block_id)
            tokens = [next(outputs[request_id]) for request_id in plan.sampled_ids]
            outcome = scheduler.commit(plan, tokens)
            yield {
                "step": clock,
                **decided,
                "finished": [end.request_id for end in outcome.finished],
                "finish_reasons": [end.reason for end in outcome.finished],
                **queue_fields(scheduler, workload.first_block_id),
            }
            clock += 1
        elif arrivals:
            clock = arrivals[-1].arrival_step
        else:
            return


def decision_fields(plan: StepPlan, first_block_id: int) -> Step:
    """What a plan decided, in the form of the recording."""
    entries = list(plan.entries)
    gained = {blocks.request_id: blocks.block_ids for blocks in plan.new_blocks}
    return {
        "kind": _KINDS[frozenset(entry.is_decode for entry in entries)],
        "batch": [[e.request_id, e.first_position, e.num_tokens] for e in entries],
        "admitted": [list(admission[:5]) for admission in plan.admitted],
        "preempted": list(plan.preempted),
        "new_blocks": [
            [block + first_block_id for block in gained.get(e.request_id, ())] for e in entries
        ],
    }


def queue_fields(scheduler: ReplayedScheduler, first_block_id: int) -> Step:
    """The queues and the free blocks as they are now, in the form of the recording."""
    return {
        "free_blocks": scheduler.num_free_blocks,
        "waiting": list(scheduler.waiting_ids()),
        "running": list(scheduler.running_ids()),
        "free_order": [block + first_block_id for block in scheduler.free_order()],
    }


_KINDS = {
    frozenset(): "empty",
    frozenset({True}): "decode",
    frozenset({False}): "prefill",
    frozenset({True, False}): "mixed",
}
