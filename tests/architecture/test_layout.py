"""What a reader may rely on: sizes of files and functions, public names, no machine's traces."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "sim", "properties", "golden")


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_files_stay_under_400_lines():
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources()
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long


def test_functions_stay_under_60_lines():
    long = []
    for path in sources():
        if path.parent.name == "kernels":
            continue  # a device kernel is one function by nature
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                lines = (node.end_lineno or first) - first + 1
                if lines > 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {lines}")
    assert not long


@pytest.mark.parametrize("package", ["engine", "engine.core"])
def test_public_names_are_complete_and_sorted(package):
    import importlib

    module = importlib.import_module(package)
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_kernel_reads_no_clock_and_draws_no_random_number():
    banned = {"time", "random", "datetime", "os", "threading", "secrets", "uuid"}
    for path in (ROOT / "engine/core").glob("*.py"):
        if path.name.startswith("steplog"):
            continue  # the log writes files
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & banned, path.name


def test_the_repository_names_no_machine():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    words = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", ".lib" + "rary")
    found = []
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".json", ".txt", ""} and path.is_file():
            text = path.read_text(errors="ignore")
            found += [(name, word) for word in words if word in text]
    assert not found
