"""8-bit checkpoints: every published form is read, and what cannot be is refused by name."""

import json

import pytest
import torch
from model_testing import hf_model, load, saved
from safetensors.torch import load_file, save_file

from engine.commands.model_random import write_random_model
from engine.core.errors import ConfigError
from engine.distributed.group import TpGroup
from engine.errors import UnsupportedModel, WeightError
from engine.layers.fp8_config import resolve_fp8
from engine.llm import LLM
from engine.models.config import load_model_config, resolve_model_config
from engine.models.loader import load_kv_scales
from engine.models.presets import PRESETS
from engine.worker import startup
from golden.fp8 import FORMS, dequantised_weights, quantised_checkpoint, quantization_config

FILE = "model.safetensors"
SCALE = "model.layers.1.mlp.down_proj.weight_scale"


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def folder(tmp_path, form):
    # Multiples of 16 throughout, as blocks need.
    reference = hf_model("Qwen3", num_attention_heads=4, intermediate_size=96)
    return quantised_checkpoint(saved(reference, tmp_path / "plain"), tmp_path / form, form)


def rewrite(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def reconfigure(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def scale_name(form):
    return SCALE + ("_inv" if form == "block" else "")


def test_every_form_is_loaded_with_its_numbers(folder):
    model = load(folder)
    plain = dequantised_weights(folder)
    down = model.layers[1].mlp.down
    assert down.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(down.matrix.plain(), plain["model.layers.1.mlp.down_proj.weight"])
    qkv = torch.cat([plain[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(model.layers[0].attention.qkv.matrix.plain(), qkv)
    assert model.embedding.weight.dtype == torch.float32


def test_ranks_hold_their_parts_of_values_and_scales(folder, form):
    whole = dequantised_weights(folder)["model.layers.1.mlp.down_proj.weight"]
    parts = [load(folder, TpGroup(rank, 2)).layers[1].mlp.down.matrix.plain() for rank in (0, 1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_corrupt_scale_is_refused_before_memory_is_taken(folder, form, value, monkeypatch):
    name = scale_name(form)

    def spoil(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    rewrite(folder, spoil)
    built = []
    build = startup.build_model
    monkeypatch.setattr(
        startup, "build_model", lambda *a, **k: built.append(a[4]) or build(*a, **k)
    )
    with pytest.raises(WeightError, match=name):
        LLM(str(folder), device="cpu", dtype="float32")
    assert built == ["meta"], "the model was built on the device"


def test_a_missing_scale_is_named(folder, form):
    rewrite(folder, lambda tensors: tensors.pop(scale_name(form)))
    with pytest.raises(WeightError, match=scale_name(form)):
        load(folder)


def test_a_scale_of_another_shape_is_named(folder, form):
    rewrite(folder, lambda tensors: tensors.update({scale_name(form): torch.ones(2, 7)}))
    with pytest.raises(WeightError, match=scale_name(form)):
        load(folder)


def test_a_matrix_in_16_bits_among_quantised_ones_is_named(folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(WeightError, match=rf"{name} is stored as BF16, not F8_E4M3"):
        load(folder)


def test_an_8_bit_matrix_that_the_config_does_not_announce_is_named(folder):
    reconfigure(folder, lambda config: config.pop("quantization_config"))
    with pytest.raises(WeightError, match="scale"):
        load(folder)


def test_modules_that_stay_in_16_bits_are_read_so(tmp_path):
    plain = saved(hf_model("Llama"), tmp_path / "plain")
    folder = quantised_checkpoint(plain, tmp_path / "fp8", "channel")
    name = "model.layers.0.self_attn.o_proj"

    def keep(tensors):
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = load_file(plain / FILE)[f"{name}.weight"]

    rewrite(folder, keep)
    with pytest.raises(WeightError, match=name):
        load(folder)
    reconfigure(folder, lambda c: c["quantization_config"]["ignore"].append(name))
    assert load(folder).layers[0].attention.out.weight.dtype == torch.float32
    ignored = ["lm_head", r"re:.*\.1\.self_attn\.q_proj"]
    reconfigure(folder, lambda c: c["quantization_config"].update(ignore=ignored))
    with pytest.raises(UnsupportedModel, match="some are quantised"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "odd"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [256, 128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 config_groups"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        resolve_model_config({**PRESETS["tiny-qwen3"], "quantization_config": changes}, ())


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("weights", {"num_bits": 4, "type": "int"}, "'int' and 4 bits"),
        ("weights", {"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized.*4 bits"),
        ("weights", {"strategy": "group"}, "group"),
        ("input_activations", {"type": "int"}, "input_activations"),
    ],
)
def test_compressed_tensors_of_other_numbers_are_refused(part, change, words):
    raw = quantization_config("channel", (16, 16))
    raw["format"] = "nvfp4-pack-quantized"
    raw["config_groups"]["group_0"][part].update(change)
    with pytest.raises(UnsupportedModel, match=words):
        resolve_fp8(raw)


def test_blocks_that_do_not_fit_the_matrices_are_refused(tmp_path):
    plain = saved(hf_model("Qwen3", num_attention_heads=4, intermediate_size=96), tmp_path / "p")
    folder = quantised_checkpoint(plain, tmp_path / "fp8", "block")
    with pytest.raises(ConfigError, match="cut blocks of 16 rows of gate_proj"):
        load(folder, TpGroup(0, 4))
    reconfigure(folder, lambda c: c["quantization_config"].update(weight_block_size=[128, 128]))
    with pytest.raises(UnsupportedModel, match=r"weight_block_size=\[128, 128\] does not divide"):
        load(folder)


def test_blocks_that_the_matrix_units_cannot_take_are_refused_for_a_gpu(tmp_path):
    plain = saved(hf_model("Qwen3", num_attention_heads=4, intermediate_size=96), tmp_path / "p")
    folder = quantised_checkpoint(plain, tmp_path / "fp8", "block")
    with pytest.raises(UnsupportedModel, match=r"weight_block_size=\[16, 16\].*least 32 columns"):
        load(folder, fused=True)


def test_the_option_names_what_it_takes(tmp_path):
    with pytest.raises(ConfigError, match="quantization"):
        LLM(str(tmp_path), quantization="awq")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM(str(tmp_path), kv_cache_dtype="fp8_e5m2")


def test_scales_of_the_kv_cache_are_read_under_both_names(tmp_path):
    folder = saved(hf_model("Qwen3"), tmp_path / "m")
    assert load_kv_scales(folder, 2) == [(1.0, 1.0), (1.0, 1.0)]
    prefix = "model.layers.{}.self_attn."
    rewrite(
        folder,
        lambda t: t.update(
            {
                prefix.format(0) + "k_scale": torch.tensor([0.5]),
                prefix.format(1) + "v_proj.v_scale": torch.tensor(0.25),
            }
        ),
    )
    assert load_kv_scales(folder, 2) == [(0.5, 1.0), (1.0, 0.25)]
    assert load(folder) is not None, "without an 8-bit cache they are skipped"
    rewrite(folder, lambda t: t.update({prefix.format(0) + "k_scale": torch.tensor([-1.0])}))
    with pytest.raises(WeightError, match=r"layers\.0\.self_attn\.k_scale"):
        load_kv_scales(folder, 2)


def test_an_8_bit_cache_holds_twice_the_blocks(tmp_path):
    folder = saved(hf_model("Qwen3"), tmp_path / "m")
    blocks = {}
    for dtype in ("auto", "fp8"):
        options = {"kv_cache_dtype": dtype, "kv_cache_memory_bytes": 2**20}
        with LLM(str(folder), device="cpu", dtype="bfloat16", max_model_len=64, **options) as llm:
            blocks[dtype] = llm._executor.info.num_blocks
    assert blocks["fp8"] == 2 * blocks["auto"]
    assert load_model_config(folder).fp8 is None


def test_random_checkpoints_follow_a_quantization_config(tmp_path, form):
    raw = {**PRESETS["tiny-qwen3"], "quantization_config": quantization_config(form, (16, 16))}
    write_random_model(tmp_path / "m", raw)
    model = load(tmp_path / "m", dtype=torch.bfloat16)
    assert model.layers[0].mlp.down.weight.dtype == torch.float8_e4m3fn
    assert 0.01 < float(model.layers[0].mlp.down.matrix.plain().std()) < 0.03


def test_a_checkpoint_may_ask_for_an_8_bit_cache(tmp_path):
    plain = saved(hf_model("Qwen3"), tmp_path / "plain")
    folder = quantised_checkpoint(plain, tmp_path / "fp8", "channel")
    scheme = {"num_bits": 8, "type": "float"}
    reconfigure(folder, lambda c: c["quantization_config"].update(kv_cache_scheme=scheme))
    bytes_of_a_block = {}
    for case in (plain, folder):
        with LLM(str(case), device="cpu", dtype="bfloat16", max_model_len=64) as llm:
            bytes_of_a_block[case] = llm._executor.info.memory_bytes["kv_block_bytes"]
    assert bytes_of_a_block[folder] * 2 == bytes_of_a_block[plain]
    scheme["type"] = "int"
    reconfigure(folder, lambda c: c["quantization_config"].update(kv_cache_scheme=scheme))
    with pytest.raises(UnsupportedModel, match="kv_cache_scheme"):
        load_model_config(folder)
