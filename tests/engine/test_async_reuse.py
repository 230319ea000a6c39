"""Blocks of an ended request are given away while a step in flight still writes to one of them."""

from __future__ import annotations

import pytest
from llm_testing import make_prompts, start, tokens_of, write_tiny_model

from engine.cli import main as cli
from engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


PROMPTS = make_prompts(seed=5, count=24, shared=9, longest=14)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first", "priority"])
def test_tokens_are_those_of_synchronous_runs_though_freed_blocks_are_reused_at_once(
    folder, tmp_path, policy, block_size
):
    blocks = dict(num_kvcache_blocks=72) if block_size == 1 else {}
    stops = tuple(range(0, 259, 6))  # about every sixth token ends its request
    options = dict(policy=policy, block_size=block_size)
    log = tmp_path / "steps.jsonl"

    def tokens(**rest):
        params = SamplingParams(
            temperature=0.8, seed=11, max_tokens=14, ignore_eos=True, stop_token_ids=stops
        )
        sizes = {"num_kvcache_blocks": 18, "max_model_len": 40, "max_num_seqs": 6, **blocks}
        with start(folder, **sizes, **options, **rest) as llm:
            outputs = []
            for _ in range(2):  # the second time with a warm prefix cache
                outputs += llm.generate(PROMPTS, params, use_tqdm=False)
            assert llm.scheduler.num_free_blocks == llm.info.num_blocks
        reasons = [output.outputs[0].finish_reason for output in outputs]
        return tokens_of(outputs), reasons.count("stop")

    expected, stopped = tokens()
    assert stopped > len(PROMPTS) / 2
    assert tokens(async_scheduling=True, debug=True, step_log=str(log)) == (expected, stopped)
    assert _reused_at_once(log) > 5
    assert cli(["sim", "replay", str(log)]) == 0


def _reused_at_once(log):
    """Blocks handed out while a step that was scheduled for their last owner is still open."""
    from engine.steplog.api import StepLogReader, StepRecord

    tables, found = {}, 0
    previous = None  # the batch of the step before, which is open while this one is scheduled
    for record in StepLogReader(log).expanded():
        if not isinstance(record, StepRecord):
            continue
        gained = {block for new in record.new_blocks for block in new.block_ids}
        batch = {entry.request_id for entry in record.entries}
        if previous is not None:
            gone = previous - batch
            found += sum(len(gained & tables.get(name, set())) for name in gone)
        for new in record.new_blocks:
            tables.setdefault(new.request_id, set()).update(new.block_ids)
        previous = batch
    return found
