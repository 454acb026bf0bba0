"""Find the syntax tree of a function or class, and the names of its scope. Does not run its code."""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import linecache
import sys
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from aot_tune.declare.fingerprint.syntax import SCOPES, Definition, normal_form


class NoSourceError(Exception):
    """A source text is missing, or is not the text that was compiled."""


# Finding ------------------------------------------------------------------------------


def function_trees(function: types.FunctionType) -> list[Definition]:
    """Return the tree of a function or lambda; several where lambdas on one line cannot be distinguished.

    Raises:
        NoSourceError: The function has no source, as with ``exec`` or ``python -c``.
    """
    code = function.__code__
    block = _block(code, function.__globals__)
    if block is not None:
        return [block]
    nodes: list[Definition] = [
        node
        for _, node in _module(code.co_filename, function.__globals__)
        if not isinstance(node, ast.ClassDef)
        and _first_line(node) == code.co_firstlineno
        and ("<lambda>" if isinstance(node, ast.Lambda) else node.name) == code.co_name
    ]
    if not nodes:
        raise NoSourceError(f"{code.co_filename}:{code.co_firstlineno} does not define {code.co_name}")
    if len(nodes) == 1:
        return nodes
    nodes = [node for node in nodes if _compiles_to(node, code)] or nodes
    # Equal lambdas on one line count once, so that breaking the line changes nothing.
    return list({"".join(normal_form(node)): node for node in nodes}.values())


def class_trees(cls: type) -> list[Definition]:
    """Return the tree of a class; several where its file defines its qualified name more than once.

    Raises:
        NoSourceError: The class has no source.
    """
    try:
        path = inspect.getfile(cls)
    except (TypeError, OSError) as error:
        raise NoSourceError(f"{cls.__qualname__} has no source file") from error
    nodes = [
        node
        for name, node in _module(path, {})
        if isinstance(node, ast.ClassDef) and name == cls.__qualname__
    ]
    if not nodes:
        raise NoSourceError(f"{path} does not define {cls.__qualname__}")
    return list(nodes)


def _first_line(node: Definition) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


_blocks: dict[tuple[str, int, str], tuple[list[str], Definition]] = {}
"""Lines of a file and the function that begins at a line, by file, first line and name."""


def _block(code: types.CodeType, module_globals: dict[str, object]) -> Definition | None:
    """Return the function that begins at the first line of its code; None where this does not decide.

    A first launch waits for this, and a file is ten times as long as a function. A line that is indented no
    further than the first ends the function, unless it is in brackets or in a string: then the text before it
    cannot be parsed.
    """
    lines = _lines(code.co_filename, module_globals)
    key = (code.co_filename, code.co_firstlineno, code.co_name)
    if key in _blocks and _blocks[key][0] is lines:
        return _blocks[key][1]
    text = lines[code.co_firstlineno - 1 :]
    if not text or not text[0].lstrip().startswith(("@", "def ", "async ")):
        return None
    depth = _indentation(text[0])
    outer = "if True:\n" if depth else ""
    for count in range(1, len(text) + 1):
        if count < len(text) and not _may_end(text[count], depth):
            continue
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            node = ast.parse(outer + "".join(text[:count])).body[0]
            if isinstance(node, ast.If):
                node = node.body[0]
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != code.co_name:
                return None
            _blocks[key] = (lines, node)
            return node
    return None


def _may_end(line: str, depth: int) -> bool:
    """Whether a function that is indented by `depth` may end before this line."""
    written = line.strip()
    return bool(written) and not written.startswith("#") and _indentation(line) <= depth


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _lines(path: str, module_globals: dict[str, object]) -> list[str]:
    linecache.checkcache(path)
    lines = linecache.getlines(path, module_globals)
    if not lines:
        raise NoSourceError(f"{path} has no source")
    return lines


def _module(path: str, module_globals: dict[str, object]) -> tuple[tuple[str, Definition], ...]:
    try:
        return _definitions("".join(_lines(path, module_globals)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NoSourceError(f"{path}: {error}") from error


@lru_cache(maxsize=256)
def _definitions(text: str) -> tuple[tuple[str, Definition], ...]:
    """Return all definitions of a module with their qualified names."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, SCOPES):
                name = prefix + ("<lambda>" if isinstance(child, ast.Lambda) else child.name)
                yield name, child
                inside = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
            yield from walk(child, inside)

    return tuple(walk(ast.parse(text), ""))


def _compiles_to(node: Definition, code: types.CodeType) -> bool:
    """Whether a lambda compiles to this code, closure variables included."""
    if not isinstance(node, ast.Lambda):
        return True
    # An outer function that owns the free variables makes the compiler treat them as closures again.
    outer = ast.parse("def outer():\n  " + "".join(f"{name} = 0; " for name in code.co_freevars) + "return 0")
    function = outer.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body[-1] = ast.copy_location(ast.Return(value=node), node)
    flags = code.co_flags & _FUTURE_FLAGS
    compiled = compile(outer, "<lambda>", "exec", flags=flags, dont_inherit=True)
    inner = next(const for const in compiled.co_consts if isinstance(const, types.CodeType))
    lambdas = [const for const in inner.co_consts if isinstance(const, types.CodeType)]
    return any(_same_code(candidate, code) for candidate in lambdas)


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    return all(
        getattr(one, field) == getattr(other, field)
        for field in ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    )


_FUTURE_FLAGS = __future__.annotations.compiler_flag


# Scopes and names ------------------------------------------------------------------------------


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure's variables that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (the access raises for an empty cell)
    except ValueError:
        return True
    return False


def annotations_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the annotations that are not text. Since Python 3.14 reading evaluates them and may fail."""
    try:
        return {name: value for name, value in function.__annotations__.items() if not isinstance(value, str)}
    except Exception:
        return {}


def slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of the slots that a class itself declares."""
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


_BY_NAME = frozenset({"cuda", "torch", "numpy", "triton", "cupy", "jax"})
"""Packages whose code is hashed by name alone: their versions are recorded elsewhere or affect no kernel."""


def counts_by_name(module: str | None) -> bool:
    """Whether a module is hashed by name alone: standard library, frameworks, aot_tune except kernels."""
    top, _, rest = (module or "").partition(".")
    if top == "aot_tune":
        return rest.partition(".")[0] != "kernels"
    return top in _BY_NAME or top in sys.stdlib_module_names


def public_name(value: Any) -> tuple[str, str]:
    """Return the package and qualified name of a value; not the module, which may move between releases."""
    package = (getattr(value, "__module__", None) or "").partition(".")[0]
    return package, getattr(value, "__qualname__", None) or str(value)
