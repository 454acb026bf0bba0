"""Hash the code of a table's figures: kernel, grid and arguments. Does not import cuda.tile.

Processes, Python releases and checkouts agree on the hash of equal code: it is made of syntax trees in a
normal form and of values, never of bytecode, addresses, file names or the order of a set.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import re
import secrets
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aot_tune.declare.fingerprint.source import (
    NoSourceError,
    annotations_of,
    class_trees,
    closure_of,
    counts_by_name,
    function_trees,
    public_name,
    slots_of,
)
from aot_tune.declare.fingerprint.syntax import Definition, Name, normal_form, outer_names
from aot_tune.nvidia import cutile

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

HEX_DIGITS = 16
"""Length of a hash, 64 bits: an accidental collision is improbable, and forging one gains nothing."""

MOST_PARTS = 2000
"""Most functions, classes and values of a kernel; a kernel that reads more reads a framework's internals."""

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_NO_REPR: object = object.__repr__
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_CODE = types.FunctionType | type
_NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip


def source_hash(tunable: Declaration) -> str:
    """Hash the kernels, ``grid_fn`` and ``args_fn``, and transitively all that they read.

    Helpers, globals, closures, annotations, defaults and decorators count; comments, docstrings, layout,
    positions and file names do not. Where a part cannot be hashed, the hash differs at every call, so that
    the code counts as changed; `unhashable` names the part.

    Returns:
        16 hexadecimal digits.
    """
    digest, obstacles = _fingerprint(tunable)
    return secrets.token_hex(HEX_DIGITS // 2) if obstacles else digest


def kernel_hash(kernel: Any) -> tuple[str, tuple[str, ...]]:
    """Hash a kernel without a declaration: its function and all that it reads, without the kernel's hints.

    Returns:
        16 hexadecimal digits, and the parts that cannot be hashed, with the reasons. With any such part the
        digits mean nothing.
    """
    hasher = _Hasher()
    hasher.add("kernel", cutile.python_function(kernel))
    return hasher.digest(), tuple(dict.fromkeys(hasher.obstacles))


def check_hash(tunable: Declaration) -> str:
    """Hash the check of results: ``make_args``, ``reference`` with its tolerances, written arguments.

    A part that cannot be hashed is left out. The hash decides whether a sweep may be resumed; a hash that
    differed at every call would forbid it.

    Returns:
        16 hexadecimal digits.
    """
    hasher = _Hasher()
    hasher.add("make_args", tunable.make_args)
    hasher.add("reference", tunable.reference)
    hasher.add("outputs", tunable.output_names)
    for name in ("inplace", "reset"):
        hasher.add(name, tuple(getattr(tunable, name)))
    return hasher.digest()


def facts_hash(tunable: Declaration) -> str:
    """Hash what a prediction reads of a declaration besides its kernels: ``work`` and ``tiles``.

    Returns:
        16 hexadecimal digits.
    """
    hasher = _Hasher()
    hasher.add("work", tunable.work)
    hasher.add("tiles", tunable.tiles)
    return hasher.digest()


def unhashable(tunable: Declaration) -> tuple[str, ...]:
    """Return the parts of a kernel's code that cannot be hashed, with reasons; empty where it is stable."""
    return _fingerprint(tunable)[1]


def _fingerprint(tunable: Declaration) -> tuple[str, tuple[str, ...]]:
    hasher = _Hasher()
    several = isinstance(tunable.kernel, Mapping)
    for name, kernel in tunable.kernel.items() if several else ((None, tunable.kernel),):
        of_several = "" if name is None else f" {name}"
        hasher.add(f"kernel{of_several}", cutile.python_function(kernel))
        hasher.add(f"hints{of_several}", cutile.default_hints(kernel))
    hasher.add("grid_fn", tunable.grid_fn)
    hasher.add("args_fn", tunable.args_fn)
    return hasher.digest(), tuple(dict.fromkeys(hasher.obstacles))


class _Hasher:
    """Feeds values and their code into a hash."""

    def __init__(self) -> None:
        self.obstacles: list[str] = []
        self._hash = hashlib.sha256()
        self._place = ""
        self._parts = 0
        # Functions and classes are described once, and kept alive so that no address is used again.
        self._described: dict[int, tuple[int, object]] = {}
        # Containers and objects are described at each place: equal constants may be one object or several.
        self._open: list[int] = []

    def digest(self) -> str:
        return self._hash.hexdigest()[:HEX_DIGITS]

    def add(self, place: str, value: object) -> None:
        """Hash a value under a name that does not change when files are renamed."""
        outer, self._place = self._place, place
        self._word("value", place)
        try:
            self._value(value)
        except RecursionError:
            self._obstacle("it is nested too deep")
        self._place = outer

    def _word(self, *words: str) -> None:
        self._hash.update(_bytes_of(words))

    def _obstacle(self, reason: str) -> None:
        self.obstacles.append(f"{self._place}: {reason}")

    # Values ------------------------------------------------------------------------------

    def _value(self, value: Any) -> None:
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            self._word(type(value).__name__, repr(value))
        elif id(value) in self._described:
            self._word("again", str(self._described[id(value)][0]))
        elif id(value) in self._open:
            self._word("cycle", str(len(self._open) - self._open.index(id(value))))
        elif self._parts >= MOST_PARTS:
            self._obstacle(f"it reads more than {MOST_PARTS} functions and values")
        else:
            self._parts += 1
            # Any is a class since Python 3.11, and counts as one on 3.10.
            if value is typing.Any or (isinstance(value, _CODE) and typing.get_origin(value) is None):
                self._described[id(value)] = (len(self._described), value)
            self._open.append(id(value))
            self._describe(value)
            self._open.pop()

    def _describe(self, value: Any) -> None:
        """Hash a value by the first kind that fits: code, a foreign name, a container, an object."""
        if isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
            self._function(value)
        elif typing.get_origin(value) is not None:  # before classes: list[int] passes for one on Python 3.10
            self._alias(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif getattr(value, "__module__", "") == "typing":
            self._word("named", "typing", getattr(value, "_name", None) or str(value))  # Any, before 3.11
        elif isinstance(value, _NATIVE):
            self._word("native", *public_name(value))
        elif isinstance(value, types.MethodType):
            self._parts_of("method", value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._parts_of("partial", value.func, value.args, value.keywords)
        elif isinstance(value, enum.Enum):
            self._parts_of("member", value.name, type(value))
        elif isinstance(value, tuple | list):
            self._parts_of(type(value).__name__, *value)
        elif isinstance(value, Mapping):
            self._parts_of("mapping", *itertools.chain.from_iterable(value.items()))
        elif isinstance(value, set | frozenset):
            self._set(value)
        elif cutile.is_kernel_like(value):
            self._parts_of("kernel", cutile.python_function(value))
        else:
            self._object(value)

    def _parts_of(self, kind: str, *parts: object) -> None:
        self._word(kind, str(len(parts)))
        for part in parts:
            self._value(part)

    def _set(self, values: Iterable[object]) -> None:
        """Hash members separately and sort the hashes, because iteration depends on PYTHONHASHSEED."""
        members = []
        for value in values:
            of_member = _Hasher()
            of_member.add(self._place, value)
            self.obstacles += of_member.obstacles
            members.append(of_member.digest())
        self._word("set", *sorted(members))

    def _alias(self, value: Any) -> None:
        """Hash ``int | None`` or ``ct.Constant[int]`` by its parts: releases print them differently."""
        origin = typing.get_origin(value)
        if origin in (typing.Union, types.UnionType):
            self._word("alias", "Union")
        elif isinstance(origin, type) and not counts_by_name(origin.__module__):
            self._value(origin)
        else:  # Annotated is a class up to Python 3.12 and none since
            self._word(
                "alias",
                getattr(origin, "__qualname__", None) or getattr(origin, "_name", None) or str(origin),
            )
        self._parts_of("of", *typing.get_args(value))

    def _module(self, module: types.ModuleType) -> None:
        if counts_by_name(module.__name__):
            self._word("module", module.__name__)
        else:
            self._obstacle(f"it passes the module {module.__name__} on; read names of it instead")

    def _object(self, value: Any) -> None:
        """Hash an object of the author's class by class and state, other objects by their printed form."""
        cls = type(value)
        if not counts_by_name(cls.__module__):
            state = {name: getattr(value, name, None) for base in cls.__mro__ for name in slots_of(base)}
            self._parts_of("object", cls, {**state, **getattr(value, "__dict__", {})})
            return
        prints = cls.__repr__ is not _NO_REPR and not hasattr(value, "shape")  # arrays leave values out
        text = repr(value) if prints else ""
        if not text or _ADDRESS.search(text):
            self._obstacle(f"a {cls.__module__}.{cls.__qualname__} has no value that can be hashed")
        else:
            self._word("printed", *public_name(cls), text)

    # Code ------------------------------------------------------------------------------

    def _function(self, function: Any) -> None:
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType):
            self._value(function)
            return
        if counts_by_name(function.__module__):
            self._word("named", *public_name(function))
            return
        try:
            trees = function_trees(function)
        except NoSourceError as error:
            self._obstacle(f"{function.__qualname__} has no source: {error}")
            return
        self._parts_of("function", function.__defaults__, function.__kwdefaults__)
        scope = {**function.__globals__, **closure_of(function)}
        if self._trees(trees, scope):
            # An annotation may name a factory's local, whose scope is gone; its value may be here.
            for name, annotation in annotations_of(function).items():
                self.add(f"{function.__qualname__}({name})", annotation)

    def _class(self, cls: type) -> None:
        if counts_by_name(cls.__module__):
            self._word("named", *public_name(cls))
            return
        try:
            trees = class_trees(cls)
        except NoSourceError as error:
            self._obstacle(f"{cls.__qualname__} has no source: {error}")
            return
        self._word("class")
        self._trees(trees, vars(sys.modules[cls.__module__]))

    def _trees(self, trees: Iterable[Definition], scope: Mapping[str, Any]) -> bool:
        """Hash trees and the values of their outer names; return whether a name has no value."""
        unknown = False
        for tree in trees:
            self._hash.update(_bytes_of_tree(tree))
            names, imports = outer_names(tree)
            for name in names:
                unknown |= not self._name(name, scope)
            for statement in imports:
                self._import(statement, scope)
        return unknown

    def _name(self, name: Name, scope: Mapping[str, Any]) -> bool:
        if name[0] not in scope:
            self._word("builtin" if hasattr(builtins, name[0]) else "unknown", name[0])
            return hasattr(builtins, name[0])
        value = scope[name[0]]
        followed = 1
        # The tree names the attribute of a foreign module; of the author's own modules the value counts.
        while isinstance(value, types.ModuleType) and not counts_by_name(value.__name__):
            if followed == len(name) or not hasattr(value, name[followed]):
                break
            value = getattr(value, name[followed])
            followed += 1
        self.add(".".join(name[:followed]), value)
        return True

    def _import(self, statement: ast.Import | ast.ImportFrom, scope: Mapping[str, Any]) -> None:
        """Hash the values of an import inside a function, which binds local names."""
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                path, attribute = alias.name, None
            else:
                path, attribute = "." * statement.level + (statement.module or ""), alias.name
            try:
                full = importlib.util.resolve_name(path, scope.get("__package__") or "")
                if counts_by_name(full):
                    continue  # the tree holds the imported name
                value: object = importlib.import_module(full)
                if attribute is not None:
                    value = getattr(value, attribute)
            except (ImportError, AttributeError) as error:
                self._obstacle(f"it imports {path}: {error}")
            else:
                self.add(alias.name, value)


def _bytes_of(words: Iterable[str]) -> bytes:
    """Return the bytes of words for a hash: each after its length, so that no two lists have equal bytes."""
    encoded = (word.encode("utf-8", "surrogatepass") for word in words)
    return b"".join(b"%d:%b" % (len(data), data) for data in encoded)


@functools.lru_cache(maxsize=1024)
def _bytes_of_tree(tree: Definition) -> bytes:
    """Return the bytes of a tree's normal form, which kernels of one module share."""
    return _bytes_of(normal_form(tree))
