"""Walk through a kernel's source, and the helpers that it calls, in the order of execution. Runs nothing.

Each loop is entered once, and each branch. Where constants alone decide a branch, the one that is taken when
they are False counts for the arrays' sizes: the other one may lay out the arrays in another way.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from aot_tune.declare.fingerprint.source import NoSourceError, closure_of, function_trees
from aot_tune.declare.kernel_source.arithmetic import (
    compared,
    computed,
    rounded,
    rounds_up,
    single,
    tile_index,
)
from aot_tune.declare.kernel_source.facts import Access, Bound, Facts
from aot_tune.declare.kernel_source.values import Function, Value, made_of, number
from aot_tune.nvidia import cutile

_LOADS = ("load", "gather", "load_advanced_indexing")
_STORES = ("store", "scatter", "store_advanced_indexing")
_PRODUCTS = ("mma", "mma_scaled", "matmul")
_KEEPING = (
    "astype", "reshape", "expand_dims", "broadcast_to", "item", "astile", "assume_divisible_by",
    "ensure_constant", "static_eval", "static_iter", "permute", "transpose", "int", "min", "minimum",
)  # fmt: skip
"""Functions whose result lies where their first argument does."""

_MOST_DEPTH = 12
"""The deepest nesting of helpers that is followed."""

_MOST_STATEMENTS = 20_000
"""Statements that are looked at, at most, those of helpers once a call."""


def facts_of(kernel: Any) -> Facts:
    """What a kernel's source does; nothing where it cannot be read."""
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
        self.untaken = 0
        self.depth = 0
        self.statements = 0
        self.outer: Mapping[str, Any] = {}

    def call_of_kernel(self, tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, outer: Any) -> None:
        """Walk through the kernel with its parameters as they are."""
        assert isinstance(tree, ast.FunctionDef | ast.Lambda)
        names = {
            name: Value(key=name, parameter=name, sources=frozenset({f"parameter {name}"}))
            for name in self.facts.parameters
        }
        self.body(Function(node=tree, names={}, outer=outer), names)

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
            return returned[-1] if returned else Value(key="None")
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
                before, more = names.get(name, Value(key=name)), self.value(node.value, names)
                if self.loops and before.of_sources("bid") and not more.lanes:
                    self.facts.persistent = self.facts.persistent or "loop while" in self.loops[-1]
                names[name] = self.sum(before, more, type(node.op).__name__)
            case ast.For():
                self.loop(node, names, returned)
            case ast.While():
                self.integer(self.value(node.test, names))
                self.inside(f"loop while {node.lineno}", node.body, names, returned)
            case ast.If():
                self.branch(node, names, returned)
            case ast.Return(value=ast.expr() as expression):
                returned.append(self.value(expression, names))
            case ast.FunctionDef():
                inner = Function(node=node, names=dict(names), outer=self.outer)
                names[node.name] = Value(key=f"function {node.name} {node.lineno}", function=inner)
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
        """The member of a tuple, or the size of an array along an axis where the value is its shape."""
        if value.items is not None and not value.is_view:
            return value.items[place] if place < len(value.items) else made_of(f"item {place}", [value])
        if value.dimension is not None and value.dimension[1] < 0:
            return self.size_of(value.dimension[0], place)
        return made_of(f"item {place}", [value])

    def size_of(self, array: str, axis: int) -> Value:
        return Value(key=f"{array}.shape[{axis}]", dimension=(array, axis))

    def branch(self, node: ast.If, names: dict[str, Value], returned: list[Value]) -> None:
        decided = self.flag(node.test, names)
        for body, taken in ((node.body, decided is not False), (node.orelse, decided is not True)):
            if not taken:
                self.untaken += 1
                self.block(body, dict(names), [])  # what it leaves in names is not there after it
                self.untaken -= 1
        products = self.facts.products
        before, most = len(products), list[tuple[tuple[str, ...], bool]]()
        for body, taken in ((node.body, decided is not False), (node.orelse, decided is not True)):
            if taken:
                self.block(body, names, returned)
                most = max(most, products[before:], key=len)  # either is run, not both
                del products[before:]
        products += most

    def flag(self, test: ast.expr, names: dict[str, Value]) -> bool | None:
        """What a test is where the constants that decide it are False or small; None where others decide."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                inner = self.flag(test.operand, names)
                return None if inner is None else not inner
            case ast.BoolOp():
                inner_flags = [self.flag(one, names) for one in test.values]
                end = isinstance(test.op, ast.Or)
                if end in inner_flags:
                    return end
                return None if None in inner_flags else not end
        value = self.value(test, names)
        if value.number is not None:
            return bool(value.number)
        deciding = value.of_sources("parameter")
        if not deciding or not deciding <= self.facts.constants.keys() or len(value.sources) > len(deciding):
            return None
        for one in deciding:
            if self.facts.constants[one] == "int":
                self.facts.decides.setdefault(one, 0 if value.parameter == one else 1)
        return False

    def loop(self, node: ast.For, names: dict[str, Value], returned: list[Value]) -> None:
        self.facts.loops += 1
        name = f"loop {len(self.loops)} {node.lineno} {getattr(node.target, 'id', '')}"
        variable = Value(key=name, sources=frozenset({name}))
        called = node.iter
        while isinstance(called, ast.Call) and len(called.args) == 1 and self.cutile_name(called.func, names):
            called = called.args[0]  # static_iter(range(...))
        if isinstance(called, ast.Call) and getattr(called.func, "id", "") == "range":
            bounds = [self.integer(self.value(one, names)) for one in called.args]
            start = bounds[0] if len(bounds) > 1 else number(0)
            stop = bounds[1] if len(bounds) > 1 else (bounds or [number(0)])[0]
            step = bounds[2] if len(bounds) > 2 else None
            sources = variable.sources | start.sources | stop.sources
            variable = replace(variable, sources=sources, step=step)
            if step is not None and start.of_sources("bid") and step.number is None:
                self.facts.persistent = True
            self.facts.bounds.append(Bound(index=variable, stop=stop, counts_tiles=step is None))
        else:
            variable = replace(variable, sources=variable.sources | self.value(node.iter, names).sources)
        self.assign(node.target, variable, names)
        self.inside(name, node.body, names, returned)

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
                return number(written)
            case ast.Name():
                named = names.get(node.id) or self.outside(node.id)
                self.facts.used |= {named.parameter} if named.parameter is not None else set()
                return named
            case ast.Tuple() | ast.List():
                return self.sequence(node.elts, names)
            case ast.Attribute():
                return self.attribute(node, names)
            case ast.Call():
                return self.call(node, names)
            case ast.BinOp():
                return self.operation(node, names)
            case ast.Subscript():
                return self.subscript(node, names)
            case ast.Compare():
                return self.comparison(node, names)
            case ast.IfExp():
                decided = self.flag(node.test, names)
                both = self.value(node.body, names), self.value(node.orelse, names)
                return both[0] if decided else both[1]
            case ast.Lambda():
                inner = Function(node=node, names=dict(names), outer=self.outer)
                return Value(key=f"lambda {node.lineno} {node.col_offset}", function=inner)
            case ast.UnaryOp(op=ast.USub()):
                inside = self.value(node.operand, names)
                return number(-inside.number) if inside.number is not None else made_of("-", [inside])
            case ast.Starred() | ast.Slice():
                return made_of("slice", self.parts(node, names))
        return made_of(type(node).__name__, self.parts(node, names))

    def parts(self, node: ast.expr, names: dict[str, Value]) -> list[Value]:
        """The values of the expressions that an expression is made of."""
        children = ast.iter_child_nodes(node)
        return [self.value(child, names) for child in children if isinstance(child, ast.expr)]

    def sequence(self, elements: Sequence[ast.expr], names: dict[str, Value]) -> Value:
        """A tuple or list; its members are not known where an unknown tuple is unpacked into it."""
        members: list[Value] = []
        known = True
        for one in elements:
            value = self.value(one.value if isinstance(one, ast.Starred) else one, names)
            known = known and (not isinstance(one, ast.Starred) or value.items is not None)
            members += (value.items or ()) if isinstance(one, ast.Starred) else (value,)
        return made_of("tuple", members, items=tuple(members) if known else None)

    def outside(self, name: str) -> Value:
        """A name of the function's globals or closure."""
        return self.object(self.outer.get(name), name)

    def object(self, known: object, name: str) -> Value:
        if isinstance(known, bool | int | float):
            return replace(number(known), known=known)
        if id(known) in self.cutile and self.cutile[id(known)] in _DTYPES:
            self.facts.dtypes.add(self.cutile[id(known)])
        if isinstance(known, tuple | list) and all(isinstance(one, int | float) for one in known):
            return Value(key=name, known=known, items=tuple(map(number, known)))
        if isinstance(known, types.FunctionType) and id(known) not in self.cutile:
            return Value(key=name, known=known, function=_read(known))
        return Value(key=name, known=known)

    def attribute(self, node: ast.Attribute, names: dict[str, Value]) -> Value:
        base = self.value(node.value, names)
        if base.known is not None:
            return self.object(getattr(base.known, node.attr, None), f"{base.key}.{node.attr}")
        if base.is_array and node.attr in ("shape", "strides"):
            axis = (base.parameter or "", -1) if node.attr == "shape" else None
            return Value(key=f"{base.key}.{node.attr}", dimension=axis)
        if base.is_array and node.attr in ("dtype", "ndim"):
            return Value(key=f"{base.key}.{node.attr}")
        if node.attr == "shape":
            return made_of("shape", [base], dimension=("", -1))
        return made_of(f".{node.attr}", [base])

    def operation(self, node: ast.BinOp, names: dict[str, Value]) -> Value:
        left, right = self.value(node.left, names), self.value(node.right, names)
        if isinstance(node.op, ast.MatMult):
            self.facts.products.append((tuple(self.loops), not self.untaken))
        if left.items is not None and right.items is not None and isinstance(node.op, ast.Add):
            both = (*left.items, *right.items)
            return made_of("tuple", both, items=both)
        if left.number is not None and right.number is not None:
            return computed(node.op, left, right)
        if isinstance(node.op, ast.FloorDiv) and left.step is not None and left.step.key == right.key:
            index = made_of("//", [left, right])
            of_left = [one.stop for one in self.facts.bounds if one.index.key == left.key]
            self.facts.bounds += [Bound(index=replace(index, step=right), stop=stop) for stop in of_left]
            return index
        if isinstance(node.op, ast.FloorDiv) and rounds_up(node, right):
            return self.counted("cdiv", rounded(left), right)
        if isinstance(node.op, ast.Mult):
            lanes = left.lanes or right.lanes
            return made_of("*", [left, right], factors=(left, right), lanes=lanes)
        if isinstance(node.op, ast.Add | ast.Sub):
            return self.sum(left, right, type(node.op).__name__)
        result = made_of(type(node.op).__name__, [left, right], lanes=left.lanes or right.lanes)
        if isinstance(node.op, ast.FloorDiv | ast.Mod | ast.BitAnd | ast.RShift):
            self.integer_operands(left, right)
        if isinstance(node.op, ast.FloorDiv) and right.parameter is not None:
            self.facts.divided[result.key] = left.key, right.parameter
        return result

    def counted(self, name: str, size: Value, tile: Value) -> Value:
        """The number of tiles of a size."""
        self.facts.counts.append((size, tile))
        return made_of(name, [size, tile], tiles_of=(size, tile))

    def integer_operands(self, left: Value, right: Value) -> None:
        if not left.lanes and not left.of_sources("load"):
            self.integer(left)
            self.integer(right)

    def sum(self, left: Value, right: Value, what: str) -> Value:
        """A sum; of a start and consecutive offsets it is a tile of such."""
        if not (left.lanes or right.lanes) or (left.lanes and right.lanes):
            return made_of(what, [left, right], factors=(left, right) if what == "Add" else None)
        offsets, start = (left, right) if left.lanes else (right, left)
        assert offsets.lanes is not None
        whole = offsets.at is not None and offsets.at.number == 0
        at = tile_index(start, offsets.lanes) if whole and what == "Add" else None
        return made_of(what, [left, right], lanes=offsets.lanes, at=at)

    def subscript(self, node: ast.Subscript, names: dict[str, Value]) -> Value:
        base, place = self.value(node.value, names), self.value(node.slice, names)
        if base.dimension is not None and base.dimension[1] < 0 and isinstance(place.number, int):
            return self.size_of(base.dimension[0], place.number)
        if base.items is not None and isinstance(place.number, int) and not base.is_view:
            return self.member(base, int(place.number) % max(1, len(base.items)))
        if base.is_array:
            self.facts.lists.add(base.parameter or "")
            self.integer(place)
            return replace(base, key=f"{base.key}[{place.key}]")
        if isinstance(node.slice, ast.Tuple) or base.lanes:  # offsets[:, None]
            return base
        return made_of("[]", [base, place])

    def comparison(self, node: ast.Compare, names: dict[str, Value]) -> Value:
        parts = [self.value(one, names) for one in (node.left, *node.comparators)]
        if len(parts) == 2 and parts[0].number is not None and parts[1].number is not None:
            return compared(node.ops[0], parts[0].number, parts[1].number)
        for one, other in itertools.pairwise(parts):
            if one.lanes is not None and one.at is not None and isinstance(node.ops[0], ast.Lt):
                self.facts.bounds.append(Bound(index=one, stop=self.integer(other)))
        return made_of("compare", parts, lanes=next((one.lanes for one in parts if one.lanes), None))

    def integer(self, value: Value) -> Value:
        """Note that the parameters which a value comes from are integers."""
        self.facts.integers |= value.of_sources("parameter")
        self.facts.integers |= {f"load {name}" for name in value.of_sources("load")}
        return value

    # Calls --------------------------------------------------------------------------------------------------

    def cutile_name(self, function: ast.expr, names: dict[str, Value]) -> str | None:
        """The name of cuTile's function that an expression is; None for any other."""
        value = self.value(function, names)
        return self.cutile.get(id(value.known)) if value.known is not None else None

    def call(self, node: ast.Call, names: dict[str, Value]) -> Value:
        function = node.func
        args = [self.value(one, names) for one in node.args]
        named = {one.arg: self.value(one.value, names) for one in node.keywords if one.arg is not None}
        called = self.value(function, names) if not isinstance(function, ast.Attribute) else None
        if isinstance(function, ast.Attribute):
            base = self.value(function.value, names)
            if base.known is None and base.function is None:
                return self.method(base, function.attr, args, named)
            called = self.value(function, names)
        assert called is not None
        name = self.cutile.get(id(called.known))
        if name is not None:
            return self.cutile_call(name, args, named)
        if called.function is not None and self.depth < _MOST_DEPTH:
            return self.helper(called.function, args, named)
        plain = getattr(called.known, "__name__", "")
        if plain == "len" and args and args[0].is_array:
            self.facts.lists.add(args[0].parameter or "")
        elif getattr(called.known, "__module__", "") != "builtins":
            self.facts.escaped |= _arrays((*args, *named.values()))
        if plain == "max" and len(args) == 2 and args[1].number is not None:
            return args[0]
        return self.result(plain, [*args, *named.values()], args)

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
        if base.is_view and base.parameter is not None:
            index = self.items(args[0] if args else named.get("index"))
            if name == "num_tiles":
                axis = _axis(args[0] if args else named.get("axis"))
                return self.count_of_tiles(base.parameter, axis, base.items)
            return self.view_access(base, name, index, [*args, *named.values()])
        if base.is_array and base.parameter is not None:
            if name == "tiled_view":
                shape = self.items(args[0] if args else named.get("tile_shape"))
                return replace(base, is_view=True, items=shape, key=f"view {base.key}")
            if name == "slice":
                self.integer(made_of("slice", [*args[1:], *named.values()]))
                along = (args[0] if args else named.get("axis", number(0))).number
                loaded = frozenset(
                    f"load {one}" for part in (*args, *named.values()) for one in part.of_sources("load")
                )
                sliced = base.sliced | ({int(along)} if along is not None else set())
                return replace(base, sliced=sliced, sources=base.sources | loaded)
            if name == "get_raw_memory":
                return replace(base, key=f"raw {base.key}")
            for word, what in (("load", "load"), ("store", "store"), ("atomic", "add")):
                if name.startswith(word):
                    self.access(base, what, None, None, args[-1] if args else None)
        self.facts.called.add(name)
        return self.result(name, [base, *args, *named.values()], [base, *args])

    def view_access(self, view: Value, name: str, index: Any, parts: Sequence[Value]) -> Value:
        what = "load" if name == "load" else "add" if name.startswith("atomic") else "store"
        self.access(view, what, index, view.items, parts[1] if len(parts) > 1 else None)
        return made_of(name, parts) if what != "load" else self.loaded(view, parts)

    def cutile_call(self, name: str, args: list[Value], named: Mapping[str, Value]) -> Value:
        """A call of one of cuTile's functions."""
        self.facts.called.add(name)
        given = [*args, *named.values()]
        first = args[0] if args else named.get("array")
        if name == "bid":
            axis = _axis(args[0] if args else named.get("axis"))
            return Value(key=f"bid {axis}", sources=frozenset({f"bid {axis}"}))
        if name == "num_blocks":
            return Value(key="num_blocks", sources=frozenset({"num_blocks all"}))
        if name == "arange":
            lanes = first if first is not None else named.get("size")
            return made_of("arange", given, lanes=lanes, at=number(0))
        if name in ("cdiv", "floordiv", "mod"):
            self.integer_operands(args[0], args[-1])
            return self.counted(name, args[0], args[1]) if name == "cdiv" else made_of(name, given)
        if name in ("add", "sub", "mul"):
            op = {"add": ast.Add(), "sub": ast.Sub(), "mul": ast.Mult()}[name]
            return self.arithmetic(op, args)
        if name in _PRODUCTS:
            self.facts.products.append((tuple(self.loops), not self.untaken))
        if first is not None and first.is_array:
            if name == "num_tiles":
                shape = self.items(args[2] if len(args) > 2 else named.get("shape"))
                axis = _axis(args[1] if len(args) > 1 else named.get("axis"))
                return self.count_of_tiles(first.parameter or "", axis, shape)
            return self.array_call(name, first, args, named)
        if name in ("less", "greater_equal") and args[0].lanes is not None and args[0].at is not None:
            self.facts.bounds.append(Bound(index=args[0], stop=self.integer(args[1])))
        return self.result(name, given, args)

    def arithmetic(self, op: ast.operator, args: Sequence[Value]) -> Value:
        left, right = args[0], args[1]
        if isinstance(op, ast.Mult):
            return made_of("*", args, factors=(left, right), lanes=left.lanes or right.lanes)
        return self.sum(left, right, type(op).__name__)

    def array_call(self, name: str, first: Value, args: list[Value], named: Mapping[str, Value]) -> Value:
        """A function of cuTile that is given an array."""
        given = [*args, *named.values()]
        place = args[1] if len(args) > 1 else named.get("index", named.get("indices"))
        if name in _LOADS:
            shape = args[2] if len(args) > 2 else named.get("shape")
            index, extents = self.ordered(self.items(place), self.items(shape), named.get("order"))
            self.access(first, "load", index, extents if shape is not None else single(index), None)
            return self.loaded(first, [one for one in (place, shape) if one is not None])
        if name in _STORES or name.startswith("atomic_"):
            tile = args[2] if len(args) > 2 else named.get("tile", named.get("value", named.get("update")))
            what = "add" if name.startswith("atomic_") else "store"
            index, _ = self.ordered(self.items(place), None, named.get("order"))
            self.access(first, what, index, None if name == "store" else single(index), tile)
            return made_of(name, given)
        self.facts.escaped.add(first.parameter or "")
        return self.result(name, given, args)

    def ordered(self, index: Any, extents: Any, order: Value | None) -> tuple[Any, Any]:
        """Index and tile along the array's own axes."""
        items = order.items if order is not None and order.items else ()
        places = [int(one.number) for one in items if one.number is not None]
        if index is None or sorted(places) != list(range(len(index))):
            return index, extents
        back = [places.index(axis) for axis in range(len(places))]
        laid = tuple(index[one] for one in back)
        return laid, tuple(extents[one] for one in back) if extents and len(extents) == len(back) else None

    def items(self, value: Value | None) -> tuple[Value, ...] | None:
        """The members of a tuple; a scalar stands for a tuple of one."""
        if value is None:
            return None
        if value.items is not None:
            return value.items
        return None if value.dimension is not None and value.dimension[1] < 0 else (value,)

    def count_of_tiles(self, array: str, axis: int, shape: tuple[Value, ...] | None) -> Value:
        extent = shape[axis] if shape is not None and axis < len(shape) else None
        key = f"num_tiles({array}, {axis}, {extent.key if extent else ''})"
        return Value(key=key, tiles_of=(self.size_of(array, axis), extent))

    def access(
        self,
        array: Value,
        what: str,
        index: tuple[Value, ...] | None,
        extents: tuple[Value | None, ...] | None,
        stored: Value | None,
    ) -> None:
        for one in index or ():
            if not one.lanes or one.at is not None:
                self.integer(one.at if one.lanes and one.at is not None else one)
            self.facts.integers |= {f"load {name}" for name in one.of_sources("load")}
        if array.parameter is None:
            return
        if array.sources and array.of_sources("load"):
            self.facts.integers |= {f"load {name}" for name in array.of_sources("load")}
        self.facts.accesses.append(
            Access(
                parameter=array.parameter,
                what=what,
                index=index,
                extents=extents,
                dtype=stored.dtype if stored is not None else None,
                sliced=array.sliced,
                tells_sizes=not self.untaken,
            )
        )

    def loaded(self, array: Value, parts: Iterable[Value]) -> Value:
        made = made_of(f"load {array.parameter}", parts)
        return replace(made, sources=frozenset({f"load {array.parameter}"}) | made.sources)

    def result(self, name: str, given: Sequence[Value], args: Sequence[Value]) -> Value:
        """What a function makes of its arguments."""
        if name == "astype" and args:
            dtype = self.cutile.get(id(args[-1].known)) if len(args) > 1 else None
            dtype = dtype or next((self.cutile.get(id(one.known)) for one in given[1:]), None)
            return replace(args[0], dtype=dtype if dtype in _DTYPES else None)
        if name in _KEEPING and args:
            kept = args[0]
            return kept if kept.number is None else replace(kept, key=kept.key)
        if name == "full" and len(args) > 1 and args[1].number is None:
            return args[1]  # where an index is filled in, it is that index
        if name in ("full", "zeros", "ones"):
            named = (self.cutile.get(id(one.known)) for one in given if one.known is not None)
            return made_of(name, given, dtype=next((one for one in named if one in _DTYPES), None))
        return made_of(name, given)


def _arrays(values: Iterable[Value]) -> set[str]:
    """The parameters among values and the members of tuples."""
    found: set[str] = set()
    for one in values:
        found |= {one.parameter} if one.parameter is not None else _arrays(one.items or ())
    return found


def _axis(value: Value | None) -> int:
    """The axis that a number in the source names; 0 where there is none."""
    return int(value.number) if value is not None and value.number is not None else 0


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


_DTYPES = (
    "bfloat16", "bool_", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "tfloat32",
    "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "float8_e5m3fnu", "float4_e2m1fn",
)  # fmt: skip
"""The names of cuTile's dtypes."""
