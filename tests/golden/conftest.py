"""A tiny model, its reference and HF's truth, made once for all tests of a process."""

import pytest
import torch

from golden.cases import tiny_model
from golden.check.check_plan import CheckPlan, make_setting
from golden.check.model_check import truth_for
from golden.reference import quiet_transformers, random_hf_model, save_model
from golden.stored.make_reference import make_reference
from golden.stored.reference_file import read_reference, write_reference

PROMPTS = (
    '{"name": "short", "prompt_token_ids": [5, 6, 7]}\n'
    '{"name": "middle", "prompt_token_ids": [%s]}\n'
    '{"name": "long", "prompt_token_ids": [%s]}\n'
    '{"name": "shared", "prompt_token_ids": [%s, 3, 4, 5]}\n'
)
LONG = [3 + (7 * place * place + 11 * place) % 147 for place in range(75)]
TOKENS = 10


def quiet(_line):
    """No progress."""


def words(ids):
    return ", ".join(map(str, ids))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    quiet_transformers()
    folder = tmp_path_factory.mktemp("golden-check") / "tiny"
    return save_model(random_hf_model(tiny_model("qwen3-gqa-tied"), 0), folder)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden-prompts") / "prompts.jsonl"
    path.write_text(PROMPTS % (words(LONG[:20]), words(LONG), words(LONG[:40])), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def plan_of(model_folder, prompts_file):
    """Plans with a small budget, so that the long prompts come in chunks."""

    def make(dtype="float32", folder=model_folder, prompts=prompts_file, **rest):
        engine = {"dtype": dtype, "device": "cpu", "max_num_batched_tokens": 48}
        engine |= rest.pop("engine", {})
        return CheckPlan(str(folder), engine, prompts, TOKENS, **rest)

    return make


@pytest.fixture(scope="session")
def truths(plan_of):
    """(setting, HF's truth) by dtype."""
    made = {}

    def of(dtype):
        if dtype not in made:
            setting = make_setting(plan_of(dtype))
            made[dtype] = setting, truth_for(setting, quiet)[0]
        return made[dtype]

    return of


@pytest.fixture(scope="session")
def reference_file(plan_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("golden-reference") / "ref.safetensors"
    write_reference(make_reference(plan_of(), 32, quiet), path)
    return path


@pytest.fixture(scope="session")
def reference(reference_file):
    return read_reference(reference_file)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
