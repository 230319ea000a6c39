"""The map of every file in the docs, made from the first lines of the files themselves.

A document holds `<!-- files of FOLDER -->` and `<!-- end of files -->`; between them stands what
the room owns and one line per file. `python tests/architecture/file_map.py` writes them again.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "sim", "properties", "golden")
DOCUMENTS = tuple(
    ROOT / "docs" / name
    for name in ("architecture.md", "engine.md", "server.md", "simulator.md", "verification.md")
)
MAP = re.compile(r"<!-- files of (\S+) -->\n(.*?)<!-- end of files -->", re.DOTALL)


def doc_of(path):
    """A module's docstring."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def rooms():
    """Every folder that is a package, as its path from the root."""
    inits = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    return sorted(str(path.parent.relative_to(ROOT)) for path in inits)


def room_map(folder):
    """What a room owns, and one line per file."""
    paragraphs = doc_of(ROOT / folder / "__init__.py").split("\n\n")
    lines = [f"**`{folder}/`** " + " ".join(" ".join(paragraphs).split())]
    files = [path for path in sorted((ROOT / folder).glob("*.py")) if path.name != "__init__.py"]
    if files:
        lines += ["", "| file | what it holds |", "|---|---|"]
    for path in files:
        first = doc_of(path).split("\n")[0].replace("|", "\\|")
        lines.append(f"| `{path.name}` | {first} |")
    return "\n".join(lines) + "\n"


def with_maps(text):
    """A document with its maps made anew."""
    return MAP.sub(
        lambda found: f"<!-- files of {found[1]} -->\n{room_map(found[1])}<!-- end of files -->",
        text,
    )


def main():
    """Writes the maps of all documents."""
    for document in DOCUMENTS:
        document.write_text(with_maps(document.read_text()))


if __name__ == "__main__":
    main()
