"""Whole models follow HF at every position, in every dtype, and planted defects are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from golden.canaries import CANARIES, SPARSE_CANARIES
from golden.cases import TINY_MODELS, ModelCase, qwen3_shape, random_batch, tiny_model
from golden.gpu import SHAPES
from golden.models import Reference, engine_options, run_model
from golden.reference import cast, hf_logits, random_hf_model
from golden.smollm2 import Variant, smollm2_results
from golden.suite import CPU_DTYPES, tiny_model_results, tiny_reference
from golden.tests.test_components import require_all

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
    return tiny_reference(tiny_model(CANARY_MODEL), scratch)


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


@pytest.fixture(scope="module", params=["qwen3-moe", "mixtral"])
def sparse_reference(request: pytest.FixtureRequest, scratch: Path) -> tuple[Reference, Path]:
    return tiny_reference(tiny_model(request.param), scratch)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", SPARSE_CANARIES)
def test_planted_defect_in_a_mixture_is_caught(
    name: str, dtype: torch.dtype, sparse_reference: tuple[Reference, Path]
) -> None:
    reference, folder = sparse_reference
    options = engine_options(folder, dtype, "cpu")
    stats, _ = run_model(options, reference, dtype, defect=SPARSE_CANARIES[name])
    assert stats.violations


def test_hf_can_be_its_own_second_yardstick() -> None:
    case = tiny_model("qwen3-head-64")
    model = random_hf_model(case, 0)
    reference = Reference(random_batch(case.settings["vocab_size"], (17, 40), 4))
    reference.add_truth(model)
    reference.add_yardstick(cast(model, torch.bfloat16), ["eager"])
    config: Any = model.config
    assert config._attn_implementation == "sdpa", "the model's own is back"
    (other,) = reference.others[torch.bfloat16]
    assert other.keys() == reference.truth.keys()
    differs = [not torch.equal(other[n], reference.yardsticks[torch.bfloat16][n]) for n in other]
    assert any(differs), "both implementations round alike, so this tests nothing"
    own_c = reference.hf_own_c(torch.bfloat16)
    assert own_c is not None and 0 < own_c < 2
    assert reference.hf_own_c(torch.float32) is None


def test_a_deep_models_branches_are_scaled_down() -> None:
    settings = {**tiny_model("qwen3-untied-bias-yarn").settings, "attention_bias": False}
    case = ModelCase("deep", "Qwen3", settings, 0.1, branch_scale=0.2, embedding_std=2.0)
    for name, parameter in random_hf_model(case, 0).named_parameters():
        if "norm" in name:
            continue
        deviation = float(parameter.detach().std())
        scaled = "o_proj" in name or "down_proj" in name
        expected = 2.0 if "embed" in name else 0.02 if scaled else 0.1
        assert deviation == pytest.approx(expected, rel=0.1), name


def test_a_pointing_head_speaks_for_the_token_after_the_one_read() -> None:
    settings = {**tiny_model("qwen3-untied-bias-yarn").settings, "hidden_size": 128}
    pointing: dict[str, Any] = {"embedding_std": 8.0, "head_from_embedding": 0.1}
    model = random_hf_model(ModelCase("pointing", "Qwen3", settings, 0.02, **pointing), 0)
    embedding = model.get_parameter("model.embed_tokens.weight").detach()
    head = model.get_parameter("lm_head.weight").detach()
    assert float(head.std()) == pytest.approx(0.1, rel=0.1)
    along = torch.cosine_similarity(head, embedding.roll(1, 0))
    assert bool((along > 0.999).all())
    assert float(torch.cosine_similarity(head, embedding).abs().mean()) < 0.2
    tokens = list(range(3, 40))
    best = hf_logits(model, tokens).argmax(-1).tolist()
    assert best == [token + 1 for token in tokens[:-1]]


def test_the_large_shapes_have_weights_that_decide() -> None:
    for name in SHAPES:
        case = qwen3_shape(name)
        assert case.head_from_embedding or case.head_tail
        # Only a head of its own can point anywhere.
        tied = case.settings["tie_word_embeddings"]
        assert (case.head_from_embedding is None) == tied


@pytest.mark.timeout(900)
def test_real_model_follows_hf_on_real_prompts(smollm2_folder: Path) -> None:
    variant = Variant("torch", {"max_num_batched_tokens": 512, "max_model_len": 2049})
    rows = require_all(smollm2_results(smollm2_folder, "cpu", CPU_DTYPES[:2], [variant]))
    assert len(rows) == 2
    for row in rows:
        assert row.stats is not None
        assert row.stats.num_positions > 2400
        assert row.measured["num_decodes"] == 5 * 23
