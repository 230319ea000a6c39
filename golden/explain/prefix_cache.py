"""Prefix caching, watched in the real kernel: registration, hits, the last-block rule, sharing."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core import KernelConfig, Prompt, Request, Scheduler, StepPlan

BLOCK_SIZE = 4
SHARED = list(range(10, 18))  # two full blocks


def explain() -> Iterator[str]:
    """The experiment, line by line."""
    yield f"Blocks hold {BLOCK_SIZE} tokens. A full block is registered under the hash of its"
    yield "tokens and of everything before it; an equal prefix later finds it there."
    yield ""
    yield from _before_and_after_registration("mixed")
    yield ""
    yield from _before_and_after_registration("prefill_first")
    yield ""
    yield from _last_block_rule()
    yield ""
    yield from _reference_counts()


def _scheduler(policy: str = "mixed", num_blocks: int = 12) -> Scheduler:
    config = KernelConfig(
        num_blocks=num_blocks, max_model_len=40, block_size=BLOCK_SIZE, policy=policy
    )
    return Scheduler(config)


def _add(scheduler: Scheduler, name: str, tokens: list[int], max_tokens: int = 3) -> None:
    scheduler.add(Request(name, Prompt(tokens), max_tokens=max_tokens))


def _step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.commit(plan, [99] * len(plan.sampled_ids))
    return plan


def _admissions(plan: StepPlan) -> Iterator[str]:
    for item in plan.admitted:
        blocks = item.hit_blocks_used + item.hit_blocks_free + item.hit_blocks_same_step
        yield (
            f"  step {plan.step}: {item.request_id} admitted, {item.hit_tokens} tokens hit "
            f"({blocks} blocks: {item.hit_blocks_used} in use, {item.hit_blocks_free} free, "
            f"{item.hit_blocks_same_step} registered in this very step)"
        )


def _before_and_after_registration(policy: str) -> Iterator[str]:
    yield f"1. Policy {policy}: A and B, with equal first blocks, arrive together; C comes later."
    scheduler = _scheduler(policy)
    _add(scheduler, "A", [*SHARED, 1])
    _add(scheduler, "B", [*SHARED, 2])
    plan = _step(scheduler)
    yield from _admissions(plan)
    hits = {item.request_id: item.hit_tokens for item in plan.admitted}
    _add(scheduler, "C", [*SHARED, 3])
    late = _step(scheduler)
    yield from _admissions(late)
    yield f"  tables: A {_table(scheduler, 'A')}, C {_table(scheduler, 'C')}"
    if hits.get("B"):
        yield "  B hits at once: this policy registers a block in the step that fills it, and the"
        yield "  keys of a step are written before they are read, layer by layer."
    else:
        yield "  B misses: this policy registers a block only after its keys were computed. The"
        yield "  twin blocks are both registered then, and C finds the first."


def _table(scheduler: Scheduler, name: str) -> str:
    return str(list(scheduler.block_table(name)))


def _last_block_rule() -> Iterator[str]:
    yield "2. The last token is never hit, so that there is always something to compute:"
    for length in (len(SHARED) - 1, len(SHARED), len(SHARED) + 1):
        scheduler = _scheduler()
        _add(scheduler, "first", [*SHARED, 1, 2, 3], max_tokens=1)
        _step(scheduler)
        _add(scheduler, "again", [*SHARED, 5][:length])
        plan = _step(scheduler)
        hit = plan.admitted[0].hit_tokens
        yield (
            f"  {len(SHARED)} tokens are cached, the prompt has {length}: "
            f"{hit} hit, {length - hit} computed"
        )
    yield "  With exactly two blocks the second is computed again, although it is cached."


def _reference_counts() -> Iterator[str]:
    yield "3. A shared block is freed when its last user ends, and stays findable after that:"
    scheduler = _scheduler()
    _add(scheduler, "A", [*SHARED, 1], max_tokens=4)
    _add(scheduler, "B", [*SHARED, 2], max_tokens=6)
    while scheduler.has_work:
        plan = _step(scheduler)
        yield (
            f"  after step {plan.step}: users per block {_users_per_block(scheduler) or 'none'}, "
            f"{scheduler.num_free_blocks} blocks free"
        )
    _add(scheduler, "C", [*SHARED, 3])
    plan = _step(scheduler)
    yield from _admissions(plan)
    yield "  Nobody used the blocks any more, yet C hits them: a freed block keeps its content"
    yield "  until it is needed for something else."


def _users_per_block(scheduler: Scheduler) -> dict[int, int]:
    tables = [scheduler.block_table(name) for name in scheduler.running_ids()]
    used = sorted({block for table in tables for block in table})
    return {block: sum(block in table for table in tables) for block in used}
