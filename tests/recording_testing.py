"""Recordings and logs made in the test, in the forms that calibration reads."""

from __future__ import annotations

import gzip
import json
from array import array
from itertools import pairwise

import pytest
from places import SHARED

from engine.core import KernelConfig, Prompt, Request, Scheduler
from engine.steplog.api import StepLogWriter
from sim.run.deployment import Deployment, build
from sim.run.run import RunPlan, log_header, run_plan
from sim.workloads.table import Workload

RECORDINGS = SHARED / "traces" / "measured_h200"
NAMES = ("conv_40", "conv_70", "conv_90", "code_60", "prefix_60")
needs_recordings = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the recordings are not beside the repository"
)


def recording_path(name):
    return RECORDINGS / f"{name}.json.gz"


def make_recording(path, num_requests=60, step_us=8_000, prompt_us=20, group_tokens=64, facts=None):
    """A recording of the kernel with step times that grow with the tokens of a step.

    Every third request belongs to a prefix group. `facts` is what the recording says of itself
    besides. Returns the document.
    """
    config = {
        "max_num_batched_tokens": 256, "max_num_seqs": 8, "block_size": 16,
        "num_gpu_blocks": 201, "max_model_len": 1024, "enable_prefix_caching": True,
        "async_scheduling": False, **(facts or {}),
    }  # fmt: skip
    scheduler = Scheduler(KernelConfig(200, 1024, 16, max_num_seqs=8, max_num_batched_tokens=256))
    requests, prompts = [], []
    for serial in range(num_requests):
        group = serial % 2 if serial % 3 == 0 else None
        length = 40 + 37 * serial % 300
        own = Prompt(range(1_000_000 * (serial + 1), 1_000_000 * (serial + 1) + length))
        spans = list(own.spans)
        if group is not None:
            first = -1_000_000 * (group + 1)
            spans = [range(first, first + group_tokens), *spans]
            length += group_tokens
        prompts.append(Prompt.from_spans(spans))
        arrival = 15_000 * serial
        requests.append(
            {"id": serial, "arrival_us": arrival, "prompt_tokens": length,
             "output_tokens": 5 + serial % 30, "prefix_group": group}
        )  # fmt: skip
    steps, waiting, now = [], list(range(num_requests)), 0
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, requests[waiting[0]]["arrival_us"])
        while waiting and requests[waiting[0]]["arrival_us"] <= now:
            serial = waiting.pop(0)
            now += 300
            requests[serial]["added_us"] = now
            scheduler.add(Request(serial, prompts[serial], requests[serial]["output_tokens"]))
        plan = scheduler.schedule()
        start = now
        done = start + step_us + prompt_us * sum(chunk.num_tokens for chunk in plan.chunks)
        steps.append(
            [start, start + 50, done, [[e.request_id, e.num_tokens] for e in plan.entries],
             [[a.request_id, a.hit_tokens] for a in plan.admitted],
             [a.request_id for a in plan.admitted if a.resumed], list(plan.preempted),
             plan.num_running, plan.num_waiting, plan.num_free_blocks]
        )  # fmt: skip
        now = done + 100 + 10 * len(plan.sampled_ids)
        outcome = scheduler.commit(plan, [-7] * len(plan.sampled_ids))
        for request_id in outcome.sampled:
            requests[request_id].setdefault("first_token_us", now)
        for finished in outcome.finished:
            requests[finished.request_id]["finish_us"] = now
    document = {"name": "made", "config": config, "requests": requests, "steps": steps}
    write_document(path, document)
    return document


