"""Random workloads of a pool with a host tier behind it, judged by the laws H and what they hit.

The content of every slot is followed on both sides of the copies: KV stands for the tokens up to
its position.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from engine.core import KernelBug, KernelConfig, Prompt, Request, Scheduler, StepPlan, audit
from properties.follower.view import LawBroken

MakeScheduler = Callable[[KernelConfig], Scheduler]
_Kv = tuple[int, ...]


class Memory:
    """What each position of the pool and of the host tier holds, by the plans alone."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool: dict[int, dict[int, _Kv]] = {}
        self._host: dict[int, dict[int, _Kv]] = {}
        self.num_loads = 0

    def run(self, plan: StepPlan) -> None:
        """Does a plan's copies and writes, then checks all that its entries read (LAW-H2)."""
        for copy in plan.copies:
            if copy.to_host:
                self._host[copy.host_slot] = dict(self._pool.get(copy.block_id, {}))
            else:
                self._pool[copy.block_id] = dict(self._host.get(copy.host_slot, {}))
                self.num_loads += 1
        size = self._scheduler.config.block_size
        for entry in plan.entries:
            table, tokens = self._table(entry.request_id), self._tokens(entry.request_id)
            for place in range(entry.first_position, entry.first_position + entry.num_tokens):
                block = self._pool.setdefault(table[place // size], {})
                block[place % size] = tokens[: place + 1]
        for entry in plan.entries:
            table, tokens = self._table(entry.request_id), self._tokens(entry.request_id)
            for place in range(entry.first_position):
                kv = self._pool.get(table[place // size], {}).get(place % size)
                if kv != tokens[: place + 1]:
                    name = entry.request_id
                    raise LawBroken("H2", f"{name!r} reads KV of other tokens at {place}")

    def _table(self, request_id: object) -> tuple[int, ...]:
        return self._scheduler.block_table(request_id)  # type: ignore[arg-type]

    def _tokens(self, request_id: object) -> _Kv:
        scheduler = self._scheduler
        request = scheduler.state.sequences[request_id].request  # type: ignore[index]
        outputs = scheduler.output_token_ids(request.request_id)
        return (*request.prompt, *outputs)


def random_config(rng: random.Random) -> KernelConfig:
    """A small kernel with a tier that is often full."""
    return KernelConfig(
        num_blocks=rng.randint(5, 10),
        max_model_len=16,
        block_size=rng.choice((1, 2, 3)),
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.choice((3, 8, 64)),
        policy=rng.choice(("mixed", "priority")),
        hash_bits=rng.choice((2, 64)),
        host_blocks=rng.randint(1, 8),
    )


def run_random(make: MakeScheduler, seed: int) -> int:
    """Runs one workload with aborts and failed steps; returns how many blocks were loaded.

    Raises:
        LawBroken: LAW-H1 or LAW-H2 does not hold.
    """
    rng = random.Random(seed)
    scheduler = make(random_config(rng))
    memory = Memory(scheduler)
    for number in range(30):
        if rng.random() < 0.6:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            request = Request(number, Prompt(prompt), max_tokens=rng.randint(1, 4))
            if -(-(len(prompt) + 3) // scheduler.config.block_size) <= scheduler.config.num_blocks:
                scheduler.add(request)
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule()
        if rng.random() < 0.05:
            scheduler.discard(plan)
        else:
            memory.run(plan)
            scheduler.commit(plan, [rng.randrange(2) for _ in plan.sampled_ids])
        _audit(scheduler)
        if rng.random() < 0.1 and scheduler.has_work:
            scheduler.abort(rng.choice([*scheduler.state.sequences]))
    return memory.num_loads


def _audit(scheduler: Scheduler) -> None:
    try:
        audit(scheduler)
    except KernelBug as bug:
        raise LawBroken(bug.law, str(bug)) from None


def compare_with_one_pool(make: MakeScheduler, seed: int) -> None:
    """One request at a time: pool and tier hit what one pool of both sizes would (LAW-H3).

    Prompts end within a block and only their last token is sampled, so that no key has two blocks.

    Raises:
        LawBroken: some request has other hits.
    """
    rng = random.Random(seed)
    config = replace(random_config(rng), block_size=2, max_num_batched_tokens=64)
    both = config.num_blocks + config.host_blocks
    tiered, single = make(config), Scheduler(replace(config, num_blocks=both, host_blocks=0))
    for number in range(40):
        prompt = [rng.randrange(2) for _ in range(2 * rng.randint(0, 4) + 1)]
        hits = [serve_alone(one, Request(number, Prompt(prompt), 1)) for one in (tiered, single)]
        if hits[0] != hits[1]:
            raise LawBroken("H3", f"request {number} hits {hits[0]} tokens, not {hits[1]}")


def serve_alone(scheduler: Scheduler, request: Request) -> int:
    """Runs a request of one output to its end; returns its hit tokens."""
    scheduler.add(request)
    hits = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        hits += sum(admission.hit_tokens for admission in plan.admitted)
        scheduler.commit(plan, [0 for _ in plan.sampled_ids])
    return hits


def first_alarm(
    make: MakeScheduler, law: str, judge: Callable[[MakeScheduler, int], object]
) -> LawBroken | None:
    """The first of 500 workloads that breaks `law`."""
    for seed in range(500):
        try:
            judge(make, seed)
        except LawBroken as broken:
            if broken.law == law:
                return broken
        except (KernelBug, AssertionError, KeyError):
            continue
    return None
