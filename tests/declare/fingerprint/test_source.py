"""The tree of a function is the one that its whole file has there, though only the function is read."""

from __future__ import annotations

import argparse
import ast
import asyncio.tasks
import dataclasses
import inspect
import linecache
import types
import typing
from collections.abc import Iterator

import pytest
import torch.nn.functional

from aot_tune.declare.fingerprint import source
from aot_tune.declare.fingerprint.syntax import normal_form
from aot_tune.kernels.products import linear

TRICKY = '''
import functools

def low_comment():
    a = 1
# a comment that is not indented
    return a

def low_string():
    text = """
def other():
return 2
"""
    return text

def low_brackets(
    a,
):
    return (
a,
)

def continued():
    a = 1 + \\
2
    return a

@functools.lru_cache
# between
@functools.wraps(
low_string
)
def decorated(): return 1

class Outer:
    @property
    def inside(self):
        """Doc."""

        return 1
    # less

    async def awaited(self):
        async def deep():
            return """
left
"""
        return await deep()

if functools:
    def branch():
        return 1
else:
    def branch():
        return 2

def last():
    return 3'''


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            if not const.co_name.startswith("<"):
                yield const
            yield from codes(const)


def compare(path: str, text: str) -> int:
    """Compare the tree of each function of a file with that of the whole file; return how many there were."""
    whole = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    count = 0
    for code in codes(compile(text, path, "exec")):
        expected = [
            "".join(normal_form(node))
            for node in whole
            if source._first_line(node) == code.co_firstlineno and node.name == code.co_name
        ]
        if not expected:
            continue  # a class
        found = source._block(code, {})
        assert found is not None, (path, code.co_name)
        assert "".join(normal_form(found)) in expected, (path, code.co_name)
        count += 1
    return count


MODULES = (argparse, asyncio.tasks, dataclasses, inspect, typing, torch.nn.functional, linear)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_function_alone_has_the_tree_that_it_has_in_its_file(module: types.ModuleType) -> None:
    assert module.__file__ is not None
    assert compare(module.__file__, "".join(linecache.getlines(module.__file__))) > 5


def test_layouts_that_look_like_the_end_of_a_function_are_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = TRICKY.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<tricky>", (len(TRICKY), None, lines, "<tricky>"))
    assert compare("<tricky>", TRICKY) == 11


def test_a_file_that_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for text in ("def f():\n    return 1\n", "def f():\n    return 2\n"):
        monkeypatch.setitem(
            linecache.cache, "<changing>", (len(text), None, text.splitlines(keepends=True), "<changing>")
        )
        (code,) = codes(compile(text, "<changing>", "exec"))
        found.append(source._block(code, {}))
    assert found[0] is not None
    assert found[1] is not None
    assert "".join(normal_form(found[0])) != "".join(normal_form(found[1]))
