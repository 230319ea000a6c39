"""`golden check`: healthy engines pass in every way, planted faults do not, and pages say why."""

import json

import pytest
import torch

from engine.cli import main
from engine.core.errors import InputError
from golden.cases import tiny_model
from golden.check import hf_side
from golden.check import memory_need as memory
from golden.check.check_plan import make_setting
from golden.check.check_prompts import read_prompts, shipped_prompts
from golden.check.model_check import CheckOutcome, check_model, compare_engine
from golden.check.ways import WAYS
from golden.faults import FAULTS
from golden.reference import random_hf_model, save_model
from tests.golden.conftest import TOKENS, quiet


def judged(truths, plan_of, dtype, fault=None):
    setting, truth = truths(dtype)
    defect = None if fault is None else (lambda runner: fault(runner.runner))
    outcome = CheckOutcome(setting, [])
    compare_engine(plan_of(dtype, defect=defect), setting, truth, outcome, quiet)
    return outcome


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_healthy_engine_passes_in_every_way(truths, plan_of, dtype):
    outcome = judged(truths, plan_of, dtype)
    assert outcome.passed, [case.detail for case in outcome.cases if not case.ok]
    names = {case.name for case in outcome.cases if case.status == "pass"}
    assert names == {"as asked", "after each layer", *(way.name for way in WAYS)}
    base = outcome.base
    assert base.greedy_tokens == 4 * TOKENS
    if dtype == "float32":
        assert base.equal_tokens == base.greedy_tokens and not base.divergences
    assert base.perplexity["engine"] == pytest.approx(base.perplexity["truth"], rel=0.02)
    assert len(outcome.layers["engine"]) == 2
    assert max(outcome.layers["engine"]) < 0.05


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_caught_in_float32(truths, plan_of, name):
    outcome = judged(truths, plan_of, "float32", FAULTS[name])
    broken = {case.name for case in outcome.cases if not case.ok}
    assert broken
    if name == "a stale prefix block":
        assert "one request at a time" in broken or "prefixes from the cache" in broken


COARSE = ("one head's KV swapped", "a stale prefix block", "a rank's shard exchanged")


@pytest.mark.parametrize("name", COARSE)
def test_coarse_faults_are_caught_in_bfloat16(truths, plan_of, name):
    assert not judged(truths, plan_of, "bfloat16", FAULTS[name]).passed


def test_a_divergence_is_explained_by_margin_and_error(truths, plan_of):
    outcome = judged(truths, plan_of, "float32", FAULTS["a rank's shard exchanged"])
    first = outcome.base.divergences[0]
    assert first.engine_token != first.truth_token
    assert first.margin > 0 and first.engine_margin > 0
    # What turns a margin of the truth around is an error at least half as large.
    assert first.engine_error >= first.margin / 2
    assert f"HF takes {first.truth_token}" in first.explain()


def test_a_mixture_is_checked_with_the_experts_of_the_truth(plan_of, tmp_path):
    folder = save_model(random_hf_model(tiny_model("qwen3-moe"), 0), tmp_path / "moe")
    outcome = check_model(plan_of("bfloat16", folder), quiet)
    assert outcome.passed, [case.detail for case in outcome.cases if not case.ok]


