"""Roofline parameters from requests alone: known ones are found again, files are checked."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sim_testing import TRACES, deployment, needs_shared, synthetic

from engine.cli import main
from engine.core import InputError
from sim.calibration.request_runs import RequestTimes, fit_requests
from sim.commands.calibrate_requests import read_requests
from sim.cost.features import StepFeatures
from sim.cost.physics import Physics
from sim.cost.roofline import RooflineCost, RooflineOptions
from sim.cost.roofline_terms import TermModel, coefficients_of, options_of
from sim.run.run import RunPlan, run_plan
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

TRUE = RooflineOptions(
    memory_efficiency=0.62, compute_efficiency=0.5, attention_compute_efficiency=0.33,
    link_efficiency=0.4, link_latency_ns=15_000, host_step_ns=900_000, host_seq_ns=9_000,
    attention_memory_efficiency=0.45,
)  # fmt: skip
DENSE = deployment(model="qwen3-8b", hardware="h100", num_kv_blocks=20_000)
SPLIT = replace(DENSE, model="qwen3-32b", tp=2)
MIXTURE = replace(DENSE, model="qwen3-30b-a3b", replicas=2, expert_parallel=True)
AHEAD = replace(DENSE, async_scheduling=True)
FEATURES = [
    StepFeatures(1, 1, (), 1),
    StepFeatures(200, 200 * 900, (), 200),
    StepFeatures(0, 0, ((0, 2048),), 1),
    StepFeatures(0, 0, ((30_000, 2048),), 0),
    StepFeatures(60, 60 * 700, ((512, 300), (0, 900)), 61),
]


def recorded(plan, options, seed=3, num_requests=120):
    """A workload and the times that its requests have under the options."""
    workload = synthetic(num_requests=num_requests, rate=12.0, seed=seed)
    plan = replace(plan, roofline=options)
    ledger = run_plan(RunPlan(workload, plan)).result.ledger
    columns = (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
    times = [np.array(column, float) for column in columns]
    return workload, RequestTimes(*(column - times[0].min() for column in times))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("options", [RooflineOptions(), TRUE])
@pytest.mark.parametrize(("model", "tp"), [("qwen3-8b", 1), ("qwen3-32b", 4), ("mixtral-8x7b", 2)])
def test_the_terms_of_a_step_add_up_to_its_time(features, options, model, tp):
    shape, sheet = model_named(model), hardware_named("h100")
    cost = RooflineCost(shape, sheet, tp, options)
    terms = TermModel(Physics(shape, sheet, tp), options)
    whole = terms.local(features).plus(terms.experts(features.num_tokens))
    time_ns = whole.time_ns(coefficients_of(options))
    assert time_ns == pytest.approx(cost.step_time_ns(features), rel=1e-9, abs=1.5)


def test_coefficients_and_options_are_two_names_of_the_same():
    again = options_of(coefficients_of(TRUE))
    assert again.given() == pytest.approx(TRUE.given())


@pytest.mark.parametrize(
    "plan", [DENSE, SPLIT, MIXTURE, AHEAD], ids=["dense", "tp", "mixture", "async"]
)
def test_a_fit_predicts_a_run_that_it_has_not_seen(plan):
    workload, times = recorded(plan, TRUE)
    fit = fit_requests(workload, plan, times)
    assert fit.num_requests == 120
    assert fit.decode_error < 0.01 and fit.wait_error < 0.01
    _, truth = recorded(plan, TRUE, seed=11)
    _, predicted = recorded(plan, fit.options, seed=11)
    # Waits without a queue are one or two steps, and which ones is a matter of luck.
    for name, limit in (("decode_ns", 0.01), ("wait_ns", 0.03)):
        error = getattr(predicted, name).mean() / getattr(truth, name).mean() - 1
        assert abs(error) < limit, name


def test_parameters_that_matter_are_found_again():
    workload, times = recorded(DENSE, TRUE, num_requests=200)
    found = fit_requests(workload, DENSE, times).options
    assert found.compute_efficiency == pytest.approx(TRUE.compute_efficiency, rel=0.05)
    # Reading the weights and host time are one sum per step, which nothing tells apart.
    body_ms = 15.1e9 / 3.35e12 * 1e3
    per_step = [one.host_step_ns / 1e6 + body_ms / one.memory_efficiency for one in (found, TRUE)]
    assert per_step[0] == pytest.approx(per_step[1], rel=0.03)
    # No link: these have no influence and stay as they were.
    assert found.link_latency_ns == RooflineOptions().link_latency_ns


def test_only_visible_requests_count():
    workload, times = recorded(DENSE, TRUE)
    early = times.last_token_ns <= np.quantile(times.last_token_ns, 0.5)
    spoiled = RequestTimes(
        times.queued_ns,
        times.first_token_ns + ~early * 1e9,
        times.last_token_ns + ~early * 9e9,
    )
    fit = fit_requests(workload, DENSE, times, early)
    assert fit_requests(workload, DENSE, spoiled, early) == fit
    assert fit.num_requests == 60 and fit.decode_error < 0.01


def test_too_few_requests_and_those_that_cannot_run_are_refused():
    workload, times = recorded(DENSE, TRUE)
    with pytest.raises(InputError, match="20 finished requests are too few"):
        fit_requests(workload, DENSE, times, np.arange(120) < 20)
    with pytest.raises(InputError, match="max_model_len=64"):
        fit_requests(workload, replace(DENSE, max_model_len=64), times)


# The command ----------------------------------------------------------------------------------

COMMAND = ["--model", "qwen3-8b", "--hardware", "h100", "--num-kv-blocks", "20000"]


def written(path, workload, times, order=None):
    """A benchmark log; its clock starts anywhere."""
    rows = [
        {"request_id": f"r{row}", "input_toks": prompt, "output_toks": output,
         "queued_ts": 5000 + queued / 1e9, "first_token_ts": 5000 + first / 1e9,
         "last_token_ts": 5000 + last / 1e9}
        for row, (prompt, output, queued, first, last) in enumerate(
            zip(workload.prompt_tokens, workload.output_tokens, times.queued_ns,
                times.first_token_ns, times.last_token_ns, strict=True)
        )
    ]  # fmt: skip
    rows = rows if order is None else [rows[row] for row in order]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_writes_parameters_that_a_run_takes(tmp_path, capsys):
    workload, times = recorded(DENSE, TRUE)
    log = written(tmp_path / "run.jsonl", workload, times)
    out = tmp_path / "fit.json"
    command = ["sim", "calibrate-requests", str(log), *COMMAND, "--out", str(out), "--until", "8"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "fitted (" in printed and "others (" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.json", "run.jsonl"]
    assert str(tmp_path) not in out.read_text()
    first = out.read_text()
    assert main(command) == 0 and out.read_text() == first
    capsys.readouterr()
    run = ["sim", "run", "--workload", "poisson", "--num-requests", "20", *COMMAND, "--json"]
    assert main([*run, "--cost", f"roofline:{out}"]) == 0
    cost = json.loads(capsys.readouterr().out)["sim"]["provenance"]["cost"]
    assert cost == {"name": "roofline", **json.loads(first)["roofline"]}


def test_a_log_in_order_of_finish_is_the_same_log(tmp_path):
    workload, times = recorded(DENSE, TRUE)
    log = written(tmp_path / "run.jsonl", workload, times)
    finish = np.argsort(times.last_token_ns, kind="stable").tolist()
    sorted_log = written(tmp_path / "sorted.jsonl", workload, times, finish)
    one, other = read_requests(log), read_requests(sorted_log)
    assert (
        list(one[0].prompt_tokens) == list(other[0].prompt_tokens) == list(workload.prompt_tokens)
    )
    assert np.array_equal(one[1].last_token_ns, other[1].last_token_ns)
    assert np.allclose(one[1].queued_ns, times.queued_ns, atol=1000)


@needs_shared
@pytest.mark.shared
def test_a_trace_gives_the_prompts_their_prefixes():
    folder = TRACES / "measured"
    log = folder / "vllm_rtxpro6000_qwen3-30b-a3b-instruct-2507_requests.jsonl"
    trace = folder / "sharegpt300_qwen3-32b_blocks16.jsonl"
    workload, times = read_requests(log, trace)
    assert len(workload) == 300 and (np.diff(times.queued_ns) >= 0).all()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    blocks = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    order = sorted(range(300), key=lambda row: rows[row]["queued_ts"])
    assert order != list(range(300)), "this log is not in the order of its queue"
    for place in range(300):
        assert workload.prompt_tokens[place] == rows[order[place]]["input_toks"]
        first = blocks[order[place]][0]
        assert workload.prompt(place)[0] == first * 16
    with pytest.raises(InputError, match="row 1: prompt_tokens differs"):
        read_requests(log, folder / "sharegpt300_llama-3.1-8b_blocks16.jsonl")


GOOD = {"input_toks": 9, "output_toks": 2, "queued_ts": 1.0, "first_token_ts": 2.0,
        "last_token_ts": 3.0}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "part"),
    [({"output_toks": 0}, "output_tokens=0"), ({"input_toks": 1.5}, "prompt_tokens=1.5"),
     ({"queued_ts": None}, "queued: is missing"), ({"queued_ts": "x"}, "queued_ts='x'"),
     ({"queued_ts": float("nan")}, "queued_ts=nan"),
     ({"first_token_ts": 0.5}, "one clock"), ({"last_token_ts": 1.5}, "one clock")],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path, change, part):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(InputError, match=r"run\.jsonl:2") as caught:
        read_requests(path)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [["missing.jsonl"], ["run.jsonl", "--cost", "constant:5"], ["run.jsonl", "--model", "x"],
     ["run.jsonl", "--out", "fit.txt"], ["run.jsonl", "--out", "no/fit.json"], ["empty.jsonl"],
     ["run.jsonl"], ["text.jsonl"], ["run.jsonl", "--trace", "missing.csv"]],
)  # fmt: skip
def test_wrong_use_ends_with_one_line_and_no_file(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.jsonl").write_text(json.dumps(GOOD) + "\n")  # one request is too few
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.jsonl").write_text("hello\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["sim", "calibrate-requests", *COMMAND, "--out", "fit.json", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and error
    assert sorted(path.name for path in tmp_path.iterdir()) == before
