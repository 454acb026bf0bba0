"""Walk through a kernel's source, and the helpers that it calls, in the order of execution. Runs nothing.

Each loop is entered once, and each branch.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from aot_tune.declare.fingerprint.source import NoSourceError, closure_of, function_trees
from aot_tune.declare.kernel_source.facts import Access, Facts, What
from aot_tune.nvidia import cutile

_ACCESSES: Mapping[str, What] = {
    "load": "load", "gather": "load", "store": "store", "scatter": "store", "atomic": "add",
}  # fmt: skip
"""What functions and methods do to an array, by the beginning of their names."""

_PRODUCTS = ("mma", "mma_scaled", "matmul")
_REDUCTIONS = ("sum", "max", "min", "prod", "argmax", "argmin", "reduce", "scan", "cumsum", "cumprod")

_MOST_DEPTH = 12
"""The deepest nesting of helpers that is followed."""

_MOST_STATEMENTS = 20_000
"""Statements that are looked at, at most, those of helpers once a call."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """What is known of an expression's value."""

    arrays: frozenset[str] = frozenset()
    """The kernel's parameters of which the value may be one, whole or in part."""

    sources: frozenset[str] = frozenset()
    """What the value is computed from: ``bid``, ``num_blocks``, ``loop``, ``product``, ``exp``, ``load x``,
    ``parameter x``."""

    constant: str | None = None
    """The `ct.Constant` parameter that the value is."""

    is_view: bool = False
    """Whether the value is a `tiled_view` of `arrays`, whose tiles have the shape `items`."""

    number: float | None = None
    """A number that is written in the source, a bool among them."""

    items: tuple[Value, ...] | None = None
    """The members of a tuple or list; of a tiled view the sizes of a tile."""

    function: Function | None = None
    """The function that the value is."""

    known: Any = None
    """The Python object that the value is, of a global of the kernel's module; None where there is none."""

    def of_sources(self, start: str) -> frozenset[str]:
        """The rest of the sources that begin with a word: ``of_sources("load")`` are names of arrays."""
        return frozenset(one.partition(" ")[2] for one in self.sources if one.partition(" ")[0] == start)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function written in Python that a kernel calls."""

    node: ast.FunctionDef | ast.Lambda
    """Its tree."""

    names: Mapping[str, Value] = field(repr=False)
    """The names around it that it may read."""

    outer: Mapping[str, Any] = field(repr=False)
    """The globals and the closure that it may read."""


def facts_of(kernel: Any) -> Facts:
    """Return the facts of a kernel's source; none where it cannot be read."""
    function = cutile.python_function(kernel)
    parameters = tuple(name for name, _ in cutile.parameters(kernel))
    facts = Facts(parameters=parameters, constants=_types(function, cutile.constant_parameters(kernel)))
    try:
        tree = function_trees(function)[0]
        assert not isinstance(tree, ast.ClassDef)
        _Walk(facts).call_of_kernel(tree, _outer(function))
    except Exception:  # no source, or one that the walk cannot follow: nothing may depend on what it found
        return Facts(
            parameters=parameters, constants=facts.constants, escaped=set(parameters), readable=False
        )
    return facts


