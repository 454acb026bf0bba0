"""Derive the origin of a kernel's cubins, for a quick comparison in serving processes. Compiles nothing.

The source hash covers everything, but parses the sources, which takes 8 to 16 ms: more than a whole first
launch. So an archive names the files that contain the kernel's code, and the global values that it reads.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

from aot_tune.cubins.origin import KernelCode, Origin, file_digest, printed
from aot_tune.declare.fingerprint.source import NoSourceError, closure_of, counts_by_name, function_trees
from aot_tune.declare.fingerprint.syntax import outer_names
from aot_tune.nvidia import cutile


def origin_of(code: KernelCode, tileiras: str) -> Origin:
    """Return the origin of cubins that this process would compile for a kernel."""
    walk = _Walk()
    for kernel in (code.kernel, *code.others):
        walk.function(cutile.python_function(kernel))
    digests = {module: file_digest(module) for module in walk.modules}
    return Origin(
        source_hash=code.source_hash(),
        files={module: digest for module, digest in digests.items() if digest is not None},
        values=walk.values,
        complete=walk.complete and None not in digests.values(),
        cuda_tile=cutile.version(),
        tileiras=tileiras,
    )


class _Walk:
    """Follows the outer names of functions, and collects the modules and values that they lead to."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.values: dict[str, str] = {}
        self.complete = True
        self._seen: set[int] = set()

    def function(self, function: Any) -> None:
        """Add a function's module and everything that its code names."""
        function = inspect.unwrap(function)
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if not isinstance(function, types.FunctionType):
            self.complete = False
            return
        self.modules.add(function.__module__)
        closed = closure_of(function)
        try:
            trees = function_trees(function)
        except NoSourceError:
            self.complete = False
            return
        if closed or not all(isinstance(tree, ast.ClassDef) or _are_literals(tree.args) for tree in trees):
            self.complete = False  # these values are not globals of a module
        for tree in trees:
            names, imports = outer_names(tree)
            self.complete &= not imports
            for name in names:
                if name[0] not in closed and name[0] in function.__globals__:
                    self._value(function.__module__, name[0], function.__globals__[name[0]], name[1:])

    def _value(self, module: str, name: str, value: Any, attributes: tuple[str, ...]) -> None:
        if isinstance(value, types.ModuleType):
            if counts_by_name(value.__name__):
                return
            if not attributes or not hasattr(value, attributes[0]):
                self.complete = False
                return
            self._value(value.__name__, attributes[0], getattr(value, attributes[0]), attributes[1:])
        elif cutile.is_kernel_like(value):
            self.function(cutile.python_function(value))
        elif hasattr(value, "__qualname__") and counts_by_name(getattr(value, "__module__", None)):
            return  # a framework's function or class; the file that names it is hashed
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif (text := printed(value)) is not None:
            self.values[f"{module}:{name}"] = text
        else:
            self.complete = False


def _are_literals(arguments: ast.arguments) -> bool:
    """Whether the defaults of a function are written out, so that its file tells them."""
    defaults = (*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None))
    try:
        return all((ast.literal_eval(default), True)[1] for default in defaults)
    except ValueError:  # a name or a call
        return False
