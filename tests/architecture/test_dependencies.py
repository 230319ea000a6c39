"""The dependency arrows, checked twice: by import-linter and by interpreters without torch."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BLOCKER = """
import sys
import tempfile
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked in this test")
sys.meta_path.insert(0, Blocked())
import pkgutil, importlib
for root in {roots!r}:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        last = module.name.rsplit(".", 1)[-1]
        if last != "__main__" and not last.startswith("test_") and last != "conftest":
            importlib.import_module(module.name)
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("roots", "blocked"),
    [
        (["engine.core"], ["torch", "numpy", "simpy", "transformers", "hypothesis", "yaml"]),
        (["engine.steplog"], ["torch", "numpy", "simpy", "transformers", "hypothesis", "yaml"]),
        (["engine.server"], ["torch", "numpy", "simpy", "transformers", "hypothesis"]),
        (["sim"], ["torch", "transformers", "hypothesis"]),
        (["properties"], ["torch", "transformers"]),
    ],
)
def test_package_imports_without_torch(roots, blocked):
    result = run(BLOCKER.format(roots=roots, blocked=set(blocked)))
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_simulation_needs_the_base_install_only():
    blocked = {"torch", "transformers", "hypothesis", "scipy", "ray", "tqdm"}
    code = BLOCKER.format(roots=["engine.core"], blocked=blocked)
    code += """
import sim.commands.run
assert sim.commands.run.run_main(["--workload", "poisson", "--rate", "5", "--num-requests", "20",
    "--model", "qwen3-8b", "--hardware", "h200", "--out", sys.argv[1]]) == 0
"""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-c", code, f"{folder}/run"],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_blocker_does_block():
    result = run(BLOCKER.format(roots=["engine.layers"], blocked={"torch"}))
    assert "torch is blocked" in result.stderr


def test_import_linter_contracts_hold():
    result = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout[-3000:]


def test_importing_the_kernel_loads_little():
    result = run(
        "import sys; import engine.core; print(len([m for m in sys.modules if m[:6] == 'engine']))"
    )
    assert int(result.stdout) < 30


def test_plain_pytest_finds_the_packages_and_not_the_test_folders():
    """`tests/sim` and `tests/engine` bear the names of packages; `python -m` would hide that."""
    result = subprocess.run(
        [str(Path(sys.executable).parent / "pytest"), "--collect-only", "-q",
         "tests/sim/calibration/test_calib_intervals.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:]
