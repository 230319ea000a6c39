"""Plans become commands of deltas, and commands survive the wire."""

from __future__ import annotations

import random
from array import array

import torch

from engine.core import KernelConfig, Prompt, Request, Scheduler, fake_token
from engine.core.policy_registry import POLICIES
from engine.requests.committed_step import StepLogprobs
from engine.sampling_params import RequestSampling, SamplingParams
from engine.step.builder import StepBuilder, batch_order
from engine.worker.batch_state import BatchState
from engine.worker.command import (
    BannedTokens,
    ChunkCommand,
    SlotParams,
    StepCommand,
    StepResult,
)
from engine.worker.inputs import mixed_step_inputs
from engine.worker.tp_messages import (
    decode_command,
    decode_result,
    encode_command,
    encode_result,
)


def random_command(rng, prompt_len=20):
    def ids(count):
        return array("q", [rng.randrange(-(2**40), 2**40) for _ in range(count)])

    rows = rng.choice([None, 0, 3])
    blocks = rng.randrange(5)
    return StepCommand(
        step=rng.randrange(2**40),
        num_decodes=rng.randrange(300),
        decode_slots=None if rows is None else ids(rows),
        decode_positions=None if rows is None else ids(rows),
        table_index=ids(blocks),
        table_blocks=ids(blocks),
        new_slots=tuple(
            SlotParams(rng.randrange(256), rng.random(), rng.randrange(50), rng.random(), 0.1, -5)
            for _ in range(rng.randrange(3))
        ),
        chunks=tuple(
            ChunkCommand(
                rng.randrange(256),
                rng.randrange(99),
                ids(prompt_len),
                rng.random() < 0.5,
                ids(rng.choice([0, 3])),
            )
            for _ in range(rng.randrange(3))
        ),
        needs_filters=rng.random() < 0.5,
        num_logprobs=rng.choice([None, 0, 5]),
        banned=tuple(BannedTokens(rng.randrange(256), ids(2)) for _ in range(rng.randrange(3))),
        num_prompt_logprobs=rng.choice([None, 0, 7]),
    )


def test_commands_survive_the_wire():
    rng = random.Random(0)
    for _ in range(200):
        command = random_command(rng)
        assert decode_command(encode_command(command)) == command


def test_a_message_has_no_size_limit():  # nano-vLLM's 1 MiB segment
    command = random_command(random.Random(1), prompt_len=400_000)
    message = encode_command(command)
    assert len(message) > 3 * 2**20
    assert decode_command(message) == command


def test_results_survive_the_wire():
    tokens = array("q", [5, 2**40, 0])
    logprobs = StepLogprobs([-0.5, -1.0, -2.0], [1, 2, 3], [[1], [2], [3]], [[0.0], [-1], [-2]])
    for result in (
        StepResult(tokens),
        StepResult(tokens, 123456789),
        StepResult(tokens, 5, logprobs),
        StepResult(tokens, 5, None, logprobs),
        StepResult(tokens, None, logprobs, logprobs),
        StepResult(array("q")),
    ):
        assert decode_result(encode_result(result)) == result


