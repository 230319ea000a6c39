"""Models that people bring: published counts and KV, stored formats, names, and refusals."""

import json
from pathlib import Path

import pytest
from sim_testing import deployment

from engine.cli import main
from engine.core import ConfigError, InputError
from sim.run.deployment import build
from sim.specs.counted import CountedShape
from sim.specs.hardware import HARDWARE, hardware_named, read_hardware
from sim.specs.models import MODELS, architecture_named, model_named
from sim.specs.read_model import architecture_of

LINES = (Path(__file__).parents[1] / "data" / "case_models.jsonl").read_text().splitlines()
CASES = {case["name"]: case for case in map(json.loads, LINES)}
# Its 40 layers of 2 KV heads of 128 keep 40,960 bytes; the collection says twice that.
WRONG_KV_IN_THE_COLLECTION = {"GLM-4-9B"}
REFUSED = {"bert-base": "is an encoder"}


def config_file(folder: Path, config: dict) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_published_model_has_its_published_sizes(name, tmp_path, capsys):
    case = CASES[name]
    path = config_file(tmp_path, case["config"])
    assert main(["model", "show", str(path), "--json"]) == 0
    sheet = json.loads(capsys.readouterr().out)
    assert sheet["parameters"] / 1e9 == pytest.approx(case["params_b"], rel=0.02)
    expected = case["kv_bytes_per_token_16bit"]
    if name in WRONG_KV_IN_THE_COLLECTION:
        expected //= 2
    assert sheet["kv_bytes_per_token"] == sheet["kv_bytes_per_token_16bit"] == expected
    assert sheet["dtype"] in ("bfloat16", "float16")
    stored_in_16_bit = 2 * sheet["parameters"]
    if "quantization_config" in case["config"]:
        assert sheet["weight_bytes"] < 0.7 * stored_in_16_bit
        assert sheet["quantization"] != "none"
    else:
        assert sheet["weight_bytes"] == stored_in_16_bit


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_decoder_is_refused_by_name(name, tmp_path, capsys):
    path = config_file(tmp_path, CASES[name]["config"])
    assert main(["model", "show", str(path)]) == 2
    error = capsys.readouterr().err
    assert REFUSED[name] in error and error.count("\n") == 1


# Those that a run takes as they are; the others say what is not modelled.
WINDOWS = {"Phi-3-mini-4k": 2047, "Gemma-2-9b": 4096, "Gemma-3-1b": 512, "Gemma-3-4b": 1024,
           "gpt-oss-20b": 128}  # fmt: skip
UNMODELLED = {"DeepSeek-V2-Lite": "latent", "MiniCPM3-4B": "latent", "Nemotron-H-8B": "state",
              "bert-base": "encoder"}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_costs_what_it_models_and_refuses_the_rest_by_name(name, tmp_path):
    path = str(config_file(tmp_path, CASES[name]["config"]))
    place = {"model": path, "hardware": "b200", "tp": 1, "num_kv_blocks": None, "cost": "auto"}
    if name in UNMODELLED:
        with pytest.raises(InputError, match=UNMODELLED[name]):
            build(deployment(**place), 0)
        return
    if name in WINDOWS:
        with pytest.raises(ConfigError, match=f"sliding window of {WINDOWS[name]} tokens"):
            build(deployment(**place), 0)
        place["max_model_len"] = WINDOWS[name]
    if name == "Qwen3-235B-A22B":
        place["tp"] = 4
    parts = build(deployment(**place), 0)
    assert parts.model.weight_bytes / 1e9 == pytest.approx(
        architecture_named(path).weight_bytes(2) / 1e9, rel=1e-3
    )


QWEN = CASES["Qwen3-8B"]["config"]
BODY = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288)
REST = 2 * (8_190_735_360 - BODY)


def quantized(**scheme: object):
    return architecture_of("config.json", "m", {**QWEN, "quantization_config": scheme})


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
# Bits of a matrix weight with its share of scales and zero points.
FORMATS = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
    "fp8 tensor": ({"quant_method": "fp8"}, 8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
    "gptq 8 bit": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    "bitsandbytes 4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    "bitsandbytes 8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    "compressed w4a16": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": INT4}}},
        4 + 16 / 128,
    ),
    "compressed fp8": (
        {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"weights": FP8_CHANNEL, "targets": ["Linear"],
                                       "input_activations": FP8_CHANNEL}}},
        8,
    ),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_counts_its_stored_bytes(name):
    scheme, bits = FORMATS[name]
    built = quantized(**scheme)
    assert built.num_params == 8_190_735_360
    assert built.weight_bytes(2) == pytest.approx(BODY * bits / 8 + REST, rel=2e-3)


