"""`lockstep bench compare` gives both engines one workload, and says so where vLLM is missing."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from engine.cli import main as cli
from engine.commands.model_random import write_random_model
from engine.models.presets import PRESETS

# Stands in for vLLM: counts what it is given, and takes a known time for it.
FAKE = """
import json, os, time
from types import SimpleNamespace as Record

class SamplingParams(Record):
    pass

class LLM:
    def __init__(self, **options):
        self.options, self.calls = options, []

    def generate(self, prompts, params, use_tqdm):
        if os.environ.get("FAKE_VLLM_FAILS"):
            raise RuntimeError("no kernel image")
        time.sleep(0.01)
        lengths = [[len(p["prompt_token_ids"]) for p in prompts], [p.max_tokens for p in params]]
        self.calls.append({"lengths": lengths, "first": prompts[0]["prompt_token_ids"]})
        with open(os.environ["FAKE_VLLM_LOG"], "w") as file:
            json.dump({"options": self.options, "calls": self.calls}, file)
        return [Record(outputs=[Record(token_ids=[0] * p.max_tokens)]) for p in params]
"""
WORKLOAD = "--num-seqs 3 --min-len 2 --max-len 6 --passes 2 --workload-seed 4"
OPTIONS = "--device cpu --max-model-len 64 --max-num-batched-tokens 64 --block-size 4"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    write_random_model(path, PRESETS["tiny-qwen3"], std=0.05)
    return path


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(FAKE)
    (site / "vllm-9.9.dist-info").mkdir()
    (site / "vllm-9.9.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    log = tmp_path / "vllm.json"
    monkeypatch.setenv("FAKE_VLLM_LOG", str(log))
    return log


def compare(folder, out):
    return cli(["bench", "compare", "--model", str(folder), "--out", str(out),
                *WORKLOAD.split(), *OPTIONS.split()])  # fmt: skip


def test_both_engines_run_the_same_workload(folder, fake_vllm, tmp_path, capsys):
    out = tmp_path / "record.json"
    assert compare(folder, out) == 0
    record, seen = json.loads(out.read_text()), json.loads(fake_vllm.read_text())
    own, other = record["lockstep"], record["vllm"]
    assert other["version"] == "9.9"
    assert len(other["passes"]) == len(own["passes"]) == 2
    for call in seen["calls"]:
        prompts, outputs = call["lengths"]
        assert sum(prompts) == own["num_prompt_tokens"]
        assert sum(outputs) == own["num_output_tokens"]
    assert seen["calls"][0]["first"] != seen["calls"][1]["first"], "the prefix cache must not help"
    assert seen["options"]["max_model_len"] == 64
    last = capsys.readouterr().out.splitlines()[-1]
    ratio = own["output_tokens_per_s"] / other["output_tokens_per_s"]
    assert last.startswith(f"ratio {ratio:.3f}")


def test_without_vllm_its_own_figure_stands_alone(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", hides_vllm())
    assert compare(folder, tmp_path / "record.json") == 0
    assert json.loads((tmp_path / "record.json").read_text())["vllm"] is None
    assert "vLLM is not installed" in capsys.readouterr().out.splitlines()[-1]


def hides_vllm():
    import importlib.util

    find_spec = importlib.util.find_spec
    return lambda name, package=None: None if name == "vllm" else find_spec(name, package)


def test_a_vllm_that_fails_is_one_line_and_exit_code_1(
    folder, fake_vllm, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("FAKE_VLLM_FAILS", "1")
    assert compare(folder, tmp_path / "record.json") == 1
    printed = capfd.readouterr()
    assert printed.err.startswith("lockstep: vLLM did not finish")
    assert "no kernel image" in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "record.json").exists()
