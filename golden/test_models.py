"""Whole models follow HF at every position, in every dtype, and planted defects are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from golden.canaries import CANARIES
from golden.cases import TINY_MODELS, ModelCase, tiny_model
from golden.models import Reference, engine_options, run_model
from golden.smollm2 import Variant, smollm2_results
from golden.suite import CPU_DTYPES, tiny_model_results, tiny_reference
from golden.test_components import require_all

CANARY_MODEL = "qwen3-gqa-tied"
# Which rule must notice: a violation that begins with these words.
CAUGHT_BY = {
    "perturbed weight": ("largest error above bound", "other token despite a clear gap"),
    "scaled row": ("largest error above bound", "other token despite a clear gap"),
    "off-by-one position": ("mean error above bound", "mean KL"),
    "rope theta +1 %": ("largest error above bound",),
}


@pytest.mark.parametrize("case", TINY_MODELS, ids=lambda case: case.name)
def test_random_model_follows_hf(case: ModelCase, scratch: Path) -> None:
    rows = require_all(tiny_model_results(case, scratch))
    assert len(rows) == len(CPU_DTYPES)
    # The batch shares a prefix, so the run went through the prefix cache.
    assert all(row.measured["hit_tokens"] for row in rows)


@pytest.fixture(scope="module")
def canary_reference(scratch: Path) -> tuple[Reference, Path]:
    return tiny_reference(tiny_model(CANARY_MODEL), scratch, CPU_DTYPES)


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.parametrize("name", CANARIES)
def test_planted_defect_is_caught(
    name: str, dtype: torch.dtype, canary_reference: tuple[Reference, Path]
) -> None:
    reference, folder = canary_reference
    options = engine_options(folder, dtype, "cpu")
    stats, _ = run_model(options, reference, dtype, defect=CANARIES[name])
    assert stats.violations
    if dtype == torch.float32:
        for words in CAUGHT_BY[name]:
            assert any(text.startswith(words) for text in stats.violations), words


@pytest.mark.timeout(900)
def test_real_model_follows_hf_on_real_prompts(smollm2_folder: Path) -> None:
    variant = Variant("torch", {"max_num_batched_tokens": 512, "max_model_len": 2049})
    rows = require_all(smollm2_results(smollm2_folder, "cpu", CPU_DTYPES[:2], [variant]))
    assert len(rows) == 2
    for row in rows:
        assert row.stats is not None
        assert row.stats.num_positions > 2400
        assert row.measured["num_decodes"] == 5 * 23
