"""Folders of results: what this program did not write keeps every byte, at whatever moment it dies.

A kill is the death of a forked process at the n-th change that it makes to the file system.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.core import ConfigError
from engine.steplog.output_folder import OutputFolder
from sim.run.outputs import run_folder

QUICK = ["sim", "run", "--workload", "poisson", "--num-requests", "4", "--rate", "50",
         "--model", "smollm2-135m", "--hardware", "l4", "--cost", "constant:5",
         "--num-kv-blocks", "64"]  # fmt: skip
RESULTS = {"report.html", "requests.csv", "steps.jsonl", "summary.json", "trace.json",
           "requests.parquet"}  # fmt: skip
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}
DIED = 77


def picture(folder: Path) -> dict[str, object]:
    """Everything below a folder, by relative name; links are not followed."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder"
    return found


def dies_at(count: int, action) -> bool:
    """Runs `action` in a fork that is killed at its `count`-th change; True if it was."""
    child = os.fork()
    if not child:
        seen = 0

        def hook(event, arguments):
            nonlocal seen
            if event not in CHANGES or (event == "open" and "r" in str(arguments[1])):
                return
            seen += 1
            if seen == count:
                os._exit(DIED)

        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            sys.addaudithook(hook)
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == DIED


def write_results(out: Path, seed: int) -> None:
    assert main([*QUICK, "--seed", str(seed), "--out", str(out)]) == 0


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> dict[str, bytes]:
    """The files of one run."""
    out = tmp_path_factory.mktemp("earlier") / "out"
    write_results(out, 1)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def fill(out: Path, earlier: dict[str, bytes], draw: random.Random) -> bool:
    """A random folder of earlier results and foreign things; True if anything is foreign."""
    out.mkdir()
    for name in draw.sample(sorted(earlier), draw.randint(0, len(earlier))):
        (out / name).write_bytes(earlier[name])
    elsewhere = out.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "treasure").write_bytes(draw.randbytes(20))
    kinds = draw.sample(
        ["nothing", "file", "hidden", "folder", "same name", "link", "link of our name", "scratch",
         "folder of our name", "dead link"],
        draw.randint(1, 3),
    )  # fmt: skip
    for kind in kinds:
        ours = out / draw.choice(sorted(RESULTS))
        if kind == "file":
            (out / draw.choice(["a.txt", "summary.json.bak", "steps.jsonl.gz"])).write_bytes(b"x")
        elif kind == "hidden":
            (out / ".git").mkdir()
            (out / ".git" / "HEAD").write_bytes(b"ref")
        elif kind == "folder":
            (out / "notes").mkdir()
            (out / "notes" / "summary.json").write_bytes(b"{}")
        elif kind == "same name":
            ours.write_bytes(draw.choice([b"", b"{}", b"my own\n", b'{"sim": 1}']))
        elif kind == "scratch":
            (out / ".lockstep-1-0.partial").mkdir()
            (out / ".lockstep-1-0.partial" / "mine").write_bytes(b"x")
        elif kind != "nothing" and not (ours.exists() and "name" not in kind):
            ours.unlink(missing_ok=True)
            if kind == "folder of our name":
                ours.mkdir()
                (ours / "inside").write_bytes(b"x")
            elif kind == "link":
                (out / "shortcut").symlink_to(elsewhere)
            elif kind == "link of our name":
                ours.symlink_to(elsewhere / "treasure")
            else:
                ours.symlink_to(out / "nowhere")
    return any(
        path.is_symlink() or not path.is_file() or earlier.get(path.name) != path.read_bytes()
        for path in out.iterdir()
    )


@pytest.mark.parametrize("seed", range(60))
def test_foreign_files_keep_every_byte_and_the_folder_is_refused(tmp_path, earlier, seed, capsys):
    draw = random.Random(seed)
    out = tmp_path / "out"
    foreign = fill(out, earlier, draw)
    before = picture(tmp_path)
    code = main([*QUICK, "--out", str(out)])
    error = capsys.readouterr().err
    if foreign:
        assert code == 2 and error.count("\n") == 1 and "out=" in error
        assert picture(tmp_path) == before
    else:
        assert code == 0 and set(picture(out)) == set(earlier)


@pytest.mark.parametrize("kind", ["new", "empty", "earlier"])
def test_a_run_that_is_killed_leaves_whole_files_and_the_next_one_succeeds(tmp_path, earlier, kind):
    later = tmp_path / "later"
    write_results(later, 2)
    after = {path.name: path.read_bytes() for path in later.iterdir()}
    killed = 0
    for count in range(1, 60):
        out = tmp_path / f"{kind}{count}"
        if kind != "new":
            out.mkdir()
        if kind == "earlier":
            for name, content in earlier.items():
                (out / name).write_bytes(content)
        if not dies_at(count, lambda out=out: write_results(out, 2)):
            break
        killed += 1
        held = {name: content for name, content in picture(out).items() if "partial" not in name}
        for name, content in held.items():
            assert content in (earlier[name], after[name]), f"{name} is half at change {count}"
        if "summary.json" in held and held["summary.json"] == after["summary.json"]:
            assert held == after, "the summary comes last"
        write_results(out, 2)
        assert picture(out) == after
    assert 8 < killed < 59


def test_links_are_refused_wherever_they_stand(tmp_path, capsys):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert main([*QUICK, "--out", str(link)]) == 2
    assert "symbolic link" in capsys.readouterr().err
    assert link.is_symlink() and not list(real.iterdir())


def test_what_comes_into_the_folder_while_a_run_lasts_is_not_touched(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match=r"precious\.txt"), run_folder(out) as folder:
        (folder.path / "summary.json").write_text("{}")
        (out / "precious.txt").write_text("x")
    assert picture(out) == {"precious.txt": b"x"}


def test_a_folder_that_another_process_writes_is_refused(tmp_path):
    out = tmp_path / "out"
    (out / f".lockstep-{os.getppid()}-0.partial").mkdir(parents=True)
    with pytest.raises(ConfigError, match="another process"):
        OutputFolder(out, {}).check()
