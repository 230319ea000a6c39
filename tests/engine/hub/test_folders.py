"""A hub id works wherever a model folder does: cache first, then only what is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_testing import REVISIONS, StandInHub, ask, environment
from llm_testing import write_tiny_model
from tokenizer_testing import KINDS

from engine.core.errors import ConfigError
from engine.hub.folders import is_hub_id, model_folder
from engine.options import EngineOptions

NAME = "org/tiny"
OTHER_FILES = {
    "README.md": b"read me",
    "pytorch_model.bin": b"the same weights once more",
    "onnx/model.onnx": b"and once more",
    "original/consolidated.safetensors": b"and once more",
}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = Path(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=280))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    KINDS["byte level"]().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(files):
    sharded = {name: data for name, data in files.items() if name != "model.safetensors"}
    sharded["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    ).encode()
    repos = {
        NAME: {**files, **OTHER_FILES},
        "org/gated": files,
        "org/sharded": {**sharded, "model-00001-of-00002.safetensors": b"1"},
        "org/own-name": {**sharded, "weights.safetensors": b"1"},
        "org/none": {"config.json": b"{}", "pytorch_model.bin": b""},
    }
    del repos["org/own-name"]["model.safetensors.index.json"]
    with StandInHub(repos, gated={"org/gated"}) as made:
        yield made


def test_only_what_is_needed_is_fetched_and_then_the_cache_is_enough(hub, files, tmp_path):
    answers, errors = ask(tmp_path, hub.url, ("model_folder", [NAME]))
    folder = Path(answers[0])
    assert hub.fetched() == sorted(files)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert "Fetching" in errors  # progress is shown
    again, _ = ask(tmp_path, NOWHERE, ("model_folder", [NAME]), ("hub_file", [NAME, "config.json"]))
    assert again == [str(folder), str(folder / "config.json")]
    assert hub.fetched() == []


def test_the_simulator_gets_the_config_alone(hub, files, tmp_path):
    answers, _ = ask(tmp_path, hub.url, ("hub_file", [NAME, "config.json"]))
    assert hub.fetched() == ["config.json"]
    assert Path(answers[0]).read_bytes() == files["config.json"]
    # What is there counts as cached, the rest is fetched when an engine needs it.
    ask(tmp_path, hub.url, ("model_folder", [NAME], {"weights": False}))
    assert "model.safetensors" not in hub.fetched()
    ask(tmp_path, hub.url, ("model_folder", [NAME]))
    assert hub.fetched() == ["model.safetensors"]


def test_revisions_shards_and_weights_under_other_names(hub, tmp_path):
    answers, _ = ask(
        tmp_path,
        hub.url,
        ("model_folder", [f"{NAME}@v1"]),
        ("model_folder", ["org/sharded"]),
        ("model_folder", ["org/own-name"]),
    )
    assert Path(answers[0]).name == REVISIONS["v1"]
    assert (Path(answers[1]) / "model-00001-of-00002.safetensors").is_file()
    assert (Path(answers[2]) / "weights.safetensors").is_file()
    hub.fetched()


def test_what_cannot_be_had_is_said_in_one_line(hub, tmp_path):
    answers, _ = ask(
        tmp_path,
        hub.url,
        ("model_folder", ["org/nothing"]),
        ("model_folder", [f"{NAME}@v2"]),
        ("model_folder", ["org/gated"]),
        ("model_folder", ["org/none"]),
        ("hub_file", [NAME, "nothing.json"]),
        ("model_folder", ["no model"]),
        ("model_folder", ["gpt2"], {"option": "tokenizer"}),
    )
    expected = [
        "InputError: 'org/nothing': no such folder; on the hub: no such model",
        f"InputError: '{NAME}@v2': no such folder; on the hub: no such revision",
        "InputError: 'org/gated': no such folder; on the hub: access must be granted on the hub, "
        "and a token given (HF_TOKEN)",
        "InputError: 'org/none': no such folder; on the hub: no *.safetensors weights, or only a "
        "part of them in the cache and the hub out of reach",
        f"InputError: '{NAME}': no such folder; on the hub: the model lacks the file",
        "ConfigError: model='no model': must be a folder in Hugging Face format or a hub id "
        "such as Qwen/Qwen3-0.6B",
        "ConfigError: tokenizer='gpt2': must be a folder in Hugging Face format or a hub id "
        "such as Qwen/Qwen3-0.6B",
    ]
    assert answers == expected
    hub.fetched()


def test_tokens_and_the_offline_switch_are_obeyed(hub, tmp_path):
    answers, _ = ask(tmp_path, hub.url, ("model_folder", ["org/gated"]), HF_TOKEN="right")
    assert Path(answers[0]).is_dir()
    calls = [("model_folder", ["org/gated"]), ("model_folder", [NAME]), ("hub_file", [NAME, "x"])]
    offline, _ = ask(tmp_path, hub.url, *calls, HF_HUB_OFFLINE="1")
    assert offline[0] == answers[0]
    assert "not in the cache" in offline[1]
    assert "not in the cache" in offline[2]
    [unreachable], _ = ask(tmp_path, NOWHERE, ("model_folder", [NAME]))
    assert unreachable.startswith(f"InputError: '{NAME}': no such folder; on the hub: ")
    assert len(unreachable.splitlines()) == 1
    hub.fetched()


def test_a_cache_laid_out_on_disk_is_enough(files, tmp_path):
    """As other programs have left it, without a tokenizer, and with no hub in reach."""
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / REVISIONS["main"]
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(REVISIONS["main"])
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(files[name])
    answers, _ = ask(tmp_path, NOWHERE, ("model_folder", [NAME]), HF_HUB_OFFLINE="1")
    assert answers == [str(snapshot)]
    (snapshot / "model.safetensors").unlink()
    answers, _ = ask(tmp_path, NOWHERE, ("model_folder", [NAME]), HF_HUB_OFFLINE="1")
    assert "not in the cache, and HF_HUB_OFFLINE is set" in answers[0]


def test_generate_takes_a_hub_id(hub, tmp_path):
    command = [sys.executable, "-m", "engine", "generate", "--device", "cpu", "--max-tokens", "3"]
    command += ["--max-model-len", "32", "--num-kvcache-blocks", "8", "--prompt", "hello"]

    def generate(model):
        return subprocess.run(
            [*command, "--model", model],
            env=environment(tmp_path, hub.url),
            capture_output=True,
            text=True,
        )

    done = generate(NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hello")
    failed = generate("org/nothing")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.splitlines()[-1].endswith(
        "'org/nothing': no such folder; on the hub: no such model"
    )
    hub.fetched()


def test_a_wrong_option_is_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr("engine.options.model_folder", pytest.fail)
    with pytest.raises(ConfigError, match="block_size"):
        EngineOptions.from_kwargs(NAME, block_size=0)


def test_a_folder_is_a_folder_whatever_its_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id(NAME)
    assert model_folder(NAME) == Path(NAME)
    assert is_hub_id("org/other@refs/pr/1")
    assert not is_hub_id("a/b/c")
