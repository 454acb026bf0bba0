"""Write a syntax tree in a normal form, and find the outer names that it reads. Pure.

The normal form is equal for every Python from 3.10 on: it has no positions, comments or docstrings, and no
empty fields, because each release adds some. Bytecode differs between releases, text between formatters.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef

Name = tuple[str, ...]
"""Name with the attributes that are read of it: ``("ct", "load")`` for ``ct.load``."""

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
"""Types of a `Definition`, for ``isinstance``."""

_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# Normal form ------------------------------------------------------------------------------


def normal_form(node: ast.AST) -> Iterator[str]:
    """Write a tree as text that is equal for equal code, whatever the release, layout and comments."""
    yield f"{type(node).__name__}("
    for field, value in ast.iter_fields(node):
        absent = value == [] or (value is None and not isinstance(node, ast.Constant))
        if absent or field in _SKIPPED_FIELDS:
            continue
        yield f"{field}="
        if isinstance(value, list):
            yield "["
            for item in _significant(node, field, value):
                yield from normal_form(item) if isinstance(item, ast.AST) else (repr(item),)
                yield ","
            yield "]"
        elif isinstance(value, ast.AST):
            yield from normal_form(value)
        else:
            yield f"{type(value).__name__}:{value!r}"
        yield ","
    yield ")"


def _significant(node: ast.AST, field: str, items: list[Any]) -> list[Any]:
    """Return a body without its docstring, an f-string without the empty texts that Python 3.12 adds."""
    if field == "body" and isinstance(node, SCOPES) and is_text(items[0]):
        return items[1:]
    if isinstance(node, ast.JoinedStr):
        return [item for item in items if not (isinstance(item, ast.Constant) and item.value == "")]
    return items


def is_text(statement: ast.AST) -> bool:
    """Return whether a statement is a text alone, such as a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


# Names ------------------------------------------------------------------------------


def outer_names(definition: Definition) -> tuple[list[Name], list[ast.Import | ast.ImportFrom]]:
    """Return the names that a definition reads but does not bind, with their attributes, and its imports.

    Names in annotations count, in strings too. Both are in the order of the text, without repeated
    names.
    """
    reader = _Reader()
    reader.read(definition, frozenset())
    return list(dict.fromkeys(reader.names)), reader.imports


class _Reader:
    """Walks a definition with the names that are bound at each place."""

    def __init__(self) -> None:
        self.names: list[Name] = []
        self.imports: list[ast.Import | ast.ImportFrom] = []

    def read(self, node: ast.AST, bound: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            self._read_function(node, bound)
        elif isinstance(node, ast.Attribute | ast.Name):
            self._read_chain(node, bound)
        elif isinstance(node, _COMPREHENSIONS):
            inside = bound | {name for part in node.generators for name in _stored(part.target)}
            self.read(node.generators[0].iter, bound)
            for child in ast.iter_child_nodes(node):
                self.read(child, inside)
        elif isinstance(node, ast.AnnAssign):
            self._read_annotation(node.annotation, bound)
            self.read(node.target, bound)
            if node.value is not None:
                self.read(node.value, bound)
        else:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.append(node)
            for child in ast.iter_child_nodes(node):
                self.read(child, bound)

    def _read_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, bound: frozenset[str]
    ) -> None:
        arguments = [arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.read(default, bound)
        for annotation in (*(arg.annotation for arg in arguments), getattr(node, "returns", None)):
            self._read_annotation(annotation, bound)
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.read(decorator, bound)
        declared = {name for part in body for name in _declared_global(part)}
        stored = {name for part in body for name in _stored(part)} - declared
        inside = (bound - declared) | stored | {arg.arg for arg in arguments}
        for part in body:
            self.read(part, inside)

    def _read_annotation(self, node: ast.AST | None, bound: frozenset[str]) -> None:
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                with contextlib.suppress(SyntaxError):  # a text inside Literal or Annotated
                    self.read(ast.parse(part.value, mode="eval"), bound)
        if node is not None:
            self.read(node, bound)

    def _read_chain(self, node: ast.Attribute | ast.Name, bound: frozenset[str]) -> None:
        attributes: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            attributes.append(base.attr)
            base = base.value
        if not isinstance(base, ast.Name):
            self.read(base, bound)
        elif base.id not in bound and isinstance(base.ctx, ast.Load):
            self.names.append((base.id, *reversed(attributes)))


def _stored(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds in its function."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    for child in ast.iter_child_nodes(node):
        if isinstance(node, _COMPREHENSIONS) and isinstance(child, ast.comprehension):
            yield from _stored(child.iter)  # a comprehension's targets are bound in it alone
        else:
            yield from _stored(child)


def _declared_global(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Global):
            yield from part.names
