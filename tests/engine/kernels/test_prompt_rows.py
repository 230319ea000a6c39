"""A padded step with chunks holds what the unpadded one does, and nothing in its padding."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from kernel_testing import KERNEL_DEVICE

from engine.kernels.worklist import WorklistSizes
from engine.worker.batch_state import BatchState
from engine.worker.command import ChunkCommand, StepCommand
from engine.worker.inputs import mixed_step_inputs
from engine.worker.prompt_steps import PromptSteps

SIZES = WorklistSizes(num_kv_heads=2, rows_per_tile=8, target=6, key_multiple=4, min_part=8)


def random_step(rng, num_slots, width, block_size):
    """A command whose slots are all different, and the block tables behind it."""
    slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
    num_decodes = rng.randint(0, len(slots) - 1)
    room = width * block_size
    chunks = []
    for slot in slots[num_decodes:]:
        length = rng.randint(1, min(20, room))
        first = rng.randint(0, room - length)
        ids = array("q", (rng.randrange(1000) for _ in range(length)))
        chunks.append(ChunkCommand(slot, first, ids, rng.random() < 0.5))
    positions = [rng.randrange(room - 1) for _ in range(num_decodes)]
    return StepCommand(
        step=0,
        num_decodes=num_decodes,
        decode_slots=array("q", slots[:num_decodes]) if num_decodes else None,
        decode_positions=array("q", positions) if num_decodes else None,
        table_index=array("q"),
        table_blocks=array("q"),
        chunks=tuple(chunks),
    )


@pytest.mark.parametrize("seed", range(12))
def test_padded_inputs_are_those_of_the_unpadded_step(seed):
    rng = random.Random(seed)
    num_slots, width, block_size = 7, 9, rng.choice([1, 3, 16])
    device = torch.device(KERNEL_DEVICE)
    command = random_step(rng, num_slots, width, block_size)
    tables = torch.randint(0, 500, (num_slots + 1, width), dtype=torch.int32)
    tokens = torch.randint(0, 1000, (num_slots + 1,))
    states = [BatchState(num_slots, num_slots, width, block_size, device) for _ in range(2)]
    for state in states:
        state.block_tables.copy_(tables)
        state.last_tokens.copy_(tokens)
        state.sample_slots.fill_(3)
        state.apply(command)
    padded, plain = states
    out = torch.empty(160, 4, 8, device=device)
    steps = PromptSteps((32, 64, 160), padded, SIZES, out)

    size = steps.bucket(command)
    steps.take(command)
    found = steps.lay_out(size)
    wanted = mixed_step_inputs(command, plain, width * block_size)

    used = wanted.input_ids.numel()
    assert size >= used
    for ours, theirs, padding in (
        (found.input_ids, wanted.input_ids, 0),
        (found.positions, wanted.positions, 0),
        (found.meta.slot_mapping, wanted.meta.slot_mapping, -1),
    ):
        assert torch.equal(ours[:used], theirs)
        assert (ours[used:] == padding).all()
    num_samples = command.num_samples
    assert torch.equal(steps.sampled_rows[:num_samples], wanted.sampled_rows)
    assert not steps.sampled_rows[num_samples:].any()
    assert torch.equal(padded.sample_slots, plain.sample_slots)
    assert torch.equal(padded.row_positions, plain.row_positions)
    same = slice(0, num_samples)
    assert torch.equal(padded.sample_positions[same], plain.sample_positions[same])
    check_items(found.meta.work, command, positions_of(command))


def positions_of(command):
    """(slot, first row, rows, context) of every sequence, in order."""
    decodes = zip(command.decode_slots or (), command.decode_positions or (), strict=True)
    found = [(slot, row, 1, position + 1) for row, (slot, position) in enumerate(decodes)]
    row = command.num_decodes
    for chunk in command.chunks:
        length = len(chunk.token_ids)
        found.append((chunk.slot, row, length, chunk.first_position + length))
        row += length
    return found


def check_items(work, command, sequences):
    """Every query is paired with every key that it sees exactly once, within the room."""
    count, part = work.count.tolist()
    assert count <= work.items.shape[0]
    items = work.items[:count].tolist()
    keys = sum(-(-n // SIZES.rows_per_tile) * context for _, _, n, context in sequences)
    assert part % SIZES.key_multiple == 0
    assert part >= max(SIZES.min_part, keys / SIZES.target)
    seen: dict[int, set[int]] = {}
    places = []
    for slot, row, rows, position, number, end, parts, place in items:
        if not rows:
            continue
        owner = next(s for s in sequences if s[1] <= row < s[1] + s[2])
        assert slot == owner[0]
        assert position == owner[3] - owner[2] + row - owner[1]
        begin = number * part
        assert begin < end <= position + rows
        if parts > 1:
            places.append(place + number)
            assert place + parts <= work.most_partial
        for query in range(rows):
            mine = set(range(begin, min(end, position + query + 1)))
            assert not mine & seen.setdefault(row + query, set())
            seen[row + query] |= mine
    assert len(places) == len(set(places))
    for _, row, rows, context in sequences:
        for query in range(rows):
            assert len(seen[row + query]) == context - rows + query + 1


def test_an_empty_step_leaves_no_trace():
    device = torch.device(KERNEL_DEVICE)
    state = BatchState(4, 4, 5, 16, device)
    steps = PromptSteps((16, 32), state, SIZES, torch.empty(32, 4, 8, device=device))
    before = [tensor.clone() for tensor in (state.last_tokens, state.row_positions)]
    found = steps.lay_out(32)
    assert (found.meta.slot_mapping == -1).all()
    assert found.meta.work.count[0] == 0
    assert (state.sample_slots == state.num_slots).all()
    assert all(map(torch.equal, before, (state.last_tokens, state.row_positions)))


def test_a_step_beyond_the_largest_size_is_not_padded():
    device = torch.device(KERNEL_DEVICE)
    state = BatchState(4, 4, 5, 16, device)
    steps = PromptSteps((16, 32), state, SIZES, torch.empty(32, 4, 8, device=device))
    for length, size in ((1, 16), (16, 16), (17, 32), (32, 32), (33, None)):
        chunk = ChunkCommand(0, 0, array("q", [1] * length), True)
        command = StepCommand(0, 0, None, None, array("q"), array("q"), chunks=(chunk,))
        assert steps.bucket(command) == size
