"""`lockstep verify search` and `replay`: records, failure files, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli import main
from properties.defects.prefix_cache import KeepsStaleEntry
from properties.search.failures import read_failure, shrink
from properties.search.run import first_failure
from properties.search.workloads import random_workload

CANARY = "properties.defects.canary:rarely_stale"


def test_search_reports_goals_and_writes_a_record(tmp_path, capsys):
    record = tmp_path / "record.json"
    words = ["verify", "search", "--workloads", "120", "--seed", "4", "--json", str(record)]
    assert main(words) == 0
    assert "120 workloads" in capsys.readouterr().out
    written = json.loads(record.read_text())
    assert written["workloads"] == 120
    assert written["failures"] == []
    assert sum(written["by_policy"].values()) == 120
    assert written["goals"]["preemption"] > 0


def test_search_prints_the_record_alone_where_it_is_asked_for(capsys):
    assert main(["verify", "search", "--workloads", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workloads"] == 20


def test_search_runs_in_several_processes():
    assert main(["verify", "search", "--workloads", "1200", "--seed", "4", "--jobs", "2"]) == 0


def test_failure_is_written_shrunk_and_replayed(tmp_path, capsys):
    words = ["verify", "search", "--workloads", "500", "--seed", "3", "--target", CANARY]
    assert main([*words, "--out", str(tmp_path)]) == 1
    files = sorted(tmp_path.iterdir())
    assert files
    assert str(files[0]) in capsys.readouterr().err
    record = read_failure(files[0])
    assert record["law"] in files[0].name
    assert main(["verify", "replay", str(files[0])]) == 1
    assert f"breaks LAW-{record['law']}" in capsys.readouterr().err


def test_replay_of_a_mended_kernel_says_so(tmp_path, capsys):
    words = ["verify", "search", "--workloads", "500", "--seed", "3", "--target", CANARY]
    main([*words, "--out", str(tmp_path)])
    path = next(tmp_path.iterdir())
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "target": "engine.core:Scheduler"}))
    assert main(["verify", "replay", str(path)]) == 0
    assert "all laws are kept" in capsys.readouterr().out


def write(path: Path, **changes: object) -> Path:
    record = {
        "format": "lockstep-failure-1",
        "version": read_version(),
        "target": "engine.core:Scheduler",
        "config": {"num_blocks": 4, "max_model_len": 16},
        "vocabulary": 2,
        "operations": [["drain"]],
        "law": "B1",
    }
    path.write_text(json.dumps({k: v for k, v in {**record, **changes}.items() if v is not None}))
    return path


def read_version() -> str:
    from properties.search.failures import lockstep_version

    return lockstep_version()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.0.1"}, "written by lockstep 0.0.1"),
        ({"format": "lockstep-failure-0"}, "lockstep-failure-0"),
        ({"format": "other"}, "not a failure file"),
        ({"config": None}, "lacks config"),
        ({"config": {"num_blocks": 0, "max_model_len": 16}}, "num_blocks"),
        ({"config": {"blocks": 3}}, "blocks"),
        ({"target": "engine.core:Nothing"}, "Nothing"),
    ],
)
def test_replay_refuses_by_name_what_it_cannot_replay(tmp_path, capsys, changes, message):
    path = write(tmp_path / "failure.json", **changes)
    assert main(["verify", "replay", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_replay_refuses_a_file_that_is_no_json_and_one_that_is_missing(tmp_path, capsys):
    path = tmp_path / "failure.json"
    path.write_text("{")
    assert main(["verify", "replay", str(path)]) == 2
    assert "not a failure file" in capsys.readouterr().err
    assert main(["verify", "replay", str(tmp_path / "missing.json")]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--seconds", "0"],
        ["--workloads", "0"],
        ["--jobs", "0"],
        ["--policy", "fifo"],
        ["--target", "no_such_module:thing"],
    ],
)
def test_search_refuses_impossible_options(words):
    assert main(["verify", "search", *words]) == 2


def test_shrinking_keeps_the_law_and_removes_operations():
    found = first_failure(KeepsStaleEntry, random_workload, range(200))
    assert found is not None
    seed, broken = found
    workload = random_workload(seed)
    small = shrink(workload, broken.law, KeepsStaleEntry)
    assert len(small.operations) < len(workload.operations)


def test_documents_are_printed(capsys):
    assert main(["verify", "laws"]) == 0
    assert "**LAW-B1**" in capsys.readouterr().out
