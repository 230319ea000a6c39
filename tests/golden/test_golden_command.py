"""`lockstep golden`: usage errors, the explanations, and the GPU run's CPU twin."""

import json

import pytest

from engine.cli import main
from golden.explain import prefix_cache, sampling, tensor_parallel


def run(*words):
    return main(["golden", *map(str, words)])


@pytest.mark.parametrize(
    "words",
    [
        ("gpu", "--tp", "0", "--device", "cpu"),
        ("gpu", "--smollm2", "no-such-folder", "--device", "cpu"),
        ("run", "--report", "table.pdf"),
        ("gpu", "--shape", "qwen3-70b", "--device", "cpu"),
        ("explain", "nothing"),
        ("report", "no-such-record.json"),
        (),
    ],
)
def test_usage_errors_exit_with_2_and_one_line(words, capsys):
    assert run(*words) == 2
    assert capsys.readouterr().err.strip()


def test_prefix_cache_experiment_shows_what_it_says():
    lines = list(prefix_cache.explain())
    text = "\n".join(lines)
    assert "B admitted, 8 tokens hit" in text  # mixed registers in the step that fills a block
    assert "B admitted, 0 tokens hit" in text  # prefill_first does not
    assert "the prompt has 8: 4 hit, 4 computed" in text
    assert "the prompt has 9: 8 hit, 1 computed" in text
    assert "{0: 2, 1: 2" in text  # shared by two
    assert "C admitted, 8 tokens hit (2 blocks: 0 in use, 2 free" in text


def test_tensor_parallel_experiment_shows_right_and_wrong_sums():
    differences = {
        line.split(":")[0].strip(): float(line.split("difference ")[1].split()[0])
        for line in tensor_parallel.explain()
        if "largest difference" in line
    }
    wrong = {"bias added by every rank", "the gate's shards swapped"}
    assert wrong < set(differences)
    for what, difference in differences.items():
        assert (difference > 0.1) == (what in wrong), what


def test_sampling_experiment_ends_near_the_softmax():
    lines = [line for line in sampling.explain() if "total variation" in line]
    assert len(lines) == 3
    for line in lines:
        race, expected = (
            float(line.split(word)[1].split()[0].rstrip(",")) for word in ("race", "about")
        )
        assert race < 3 * expected


def test_one_shape_can_be_run_alone(tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ("gpu", "--device", "cpu", "--tiny", "--quick", "--shape", "qwen3-8b", "--out", path)
    code = run(*words)
    assert code == 0, capsys.readouterr().out[-3000:]
    record = json.loads(path.read_text())
    assert "--shape qwen3-8b" in record["command"]
    groups = [case["group"] for case in record["cases"] if case["status"] == "pass"]
    assert groups and set(groups) == {"qwen3-8b"}


@pytest.mark.timeout(900)  # the ranks alone start four processes
def test_the_gpu_run_works_end_to_end_in_small_shapes(tmp_path, capsys):
    record_path, report_path = tmp_path / "r.json", tmp_path / "r.html"
    code = run(
        "gpu", "--device", "cpu", "--tiny", "--quick", "--tp", "2",
        "--out", record_path, "--report", report_path, "--commit", "abc",
    )  # fmt: skip
    output = capsys.readouterr().out
    assert code == 0, output[-3000:]
    record = json.loads(record_path.read_text())
    assert record["commit"] == "abc"
    assert record["failure"] is None
    groups = {case["group"] for case in record["cases"] if case["status"] == "pass"}
    assert groups >= {
        "components", "sampler", "canaries", "qwen3-0.6b", "tensor parallel", "invariance",
    }  # fmt: skip
    skips = [case for case in record["cases"] if case["status"] == "skip"]
    assert all(case["detail"] for case in skips)
    assert f"{len(skips)} skipped" in output
    assert "Golden report" in report_path.read_text()
    # The record becomes a table afterwards too.
    assert run("report", record_path) == 0
    assert "| group | case |" in capsys.readouterr().out
