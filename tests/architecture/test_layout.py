"""What a reader may rely on: sizes of files and functions, public names, no machine's traces."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture import file_map

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
    for path in (ROOT / "engine/core").rglob("*.py"):
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


@pytest.mark.parametrize("room", file_map.rooms())
def test_every_package_says_what_it_owns_and_what_it_may_import(room):
    text = file_map.doc_of(ROOT / room / "__init__.py")
    sentences = re.findall(r"\S[.!?](?=\s|$)", text)
    assert len(sentences) >= 2, text
    assert "import" in text.lower(), text


def test_the_docs_map_every_file_and_no_map_is_stale():
    texts = {path.name: path.read_text() for path in file_map.DOCUMENTS}
    mapped = [found[1] for text in texts.values() for found in file_map.MAP.finditer(text)]
    assert sorted(mapped) == file_map.rooms()
    stale = [name for name, text in texts.items() if file_map.with_maps(text) != text]
    assert not stale, "run `python tests/architecture/file_map.py`"


def test_every_file_says_in_one_line_what_it_holds():
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if not file_map.doc_of(path).split("\n")[0].endswith((".", ":"))
    ]
    assert not silent


def test_few_files_lie_at_the_top_of_the_packages():
    assert len(list((ROOT / "engine").glob("*.py"))) <= 8
    assert {path.name for path in (ROOT / "sim").glob("*.py")} <= {"__init__.py", "__main__.py"}
