"""Studies are checked before anything runs, and every complaint names its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cli import main
from engine.core.errors import InputError
from sim.planning.parse import read_study
from sim.planning.sampling import load_source
from sim.planning.space import all_choices, candidate_of, merge_equal

GOOD = """
workload: {generator: poisson, prompt: 64, output: 16}
slo: {ttft_ms: {p90: 100}}
space: {cost: "constant:5", max_num_seqs: [8, 16], hardware: h200}
search: {requests: 200, seeds: 2, verify_seeds: 0}
"""


def study_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_study_is_read_with_its_defaults(tmp_path):
    study = read_study(study_file(tmp_path, GOOD))
    assert study.name == "study"
    assert study.axes["max_num_seqs"] == (8, 16)
    assert study.slo.describe() == "p90 ttft <= 100 ms"
    assert study.objective.kind == "max_goodput_per_gpu"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("max_num_seqs", "max_num_seq", "space.max_num_seq: unknown key; did you mean"),
        ("ttft_ms", "ttft", "slo.ttft: unknown key; did you mean 'ttft_ms'?"),
        ("p90", "90", "slo.ttft_ms='{'"),
        ("p90", "p0", "slo.ttft_ms.p0: must be mean or p1 to p100"),
        ("100", "-1", "slo.ttft_ms.p90=-1: must be above 0"),
        ("{ttft_ms: {p90: 100}}", "{}", "slo={}: holds no limit"),
        ("[8, 16]", "[]", "space.max_num_seqs=[]: an empty list leaves nothing to search"),
        ("[8, 16]", "[8, 8]", "space.max_num_seqs[1]=8: stands twice"),
        ("[8, 16]", "[8, true]", "space.max_num_seqs[1]=True: must be a whole number"),
        ("generator: poisson", "generator: closed", "a closed loop sets its own rate"),
        ("generator: poisson", "trace: no.csv", "workload.prompt: unknown key"),
        ("h200", "h2000", "space.hardware='h2000': must be one of"),
        ("seeds: 2", "seeds: 1", "search.seeds=1: must be at least 2"),
        ("seeds: 2", "seeds: 2, seeds: 3", "'seeds' stands twice"),
        ("seeds: 2", "confidence: 0.8", "search.confidence=0.8: must be one of 0.9, 0.95, 0.99"),
        ("slo:", "goal:", "goal: unknown key"),
        ("workload: {generator: poisson, prompt: 64, output: 16}", "", "workload: is missing"),
        ("hardware: h200", "fleet: pair", "space.fleet='pair': the study has no fleets"),
        ("hardware: h200", "replicas: auto", "space.replicas='auto': auto needs the objective"),
    ],
)
def test_a_bad_study_is_refused_by_key_path(tmp_path, old, new, complaint):
    assert old in GOOD
    if complaint == "slo.ttft_ms='{'":
        complaint = "must be text"  # YAML reads 90 as a number
    with pytest.raises(InputError) as caught:
        read_study(study_file(tmp_path, GOOD.replace(old, new, 1)))
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "study.yaml"))


def test_an_axis_has_every_name_of_its_option(tmp_path):
    text = GOOD.replace("max_num_seqs: [8, 16]", "{}: {}")
    for name, value, axis in (
        ("tensor_parallel_size", 2, "tp"),
        ("data_parallel_size", 3, "replicas"),
        ("num_gpu_blocks_override", 900, "num_kv_blocks"),
        ("enable_prefix_caching", False, "prefix_caching"),
        ("scheduling_policy", "prefill_first", "policy"),
        ("watermark_blocks", 5, "watermark_blocks"),
    ):
        shown = str(value).lower()
        study = read_study(study_file(tmp_path, text.replace("{}: {}", f"{name}: {shown}")))
        assert study.axes[axis] == (value,)
    twice = GOOD.replace("max_num_seqs", "tp: 1, tensor_parallel_size")
    with pytest.raises(InputError, match=r"space\.tensor_parallel_size=.* another name of tp"):
        read_study(study_file(tmp_path, twice))


@pytest.mark.parametrize(
    ("workload", "complaint"),
    [
        ("generator: poisson, turns: 3", "workload.turns=3: belongs to sessions"),
        ("generator: poisson, burstiness: 2", "belongs to arrivals of a gamma process"),
        ("generator: sessions, turns: 3, think_s: -1", "workload.think_s=-1: must be at least 0"),
        ("generator: poisson, prompt: 4, prompt_len: 5", "another name of prompt"),
        ("trace: t.csv, burstiness: 2", "belongs to arrivals of a gamma process"),
    ],
)
def test_a_key_that_would_have_no_effect_is_refused(tmp_path, workload, complaint):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n1,9,9\n")
    text = GOOD.replace("generator: poisson, prompt: 64, output: 16", workload)
    with pytest.raises(InputError, match=r"study\.yaml") as caught:
        read_study(study_file(tmp_path, text))
    assert complaint in str(caught.value)


def test_a_window_of_a_timed_trace_is_what_a_study_draws_from(tmp_path):
    rows = "".join(f"{second},{second + 1},9\n" for second in range(20))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    text = GOOD.replace(
        "generator: poisson, prompt: 64, output: 16",
        "trace: t.csv, window_start_s: 5, window_length_s: 3",
    )
    base = load_source(read_study(study_file(tmp_path, text)).workload).base
    assert list(base.prompt_tokens) == [6, 7, 8]
    whole = text.replace(", window_start_s: 5, window_length_s: 3", "")
    assert len(load_source(read_study(study_file(tmp_path, whole)).workload).base) == 20


def test_a_gpu_may_be_a_file_beside_the_study(tmp_path):
    sheet = (
        '{"name": "mi300x", "bf16_tflops": 1307, "memory_gb_per_s": 5300, "memory_mib": 196288,'
        ' "link_gb_per_s": 64}'
    )
    (tmp_path / "gpu.json").write_text(sheet)
    text = GOOD.replace("h200", "gpu.json")
    study = read_study(study_file(tmp_path, text))
    assert study.axes["hardware"] == (str((tmp_path / "gpu.json").resolve()),)
    (tmp_path / "gpu.json").write_text(sheet.replace("1307", "-1"))
    with pytest.raises(InputError, match=r"gpu\.json: bf16_tflops=-1"):
        read_study(study_file(tmp_path, text))


def test_a_trace_that_does_not_exist_is_named(tmp_path, capsys):
    text = GOOD.replace("generator: poisson, prompt: 64, output: 16", "trace: no.csv")
    assert main(["sim", "plan", str(study_file(tmp_path, text))]) == 2
    error = capsys.readouterr().err.strip()
    assert "workload.trace='no.csv': no such file" in error
    assert "\n" not in error


def test_a_model_that_does_not_fit_is_one_sentence(tmp_path, capsys):
    text = GOOD.replace("hardware: h200", "hardware: l4, model: llama-3.1-70b")
    assert main(["sim", "plan", str(study_file(tmp_path, text)), "--quiet"]) == 2
    error = capsys.readouterr().err.strip()
    assert "leave no KV block in" in error
    assert "none of 2 configurations is possible" in error
    assert "\n" not in error


def test_impossible_configurations_are_left_out_and_listed(tmp_path, capsys):
    text = GOOD.replace("hardware: h200", "hardware: [l4, h200], model: qwen3-14b")
    text = text.replace("[8, 16]", "8")
    assert main(["sim", "plan", str(study_file(tmp_path, text)), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "left out: hardware=l4: model='qwen3-14b': weights" in out


def test_the_example_of_init_is_a_valid_study(tmp_path, capsys):
    path = tmp_path / "example.yaml"
    assert main(["sim", "plan", "--init", str(path)]) == 0
    study = read_study(path)
    assert len(list(all_choices(study))) == 4
    assert main(["sim", "plan", "--init", str(path)]) == 2
    assert "overwrites nothing" in capsys.readouterr().err


def test_min_cost_needs_prices_and_a_rate(tmp_path):
    text = GOOD + "objective: {kind: min_cost, rate: 5}\n"
    with pytest.raises(InputError, match="prices: is missing"):
        read_study(study_file(tmp_path, text))
    with pytest.raises(InputError, match="min_cost needs the rate"):
        read_study(study_file(tmp_path, text.replace(", rate: 5", "")))
    with pytest.raises(InputError, match=r"prices\.h200: is missing"):
        read_study(study_file(tmp_path, text + "prices: {l4: 1}\n"))


def test_a_router_makes_no_two_configurations_of_one_server(tmp_path):
    text = GOOD.replace("hardware: h200", "router: [round-robin, least-tokens], replicas: [1, 2]")
    study = read_study(study_file(tmp_path, text))
    merged = merge_equal([candidate_of(study, one) for one in all_choices(study)])
    assert [one.num_fronts for one in merged].count(1) == 2
    assert [one.num_fronts for one in merged].count(2) == 4


def test_fleets_change_any_axis_and_are_priced(tmp_path):
    text = GOOD.replace("hardware: h200", "hardware: h200, tp: 2, fleet: pair, replicas: 3")
    text += (
        "fleets: {pair: [{role: prefill, count: 2}, {role: decode, hardware: l40s, tp: 1}]}\n"
        "prices: {h200: 4, l40s: 1}\n"
    )
    study = read_study(study_file(tmp_path, text))
    candidate = candidate_of(study, next(all_choices(study)))
    assert candidate.num_gpus() == 3 * (2 * 2 + 1)
    assert candidate.price_per_hour(study.prices) == 3 * (4 * 4 + 1)
    assert candidate.num_fronts == 6
    with pytest.raises(InputError, match="both prefill and decode servers"):
        read_study(study_file(tmp_path, text.replace("role: decode, ", "")))