def _types(function: Any, constants: Sequence[str]) -> dict[str, str]:
    """The name of each constant's type: of that between the brackets of its annotation."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # an annotation need not be evaluable here
        hints = {}
    inside = {name: (get_args(hints.get(name)) or (int,))[0] for name in constants}
    return {name: one.__name__ if isinstance(one, type) else "int" for name, one in inside.items()}


def _outer(function: types.FunctionType) -> Mapping[str, Any]:
    return {**vars(builtins), **function.__globals__, **closure_of(function)}


class _Walk:
    """Follows the statements of a kernel, with the values of all names."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.cutile = cutile.public_names()
        self.loops: list[str] = []
        self.depth = 0
        self.statements = 0
        self.handed: set[str] = set()
        """Parameters that other functions of cuTile are given: arrays among them may be written."""
        self.outer: Mapping[str, Any] = {}

    def call_of_kernel(self, tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, outer: Any) -> None:
        """Walk through the kernel with its parameters as they are."""
        assert isinstance(tree, ast.FunctionDef | ast.Lambda)
        names = {
            name: Value(
                arrays=frozenset({name}),
                sources=frozenset({f"parameter {name}"}),
                constant=name if name in self.facts.constants else None,
            )
            for name in self.facts.parameters
        }
        self.body(Function(node=tree, names={}, outer=outer), names)
        self.facts.escaped |= self.handed & set(self.facts.arrays)

    def body(self, function: Function, names: dict[str, Value]) -> Value:
        """Walk through a function's body; return what it returns."""
        before, self.outer = self.outer, function.outer
        self.depth += 1
        scope = {**function.names, **names}
        try:
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body, scope)
            returned: list[Value] = []
            self.block(function.node.body, scope, returned)
            return _one_of(returned) if returned else Value()
        finally:
            self.depth -= 1
            self.outer = before

    # Statements ---------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt], names: dict[str, Value], returned: list[Value]) -> None:
        for place, statement in enumerate(statements):
            self.statements += 1
            if self.statements > _MOST_STATEMENTS:
                self.facts.escaped.update(self.facts.parameters)
                return
            if isinstance(statement, ast.If) and _leaves(statement.body) and not statement.orelse:
                rest = ast.If(test=statement.test, body=statement.body, orelse=list(statements[place + 1 :]))
                self.branch(rest, names, returned)
                return
            self.statement(statement, names, returned)

    def statement(self, node: ast.stmt, names: dict[str, Value], returned: list[Value]) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value, names)
                for target in node.targets:
                    self.assign(target, value, names)
            case ast.AnnAssign(value=ast.expr() as expression):
                self.assign(node.target, self.value(expression, names), names)
            case ast.AugAssign(target=ast.Name(id=name)):
                before, more = names.get(name, Value()), self.value(node.value, names)
                if self.loops and "bid" in before.sources and "while" in self.loops[-1]:
                    self.facts.persistent = True
                names[name] = _made_of([before, more])
            case ast.For():
                self.loop(node, names, returned)
            case ast.While():
                self.value(node.test, names)
                self.inside(f"while {node.lineno}", node.body, names, returned)
            case ast.If():
                self.branch(node, names, returned)
            case ast.Return(value=ast.expr() as expression):
                returned.append(self.value(expression, names))
            case ast.FunctionDef():
                inner = Function(node=node, names=dict(names), outer=self.outer)
                names[node.name] = Value(function=inner)
            case ast.With():
                self.block(node.body, names, returned)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.value(child, names)

    def assign(self, target: ast.expr, value: Value, names: dict[str, Value]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for place, one in enumerate(target.elts):
                self.assign(one, self.member(value, place), names)

    def member(self, value: Value, place: int) -> Value:
        """The member of a tuple."""
        if value.items is not None and not value.is_view and place < len(value.items):
            return value.items[place]
        return _made_of([value])

    def branch(self, node: ast.If, names: dict[str, Value], returned: list[Value]) -> None:
        self.value(node.test, names)
        before, products = len(self.facts.products), self.facts.products
        most: list[tuple[str, ...]] = []
        after: list[dict[str, Value]] = []
        for body in (node.body, node.orelse):
            inside = dict(names)
            self.block(body, inside, returned)
            if not (body and _leaves(body)):
                after.append(inside)
            most = max(most, products[before:], key=len)  # either is run, not both
            del products[before:]
        products += most
        for name in {name for one in after for name in one}:
            names[name] = _one_of([one[name] for one in after if name in one])

    def loop(self, node: ast.For, names: dict[str, Value], returned: list[Value]) -> None:
        called = node.iter
        while isinstance(called, ast.Call) and len(called.args) == 1 and self.cutile_name(called.func, names):
            called = called.args[0]  # static_iter(range(...))
        variable = Value(sources=frozenset({"loop"}))
        if isinstance(called, ast.Call) and getattr(called.func, "id", "") == "range":
            bounds = [self.value(one, names) for one in called.args]
            for bound in bounds:
                self.facts.bounding |= bound.of_sources("load")
            variable = _made_of([variable, *(bounds[:1] if len(bounds) > 1 else ())])
            if len(bounds) > 2 and "bid" in bounds[0].sources and bounds[2].number is None:
                self.facts.persistent = True
        else:
            variable = _made_of([variable, self.value(node.iter, names)])
        self.assign(node.target, variable, names)
        self.inside(f"for {node.lineno} {self.depth}", node.body, names, returned)

    def inside(
        self, name: str, body: Sequence[ast.stmt], names: dict[str, Value], returned: list[Value]
    ) -> None:
        self.loops.append(name)
        self.block(body, names, returned)
        self.loops.pop()

    # Expressions --------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, names: dict[str, Value]) -> Value:
        match node:
            case ast.Constant(value=bool() | int() | float() as written):
                return Value(number=written)
            case ast.Name():
                return names.get(node.id) or self.object(self.outer.get(node.id))
            case ast.Tuple() | ast.List():
                return self.sequence(node.elts, names)
            case ast.Attribute():
                return self.attribute(node, names)
            case ast.Call():
                return self.call(node, names)
            case ast.Subscript():
                return self.subscript(node, names)
            case ast.IfExp():
                self.value(node.test, names)
                return _one_of([self.value(node.body, names), self.value(node.orelse, names)])
            case ast.Lambda():
                return Value(function=Function(node=node, names=dict(names), outer=self.outer))
            case ast.BinOp(op=ast.MatMult()):
                self.facts.products.append(tuple(self.loops))
            case ast.BinOp(op=ast.Add()):
                left, right = self.value(node.left, names), self.value(node.right, names)
                if left.items is not None and right.items is not None:
                    return replace(_made_of([left, right]), items=(*left.items, *right.items))
                return _made_of([left, right])
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as written)):
                return Value(number=-written)
        parts = [self.value(one, names) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return _made_of(parts)

    def sequence(self, elements: Sequence[ast.expr], names: dict[str, Value]) -> Value:
        """A tuple or list; its members are not known where an unknown tuple is unpacked into it."""
        members: list[Value] = []
        known = True
        for one in elements:
            value = self.value(one.value if isinstance(one, ast.Starred) else one, names)
            known = known and (not isinstance(one, ast.Starred) or value.items is not None)
            members += (value.items or (value,)) if isinstance(one, ast.Starred) else (value,)
        return replace(_made_of(members), items=tuple(members) if known else None)

    def object(self, known: object) -> Value:
        """A global of the kernel's module, or a member of one."""
        if isinstance(known, bool | int | float):
            return Value(number=known, known=known)
        if isinstance(known, tuple | list) and all(isinstance(one, int | float) for one in known):
            return Value(known=known, items=tuple(Value(number=one) for one in known))
        if isinstance(known, types.FunctionType) and id(known) not in self.cutile:
            return Value(known=known, function=_read(known))
        return Value(known=known)

    def attribute(self, node: ast.Attribute, names: dict[str, Value]) -> Value:
        base = self.value(node.value, names)
        if base.known is not None:
            return self.object(getattr(base.known, node.attr, None))
        if node.attr in ("shape", "strides", "dtype", "ndim"):
            self.facts.shaped |= base.arrays - self.facts.constants.keys()
        return Value(sources=base.sources)

    def subscript(self, node: ast.Subscript, names: dict[str, Value]) -> Value:
        base, place = self.value(node.value, names), self.value(node.slice, names)
        if base.items is not None and isinstance(place.number, int) and not base.is_view:
            return self.member(base, int(place.number) % max(1, len(base.items)))
        if base.arrays and not base.is_view:
            self.facts.lists |= base.arrays
            self.facts.placing |= place.of_sources("load")
            return base
        return _made_of([base, place])

    # Calls --------------------------------------------------------------------------------------------------

    def cutile_name(self, function: ast.expr, names: dict[str, Value]) -> str | None:
        """The name of cuTile's function that an expression is; None for any other."""
        value = self.value(function, names)
        return self.cutile.get(id(value.known)) if value.known is not None else None

    def call(self, node: ast.Call, names: dict[str, Value]) -> Value:
        args = [self.value(one, names) for one in node.args]
        named = {one.arg: self.value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value, names)
            if base.known is None and base.function is None:
                return self.method(base, node.func.attr, args, named)
        called = self.value(node.func, names)
        name = self.cutile.get(id(called.known))
        if name is not None:
            return self.cutile_call(name, args, named)
        if called.function is not None and self.depth < _MOST_DEPTH:
            return self.helper(called.function, args, named)
        given = [*args, *named.values()]
        if getattr(called.known, "__name__", "") == "len" and args:
            self.facts.lists |= args[0].arrays
        elif getattr(called.known, "__module__", "") != "builtins":
            self.facts.escaped |= _arrays(given)
        return _made_of(given)

    def helper(self, function: Function, args: list[Value], named: Mapping[str, Value]) -> Value:
        taken = function.node.args
        parameters = [one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
        names: dict[str, Value] = {}
        positional = [*taken.posonlyargs, *taken.args]
        for one, default in zip(reversed(positional), reversed(taken.defaults), strict=False):
            names[one.arg] = self.value(default, {})
        for one, given in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
            if given is not None:
                names[one.arg] = self.value(given, {})
        names |= dict(zip(parameters, args, strict=False))
        names |= {name: value for name, value in named.items() if name in parameters}
        return self.body(function, names)

    def method(self, base: Value, name: str, args: list[Value], named: Mapping[str, Value]) -> Value:
        """A call of a method of an array, a tiled view or a tile."""
        given = [*args, *named.values()]
        first = args[0] if args else named.get("index")
        what = _ACCESSES.get(name.partition("_")[0])
        if base.arrays and what is not None:
            place, shape = (first, base) if base.is_view else (None, None)
            return self.access(base, what, place, shape, given)
        if base.arrays:
            if name == "tiled_view":
                shape = first if first is not None else named.get("tile_shape")
                return replace(base, is_view=True, items=_items(shape))
            if name in ("slice", "get_raw_memory", "permuted"):
                for one in given:
                    self.facts.bounding |= one.of_sources("load")
                return base
        self.facts.called.add(name)
        return _made_of([base, *given])

    def cutile_call(self, name: str, args: list[Value], named: Mapping[str, Value]) -> Value:
        """A call of one of cuTile's functions."""
        self.facts.called.add(name)
        given = [*args, *named.values()]
        first = args[0] if args else named.get("array")
        if name in ("bid", "num_blocks"):
            return Value(sources=frozenset({name}))
        if name in _PRODUCTS:
            self.facts.products.append(tuple(self.loops))
            self.facts.chained |= any({"product", "exp"} <= one.sources for one in args[:2])
            return Value(sources=_made_of(given).sources | {"product"})
        if name in ("exp", "exp2"):
            return Value(sources=_made_of(given).sources | {"exp"})
        if name in _REDUCTIONS:
            axis = named.get("axis", args[1] if len(args) > 1 else Value())
            self.facts.reduced.add(axis.number)
        if first is not None and first.arrays and first.constant is None:
            return self.array_call(name, first, args, named)
        return _made_of(given)

    def array_call(self, name: str, first: Value, args: list[Value], named: Mapping[str, Value]) -> Value:
        """A function of cuTile that is given an array."""
        place = args[1] if len(args) > 1 else named.get("index", named.get("indices"))
        what = _ACCESSES.get(name.partition("_")[0])
        if what is not None:
            shape = args[2] if len(args) > 2 else named.get("shape")
            return self.access(
                first, what, place, shape if what == "load" else None, [*args[1:], *named.values()]
            )
        if name == "num_tiles":
            self.facts.shaped |= first.arrays
            return Value(sources=first.sources)  # its shape is that of tiles that are loaded
        self.handed |= first.arrays
        return _made_of([*args, *named.values()])

    def access(
        self,
        array: Value,
        what: What,
        place: Value | None,
        shape: Value | None,
        given: Sequence[Value],
    ) -> Value:
        """Note an access, and what the sizes of its tile depend on."""
        index, extents = _items(place), _items(shape)
        for one in index or ():
            self.facts.placing |= one.of_sources("load")
        for at, extent in zip(index or (), extents or (), strict=False):
            if extent.constant is not None:
                moves = bool(at.sources & {"bid", "loop", "num_blocks"})
                (self.facts.moving if moves else self.facts.covering).add(extent.constant)
        rank = None if index is None else len(index)
        for name in sorted(array.arrays):
            self.facts.accesses.append(Access(parameter=name, what=what, rank=rank))
        loaded = {f"load {name}" for name in array.arrays if what == "load"}
        return Value(sources=_made_of(given).sources | loaded)


def _items(value: Value | None) -> tuple[Value, ...] | None:
    """The members of a tuple; a scalar stands for a tuple of one."""
    if value is None:
        return None
    return (value,) if value.items is None else value.items


def _made_of(parts: Iterable[Value]) -> Value:
    """A value that is computed from others."""
    return Value(sources=frozenset[str]().union(*(one.sources for one in parts)))


def _one_of(values: Sequence[Value]) -> Value:
    """What is known of a value that is one of several."""
    if all(one == values[0] for one in values[1:]):
        return values[0]
    lengths = {None if one.items is None else len(one.items) for one in values}
    items = None
    if len(lengths) == 1 and None not in lengths:
        items = tuple(map(_one_of, zip(*(one.items or () for one in values), strict=True)))
    return replace(
        _made_of(values),
        arrays=frozenset[str]().union(*(one.arrays for one in values)),
        is_view=any(one.is_view for one in values),
        items=items,
        function=next((one.function for one in values if one.function is not None), None),
    )


def _arrays(values: Iterable[Value]) -> set[str]:
    """The parameters among values and the members of tuples."""
    found: set[str] = set()
    for one in values:
        found |= one.arrays or _arrays(one.items or ())
    return found


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch ends the function or the turn of a loop."""
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _read(function: types.FunctionType) -> Function | None:
    try:
        tree = function_trees(function)[0]
    except (NoSourceError, RecursionError):
        return None
    if not isinstance(tree, ast.FunctionDef | ast.Lambda):
        return None
    return Function(node=tree, names={}, outer=_outer(function))
