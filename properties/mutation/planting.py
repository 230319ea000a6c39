"""Puts a changed function into a running program, in place, so that every name for it sees it."""

from __future__ import annotations
import __future__

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from properties.mutation.operators import Change, FunctionNode, changes

_FLAGS = __future__.annotations.compiler_flag


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change together with its code."""

    module: str
    change: Change
    code: CodeType

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.module}:{self.change.function}:{self.change.line} {self.change.operator}"


def mutants_of(module: str, path: Path) -> Iterator[Mutant]:
    """All mutants of a module whose code differs from the original's and from one another's."""
    tree = ast.parse(path.read_text())
    for owner, function in _functions(tree):
        name = f"{owner}.{function.name}" if owner else function.name
        seen = {_essence(_compiled(function, owner, path))}
        for change in changes(function, name):
            try:
                code = _compiled(function, owner, path)
            except SyntaxError:
                continue
            if _essence(code) not in seen:
                seen.add(_essence(code))
                yield Mutant(module, change, code)


def _functions(tree: ast.Module) -> Iterator[tuple[str, FunctionNode]]:
    for node in tree.body:
        if isinstance(node, FunctionNode):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, FunctionNode):
                    yield node.name, item


def _compiled(function: FunctionNode, owner: str, path: Path) -> CodeType:
    """The function's code alone; within its class, so that `super()` and private names work."""
    decorators, function.decorator_list = function.decorator_list, []
    try:
        body: list[ast.stmt] = [function]
        if owner:
            body = [ast.ClassDef(owner, [], [], body, [])]
        tree = ast.fix_missing_locations(ast.Module(body, []))
        outer = compile(tree, str(path), "exec", _FLAGS, dont_inherit=True)
    finally:
        function.decorator_list = decorators
    if owner:
        outer = _inner(outer, owner)
    return _inner(outer, function.name)


def _inner(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _essence(code: CodeType) -> tuple[object, ...]:
    consts = tuple(
        _essence(const) if isinstance(const, CodeType) else (type(const).__name__, const)
        for const in code.co_consts
    )
    return code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars


def plant(mutant: Mutant) -> None:
    """Changes this process; meant for one that ends soon."""
    place: Any = import_module(mutant.module)
    *owners, name = mutant.change.function.split(".")
    for owner in owners:
        place = getattr(place, owner)
    whole = vars(place)[name]
    function = _plain(whole)
    if function.__code__.co_freevars == mutant.code.co_freevars:
        function.__code__ = mutant.code
        return
    # It lost its way to a cell, such as that of super().
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple([cells[free] for free in mutant.code.co_freevars])
    other = FunctionType(
        mutant.code, function.__globals__, name, function.__defaults__, closure or None
    )
    other.__kwdefaults__ = function.__kwdefaults__
    setattr(place, name, _wrapped(whole, other))


def _plain(whole: Any) -> Any:  # noqa: ANN401
    if isinstance(whole, property):
        return whole.fget
    if isinstance(whole, classmethod | staticmethod):
        return whole.__func__
    if isinstance(whole, cached_property):
        return whole.func
    while hasattr(whole, "__wrapped__"):
        whole = whole.__wrapped__
    return whole


def _wrapped(whole: Any, function: FunctionType) -> Any:  # noqa: ANN401
    if isinstance(whole, property | classmethod | staticmethod):
        return type(whole)(function)
    return function
