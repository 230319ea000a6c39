"""Sparse models: what their configs may say, and every form in which experts are stored."""

import json

import pytest
import torch
from model_testing import hf_model, load, saved
from safetensors.torch import load_file, save_file

from engine.attention.torch_backend import TorchAttention
from engine.commands.model_random import write_random_model
from engine.distributed.group import TpGroup
from engine.errors import UnsupportedModel, WeightError
from engine.llm import LLM
from engine.models.build import build_model
from engine.models.config import resolve_model_config
from engine.models.presets import PRESETS
from engine.sampling_params import SamplingParams

FILE = "model.safetensors"
KINDS = {
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def resolve(name="tiny-qwen3-moe", **changes):
    raw = {**PRESETS[name], **changes}
    return resolve_model_config({k: v for k, v in raw.items() if v != "absent"}, ())


def test_sparse_layers_follow_step_and_exceptions():
    def layers(**changes):
        return sorted(resolve(num_hidden_layers=6, **changes).moe.sparse_layers)

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    assert layers(mlp_only_layers=None) == [0, 1, 2, 3, 4, 5]


def test_each_family_weighs_its_experts_as_it_defines():
    assert resolve(norm_topk_prob=True).moe.renormalised
    assert not resolve(norm_topk_prob="absent").moe.renormalised
    assert resolve("tiny-mixtral").moe.renormalised
    assert resolve("tiny-mixtral").moe.intermediate_size == 96


def test_the_number_of_experts_is_read_under_both_names():
    moved = resolve(num_experts="absent", num_local_experts=5)
    assert moved.moe.num_experts == 5


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_experts": "absent"}, "num_local_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"moe_intermediate_size": "absent"}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers"),
        (
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "shared_expert_intermediate_size": None,
            },
            "shared_expert",
        ),
    ],
)
def test_an_impossible_mixture_is_refused_by_name(changes, word):
    with pytest.raises(UnsupportedModel, match=word):
        resolve(**changes)


@pytest.fixture(params=KINDS)
def stored(tmp_path, request):
    reference = hf_model(request.param, **KINDS[request.param])
    return saved(reference, tmp_path / "m"), reference


def test_stacked_and_single_experts_load_alike(stored):
    folder, reference = stored
    single = dict(load(folder).named_parameters())
    stacked = {name: t.contiguous() for name, t in reference.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    save_file(stacked, folder / FILE)
    for name, parameter in load(folder).named_parameters():
        assert torch.equal(parameter, single[name]), name


def test_a_missing_expert_is_named(stored):
    folder, _ = stored
    tensors = load_file(folder / FILE)
    name = next(n for n in tensors if ".1." in n and ".experts.3." in n)
    del tensors[name]
    save_file(tensors, folder / FILE)
    with pytest.raises(WeightError, match=name):
        load(folder)


def test_an_expert_too_many_is_named(stored):
    folder, _ = stored
    tensors = load_file(folder / FILE)
    name = next(n for n in tensors if ".experts.3." in n)
    more = name.replace(".experts.3.", ".experts.9.")
    tensors[more] = tensors[name].clone()
    save_file(tensors, folder / FILE)
    with pytest.raises(WeightError, match=more):
        load(folder)


def test_stacked_experts_of_another_number_are_refused(stored):
    folder, reference = stored
    stacked = {name: t.contiguous() for name, t in reference.state_dict().items()}
    name = "model.layers.1.mlp.experts.down_proj"
    stacked[name] = stacked[name][:-1].contiguous()
    save_file(stacked, folder / FILE)
    with pytest.raises(WeightError, match=name):
        load(folder)


def test_a_token_meets_the_experts_it_visits_and_no_others():
    """What a step computes, and so which steps are worth a graph, depends on those."""
    config = resolve_model_config(PRESETS["qwen3-30b-a3b"], ())
    model = build_model(config, TpGroup(), TorchAttention(), torch.bfloat16, "meta", max_position=1)
    # The published 3.3 billion active parameters, less embedding and head.
    assert model.num_layer_weights == pytest.approx(3.35e9 - 2 * 151936 * 2048, rel=0.02)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(30.5e9, rel=0.01)


def test_the_step_log_says_what_is_sparse_and_quantised(tmp_path):
    write_random_model(tmp_path / "m", PRESETS["tiny-qwen3-moe"])
    log = tmp_path / "steps.jsonl"
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "step_log": str(log)}
    with LLM(str(tmp_path / "m"), device="cpu", max_model_len=64, **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
    header = json.loads(log.read_text().splitlines()[0])
    assert header["model"]["weights"] == "fp8"
    assert header["model"]["num_experts"] == 8
    assert header["model"]["num_experts_per_tok"] == 2
    assert header["model"]["num_sparse_layers"] == 2
    assert header["options"]["kv_cache_dtype"] == "fp8"
