"""What is shipped: the sdist holds tests and docs, the wheel holds what runs and no test."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools changes sys.argv
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


def tracked():
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names inside the sdist and the wheel of a clean copy of the tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=tree, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        source = {name.partition("/")[2] for name in sdist.getnames()}
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return source, set(wheel.namelist())


def test_the_sdist_holds_every_tracked_file_that_a_reader_needs(built):
    source, _ = built
    assert not {name for name in tracked() if not name.startswith(".")} - source


def test_the_wheel_holds_no_test_and_nothing_of_the_repository_alone(built):
    _, wheel = built
    roots = {name.partition("/")[0] for name in wheel}
    assert {root for root in roots if not root.endswith(".dist-info")} == {
        "engine", "sim", "properties", "golden",
    }  # fmt: skip
    parts = {part for name in wheel for part in name.split("/")}
    assert not {"tests", "mutation", "records"} & parts
    assert not [name for name in wheel if name.startswith("properties/models/")]
    assert not [part for part in parts if part.startswith("test_") or part == "conftest.py"]


def test_the_wheel_holds_every_module_and_the_data_that_they_read(built):
    _, wheel = built
    needed = [
        name
        for name in tracked()
        if name.startswith(("engine/", "sim/", "properties/", "golden/"))
        and name.endswith((".py", "py.typed"))
        and not {"tests", "mutation"} & set(name.split("/"))
        and not name.startswith("properties/models/")
    ]
    needed += [name for name in tracked() if name.startswith("sim/data/")]
    assert not set(needed) - wheel
