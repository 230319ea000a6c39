"""Logits equal HF's in float32, however the tokens are cut into steps, rows and ranks."""

import pytest
import torch
from model_testing import hf_model, load, new_caches, rope_raw, saved, step
from tp_testing import run_ranks

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-untied-bias": ("Qwen3", {"attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    **{f"llama-{k}": ("Llama", rope_raw(k)) for k in ("linear", "llama3", "yarn")},
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3-moe-dense-between": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-yarn": ("Qwen3", rope_raw("yarn", theta=1e6)),
}


def hf_logits(model, *prompts):
    with torch.inference_mode():
        return [model(torch.tensor([p])).logits[0] for p in prompts]


def tokens(num, seed=0, vocab=97):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (num,), generator=generator).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_hfs(tmp_path, name):
    """One prompt in two chunks, another in one, then decodes of both in a batch."""
    kind, overrides = MODELS[name]
    reference = hf_model(kind, **overrides)
    model = load(saved(reference, tmp_path))
    a, b = tokens(25, 1), tokens(18, 2)
    caches = new_caches(model)
    tables = {"a": [7, 3, 12, 4, 9, 1, 0], "b": [8, 31, 2, 5, 6]}
    hidden = {"a": [], "b": []}

    def run(*rows):
        out = step(model, caches, list(rows), tables)
        for sequence, ids, _ in rows:
            hidden[sequence].append(out[: len(ids)])
            out = out[len(ids) :]

    run(("a", a[:10], 0))
    run(("a", a[10:20], 10), ("b", b[:15], 0))
    run(("b", b[15:16], 15), ("a", a[20:22], 20))
    run(("a", a[22:23], 22), ("b", b[16:17], 16))
    run(("b", b[17:18], 17), ("a", a[23:24], 23))
    run(("a", a[24:25], 24))
    for sequence, expected in zip("ab", hf_logits(reference, a, b), strict=True):
        logits = model.compute_logits(torch.cat(hidden[sequence]))
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_a_perturbed_weight_is_seen(tmp_path):
    """The comparison has power: one weight changed by 1 % breaks it."""
    reference = hf_model("Qwen3")
    model = load(saved(reference, tmp_path))
    with torch.no_grad():
        model.layers[1].mlp.down.weight[3].mul_(1.01)
    ids = tokens(12)
    logits = model.compute_logits(step(model, new_caches(model), [("a", ids, 0)], {"a": [0, 1, 2]}))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(logits, hf_logits(reference, ids)[0], **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "overrides", "size"),
    [
        ("Qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}, 2),
        ("Qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}, 8),
        ("Qwen2", {"num_attention_heads": 8, "num_key_value_heads": 2}, 4),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 81}, 3),
    ],
)
def test_ranks_together_compute_the_whole_model(tmp_path, kind, overrides, size):
    """Each rank loads its own slices; logits are equal on all and equal to the whole model's."""
    if size == 3:
        overrides = {
            **overrides,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 72,
        }
    reference = hf_model(kind, **overrides)
    folder = saved(reference, tmp_path)
    ids = tokens(14, 3)
    expected = hf_logits(reference, ids)[0]

    def logits_of(group):
        model = load(folder, group=group)
        caches = new_caches(model)
        tables = {"a": [3, 0, 2, 1]}
        hidden = [step(model, caches, [("a", ids[:13], 0)], tables)]
        hidden.append(step(model, caches, [("a", ids[13:], 13)], tables))
        return model.compute_logits(torch.cat(hidden))

    results = run_ranks(size, logits_of)
    for logits in results:
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert torch.equal(logits, results[0])


def test_bf16_stays_within_twice_hfs_own_error(tmp_path):
    """The three-way rule: HF in float32 is the truth, HF in bfloat16 the yardstick."""
    reference = hf_model("Qwen3", num_hidden_layers=4)
    folder = saved(reference, tmp_path)
    ids = tokens(40, 5)
    truth = hf_logits(reference, ids)[0]
    yardstick = (hf_logits(reference.to(torch.bfloat16), ids)[0].float() - truth).abs()
    model = load(folder, dtype=torch.bfloat16)
    tables = {"a": list(range(10))}
    hidden = step(model, new_caches(model), [("a", ids, 0)], tables)
    error = (model.compute_logits(hidden).float() - truth).abs()
    rounding = 2 * torch.finfo(torch.bfloat16).eps * truth.abs().max()
    assert error.max() <= 2 * yardstick.max() + rounding
    assert error.mean() <= 2 * yardstick.mean()