def make_async_recording(
    path, num_requests=60, gap_us=12_000, launch_us=9_000, token_us=20, graph_up_to=1_000_000
):
    """An asynchronous recording of the kernel with two clocks; returns the document.

    Decode steps take 5 ms and more on the device and nothing to launch; steps with prompts take
    4 ms and `token_us` a token, and `launch_us` to launch, twice that beyond `graph_up_to` tokens.
    """
    config = {
        "max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 16, "num_blocks": 401,
        "max_model_len": 1024, "enable_prefix_caching": True, "async_scheduling": True,
    }  # fmt: skip
    scheduler = Scheduler(
        KernelConfig(400, 1024, 16, max_num_seqs=16, max_num_batched_tokens=512,
                     async_scheduling=True)
    )  # fmt: skip
    requests = [
        {"id": serial, "arrival_us": gap_us * (serial // 2 * 2),
         "sent_us": gap_us * (serial // 2 * 2) + 300,
         "prompt_tokens": 40 + 37 * serial % 300, "output_tokens": 3 + serial % 40,
         "prefix_group": None}
        for serial in range(num_requests)
    ]  # fmt: skip
    steps, updates, seen = [], [], {serial: [] for serial in range(num_requests)}
    waiting, now, device_end, in_flight = list(range(num_requests)), 0, 0, []
    while waiting or scheduler.has_work or in_flight:
        if not scheduler.has_work and not in_flight:
            now = max(now, requests[waiting[0]]["sent_us"] + 1_500)
        while waiting and requests[waiting[0]]["sent_us"] + 1_500 <= now:
            serial = waiting.pop(0)
            requests[serial]["added_us"] = now
            prompt = Prompt(
                range(10_000 * serial, 10_000 * serial + requests[serial]["prompt_tokens"])
            )
            scheduler.add(Request(serial, prompt, requests[serial]["output_tokens"]))
            now += 30
        if scheduler.has_work:
            plan, begin = scheduler.schedule(), now
            now += 50 + 10 * plan.num_entries
            if plan.num_entries:
                steps.append(
                    [begin, now, [[e.request_id, e.num_tokens] for e in plan.entries],
                     [[a.request_id, a.hit_tokens] for a in plan.admitted][::-1],
                     list(plan.preempted), plan.num_running, plan.num_waiting,
                     plan.num_free_blocks]
                )  # fmt: skip
                tokens = sum(chunk.num_tokens for chunk in plan.chunks)
                context = sum(entry.first_position + 1 for entry in plan.entries if entry.is_decode)
                device_end = max(device_end, now) + (
                    4_000 + token_us * tokens
                    if plan.chunks
                    else 5_000 + 20 * len(plan.decode) + context // 10
                )
                eager = tokens + len(plan.decode) > graph_up_to
                now += launch_us * (1 + eager) if plan.chunks else 0
                if plan.chunks:
                    device_end = max(device_end, now)
            in_flight.append((plan, device_end))
            if len(in_flight) < 2:
                continue
        plan, end = in_flight.pop(0)
        if plan.num_entries:
            start = now = max(now, end)
            now += 40 + 5 * plan.num_entries
        outcome = scheduler.commit(plan, [-7] * len(plan.sampled_ids))
        if plan.num_entries:
            updates.append([len(updates), start, now, [f.request_id for f in outcome.finished]])
        for request_id in outcome.sampled:
            seen[request_id].append(now + 700 + 10 * len(outcome.sampled))
    for request in requests:
        times = seen[request["id"]]
        request["first_token_us"] = times[0]
        request["token_gaps_us"] = [max(0, after - before) for before, after in pairwise(times)]
    document = {"name": "made", "config": config, "requests": requests, "steps": steps,
                "updates": updates}  # fmt: skip
    write_document(path, document)
    return document


def write_document(path, document):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(document, file)


def make_workload(num_requests=150, gap_ms=40):
    return Workload(
        "made",
        array("q", [serial * gap_ms * 1_000_000 for serial in range(num_requests)]),
        array("q", [100 + 211 * serial % 1500 for serial in range(num_requests)]),
        array("q", [30 + 37 * serial % 400 for serial in range(num_requests)]),
    )


def make_log(path, gap_ms=40, num_requests=150, **deployment):
    """A step log of a simulated run with the shipped profile; returns the run."""
    plan = RunPlan(make_workload(num_requests, gap_ms), Deployment(hardware="h200", **deployment))
    parts = build(plan.deployment, 0)
    with StepLogWriter(path, log_header(plan, parts)) as log:
        return run_plan(plan, parts, log)