def test_modules_that_are_left_out_keep_16_bits():
    whole = quantized(quant_method="awq", bits=4).weight_bytes(2)
    attention = 36 * 4096 * 128 * (2 * 32 + 2 * 8)
    for names in (["self_attn"], ["model.layers.*.self_attn.*"], [r"re:.*self_attn.*"],
                  [f"model.layers.{index}.self_attn" for index in range(36)]):  # fmt: skip
        part = quantized(quant_method="awq", bits=4, modules_to_not_convert=names)
        added = part.weight_bytes(2) - whole
        assert added == attention * 2 - attention * (4 * 128 + 20) // 8 // 128
    # A name is one of whole modules: "gate" is a router and no gate_proj.
    assert quantized(quant_method="awq", modules_to_not_convert=["gate"]).weight_bytes(2) == whole


@pytest.mark.parametrize(
    ("scheme", "part"),
    [({"quant_method": "aqlm"}, "'aqlm' is known"), ({"quant_method": "new"}, "'new' is not known"),
     ({"quant_method": "gptq", "bits": 5}, "bits=5"), ({"quant_method": "bitsandbytes"}, "neither"),
     ({"quant_method": "awq", "group_size": 0}, "group_size=0"),
     ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
     ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 schemes"),
     ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": INT4}},
       "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
     ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ")],
)  # fmt: skip
def test_a_format_of_unknown_size_is_refused_by_name(scheme, part):
    with pytest.raises(InputError, match=part):
        quantized(**scheme)


def test_modelopt_is_read_from_its_own_file(tmp_path):
    config_file(tmp_path, QWEN)
    text = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(text))
    built = architecture_named(str(tmp_path))
    assert built.quantization.method == "modelopt FP8"
    shape = model_named(str(tmp_path))
    assert shape.kv_bytes_per_token() == 147_456 // 2
    assert model_named(str(tmp_path), kv_cache_dtype="bfloat16").kv_bytes_per_token() == 147_456


def test_quantised_weights_cost_their_bytes_and_arithmetic(tmp_path):
    path = config_file(tmp_path, CASES["Qwen3-8B-FP8"]["config"])
    place = {"model": str(path), "cost": "auto", "num_kv_blocks": None}
    fp8 = build(deployment(**place, hardware="h100"), 0)
    plain = build(deployment(**{**place, "model": "qwen3-8b"}, hardware="h100"), 0)
    assert isinstance(fp8.model, CountedShape)
    # A profile of 16-bit weights does not fit, so the roofline costs it.
    assert fp8.costs[0].name == "roofline"
    assert fp8.physics.body_bytes == pytest.approx(plain.physics.body_bytes / 2, rel=1e-3)
    assert fp8.physics.head_bytes == plain.physics.head_bytes
    assert fp8.physics.token_flops == plain.physics.token_flops // 2
    assert fp8.kernel.num_blocks > plain.kernel.num_blocks
    # Without 8-bit floating point units the weights are widened first.
    old = build(deployment(**place, hardware="a100"), 0)
    assert old.physics.token_flops == plain.physics.token_flops


def test_the_kv_cache_dtype_is_half_of_16_bit_for_fp8():
    half = model_named("qwen3-8b", kv_cache_dtype="fp8")
    assert half.kv_bytes_per_token() == MODELS["qwen3-8b"].kv_bytes_per_token() // 2
    assert model_named("qwen3-8b", "float32").kv_bytes_per_token() == 2 * 147_456
    with pytest.raises(ConfigError, match="kv_cache_dtype='int3'"):
        model_named("qwen3-8b", kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match="dtype='int8'"):
        model_named("qwen3-8b", "int8")


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_names_agrees_with_the_exact_counts(name):
    built, shape = architecture_named(name), MODELS[name]
    assert built.num_params == pytest.approx(shape.num_params, rel=2e-3)
    assert built.kv_values_per_token * 2 == shape.kv_bytes_per_token()
    assert not built.not_modelled


