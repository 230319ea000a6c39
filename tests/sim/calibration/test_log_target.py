"""A log that says what it is of is not taken for something else."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from recording_testing import make_recording

from engine.cli import main
from engine.core import KernelConfig
from engine.core.errors import InputError
from engine.steplog.api import LogHeader
from sim.calibration.build import target_of
from sim.calibration.log_target import check_log, said_hardware
from sim.specs.models import model_named

TARGET = target_of(model_named("qwen3-8b"), "h200", "bfloat16", 1, "")
ENGINE_MODEL = {
    "architecture": "Qwen3ForCausalLM", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_layers": 36, "num_heads": 32, "num_kv_heads": 8,
    "head_dim": 128, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
ENGINE_HARDWARE = {"device": "cuda:0", "device_name": "NVIDIA H200", "tensor_parallel_size": 1}


def header(model=None, hardware=None):
    return LogHeader(
        writer="engine",
        kernel=KernelConfig(num_blocks=4, max_model_len=8),
        model={**ENGINE_MODEL, **(model or {})},
        hardware={**ENGINE_HARDWARE, **(hardware or {})},
    )


def test_the_engines_the_simulators_and_silent_logs_of_the_target_pass():
    check_log(header(), "log", TARGET)
    check_log(replace(header(), model={}, hardware={}), "log", TARGET)
    simulated = asdict(model_named("qwen3-8b"))
    check_log(replace(header(), model=simulated, hardware={"name": "h200", "tp": 1}), "x", TARGET)
    named = {"name": "qwen3-8b shapes, random bfloat16 weights"}
    check_log(replace(header(), model=named, hardware={"name": "NVIDIA H200"}), "x", TARGET)
    assert said_hardware(header(hardware={"device_name": "NVIDIA H100 80GB HBM3"})) == "h100"


@pytest.mark.parametrize(
    ("model", "hardware", "complaint"),
    [
        ({"num_layers": 28}, {}, "a model with num_layers=28, qwen3-8b has 36"),
        ({"tie_word_embeddings": True}, {}, "tied_embeddings=True"),
        ({"dtype": "float16"}, {}, "dtype float16, not bfloat16"),
        ({"dtype": "torch.float32"}, {}, "dtype float32, not bfloat16"),
        ({}, {"device_name": "NVIDIA A100-SXM4-80GB"}, "not h200"),
        ({}, {"device_name": "cpu"}, "hardware cpu, not h200"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size 2, not 1"),
    ],
)
def test_a_log_of_something_else_is_refused_by_what_it_says(model, hardware, complaint):
    with pytest.raises(InputError, match=complaint):
        check_log(header(model, hardware), "log.jsonl", TARGET)


def test_another_models_name_is_refused_by_its_shape():
    named = replace(header(), model={"name": "qwen3-4b"}, hardware={})
    with pytest.raises(InputError, match=r"num_layers|hidden_size"):
        check_log(named, "log", TARGET)


@pytest.mark.parametrize("verb", ["validate", "calibrate"])
@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"hardware": "NVIDIA A100-SXM4-80GB"}, "log.json.gz: is of hardware"),
        ({"model": "qwen3-4b"}, "log.json.gz: is of a model"),
        ({"dtype": "float16"}, "dtype"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2, not 1"),
    ],
)
def test_both_verbs_refuse_a_recording_of_something_else(
    tmp_path, capsys, monkeypatch, verb, facts, complaint
):
    monkeypatch.chdir(tmp_path)
    make_recording("log.json.gz", 20, facts=facts)
    words = ["--model", "qwen3-8b", "--hardware", "h200", "--out", "v.json"]
    words += ["--dtype", "bfloat16"] if verb == "calibrate" else []
    assert main(["sim", verb, "log.json.gz", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log.json.gz"]
