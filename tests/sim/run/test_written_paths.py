"""Every verb that writes refuses a folder, a link and a missing parent as its file: one line."""

from __future__ import annotations

import pytest
from sim_testing import rows_workload, run

from engine.cli import main


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    run(rows_workload((0, 8, 3), (1, 8, 2)), log_path=path)
    return path


VERBS = {
    "log trace": lambda log, out: ["log", "trace", str(log), "--out", str(out / "x.json")],
    "log expand": lambda log, out: ["log", "expand", str(log), "--out", str(out / "x.jsonl")],
    "sim plan --init": lambda log, out: ["sim", "plan", "--init", str(out / "x.yaml")],
}


@pytest.mark.parametrize("place", ["folder", "link", "missing"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_place_is_refused_in_one_line(verb, place, log, tmp_path, capsys):
    out = tmp_path / "out"
    words = VERBS[verb](log, out)
    path = out / words[-1].rpartition("/")[2]
    if place != "missing":
        out.mkdir()
    if place == "folder":
        path.mkdir()
    elif place == "link":
        (out / "target").write_text("precious")
        path.symlink_to(out / "target")
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and path.name in error
    assert sorted(tmp_path.rglob("*")) == before
    if place == "link":
        assert path.is_symlink() and path.read_text() == "precious"


def test_a_plan_replaces_no_file_of_somebody_else_and_says_so_before_it_searches(tmp_path, capsys):
    study = tmp_path / "study.yaml"
    assert main(["sim", "plan", "--init", str(study)]) == 0
    out = tmp_path / "out"
    out.mkdir()
    for name, content in (("report.html", "<p>mine"), ("plan.json", "{}")):
        (out / name).write_text(content)
        capsys.readouterr()
        assert main(["sim", "plan", str(study), "--out", str(out), "--quiet"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and name in error
        assert [(p.name, p.read_text()) for p in out.iterdir()] == [(name, content)]
        (out / name).unlink()
    link = tmp_path / "link"
    link.symlink_to(out)
    assert main(["sim", "plan", str(study), "--out", str(link), "--quiet"]) == 2
    assert "symbolic link" in capsys.readouterr().err
