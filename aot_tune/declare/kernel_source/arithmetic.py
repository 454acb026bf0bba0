"""Arithmetic on values of a kernel's source: on numbers, and on what leads to the index of a tile. Pure."""

from __future__ import annotations

import ast

from aot_tune.declare.kernel_source.values import Value, made_of, number


def computed(op: ast.operator, left: Value, right: Value) -> Value:
    """The result of an operation on two numbers."""
    assert left.number is not None
    assert right.number is not None
    try:
        match op:
            case ast.Add():
                return number(left.number + right.number)
            case ast.Sub():
                return number(left.number - right.number)
            case ast.Mult():
                return number(left.number * right.number)
            case ast.FloorDiv():
                return number(left.number // right.number)
            case ast.Div():
                return number(left.number / right.number)
            case ast.Pow():
                return number(left.number**right.number)
    except (ZeroDivisionError, OverflowError):
        pass
    return made_of(type(op).__name__, [left, right])


def compared(op: ast.cmpop, left: float, right: float) -> Value:
    """The result of comparing two numbers."""
    results = {
        ast.Eq: left == right, ast.NotEq: left != right, ast.Lt: left < right,
        ast.LtE: left <= right, ast.Gt: left > right, ast.GtE: left >= right,
    }  # fmt: skip
    found = results.get(type(op))
    return Value(key="compare") if found is None else number(found)


def tile_index(start: Value, lanes: Value) -> Value | None:
    """The index of the tile that begins at `start`, where tiles of `lanes` elements lie side by side."""
    if start.step is not None and start.step.key == lanes.key:
        return start
    for one, other in (start.factors or (), (start.factors or ())[::-1]) if start.factors else ():
        if other.key == lanes.key and start.key.startswith("*("):
            return one
    return start if start.number == 0 else None


def rounds_up(node: ast.BinOp, divisor: Value) -> bool:
    """Whether a division is ``(size + tile - 1) // tile``."""
    return isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Sub) and divisor.number != 2


def rounded(left: Value) -> Value:
    """The size in ``size + tile - 1``."""
    return left.factors[0] if left.factors else left


def single(index: tuple[Value, ...] | None) -> tuple[Value | None, ...] | None:
    """The extents of a gather: one element along each axis that is indexed by a plain number."""
    if index is None:
        return None
    return tuple(None if one.lanes or one.of_sources("load") else number(1) for one in index)