EIGHT = [
    ("bfloat16", {"quantization": "fp8"}),
    ("float32", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
]


@pytest.mark.parametrize(("dtype", "engine"), EIGHT)
def test_a_quantised_engine_may_err_as_hf_with_8_bit_numbers_does(plan_of, dtype, engine):
    healthy = check_model(plan_of(dtype, engine=engine), quiet)
    assert healthy.passed, [case.detail for case in healthy.cases if not case.ok]
    assert healthy.base.stats.hf_kl_mean > 1e-5  # the yardstick has 8-bit numbers indeed
    fault = FAULTS["a rank's shard exchanged"]
    plan = plan_of(dtype, engine=engine, defect=lambda runner: fault(runner.runner))
    assert not check_model(plan, quiet).passed


def test_a_fault_begins_in_the_layer_where_it_was_planted(truths, plan_of):
    layers = judged(truths, plan_of, "float32", FAULTS["one head's KV swapped"]).layers["engine"]
    assert layers[0] < 1e-5 < 1e-2 < layers[1]


@pytest.mark.timeout(600)
def test_two_ranks_pass_and_an_exchanged_shard_does_not(plan_of, truths):
    plan = plan_of("float32", engine={"tensor_parallel_size": 2})
    setting, truth = truths("float32")
    for defect, passes in ((None, True), ("swap_shards", False)):
        outcome = CheckOutcome(setting, [])
        plan = plan_of("float32", engine={"tensor_parallel_size": 2}, rank_defect=defect)
        compare_engine(plan, setting, truth, outcome, quiet)
        assert outcome.passed == passes, [case.detail for case in outcome.cases]
        agree = [case for case in outcome.cases if "ranks agree" in case.name]
        assert len(agree) == 1 + len(WAYS) and all(case.ok for case in agree)


# Memory ---------------------------------------------------------------------------------------


def test_a_truth_that_does_not_fit_is_computed_layer_by_layer(plan_of, monkeypatch):
    setting = make_setting(plan_of("bfloat16"))
    whole = hf_side.hf_truth(
        setting.folder, setting.config, setting.prompts, TOKENS,
        (torch.bfloat16,), setting.device, by_layer=False,
    )  # fmt: skip
    slim = hf_side.hf_truth(
        setting.folder, setting.config, setting.prompts, TOKENS,
        (torch.bfloat16,), setting.device, by_layer=True,
    )  # fmt: skip
    item = slim.sequences[2]
    assert item.prompt + item.forced == setting.prompts[2].token_ids
    rows = torch.arange(len(item.prompt))
    for mine, theirs in ((slim.truth, whole.truth), (slim.yardsticks[0], whole.yardsticks[0])):
        assert torch.allclose(
            mine.logits("long", rows).float(), theirs.logits("long", rows).float(), atol=1e-2
        )


@pytest.mark.parametrize(("free", "by_layer"), [(1 << 40, False), ((1 << 30) + 300_000, True)])
def test_what_a_check_needs_is_said_before_it_starts(plan_of, monkeypatch, free, by_layer):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    setting = make_setting(plan_of())
    need = memory.need_of(
        setting.folder, setting.config, setting.dtype, setting.device, 200, 1000, 0
    )
    assert need.by_layer == by_layer
    (line,) = need.lines()
    assert ("layer by layer" if by_layer else "whole") in line and "GiB" in line


def test_a_check_that_cannot_fit_is_refused_with_what_to_do(plan_of, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(InputError, match=r"golden record, --reference"):
        check_model(plan_of(), quiet)


# Prompts --------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text, *, add_special_tokens):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def test_the_shipped_prompts_are_of_every_kind_and_none_is_too_long():
    prompts = shipped_prompts(Letters(), 10**6, 1500)
    names = {item.name for item in prompts}
    assert {"python", "chat", "long", "one word repeated", "east asian", "right to left"} <= names
    assert len(names) == len(prompts) >= 15
    assert max(len(item.token_ids) for item in prompts) == 1500
    texts = {item.name: "".join(map(chr, item.token_ids)) for item in prompts}
    assert texts["chat"].startswith("<system>")
    one, two = (texts[f"shared beginning, {which}"] for which in ("one", "two"))
    assert one[:150] == two[:150] and one != two


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "must be an object"),
        ("{", "not JSON"),
        ('{"prompt_token_ids": [1, 999]}', "ids from 0 to 150"),
        ('{"prompt_token_ids": []}', "has 0 tokens"),
        ('{"prompt": "x"}', "no tokenizer"),
        ("", "holds no prompt"),
        ('{"name": "a", "prompt_token_ids": [1]}\n{"name": "a", "prompt_token_ids": [2]}', "named"),
    ],
)
def test_a_file_of_prompts_that_is_wrong_is_refused_by_line(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_prompts(path, None, 151, 100)


def test_a_text_file_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("one\n\ntwo words\n", encoding="utf-8")
    names = {p.name: len(p.token_ids) for p in read_prompts(path, Letters(), 10**6, 100)}
    assert names == {"line 1": 3, "line 3": 9}


# The verb -------------------------------------------------------------------------------------


def run(*words):
    return main(["golden", *map(str, words)])


def test_the_verb_writes_table_record_and_page(model_folder, prompts_file, tmp_path, capsys):
    record_path, page_path = tmp_path / "r.json", tmp_path / "r.html"
    code = run(
        "check", "--model", model_folder, "--device", "cpu", "--dtype", "bfloat16",
        "--prompts", prompts_file, "--max-tokens", 6, "--out", record_path, "--html", page_path,
    )  # fmt: skip
    output = capsys.readouterr()
    assert code == 0, output.out
    assert "memory on this machine, one after the other" in output.err
    assert "preempted and computed again" in output.out and "perplexity" in output.out
    record = json.loads(record_path.read_text())
    assert record["failure"] is None and record["check"]["prompts"]["long"] == 75
    assert set(record["check"]["layers"]) == {"engine", "HF in the dtype"}
    page = page_path.read_text()
    assert page.count("<svg") == 4 and "after each layer" in page
    # `golden report` reads it as well.
    assert run("report", record_path) == 0


@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("check", "--model", "no-such-folder"),
        ("check", "--model", ".", "--prompts", "no-such-file"),
        ("check", "--model", ".", "--reference", "r", "--prompts", "p"),
        ("check", "--model", ".", "--html", "page.txt"),
        ("check", "--model", ".", "--max-tokens", "0"),
        ("record", "--model", ".", "--out", "ref.bin"),
        ("endpoint", "--url", "ftp://x", "--reference", "no-such-file"),
    ],
)
def test_what_cannot_be_checked_exits_with_2_and_one_line(words, capsys):
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: ")
