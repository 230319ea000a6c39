"""Runs requests through a scheduler and logs every step, for the tests of the step log."""

from __future__ import annotations

import random

from engine.core import KernelConfig, Prompt, Request, Scheduler
from engine.steplog.api import AddRecord, DecodeRunEvent, LogHeader, StepEvent, StepLogWriter


def token(request_id, index, ranges):
    """Output `index` of a request: ids that count upwards, or unrelated ones."""
    if ranges:
        return 1_000 * (hash(request_id) % 97) + index
    return random.Random(f"{request_id} {index}").randrange(50)


def duration(step):
    return 1_000 + 37 * (step % 11)


def drive(
    path,
    config,
    arrivals,
    *,
    runs,
    header=None,
    ranges=False,
    aborts=(),
    gap=0,
    scheduler_of=Scheduler,
):
    """Runs requests, given as (arrival step, request), and logs them; returns the scheduler."""
    scheduler = scheduler_of(config)
    outputs = {request.request_id: 0 for _, request in arrivals}
    pending = sorted(arrivals, key=lambda item: item[0])[::-1]
    aborting = sorted(aborts)[::-1]
    step, now = 0, 0
    header = header or LogHeader("sim", config, seed=1)
    with StepLogWriter(path, header) as log:
        while pending or scheduler.has_work:
            while pending and (pending[-1][0] <= step or not scheduler.has_work):
                request = pending.pop()[1]
                scheduler.add(request)
                planned = [token(request.request_id, k, ranges) for k in range(request.max_tokens)]
                log.add(
                    AddRecord(
                        request,
                        now,
                        now,
                        outputs=Prompt(planned) if header.outputs_in_adds else None,
                    )
                )
            while aborting and aborting[-1][0] <= step:
                request_id = aborting.pop()[1]
                if request_id in scheduler.running_ids():
                    scheduler.abort(request_id)
                    log.abort(request_id, now)
            if not scheduler.has_work:
                continue
            plan = scheduler.schedule()
            count = 1
            if runs and plan.is_pure_decode:
                events = [pending[-1][0]] if pending else []
                events += [aborting[-1][0]] if aborting else []
                count = max(1, min([scheduler.decode_horizon(plan), *[e - step for e in events]]))
                rows = []
                for request_id in plan.decode.request_ids:
                    first = outputs[request_id]
                    outputs[request_id] += count
                    rows.append([token(request_id, first + k, ranges) for k in range(count)])
                run = scheduler.run_decode(plan, count, rows.__getitem__)
                durations = [duration(step + k) for k in range(count)]
                log.decode_run(DecodeRunEvent(plan, run, now, durations, rows))
                now += sum(durations)
            else:
                tokens = []
                for request_id in plan.sampled_ids:
                    tokens.append(token(request_id, outputs[request_id], ranges))
                    outputs[request_id] += 1
                outcome = scheduler.commit(plan, tokens)
                log.step(StepEvent(plan, outcome, now, duration(step)))
                now += duration(step) + gap
            step += count
    return scheduler


def workload(seed, num_requests=12, most_tokens=40):
    rng = random.Random(seed)
    arrivals = []
    for number in range(num_requests):
        prompt = Prompt(rng.randrange(8) for _ in range(rng.randrange(1, 20)))
        if rng.random() < 0.5:
            start = rng.randrange(3) * 100
            prompt = Prompt.from_spans(
                [range(start, start + rng.randrange(4, 20)), prompt.tokens(0, 1)]
            )
        request = Request(number, prompt, rng.randrange(1, most_tokens))
        arrivals.append((rng.randrange(60), request))
    return arrivals


def config(policy="mixed", num_blocks=40, **options):
    sizes = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    return KernelConfig(num_blocks=num_blocks, max_model_len=100, policy=policy, **sizes | options)


def small_log(path, **options):
    drive(path, config(), workload(3), runs=False, **options)
    return path
