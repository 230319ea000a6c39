"""Properties as plain functions: mutmut leaves everything alone that has a decorator."""

from __future__ import annotations

import ast

GETTER = "_getter_of_"


def as_functions(source: str) -> str:
    """The same module with each `@property def x` as a function and `x = property(...)` after it.

    Only the copy that mutmut works in is written like this.
    """
    lines = source.splitlines()
    tree = ast.parse(source)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = [node for node in found if [_name(d) for d in node.decorator_list] == ["property"]]
    for node in sorted(found, key=lambda node: -node.lineno):
        decorator = node.decorator_list[0]
        indent = " " * node.col_offset
        assert node.end_lineno is not None
        lines.insert(node.end_lineno, f"{indent}{node.name} = property({GETTER}{node.name})")
        header = node.lineno - 1
        lines[header] = lines[header].replace(f"def {node.name}(", f"def {GETTER}{node.name}(", 1)
        del lines[decorator.lineno - 1]
    return "\n".join(lines) + "\n"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
