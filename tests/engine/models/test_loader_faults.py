"""Every tensor is accounted for: what is missing, extra, mis-shaped or truncated is named."""

import json

import pytest
import torch
from model_testing import hf_model, load, new_caches, saved, step
from safetensors.torch import load_file, save_file

from engine.attention.torch_backend import TorchAttention
from engine.distributed.group import TpGroup
from engine.errors import WeightError
from engine.models.build import build_model
from engine.models.config import load_model_config
from engine.models.loader import init_dummy_weights, load_weights, weight_kind

FILE = "model.safetensors"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(tmp_path, request):
    return saved(hf_model("Qwen3", tie_word_embeddings=request.param), tmp_path / "m")


def rewrite(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def test_everything_is_loaded_and_reported(folder):
    config = load_model_config(folder)
    model = build_model(config, TpGroup(), TorchAttention(), torch.float32, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    report = load_weights(model, folder)
    assert not any(torch.isnan(p[: config.vocab_size]).any() for p in model.parameters())
    assert report.num_tensors == len(load_file(folder / FILE))
    assert report.num_files == 1
    assert report.skipped == ()


def test_every_parameter_is_covered_by_slices(folder):
    """BUG-B34: no part of a parameter is left as it was allocated."""
    config = load_model_config(folder)
    model = build_model(config, TpGroup(), TorchAttention(), torch.float32, "cpu")
    padding = sum(t.weight.numel() for t in {model.embedding, model.head.table}) - sum(
        t.rows.size * config.hidden_size for t in {model.embedding, model.head.table}
    )
    covered = sum(item.target.numel() for item in model.weight_slices())
    assert covered + padding == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_weight_is_named(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightError, match=name):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "vision.patch.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
    ],
)
def test_an_extra_weight_is_named(folder, name):
    """BUG-B34: an already fused or otherwise unknown name is never matched by a part of it."""
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(WeightError, match=name) as caught:
        load(folder)
    assert FILE in str(caught.value)


