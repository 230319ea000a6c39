"""References that travel: whole and of this model, or refused; as strict as HF itself."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from engine.cli import main
from engine.core.errors import ConfigError, InputError
from golden.cases import tiny_model
from golden.faults import FAULTS
from golden.reference import random_hf_model, save_model
from golden.stored.assertion import assert_golden, from_logits
from golden.stored.make_reference import make_reference
from golden.stored.reference_file import (
    MOST_BYTES_PER_POSITION,
    check_dtype,
    read_reference,
    write_reference,
)
from golden.stored.stored_check import check_stored
from golden.stored.stored_rules import Seen, StoredJudge
from tests.golden.conftest import quiet


def test_a_reference_comes_back_as_it_was_written(reference, tmp_path):
    again_path = tmp_path / "again.safetensors"
    size = write_reference(reference, again_path)
    assert size < MOST_BYTES_PER_POSITION * reference.num_positions
    again = read_reference(again_path)
    assert again.token_ids == reference.token_ids
    for mine, theirs in zip(again.sequences, reference.sequences, strict=True):
        assert torch.equal(mine.top_logprobs, theirs.top_logprobs)
        assert torch.equal(mine.yardsticks["float16"].error, theirs.yardsticks["float16"].error)


def test_what_is_stored_is_what_hf_says(reference, truths):
    _, truth = truths("float32")
    for item in reference.sequences:
        logits = truth.truth.logits(item.name, torch.arange(item.num_positions)).double()
        logprobs = torch.log_softmax(logits, -1)
        assert torch.equal(item.top_ids[:, 0], logits.argmax(-1))
        found = logprobs.gather(-1, item.top_ids)
        assert torch.allclose(found, item.top_logprobs.double(), atol=1e-5)
        assert torch.allclose(logits.logsumexp(-1), item.logsumexp.double(), atol=1e-5)
        # A position's likeliest tokens are stored from the best one down.
        assert bool((item.top_logprobs.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_healthy_engine_passes(plan_of, reference, dtype):
    outcome = check_stored(plan_of(dtype, prompts=None), reference, quiet)
    assert all(case.status == "pass" for case in outcome.cases), outcome.cases
    assert len(outcome.cases) == 6
    stats = outcome.stats["as asked"]
    assert stats.greedy_tokens == 40 and stats.perplexity == pytest.approx(
        stats.reference_perplexity, rel=0.02
    )
    assert (stats.pooled_ratio is None) == (dtype == "float32")


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_caught(plan_of, reference, name):
    plan = plan_of(prompts=None, defect=lambda runner: FAULTS[name](runner.runner))
    outcome = check_stored(plan, reference, quiet)
    assert any(case.status == "fail" for case in outcome.cases)


# What is no reference, or one of something else ------------------------------------------------


def test_a_file_that_was_cut_short_is_refused(reference_file, tmp_path):
    whole = reference_file.read_bytes()
    for share in (0, 5, len(whole) // 2, len(whole) - 1):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(whole[:share])
        with pytest.raises(InputError, match=r"not a whole safetensors file .* copy it again"):
            read_reference(path)


def test_a_file_with_other_numbers_is_refused(reference_file, tmp_path):
    damaged = bytearray(reference_file.read_bytes())
    damaged[-9] ^= 1
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="not those that were written"):
        read_reference(path)


def test_a_model_of_weights_is_no_reference(model_folder):
    with pytest.raises(InputError, match="not a reference of golden record"):
        read_reference(model_folder / "model.safetensors")


def test_another_revision_is_refused_by_the_layer_that_differs(plan_of, reference, tmp_path):
    folder = save_model(random_hf_model(tiny_model("qwen3-gqa-tied"), 0), tmp_path / "changed")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"of another revision than changed: .*layer 1 differ"):
        check_stored(plan_of(folder=folder, prompts=None), reference, quiet)


def test_another_model_is_refused_by_the_key_that_differs(plan_of, reference, tmp_path):
    folder = save_model(random_hf_model(tiny_model("llama-gqa"), 0), tmp_path / "llama")
    with pytest.raises(InputError, match=r"of another model than llama: architecture is"):
        check_stored(plan_of(folder=folder, prompts=None), reference, quiet)


def test_another_tokenizer_is_refused(plan_of, model_folder, tmp_path):
    folders = []
    for name, content in (("one", "{}"), ("two", '{"x": 1}')):
        folder = shutil.copytree(model_folder, tmp_path / name)
        (folder / "vocab.json").write_text(content, encoding="utf-8")
        folders.append(folder)
    from golden.stored.identity import check_same, identity_of

    made = identity_of(folders[0]).to_json()
    check_same(made, identity_of(folders[0]), "ref", folders[0])
    with pytest.raises(InputError, match="ref: the reference is of another tokenizer than two"):
        check_same(made, identity_of(folders[1]), "ref", folders[1])


def test_the_same_weights_in_other_files_are_the_same_model(model_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    from golden.stored.identity import identity_of

    folder = shutil.copytree(model_folder, tmp_path / "split")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    assert identity_of(folder).weights == identity_of(model_folder).weights


def test_what_a_reference_cannot_judge_is_refused(plan_of, reference):
    with pytest.raises(InputError, match="8-bit matrices"):
        check_stored(plan_of(engine={"quantization": "fp8"}), reference, quiet)
    mixture = replace(reference, about={**reference.about, "is_mixture": True})
    check_dtype(mixture, "float32")
    with pytest.raises(InputError, match="choice of experts is not stored"):
        check_stored(plan_of("bfloat16", prompts=None), mixture, quiet)
    no_half = replace(reference, about={**reference.about, "yardsticks": ["bfloat16"]})
    with pytest.raises(InputError, match="no yardstick for float16; it has float32, bfloat16"):
        check_dtype(no_half, "float16")


def test_too_many_tokens_for_2_kb_are_refused(plan_of):
    with pytest.raises(ConfigError, match="keep a position below 2 kB"):
        make_reference(plan_of(), 140, quiet)


# Rules on what is only partly known ------------------------------------------------------------


def told(item, shift=0.0, rows=None, **changes):
    rows = torch.arange(item.num_positions) if rows is None else rows
    values = {
        "tops": item.top_logprobs[rows].double() + shift,
        "tokens": item.token_logprobs[rows].double(),
        "drawn": {},
        **changes,
    }
    return Seen(item.name, rows, **values)


def judged(reference, dtype, *seen):
    judge = StoredJudge(reference, dtype)
    for one in seen:
        judge.add(one)
    return judge.finish()


def test_the_reference_passes_itself_and_a_shift_does_not(reference):
    for dtype in ("float32", "bfloat16"):
        assert judged(reference, dtype, *map(told, reference.sequences)).passed
    off = judged(reference, "float32", told(reference.sequences[0], shift=1e-3))
    assert not off.passed and "log-probability off at" in off.violations[0]
    assert not judged(reference, "bfloat16", told(reference.sequences[0], shift=0.7)).passed


def test_unknown_values_are_not_judged_and_infinities_are(reference):
    item = reference.sequences[1]
    unknown = torch.full_like(item.top_logprobs, math.nan).double()
    stats = judged(reference, "float32", told(item, tops=unknown))
    assert stats.passed and stats.num_values == item.num_positions
    infinite = told(item, tokens=torch.full_like(item.token_logprobs, -math.inf).double())
    assert any("not finite" in text for text in judged(reference, "float32", infinite).violations)


def test_logits_that_are_no_numbers_are_wrong_and_not_unknown(reference, truths, plan_of):
    _, truth = truths("float32")
    logits = {
        item.name: truth.truth.logits(item.name, torch.arange(item.num_positions)).clone()
        for item in reference.sequences
    }
    logits["short"][2] = math.nan
    with pytest.raises(AssertionError, match="not finite at 1 of"):
        assert_golden(logits, reference, "float32")

    def spoil(runner):
        runner.model.norm.weight[0] = math.nan

    outcome = check_stored(plan_of(prompts=None, defect=spoil), reference, quiet)
    assert not any(case.status == "pass" for case in outcome.cases)


def test_a_token_counts_only_where_its_gap_is_clear(reference):
    item = reference.sequences[2]
    gaps = item.top_logprobs[:, 0] - item.top_logprobs[:, 1]
    clear = int(gaps.argmax())
    wrong = {clear: int(item.top_ids[clear, 1])}
    stats = judged(reference, "float32", told(item, drawn=wrong, follows=False))
    assert any("despite a clear gap" in text for text in stats.violations)
    close = int(gaps.argmin())
    allowed = {close: int(item.top_ids[close, 1])}
    assert judged(reference, "bfloat16", told(item, drawn=allowed, follows=False)).passed


# One line of a test ------------------------------------------------------------------------------


def test_assert_golden_takes_logits_and_names_what_is_wrong(reference, truths):
    _, truth = truths("float32")
    logits = {
        item.name: truth.truth.logits(item.name, torch.arange(item.num_positions))
        for item in reference.sequences
    }
    assert assert_golden(logits, reference, "float32").num_positions == reference.num_positions
    as_arrays = {name: value.numpy() for name, value in logits.items()}
    assert_golden(as_arrays, reference, "float32")
    logits["middle"] = logits["middle"] * 1.01
    with pytest.raises(AssertionError, match=r"log-probability off at .* first middle position"):
        assert_golden(logits, reference, "float32")


def test_assert_golden_refuses_outputs_of_something_else(reference):
    with pytest.raises(InputError, match="there are 1 outputs for 4"):
        assert_golden([None], reference)
    with pytest.raises(InputError, match="no output for 'short'"):
        assert_golden({}, reference)
    with pytest.raises(InputError, match="must be logits of"):
        assert_golden([torch.zeros(3)] * 4, reference)
    nothing = [[None] * len(ids) for ids in reference.token_ids]
    with pytest.raises(InputError, match="hold no log-probability"):
        assert_golden(nothing, reference)


def test_rows_of_logits_and_of_places_are_the_same(reference, truths):
    _, truth = truths("float32")
    item = reference.sequences[0]
    logits = truth.truth.logits(item.name, torch.arange(item.num_positions))
    places = [None]
    for row in torch.log_softmax(logits.double(), -1):
        places.append({token: float(value) for token, value in enumerate(row)})
    stats = [judged(reference, "float32", seen) for seen in (from_logits(item, logits), told(item))]
    assert stats[0].passed and stats[1].passed
    one = [places if name == item.name else truth_places(reference, truth, name)
           for name in (i.name for i in reference.sequences)]  # fmt: skip
    assert assert_golden(one, reference, "float32").agreement == 1.0


def truth_places(reference, truth, name):
    (item,) = (one for one in reference.sequences if one.name == name)
    logprobs = torch.log_softmax(
        truth.truth.logits(name, torch.arange(item.num_positions)).double(), -1
    )
    top = logprobs.topk(8)
    return [None] + [
        {**dict(zip(ids, values, strict=True)), token: float(row[token])}
        for ids, values, row, token in zip(
            top.indices.tolist(), top.values.tolist(), logprobs, item.sequence.tokens[1:],
            strict=True,
        )
    ]  # fmt: skip


# The verbs -----------------------------------------------------------------------------------


def test_record_and_check_from_the_command_line(model_folder, prompts_file, tmp_path, capsys):
    path, out, page = (tmp_path / name for name in ("ref.safetensors", "r.json", "r.html"))
    record = ("golden", "record", "--model", model_folder, "--device", "cpu")
    words = (*record, "--prompts", prompts_file, "--max-tokens", "4", "--out", path)
    assert main([*map(str, words)]) == 0
    assert "bytes each" in capsys.readouterr().out
    check = ("golden", "check", "--model", model_folder, "--device", "cpu", "--dtype", "float16")
    words = (*check, "--reference", path, "--out", out, "--html", page)
    assert main([*map(str, words)]) == 0
    assert "prefixes from the cache" in capsys.readouterr().out
    assert json.loads(out.read_text())["reference_check"]["dtype"] == "float16"
    assert "All rules are kept." in page.read_text()
    path.write_bytes(path.read_bytes()[:1000])
    assert main([*map(str, (*check, "--reference", path))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "copy it again" in line