@pytest.mark.parametrize(
    ("name", "known"),
    [("Qwen/Qwen3-8B", "qwen3-8b"), ("QWEN3-8B", "qwen3-8b"), ("qwen3_8b", "qwen3-8b"),
     ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
     ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
     ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b"), ("Llama-2-7b-chat-hf", "llama-2-7b"),
     ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
     ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
     ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m")],
)  # fmt: skip
def test_a_name_may_have_its_owner_and_training(name, known):
    assert model_named(name) is MODELS[known]


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An empty cache, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_name_on_the_hub_needs_its_config_alone(no_hub):
    repo = no_hub / "models--acme--tiny-chat"
    snapshot = repo / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    config_file(snapshot, CASES["Qwen3-8B-FP8"]["config"])
    shape = model_named("acme/tiny-chat")
    assert shape.name == "tiny-chat" and shape.weight_bytes < 10e9
    with pytest.raises(ConfigError, match="acme/other"):
        model_named("acme/other")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "hint"),
    [("qwen3-8bb", "qwen3-8b"), ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
     ("mistralai/Mistral-7B-v0.1", "mistral-7b"), ("lama-3.1-8b", "llama-3.1-8b")],
)  # fmt: skip
def test_a_near_name_is_refused_with_a_suggestion(name, hint):
    """Another quantisation or version is another model, however near its name."""
    with pytest.raises(ConfigError, match=rf"did you mean {hint}\?"):
        model_named(name)


def test_a_folder_comes_before_a_built_in_model_of_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "own" / "qwen3-8b"
    folder.mkdir(parents=True)
    config_file(folder, CASES["Qwen3-0.6B"]["config"])
    monkeypatch.chdir(tmp_path)
    assert model_named("own/qwen3-8b").num_layers == 28


@pytest.mark.parametrize(
    ("name", "known"),
    [("NVIDIA H100", "h100"), ("H100-80GB", "h100"), ("NVIDIA H100 80GB HBM3", "h100"),
     ("nvidia_h200", "h200"), ("A100-SXM4-40GB", "a100-40gb"), ("Tesla L4", "l4"),
     ("NVIDIA GeForce RTX 4090", "rtx4090"), ("RTX 5090", "rtx5090"), ("NVIDIA L40S", "l40s")],
)  # fmt: skip
def test_a_gpu_may_be_written_as_its_driver_does(name, known):
    assert hardware_named(name) is HARDWARE[known]


def test_a_near_gpu_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"did you mean h100\?"):
        hardware_named("H1000")


SHEET = {"name": "mi300x", "bf16_tflops": 1307, "memory_gb_per_s": 5300, "memory_mib": 196288,
         "link_gb_per_s": 64, "fp8_tflops": 2614}  # fmt: skip


def test_a_gpu_can_be_given_as_a_file(tmp_path):
    as_json, as_yaml = tmp_path / "gpu.json", tmp_path / "gpu.yaml"
    as_json.write_text(json.dumps(SHEET))
    as_yaml.write_text("\n".join(f"{key}: {value}" for key, value in SHEET.items()))
    sheet = hardware_named(str(as_json))
    assert (sheet.name, sheet.flops_per_s, sheet.memory_bytes) == ("mi300x", 1307e12, 196288 << 20)
    assert (sheet.fp8_speedup, sheet.int8_speedup) == (2.0, 1.0)
    other = hardware_named(str(as_yaml))
    assert other.memory_bytes_per_s == sheet.memory_bytes_per_s == 5.3e12
    parts = build(deployment(hardware=str(as_json), num_kv_blocks=None), 0)
    assert parts.hardware == sheet and parts.kernel.num_blocks > 0


@pytest.mark.parametrize(
    ("change", "part"),
    [({"bf16_tflops": None}, "bf16_tflops=None"), ({"memory_mib": -1}, "memory_mib=-1"),
     ({"memory_mib": "much"}, "memory_mib='much'"), ({"tflops": 3}, "'tflops' is not one of"),
     ({"name": "H100"}, "name='H100'"), ({"link_gb_per_s": True}, "link_gb_per_s=True")],
)  # fmt: skip
def test_a_wrong_sheet_names_its_key(tmp_path, change, part):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({**SHEET, **change}))
    with pytest.raises(InputError, match=r"gpu\.json") as caught:
        read_hardware(path)
    assert part in str(caught.value)
    with pytest.raises(InputError, match=r"none\.json"):
        hardware_named("none.json")
