"""The kernel makes the recorded decisions of nano-vLLM and vLLM, and the comparison can fail."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from places import SHARED

from engine.cli import main as lockstep
from engine.core import InputError, Scheduler, StepOutcome, StepPlan
from engine.core.plan import NO_DECODES
from engine.core.policies.mixed import MixedPolicy
from properties.defects import asynchrony
from properties.recordings import verify as decisions
from properties.recordings.nano_twin import CONDITION, twin_steps
from properties.recordings.recording import Workload, read_workloads
from properties.recordings.verify import DIFFERENT, EQUAL, SET_ASIDE, compare, verify_file

DATA = Path(__file__).parent / "data"
NANO = DATA / "nano_vllm_bb823b3.excerpt.jsonl.gz"
VLLM = DATA / "vllm_v1_0.25.1.excerpt.jsonl.gz"
ASYNC = DATA / "vllm_v1_0.33.0_async.excerpt.jsonl.gz"
RULES = DATA / "vllm_v1_0.33.0_rules.excerpt.jsonl.gz"
IMPOSSIBLE = DATA / "infeasible.excerpt.jsonl"
FULL = SHARED / "decisions"

needs_recordings = [
    pytest.mark.shared,
    pytest.mark.skipif(not FULL.is_dir(), reason="the full recordings are not here"),
]


def workload(path: Path, name: str) -> Workload:
    return next(w for w in read_workloads(path) if w.name == name)


def lines(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def altered(original: Workload, index: int, **fields) -> Workload:
    steps = copy.deepcopy(original.steps)
    steps[index].update(fields)
    return dataclasses.replace(original, steps=steps)


@pytest.mark.parametrize(
    "path", [NANO, VLLM, ASYNC, RULES], ids=["nano_vllm", "vllm", "vllm_async", "vllm_rules"]
)
def test_excerpt_is_reproduced_at_every_level(path):
    report = verify_file(path, Scheduler)
    assert report.failures == []
    assert report.num_workloads > 50


def test_a_file_of_an_older_vllm_is_told_by_its_threshold_and_then_judged_by_one_rule():
    report = verify_file(VLLM, Scheduler)
    assert report.older_rule.startswith("v01")
    assert "before 0.33" in decisions.render(report)
    assert not verify_file(RULES, Scheduler).older_rule


def test_keys_of_a_withdrawn_entry_are_set_aside_by_name_and_nothing_else_is():
    report = verify_file(RULES, Scheduler)
    assert report.conditions == {decisions.WITHDRAWN_KEYS: 1}
    verdict = compare(workload(RULES, "v030024"), Scheduler)
    assert set(verdict.status.values()) == {SET_ASIDE}
    wrong = altered(workload(RULES, "v030024"), 3, free_blocks=-1)
    assert DIFFERENT in compare(wrong, Scheduler).status.values()


@pytest.mark.parametrize(
    ("defect", "level"),
    [
        (asynchrony.KeepsBlocksOfTheEnded, "cache effect"),
        (asynchrony.SparesThoseAtTheirLimit, "decisions"),
        (asynchrony.KeysOnlyAtTheCommit, "cache effect"),
        (asynchrony.ForgetsStaleTokens, "decisions"),
        (asynchrony.ReportsVoidTokens, ""),
    ],
)
def test_a_kernel_with_other_asynchronous_rules_is_caught_by_the_excerpt(defect, level):
    report = verify_file(ASYNC, defect)
    assert bool(report.failures) == bool(level)
    if level:
        assert report.counts[level][DIFFERENT]


@pytest.mark.parametrize(
    ("field", "level"),
    [
        *[(name, "decisions") for name in ("scheduled", "updated", "known", "samples")],
        *[(name, "decisions") for name in ("dropped", "stale", "in_flight", "arrived")],
        ("free_blocks_after", "cache effect"),
        ("running_after", "exact blocks"),
    ],
)
def test_an_altered_asynchronous_recording_differs_at_its_level(field, level):
    recorded = workload(ASYNC, "v021008")
    assert set(compare(recorded, Scheduler).status.values()) == {EQUAL}
    assert field in recorded.steps[2]
    verdict = compare(altered(recorded, 2, **{field: [99]}), Scheduler)
    assert verdict.differences[level].field == field
    assert verdict.differences[level].index == 2


@pytest.mark.parametrize(
    ("path", "option", "value"),
    [
        (VLLM, "watermark_blocks", 0),
        (VLLM, "reserve_full_prompt", False),
        (VLLM, "long_prefill_token_threshold", 0),
        (VLLM, "enable_prefix_caching", False),
        (VLLM, "policy", "prefill_first"),
        (NANO, "bound_holders", True),
        (NANO, "bound_decode_tokens", True),
        (NANO, "enable_prefix_caching", False),
        (NANO, "policy", "mixed"),
    ],
)
def test_a_kernel_with_one_rule_changed_is_caught_by_the_excerpt(path, option, value):
    def changed(kernel_config):
        return Scheduler(dataclasses.replace(kernel_config, **{option: value}))

    report = verify_file(path, changed)
    assert report.failures
    assert "first of" in decisions.render(report)


def test_a_kernel_that_frees_in_another_order_is_caught_at_the_exact_block_level(monkeypatch):
    recorded = workload(VLLM, "v000014")
    assert set(compare(recorded, Scheduler).status.values()) == {EQUAL}
    monkeypatch.setattr(MixedPolicy, "unregistered_first", False)
    verdict = compare(recorded, Scheduler)
    assert verdict.status["decisions"] == EQUAL
    assert verdict.differences["exact blocks"].field == "free_order"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nano_vllm_bb823b3.jsonl.gz", marks=needs_recordings),
        pytest.param("vllm_v1_0.25.1.jsonl.gz", marks=needs_recordings),
        pytest.param("vllm_v1_0.33.0.jsonl.gz", marks=needs_recordings),
        pytest.param("vllm_v1_0.33.0_async.jsonl.gz", marks=needs_recordings),
        pytest.param("vllm_v1_0.33.0_rules.jsonl.gz", marks=needs_recordings),
        pytest.param("vllm_v1_0.33.0_rules_async.jsonl.gz", marks=needs_recordings),
    ],
)
def test_full_recording_is_reproduced_with_few_workloads_set_aside(name):
    report = verify_file(FULL / name, Scheduler)
    assert report.failures == []
    assert report.num_workloads > 250
    print(decisions.render(report))
    assert report.conditions[CONDITION] < 0.1 * report.num_workloads
    if name.startswith("vllm"):
        assert report.conditions == ({decisions.WITHDRAWN_KEYS: 1} if "rules" in name else {})


@pytest.mark.parametrize(
    "path",
    [IMPOSSIBLE, pytest.param(FULL / "infeasible.jsonl", marks=needs_recordings)],
    ids=["excerpt", "full"],
)
def test_impossible_workloads_are_refused_with_a_typed_error_or_complete(path):
    report = verify_file(path, Scheduler)
    assert report.failures == []
    completed = {kind for kind, outcome in report.impossible if outcome == "completed"}
    assert completed == {"seqs_over_budget"}


@pytest.mark.parametrize("name", ["n018019", "n000026", "n018014"])
def test_workloads_known_for_an_unreachable_twin_are_set_aside_from_there_on(name):
    recorded = workload(NANO, name)
    verdict = compare(recorded, Scheduler)
    assert set(verdict.status.values()) <= {EQUAL, SET_ASIDE}
    assert SET_ASIDE in verdict.status.values()
    first = min(difference.index for difference in verdict.differences.values())
    assert first in twin_steps(recorded)


def test_a_twin_needs_an_overwritten_entry_and_its_loss():
    names = {w.name for w in read_workloads(NANO) if twin_steps(w)}
    with_copies = {line["id"] for line in lines(NANO) if line["stats"]["duplicate_blocks"]}
    assert names and names <= with_copies
    # Copies alone do not make a twin: the newest must also have been handed out again.
    assert with_copies - names
    assert all(not twin_steps(w) for w in read_workloads(VLLM))


def test_a_twin_does_not_excuse_a_difference_before_it():
    recorded = workload(NANO, "n018019")
    first = min(twin_steps(recorded))
    assert first > 0
    wrong = altered(recorded, first - 1, free_blocks=-1)
    verdict = compare(wrong, Scheduler)
    assert verdict.status["cache effect"] == DIFFERENT
    assert verdict.differences["cache effect"].index == first - 1


@pytest.mark.parametrize(
    ("field", "level"),
    [
        ("batch", "decisions"),
        ("preempted", "decisions"),
        ("finished", "decisions"),
        ("free_blocks", "cache effect"),
        ("finish_reasons", "cache effect"),
        ("kind", "cache effect"),
        ("new_blocks", "exact blocks"),
        ("free_order", "exact blocks"),
        ("waiting", "exact blocks"),
        ("running", "exact blocks"),
    ],
)
@pytest.mark.parametrize(("path", "name"), [(NANO, "n000001"), (VLLM, "v000001")])
def test_an_altered_recording_differs_at_its_level_and_the_higher_ones(path, name, field, level):
    levels = list(decisions.LEVELS)
    wrong = altered(workload(path, name), 1, **{field: [[99]]})
    verdict = compare(wrong, Scheduler)
    at = levels.index(level)
    assert [verdict.status[x] for x in levels] == [EQUAL] * at + [DIFFERENT] * (3 - at)
    difference = verdict.differences[level]
    assert (difference.index, difference.field) == (1, field)
    assert "expected step:" in str(difference) and "[[99]]" in str(difference)


def test_admissions_are_compared_up_to_their_hits_at_level_two_and_in_full_at_level_three():
    recorded = workload(VLLM, "v000001")
    more_hits = [[0, 4, 1, 0, 0], [1, 8, 0, 0, 2]]
    assert compare(altered(recorded, 0, admitted=more_hits), Scheduler).status == {
        "decisions": EQUAL,
        "cache effect": DIFFERENT,
        "exact blocks": DIFFERENT,
    }
    other_place = [[0, 0, 0, 0, 0], [1, 8, 2, 0, 0]]
    assert compare(altered(recorded, 0, admitted=other_place), Scheduler).status == {
        "decisions": EQUAL,
        "cache effect": EQUAL,
        "exact blocks": DIFFERENT,
    }


def test_a_missing_or_additional_step_is_a_difference():
    recorded = workload(VLLM, "v000001")
    shorter = dataclasses.replace(recorded, steps=recorded.steps[:-1])
    longer = dataclasses.replace(recorded, steps=(*recorded.steps, recorded.steps[-1]))
    for wrong in (shorter, longer):
        assert compare(wrong, Scheduler).differences["decisions"].field == "number of steps"


def test_a_scheduler_that_fails_is_a_difference_and_not_a_crash():
    class Failing(Scheduler):
        def schedule(self):
            raise RuntimeError("planted")

    verdict = compare(workload(VLLM, "v000001"), Failing)
    assert set(verdict.status.values()) == {DIFFERENT}
    assert "planted" in str(verdict.differences["decisions"])


def test_an_impossible_workload_that_hangs_is_reported(monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_STEPS", 50)

    class Hanging(Scheduler):
        has_work = True

        def schedule(self):
            return StepPlan(0, 0, NO_DECODES, (), (), (), (), 0, 0, 1, 1)

        def commit(self, plan, token_ids, stopped=()):
            return StepOutcome(0, (), (), ())

    report = verify_file(IMPOSSIBLE, Hanging, every=10)
    assert len(report.failures) == report.num_workloads > 0
    assert "no end after" in report.failures[0]


def test_command_exits_0_on_equality_and_1_on_a_difference(tmp_path, capsys):
    assert lockstep(["verify", "decisions", str(VLLM), str(IMPOSSIBLE), "--every", "10"]) == 0
    line = lines(VLLM)[0]
    line["steps"][1]["free_blocks"] += 1
    (tmp_path / "wrong.jsonl").write_text(json.dumps(line) + "\n")
    capsys.readouterr()
    assert lockstep(["verify", "decisions", str(tmp_path / "wrong.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "workload v000001" in printed and "'free_blocks'" in printed
    assert "expected free_blocks: 37" in printed and "got      free_blocks: 36" in printed


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty file"),
        (b"no json\n", ":1: not a recorded workload"),
        (b'{"id":"x1"}\n', "begins with neither n nor v"),
        (b'{"id":"v1","config":{},"requests":[]}\n', "'steps' is missing"),
        (b"[1]\n", ":1: not a recorded workload"),
    ],
)
def test_bad_file_exits_2_with_one_line_naming_file_and_line(tmp_path, capsys, content, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert lockstep(["verify", "decisions", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(path) in message and complaint in message


def test_missing_and_truncated_files_exit_2(tmp_path, capsys):
    assert lockstep(["verify", "decisions", str(tmp_path / "none.jsonl")]) == 2
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(VLLM.read_bytes()[:-5000])
    assert lockstep(["verify", "decisions", str(cut)]) == 2
    assert "damaged gzip file" in capsys.readouterr().err


def test_reading_is_strict_about_configurations(tmp_path):
    line = lines(VLLM)[0]
    line["config"]["num_blocks"] = "many"
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(InputError, match="num_blocks"):
        list(read_workloads(path))