def test_a_fused_name_in_place_of_its_parts_is_refused(folder):
    def fuse(tensors):
        prefix = "model.layers.0.mlp."
        parts = [tensors.pop(f"{prefix}{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(parts)

    rewrite(folder, fuse)
    with pytest.raises(WeightError, match="gate_proj"):
        load(folder)


def test_a_wrong_shape_is_named_before_anything_is_copied(folder):
    name = "model.norm.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(47)}))
    config = load_model_config(folder)
    model = build_model(config, TpGroup(), TorchAttention(), torch.float32, "cpu")
    before = {k: p.clone().fill_(7.0) for k, p in model.named_parameters()}
    for p in model.parameters():
        p.data.fill_(7.0)
    with pytest.raises(WeightError, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load_weights(model, folder)
    assert all(torch.equal(p, before[k]) for k, p in model.named_parameters())


def test_an_integer_weight_is_refused(folder):
    name = "model.norm.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(WeightError, match="int8"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_named(folder, keep):
    data = (folder / FILE).read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    (folder / FILE).write_bytes(data[:cut])
    with pytest.raises(WeightError, match=FILE):
        load(folder)


def test_a_folder_without_weights_is_refused(folder):
    """BUG-B34: an empty folder is not a model of uninitialised weights."""
    (folder / FILE).unlink()
    with pytest.raises(WeightError, match=r"no \*\.safetensors"):
        load(folder)


def test_sharded_checkpoints_and_their_faults(tmp_path):
    reference = hf_model("Llama")
    folder = saved(reference, tmp_path / "m", max_shard_size="40KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    model = load(folder)
    sample = model.layers[1].mlp.down.weight
    assert torch.equal(sample, reference.model.layers[1].mlp.down_proj.weight)

    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    moved = dict(content["weight_map"])
    moved["model.norm.weight"] = next(f.name for f in files if f.name != moved["model.norm.weight"])
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(WeightError, match=r"model\.norm\.weight"):
        load(folder)
    index.write_text(json.dumps(content))
    files[1].unlink()
    with pytest.raises(WeightError, match=files[1].name):
        load(folder)
    index.write_text("{}")
    with pytest.raises(WeightError, match="index"):
        load(folder)


def test_the_same_name_in_two_files_is_refused(folder):
    (folder / FILE).rename(folder / "one.safetensors")
    save_file({"model.norm.weight": torch.ones(48)}, folder / "other.safetensors")
    with pytest.raises(WeightError, match="also stored"):
        load(folder)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter.safetensors"])
def test_a_stray_file_beside_the_standard_one_is_left_alone(folder, name):
    """Mistral ships its weights a second time under names of its own."""
    before = load(folder).norm.weight.clone()
    save_file(
        {"model.norm.weight": torch.ones(48), "tok_embeddings.weight": torch.ones(3)},
        folder / name,
    )
    assert torch.equal(load(folder).norm.weight, before)


def test_a_stray_file_beside_shards_is_left_alone(tmp_path):
    folder = saved(hf_model("Llama"), tmp_path / "m", max_shard_size="40KB")
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "consolidated.safetensors")
    assert load(folder).norm.weight.abs().max() > 0
    (folder / "model.safetensors.index.json").unlink()
    assert load(folder).norm.weight.abs().max() > 0


@pytest.mark.parametrize(
    "head", [lambda e: e * 1.01, lambda e: e[:50].clone(), lambda e: e.roll(1, 0)]
)
def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path, head):
    """HF would use the embedding in silence, and the model would not be the one that was saved."""
    folder = saved(hf_model("Qwen3", tie_word_embeddings=True), tmp_path / "m")
    rewrite(
        folder,
        lambda t: t.update({"lm_head.weight": head(t["model.embed_tokens.weight"])}),
    )
    with pytest.raises(WeightError, match=r"lm_head\.weight differs from .*tie_word_embeddings"):
        load(folder)


def test_a_tied_head_works_with_and_without_a_stored_one(tmp_path):
    """BUG-C61: both checkpoints give the same logits, and neither leaves a head of zeros."""
    reference = hf_model("Qwen3", tie_word_embeddings=True)
    folder = saved(reference, tmp_path / "m")
    assert "lm_head.weight" not in load_file(folder / FILE)

    def logits():
        model = load(folder)
        hidden = step(model, new_caches(model), [("a", [5, 6, 7], 0)], {"a": [0]})
        return model.compute_logits(hidden)

    without = logits()
    rewrite(
        folder,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(logits(), without)
    assert without.abs().max() > 0.1


def test_an_untied_head_must_be_stored(tmp_path):
    folder = saved(hf_model("Qwen3"), tmp_path / "m")
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightError, match=r"lm_head\.weight"):
        load(folder)


def test_weights_are_cast_to_the_run_dtype(tmp_path):
    reference = hf_model("Llama")
    model = load(saved(reference, tmp_path / "m"), dtype=torch.bfloat16)
    expected = reference.model.norm.weight.to(torch.bfloat16)
    assert torch.equal(model.norm.weight, expected)


def test_dummy_weights_are_random_and_repeatable(folder):
    def dummy(seed):
        config = load_model_config(folder)
        model = build_model(config, TpGroup(), TorchAttention(), torch.float32, "cpu")
        init_dummy_weights(model, seed)
        return model

    one, same, other = dummy(0), dummy(0), dummy(1)
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    assert torch.equal(one.norm.weight, torch.ones(48))
    up, gate = one.layers[0].mlp.gate_up.weight.chunk(2)
    assert not torch.equal(up, gate)


def test_kinds_of_weights():
    assert weight_kind("model.layers.0.self_attn.q_norm.weight") == "norm"
    assert weight_kind("model.layers.0.post_attention_layernorm.weight") == "norm"
    assert weight_kind("model.norm.weight") == "norm"
    assert weight_kind("model.layers.0.self_attn.q_proj.bias") == "bias"
    assert weight_kind("model.layers.0.self_attn.q_proj.weight") == "matrix"
