"""What a mutant changes, read from its name and its diff."""

from __future__ import annotations

from properties.mutation.getters import GETTER


def function_of(mutant: str) -> str:
    """`Class.method` or `function` of a mutant's name as mutmut gives it."""
    mangled = mutant.rpartition(".")[2].partition("__mutmut_")[0]
    name = mangled.removeprefix("xǁ").removeprefix("x_").replace("ǁ", ".")
    return name.replace(f".{GETTER}", ".")


def change_in(mutant: str, diff: str) -> tuple[str, str, str]:
    """Function and changed lines of a unified diff, joined, without indentation."""
    before, after = [], []
    for line in diff.splitlines():
        if line.startswith("-") and not line.startswith("---"):
            before.append(line[1:].strip())
        elif line.startswith("+") and not line.startswith("+++"):
            after.append(line[1:].strip())
    return function_of(mutant), " ".join(before), " ".join(after)
