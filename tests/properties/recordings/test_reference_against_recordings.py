"""The naive reference makes the recorded decisions of both real systems, step by step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from places import SHARED

from engine.core.config import KernelConfig
from engine.core.plan import Entry
from engine.core.request import Request
from engine.core.tokens import Prompt
from properties.reference import ReferenceBlock, ReferencePool, ReferenceScheduler
from properties.reference.naive_pool import PrefixKey

FILES = {
    "mixed": SHARED / "decisions" / "vllm_v1_0.25.1.jsonl.gz",
    "prefill_first": SHARED / "decisions" / "nano_vllm_bb823b3.jsonl.gz",
}

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FILES["mixed"].exists(), reason="the recordings are not here"),
]


def recorded(policy: str) -> Iterator[dict[str, Any]]:
    with gzip.open(FILES[policy], "rt") as lines:
        for line in lines:
            yield json.loads(line)


def kernel_config(policy: str, recorded_config: dict[str, Any]) -> KernelConfig:
    common = {
        name: recorded_config[name]
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "enable_prefix_caching",
        )
    }
    if policy == "prefill_first":
        return KernelConfig(
            num_blocks=recorded_config["num_blocks"],
            policy=policy,
            bound_holders=False,
            bound_decode_tokens=False,
            bound_model_len=False,
            reject_impossible=False,
            **common,
        )
    return KernelConfig(
        num_blocks=recorded_config["num_blocks"] - 1,
        policy=policy,
        threshold_when_alone=True,  # the recording is older than P-R1
        long_prefill_token_threshold=recorded_config["long_prefill_token_threshold"],
        watermark_blocks=int(recorded_config["watermark"] * recorded_config["num_blocks"]),
        reserve_full_prompt=recorded_config["reserve_full_prompt"],
        **common,
    )


def kernel_request(entry: dict[str, Any]) -> Request:
    stops = set(entry.get("stop_token_ids") or ())
    if not entry["ignore_eos"]:
        stops.add(entry["eos"])
    return Request(entry["id"], Prompt(entry["prompt"]), entry["max_tokens"], frozenset(stops))


def recorded_kind(entries: tuple[Entry, ...]) -> str:
    kinds = {entry.is_decode for entry in entries}
    return {0: "empty", 2: "mixed"}.get(len(kinds), "decode" if kinds == {True} else "prefill")


def first_difference(
    policy: str,
    workload: dict[str, Any],
    scheduler_of: Callable[[KernelConfig], ReferenceScheduler] = ReferenceScheduler,
) -> tuple[str, int] | None:
    """Replays one workload; the first field and step that differ, or None."""
    scheduler = scheduler_of(kernel_config(policy, workload["config"]))
    outputs = {entry["id"]: entry["outputs"] for entry in workload["requests"]}
    sampled = dict.fromkeys(outputs, 0)
    arrivals = list(workload["requests"])
    shift = 1 if policy == "mixed" else 0
    for step in workload["steps"]:
        while arrivals and arrivals[0]["arrival_step"] <= step["step"]:
            scheduler.add(kernel_request(arrivals.pop(0)))
        plan = scheduler.schedule()
        tokens = []
        for request_id in plan.sampled_ids:
            tokens.append(outputs[request_id][sampled[request_id]])
            sampled[request_id] += 1
        outcome = scheduler.commit(plan, tokens)
        gains = {gain.request_id: gain.block_ids for gain in plan.new_blocks}
        ours: dict[str, Any] = {
            "batch": [[e.request_id, e.first_position, e.num_tokens] for e in plan.entries],
            "preempted": list(plan.preempted),
            "finished": [f.request_id for f in outcome.finished],
            "admitted": [list(admission[:5]) for admission in plan.admitted],
            "finish_reasons": [f.reason for f in outcome.finished],
            "kind": recorded_kind(plan.entries),
            "free_blocks": scheduler.num_free_blocks,
            "new_blocks": [
                [block + shift for block in gains.get(e.request_id, ())] for e in plan.entries
            ],
            "free_order": [block + shift for block in scheduler.free_order()],
            "waiting": scheduler.waiting_ids(),
            "running": scheduler.running_ids(),
        }
        for field, value in ours.items():
            if field in step and step[field] != value:
                return field, step["step"]
    return ("drained", -1) if scheduler.has_work or arrivals else None


def test_reference_equals_every_vllm_recording_at_all_levels() -> None:
    differing = {w["id"]: d for w in recorded("mixed") if (d := first_difference("mixed", w))}
    assert differing == {}


class OneBlockPerKey(ReferencePool):
    """nano-vLLM's map: the newest copy replaces the entry, and the older one cannot be found."""

    def register(self, block: ReferenceBlock, key: PrefixKey, step: int) -> None:
        block.key = key
        self.copies[key] = [block]

    def unregister(self, block: ReferenceBlock) -> None:
        if block.key is not None and self.copies.get(block.key) == [block]:
            del self.copies[block.key]
        block.key = None


def nano_vllm(config: KernelConfig) -> ReferenceScheduler:
    scheduler = ReferenceScheduler(config)
    scheduler.pool = OneBlockPerKey(config.num_blocks, unregistered_first=False, newest_copy=True)
    return scheduler


def test_reference_differs_from_nano_recordings_only_where_a_twin_became_unreachable() -> None:
    differing = {}
    for workload in recorded("prefill_first"):
        assert first_difference("prefill_first", workload, nano_vllm) is None, workload["id"]
        difference = first_difference("prefill_first", workload)
        if difference:
            differing[workload["id"]] = difference
    # POLICIES.md names these three among the 29 that lose a hit.
    assert {"n018019", "n000026", "n018014"} <= set(differing)
    assert len(differing) <= 29
