"""`from sim import simulate` does what `lockstep sim run` does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import sim
from engine.cli import main
from engine.core import ConfigError, InputError
from sim import simulate

OPTIONS = {"workload": "poisson", "rate": 20, "num_requests": 30, "model": "smollm2-135m",
           "hardware": "l4", "cost": "constant:5", "num_kv_blocks": 500, "seed": 3}  # fmt: skip
WORDS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, []),
        ({"prefix_caching": False}, ["--no-prefix-caching"]),
        ({"step_by_step": True}, ["--step-by-step"]),
        ({"step_by_step": False, "max_concurrency": None}, []),
        ({"goodput": {"ttft": 500}}, ["--goodput", "ttft:500"]),
        ({"goodput": ["ttft:500", "tpot:5"]}, ["--goodput", "ttft:500", "tpot:5"]),
        ({"intervals": 5}, ["--intervals", "5"]),
    ],
)
def test_the_figures_are_those_of_the_command(more, words, capsys):
    assert main(["sim", "run", *WORDS, *words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(simulate(**OPTIONS, **more).to_json())) == shown
    assert capsys.readouterr() == ("", "")


def test_the_same_files_are_written(tmp_path):
    simulate(**OPTIONS, out=tmp_path / "a", perfetto=False)
    assert main(["sim", "run", *WORDS, "--no-perfetto", "--out", str(tmp_path / "b")]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "trace.json" not in names
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in set(names) - {"report.html"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_wrong_options_are_refused_as_by_the_command():
    with pytest.raises(InputError, match="replica"):
        simulate(**OPTIONS, replica=2)
    with pytest.raises(ConfigError, match="replicas"):
        simulate(**OPTIONS, replicas=0)
    with pytest.raises(InputError, match="workload"):
        simulate(rate=3)


def test_importing_the_package_loads_nothing_until_it_is_asked():
    code = "import sim, sys; print('numpy' in sys.modules, sim.__all__); sim.simulate"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False ['simulate']\n"
    with pytest.raises(AttributeError):
        sim.__getattr__("nothing")
