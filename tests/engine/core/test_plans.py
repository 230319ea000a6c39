"""What a plan tells its runner: ids of chunks, sizes and places in the batch."""

from itertools import product

import pytest

from engine.core import KernelConfig, Prompt, Request, Scheduler

POLICIES = ("mixed", "prefill_first")


def make(policy="mixed", **options):
    sizes = {"num_blocks": 16, "max_model_len": 64, "block_size": 2, "max_num_batched_tokens": 32}
    return Scheduler(KernelConfig(policy=policy, **{**sizes, **options}))


def drive(scheduler, tokens, next_token=1000):
    """Runs to the end with a new token per sample and yields each plan before its commit.

    `tokens` are all tokens of each request, written down from outside.
    """
    while scheduler.has_work:
        plan = scheduler.schedule()
        yield plan
        sampled = list(plan.sampled_ids)
        scheduler.commit(plan, range(next_token, next_token + len(sampled)))
        for name in sampled:
            tokens[name].append(next_token)
            next_token += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_hand_over_the_tokens_at_their_positions_also_when_they_recompute_outputs(policy):
    kinds = set()
    for budget in (2, 3, 5, 32):
        scheduler = make(
            policy,
            num_blocks=6,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            max_num_seqs=3,
        )
        tokens = {name: [10 * name + i for i in range(2 + name)] for name in range(3)}
        lengths = {name: len(known) for name, known in tokens.items()}
        for name, known in tokens.items():
            scheduler.add(Request(name, Prompt(known), 9 - name))
        for plan in drive(scheduler, tokens):
            for chunk in plan.chunks:
                first, stop = chunk.first_position, chunk.first_position + chunk.num_tokens
                assert list(chunk.token_ids) == tokens[chunk.request_id][first:stop]
                assert len(chunk.token_ids) == chunk.num_tokens
                prompt = lengths[chunk.request_id]
                kinds.add("prompt" if stop <= prompt else "both" if first < prompt else "outputs")
    assert kinds == {"prompt", "both", "outputs"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_is_pure_decode_exactly_if_no_entry_is_a_prompt(policy):
    scheduler = make(policy, max_num_batched_tokens=5)
    scheduler.add(Request(0, Prompt([1, 2]), 6))
    seen = set()
    tokens = {0: [1, 2], 1: list(range(50, 58))}
    for plan in drive(scheduler, tokens):
        if plan.step == 1:
            scheduler.add(Request(1, Prompt(tokens[1]), 2))
        kinds = [entry.is_decode for entry in plan.entries]
        assert plan.is_pure_decode is all(kinds)
        assert plan.num_entries == len(kinds)
        seen.add((any(kinds), all(kinds)))
    assert {(True, True), (False, False)} <= seen
    assert ((True, False) in seen) is (policy == "mixed")


@pytest.mark.parametrize("threshold", [1, 3])
def test_entries_are_in_running_order_wherever_half_done_prompts_lie_between_decodes(threshold):
    mixtures = set()
    for lengths in product((1, 12), repeat=6):
        scheduler = make(num_blocks=64, max_num_seqs=6, long_prefill_token_threshold=threshold)
        for name, length in enumerate(lengths):
            scheduler.add(Request(name, Prompt([name] * length), 4))
        computed = dict.fromkeys(range(6), 0)
        while scheduler.has_work:
            plan = scheduler.schedule()
            entries = list(plan.entries)
            assert [entry.request_id for entry in entries] == scheduler.running_ids()
            mixtures.add("".join("d" if entry.is_decode else "c" for entry in entries))
            for entry in entries:
                assert entry.first_position == computed[entry.request_id]
                computed[entry.request_id] += entry.num_tokens
            finished = scheduler.commit(plan, [70] * len(plan.sampled_ids)).finished
            for ended in finished:
                del computed[ended.request_id]
    assert {"ddcdcd", "dccdcc", "cdcdcd", "ccddcd"} <= mixtures


@pytest.mark.parametrize("policy", POLICIES)
def test_the_generation_of_the_decode_part_grows_exactly_with_its_rows(policy):
    """A runner that has seen a generation reuses all that it has built for its rows."""
    scheduler = make(policy, num_blocks=9, max_num_seqs=4, max_num_batched_tokens=6)
    tokens = {name: [10 * name + i for i in range(1 + name % 4)] for name in range(8)}
    for name, known in tokens.items():
        scheduler.add(Request(name, Prompt(known), 3 + 2 * name % 7))
    rows, newest, num_kept = {}, 0, 0
    for plan in drive(scheduler, tokens):
        decode = plan.decode
        if not len(decode):
            continue
        described = (decode.request_ids, decode.base_positions)
        assert rows.setdefault(decode.generation, described) == described
        assert decode.generation >= newest
        num_kept += decode.generation == newest
        newest = decode.generation
    assert num_kept > 3
    assert len(rows) > 5
    assert min(rows) > 0
