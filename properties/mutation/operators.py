"""Every small change of a function: what mutmut knows, and what planted bugs look like.

Dropped and cut statements, conditions negated, weakened and fixed, loops restricted, branches
swapped, numbers off by one, operators and arguments exchanged. Left alone: assertions, annotations,
decorators, and what is only said (docstrings, f-strings and whatever a `raise` says).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_RENAMED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter",
    "popleft": "pop", "keys": "values", "update": "clear", "add": "discard",
}  # fmt: skip
_SKIPPED = (ast.Assert, ast.JoinedStr, ast.arguments)
_SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "type_params", "exc", "cause")


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a function: `before` and `after` are its changed lines, joined."""

    function: str  # Class.method or function
    operator: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """By which a justified survivor is found."""
        return self.function, self.before, self.after


def _none() -> ast.expr:
    return ast.Constant(None)


def _expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Other expressions for this one."""
    if isinstance(node, ast.Constant):
        yield from _constant(node.value)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and-or", ast.BoolOp(other, node.values)
        for place in range(len(node.values)):
            rest = node.values[:place] + node.values[place + 1 :]
            yield "weakened", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "without sign", node.operand
    elif isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            changed = _COMPARED[type(op)]()
            ops = [*node.ops[:place], changed, *node.ops[place + 1 :]]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.IfExp):
        yield "swapped", ast.IfExp(node.test, node.orelse, node.body)
        yield "one branch", node.body
        yield "one branch", node.orelse
    elif isinstance(node, ast.Lambda):
        yield "lambda", ast.Lambda(node.args, _none())
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield from _slice(node, node.slice)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        yield from _comprehension(node)


def _constant(value: object) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(value, bool):
        yield "boolean", ast.Constant(not value)
    elif isinstance(value, int):
        yield "off by one", ast.Constant(value + 1)
        yield "off by one", ast.Constant(value - 1)
    elif isinstance(value, str) and value:
        yield "text", ast.Constant(f"XX{value}XX")


def _call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func
    if isinstance(name, ast.Name) and name.id in _RENAMED:
        yield "other call", ast.Call(ast.Name(_RENAMED[name.id], ast.Load()), node.args, [])
    if isinstance(name, ast.Attribute) and name.attr in _RENAMED:
        other = ast.Attribute(name.value, _RENAMED[name.attr], ast.Load())
        yield "other call", ast.Call(other, node.args, node.keywords)
    for place, argument in enumerate(node.args):
        before, after = node.args[:place], node.args[place + 1 :]
        if not isinstance(argument, ast.Starred):
            yield "argument", ast.Call(name, [*before, _none(), *after], node.keywords)
        if len(node.args) > 1:
            yield "fewer arguments", ast.Call(name, [*before, *after], node.keywords)
    for place, keyword in enumerate(node.keywords):
        others = node.keywords[:place], node.keywords[place + 1 :]
        yield "fewer arguments", ast.Call(name, node.args, [*others[0], *others[1]])
        changed = ast.keyword(keyword.arg, _none())
        yield "argument", ast.Call(name, node.args, [*others[0], changed, *others[1]])


def _slice(node: ast.Subscript, cut: ast.Slice) -> Iterator[tuple[str, ast.expr]]:
    def moved(bound: ast.expr) -> ast.expr:
        return ast.BinOp(bound, ast.Add(), ast.Constant(1))

    def cut_by(lower: ast.expr | None, upper: ast.expr | None) -> ast.expr:
        return ast.Subscript(node.value, ast.Slice(lower, upper, cut.step), node.ctx)

    if cut.lower is not None:
        yield "slice", cut_by(moved(cut.lower), cut.upper)
        yield "slice", cut_by(None, cut.upper)
    if cut.upper is not None:
        yield "slice", cut_by(cut.lower, moved(cut.upper))
        yield "slice", cut_by(cut.lower, None)


def _comprehension(node: Any) -> Iterator[tuple[str, ast.expr]]:  # noqa: ANN401
    kind = type(node)
    for place, loop in enumerate(node.generators):
        for filtered in range(len(loop.ifs)):
            ifs = loop.ifs[:filtered] + loop.ifs[filtered + 1 :]
            other = ast.comprehension(loop.target, loop.iter, ifs, loop.is_async)
            loops = [*node.generators[:place], other, *node.generators[place + 1 :]]
            held = (node.key, node.value) if kind is ast.DictComp else (node.elt,)
            yield "without filter", kind(*held, loops)


def _statement(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Other statements for this one."""
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
        yield "dropped", [ast.Pass()]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield "dropped", [ast.AnnAssign(node.target, node.annotation, None, node.simple)]
    if isinstance(node, ast.Assign):
        yield "assignment", [ast.Assign(node.targets, _emptied(node.value))]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        value = _emptied(node.value)
        yield "assignment", [ast.AnnAssign(node.target, node.annotation, value, node.simple)]
    elif isinstance(node, ast.AugAssign):
        yield "assignment", [ast.Assign([node.target], node.value)]
        if type(node.op) in _ARITHMETIC:
            other = _ARITHMETIC[type(node.op)]()
            yield "arithmetic", [ast.AugAssign(node.target, other, node.value)]
    elif isinstance(node, ast.Return):
        yield "dropped", [ast.Pass()]
        if node.value is not None and not _is_false(node.value):
            yield "return", [ast.Return(None)]
    elif isinstance(node, ast.Continue | ast.Break):
        yield "dropped", [ast.Pass()]
        other_end = ast.Break() if isinstance(node, ast.Continue) else ast.Continue()
        yield "break-continue", [other_end]
    elif isinstance(node, ast.If | ast.While | ast.For):
        yield from _compound(node)