class Mirror:
    """A kernel, the builder, and the device state on a CPU, driven together."""

    def __init__(self, **config):
        self.scheduler = Scheduler(KernelConfig(**config))
        config = self.scheduler.config
        width = -(-config.max_model_len // config.block_size)
        self.sampling = {}
        self.builder = StepBuilder(config.max_num_seqs, width, self.sampling.__getitem__)
        rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.state = BatchState(
            config.max_num_seqs, rows, width, config.block_size, torch.device("cpu")
        )
        self.prompts = {}

    def add(self, request_id, prompt, max_tokens):
        self.prompts[request_id] = prompt
        self.scheduler.add(Request(request_id, Prompt(prompt), max_tokens))
        sampling = RequestSampling(SamplingParams(), request_id, len(prompt), frozenset())
        self.sampling[request_id] = sampling

    def step(self):
        plan = self.scheduler.schedule()
        command = decode_command(encode_command(self.builder.build(plan)))
        self.state.apply(command)
        self.check(plan, command)
        tokens = [self.next_token(request_id) for request_id in plan.sampled_ids]
        order = batch_order(plan) or range(len(tokens))
        by_row = [0] * len(tokens)
        for place, row in enumerate(order):
            by_row[row] = tokens[place]
        self.state.keep_sampled(len(by_row), torch.tensor(by_row, dtype=torch.int64))
        for finished in self.scheduler.commit(plan, tokens).finished:
            self.builder.remove(finished.request_id)
        return command

    def next_token(self, request_id):
        known = [*self.prompts[request_id], *self.scheduler.output_token_ids(request_id)]
        return fake_token(known, 50, request_id)

    def check(self, plan, command):
        """Every token of the step has the right id, position and slot on the device."""
        scheduler, block_size = self.scheduler, self.state.block_size
        expected = []
        for entry in sorted(plan.entries, key=lambda entry: not entry.is_decode):
            table = scheduler.block_table(entry.request_id)
            known = [*self.prompts[entry.request_id]]
            known += scheduler.output_token_ids(entry.request_id)
            for position in range(entry.first_position, entry.first_position + entry.num_tokens):
                block = table[position // block_size]
                place = block * block_size + position % block_size
                expected.append((known[position], position, place))
        if command.chunks:
            inputs = mixed_step_inputs(command, self.state, 10**6)
            ids, positions, mapping = (
                inputs.input_ids,
                inputs.positions,
                inputs.meta.slot_mapping,
            )
            assert inputs.sampled_rows.numel() == len(plan.sampled_ids)
            contexts = inputs.meta.decode_context_lens
        else:
            ids, positions, mapping, _, contexts = self.state.decode_rows(command.num_decodes)
        found = list(zip(ids.tolist(), positions.tolist(), mapping.tolist(), strict=True))
        assert found == expected
        decodes = plan.decode
        assert contexts.tolist() == [base + plan.clock + 1 for base in decodes.base_positions]


def test_the_device_reads_and_writes_what_the_kernel_means():  # BUG-C06, BUG-C15, BUG-C77, BUG-C80
    for seed in range(60):
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 3, 4])
        policy = rng.choice([*POLICIES])
        threshold = {} if policy == "prefill_first" else {"long_prefill_token_threshold": 2}
        mirror = Mirror(
            num_blocks=40 // block_size,
            max_model_len=40,
            block_size=block_size,
            max_num_seqs=rng.choice([1, 2, 5]),
            max_num_batched_tokens=rng.choice([1, 3, 8, 40]),
            policy=policy,
            **rng.choice([{}, {}, threshold]),
        )
        for request_id in range(8):
            length = rng.randint(1, 15)
            prompt = [rng.randrange(3) for _ in range(length)]
            mirror.add(request_id, prompt, rng.randint(1, 15))
            for _ in range(rng.randrange(4)):
                if mirror.scheduler.has_work:
                    mirror.step()
        while mirror.scheduler.has_work:
            mirror.step()
        assert mirror.builder.num_free_slots == mirror.scheduler.config.max_num_seqs


def test_steady_decode_sends_nothing_but_new_blocks():
    mirror = Mirror(num_blocks=64, max_model_len=256, block_size=16, max_num_seqs=4)
    for request_id in range(4):
        mirror.add(request_id, [1] * (10 + request_id), 100)
    mirror.step()
    first = mirror.step()
    assert first.decode_slots is not None
    sizes = []
    for _ in range(60):
        command = mirror.step()
        assert command.decode_slots is None
        assert len(command.table_index) <= 4
        sizes.append(len(encode_command(command)))
    assert min(sizes) < 64
    assert max(sizes) < 128


def test_padded_rows_write_nothing_and_see_nothing():  # BUG-B43
    mirror = Mirror(num_blocks=64, max_model_len=64, block_size=4, max_num_seqs=4)
    mirror.add(0, [1, 2, 3], 30)
    mirror.add(1, [4, 5], 30)
    mirror.step()
    mirror.step()
    plan = mirror.scheduler.schedule()
    mirror.state.apply(mirror.builder.build(plan))
    before = mirror.state.row_positions.tolist()
    _, _, mapping, tables, contexts = mirror.state.decode_rows(4)
    assert mapping.tolist()[2:] == [-1, -1]
    assert contexts.tolist()[2:] == [0, 0]
    assert int(tables.min()) >= 0
    after = mirror.state.row_positions.tolist()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 0, 0]
