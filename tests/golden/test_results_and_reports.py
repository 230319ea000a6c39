"""A run fails for the right reasons, and its record and reports tell everything."""

import json

import pytest
import torch

from engine.core.errors import ConfigError, InputError
from golden.case_table import to_html, to_markdown
from golden.compare import LogitComparison
from golden.record import make_record, read_record, write_record
from golden.results import from_stats, judged, run_case, run_failed, skipped


def some_stats():
    comparison = LogitComparison(torch.float32)
    truth = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    comparison.add("a", torch.arange(3), truth, truth, None)
    return comparison.finish()


def rows():
    return [
        from_stats("models", "good | case", some_stats()),
        skipped("components", "flash", "no <GPU> here"),
        judged("invariance", "cell", [], bitwise="yes", distance_to_base=0.0),
    ]


def record(results):
    return make_record(results, "lockstep golden run", torch.device("cpu"), "abc123", 1.5)


def test_a_case_that_raises_becomes_a_result_and_later_cases_run():
    def broken():
        yield judged("g", "first", [])
        raise RuntimeError("boom")

    results = list(run_case("g", "broken", broken))
    assert [row.status for row in results] == ["pass", "error"]
    assert "boom" in results[1].detail


def test_a_missing_backend_is_a_skip_and_any_other_refused_option_an_error():
    def refuses(option):
        raise ConfigError(option, 1, "no")
        yield

    missing = list(run_case("g", "c", lambda: refuses("attention_backend")))
    other = list(run_case("g", "c", lambda: refuses("block_size")))
    assert [row.status for row in missing + other] == ["skip", "error"]


def test_a_run_fails_on_a_bad_case_or_if_nothing_ran():
    assert run_failed(rows()) is None
    assert "g/x" in run_failed([*rows(), judged("g", "x", ["wrong"])])
    assert "skipped" in run_failed([skipped("g", "a", "no GPU"), skipped("g", "b", "no GPU")])
    assert run_failed([]) is not None


def test_a_run_that_was_cut_short_says_so():
    made = make_record(rows(), "c", torch.device("cpu"), "abc", complete=False)
    assert "cut short" in made["failure"]
    assert "FAILED: the run was cut short" in to_markdown(made)


def test_record_survives_its_file_and_counts_everything(tmp_path):
    made = record(rows())
    path = tmp_path / "deep" / "r.json"
    write_record(made, path)
    again = read_record(path)
    assert again["counts"] == {"pass": 2, "fail": 0, "error": 0, "skip": 1}
    assert again["commit"] == "abc123"
    assert again["versions"]["torch"]
    assert again["cases"][0]["stats"]["num_positions"] == 3
    assert not list(tmp_path.glob("**/*.partial"))


def test_a_record_is_plain_json_even_with_infinite_numbers(tmp_path):
    path = tmp_path / "r.json"
    write_record(record([judged("g", "x", ["bad"], excess=float("inf"))]), path)
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert strict["cases"][0]["measured"]["excess"] == "inf"


@pytest.mark.parametrize("text", ["not json", "[]", '{"format": "other"}'])
def test_what_is_no_record_is_refused(text, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"r\.json"):
        read_record(path)


def test_reports_name_every_case_and_every_reason():
    made = record([*rows(), judged("g", "broken", ["c is 9"])])
    markdown, page = to_markdown(made), to_html(made)
    for report in (markdown, page):
        for text in ("cell", "c is 9", "2 passed, 1 failed, 0 raised, 1 skipped", "bitwise"):
            assert text in report
    assert "good \\| case" in markdown
    assert "no &lt;GPU&gt; here" in page
    widths = {line.replace("\\|", "").count("|") for line in markdown.splitlines() if "|" in line}
    assert len(widths) == 2  # the main table and the invariance table