def _compound(node: ast.If | ast.While | ast.For) -> Iterator[tuple[str, list[ast.stmt]]]:
    body, other = node.body, node.orelse
    if isinstance(node, ast.For):
        for name, bounds in (
            ("first only", ast.Slice(None, ast.Constant(1))),
            ("not the first", ast.Slice(ast.Constant(1), None)),
            ("not the last", ast.Slice(None, ast.Constant(-1))),
        ):
            items = ast.List([ast.Starred(node.iter, ast.Load())], ast.Load())
            cut = ast.Subscript(items, bounds, ast.Load())
            yield f"loop: {name}", [ast.For(node.target, cut, body, other)]
        yield "loop: never", [ast.For(node.target, ast.List([], ast.Load()), body, other)]
    elif isinstance(node, ast.While):
        yield "loop: once", [ast.While(node.test, [*body, ast.Break()], other)]
        yield "loop: never", [ast.While(ast.Constant(False), body, other)]
    else:
        yield "negated", [ast.If(ast.UnaryOp(ast.Not(), node.test), body, other)]
        yield "condition: always", [ast.If(ast.Constant(True), body, other)]
        yield "condition: never", [ast.If(ast.Constant(False), body, other)]


def _is_false(value: ast.expr) -> bool:
    """Where False is told, None says the same."""
    return isinstance(value, ast.Constant) and value.value is False


def _emptied(value: ast.expr) -> ast.expr:
    is_none = isinstance(value, ast.Constant) and value.value is None
    return ast.Constant("") if is_none else _none()


def changes(function: FunctionNode, name: str) -> Iterator[Change]:
    """Every change of a function; while one is told, `function` itself is changed.

    So whoever wants its code compiles it before asking for the next.
    """
    original = ast.unparse(function).splitlines()
    for operator, line, put, back in _places(function):
        put()
        ast.fix_missing_locations(function)
        before, after = _difference(original, ast.unparse(function).splitlines())
        yield Change(name, operator, line, before, after)
        back()


_Edit = tuple[str, int, Callable[[], None], Callable[[], None]]


def _places(node: ast.AST) -> Iterator[_Edit]:
    """How to make and to take back each change below a node."""
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED_FIELDS:
            continue
        if isinstance(value, list):
            for place in range(len(value)):
                yield from _edits_in_list(value, place)
        elif isinstance(value, ast.expr) and not isinstance(value, _SKIPPED):
            for operator, other in list(_expression(value)):
                put, back = _setter(node, field, other), _setter(node, field, value)
                yield operator, value.lineno, put, back
            yield from _places(value)
        elif isinstance(value, ast.AST) and not isinstance(value, _SKIPPED):
            yield from _places(value)


def _edits_in_list(items: list[Any], place: int) -> Iterator[_Edit]:
    item = items[place]
    if isinstance(item, _SKIPPED) or not isinstance(item, ast.AST) or _is_text(item):
        return
    if isinstance(item, ast.stmt):
        for operator, statements in list(_statement(item)):
            for statement in statements:
                ast.copy_location(statement, item)
            put, back = _placer(items, place, statements[0]), _placer(items, place, item)
            yield operator, item.lineno, put, back
    elif isinstance(item, ast.expr):
        for operator, other in list(_expression(item)):
            put, back = _placer(items, place, other), _placer(items, place, item)
            yield operator, item.lineno, put, back
    yield from _places(item)


def _is_text(item: ast.AST) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)


def _setter(node: ast.AST, field: str, value: ast.AST) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def _placer(items: list[Any], place: int, value: ast.AST) -> Callable[[], None]:
    return lambda: items.__setitem__(place, value)


def _difference(before: list[str], after: list[str]) -> tuple[str, str]:
    """The lines that differ, joined; equal ones at both ends are left out."""
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    last = 0
    while last < min(len(before), len(after)) - first and before[-1 - last] == after[-1 - last]:
        last += 1
    cut = [lines[first : len(lines) - last] for lines in (before, after)]
    return " ".join(map(str.strip, cut[0])), " ".join(map(str.strip, cut[1]))
