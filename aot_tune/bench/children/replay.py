"""Call one operation of TileGym, at the commands of the section `replay`.

``python -m aot_tune.bench.children.replay OPERATION`` imports the library, then reads commands from
stdin, each a line of JSON that is answered by one:

======================================  ====================================================================
``{"do": "prepare"}``                   makes the context and all tensors
``{"do": "first", "shape": 0}``         calls it: milliseconds until the GPU is done, and cuTile's searches
``{"do": "later", "shape": 0}``         microseconds of a call on the host
``{"do": "gpu", "shape": 0}``           microseconds of a call on the GPU
======================================  ====================================================================

With ``--no-compiler`` nothing can be compiled. Where a call needs that, the answer has the key ``missing``,
and its time is that of a second call, with the compiler.
"""

from __future__ import annotations

import importlib
import importlib.abc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from aot_tune.bench.host import launch_us
from aot_tune.bench.sections.replay import SHAPES
from aot_tune.errors import CompilerMissingError
from aot_tune.nvidia import cutile

Call = Callable[[], object]

_LAUNCHES = 100
"""Calls in one measurement of the host's time."""

_SAMPLES = 15
"""Calls in one measurement of the GPU's time; the median counts."""


class Operation(NamedTuple):
    """An operation of the library."""

    module: str
    """Module of the operation below ``tilegym.ops.cutile``."""

    make: Callable[..., Call]
    """(the module, the numbers of a shape) -> a call on tensors that are made now."""


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _matmul(library: Any, m: int, n: int, k: int) -> Call:
    a, b = _normal(m, k), _normal(k, n)
    return lambda: library.matmul(a, b)


def _static_persistent_matmul(library: Any, m: int, n: int, k: int) -> Call:
    a, b = _normal(m, k), _normal(k, n)
    return lambda: library.matmul(a, b, static_persistent=True)


def _attention(library: Any, batch: int, heads: int, kv_heads: int, length: int, size: int) -> Call:
    q, k, v = (_normal(batch, count, length, size) for count in (heads, kv_heads, kv_heads))
    return lambda: library.tile_fmha(q, k, v, is_causal=True)


def _softmax(library: Any, rows: int, cols: int) -> Call:
    x = _normal(rows, cols)
    return lambda: library.softmax(x)


def _rms_norm(library: Any, rows: int, cols: int) -> Call:
    x, weight = _normal(rows, cols), _normal(cols)
    return lambda: library.rms_norm(x, (cols,), weight, 1e-6)


def _silu_and_mul(library: Any, rows: int, hidden: int) -> Call:
    x = _normal(rows, 2 * hidden)
    return lambda: library.silu_and_mul(x)


def _bmm(library: Any, batch: int, m: int, n: int, k: int) -> Call:
    a, b = _normal(batch, m, k), _normal(batch, k, n)
    return lambda: library.bmm(a, b)


def _rope(library: Any, batch: int, heads: int, kv_heads: int, length: int, size: int) -> Call:
    q, k = (_normal(batch, count, length, size) for count in (heads, kv_heads))
    angles = _normal(1, length, size // 2).repeat(1, 1, 2)  # a rotation, so that values stay as large
    cos, sin = angles.cos(), angles.sin()
    return lambda: library.apply_rope_base(q, k, cos, sin)


def _layer_norm(library: Any, rows: int, cols: int) -> Call:
    x, weight, bias = _normal(rows, cols), _normal(cols), _normal(cols)
    return lambda: library.layer_norm(x, 1, 2, weight, bias, 1e-5)


def _persistent_layer_norm(library: Any, rows: int, cols: int) -> Call:
    x, weight, bias = _normal(rows, cols), _normal(cols), _normal(cols)
    return lambda: library.persistent_layer_norm(x, (cols,), weight, bias, 1e-5)


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation("matmul", _matmul),
    "static_persistent_matmul": Operation("matmul", _static_persistent_matmul),
    "attention": Operation("attention", _attention),
    "softmax": Operation("softmax", _softmax),
    "rms_norm": Operation("rms_norm", _rms_norm),
    "silu_and_mul": Operation("silu_and_mul", _silu_and_mul),
    "bmm": Operation("bmm", _bmm),
    "rope": Operation("rope", _rope),
    "layer_norm": Operation("layer_norm", _layer_norm),
    "persistent_layer_norm": Operation("layer_norm_legacy", _persistent_layer_norm),
}
"""Operation of each name of `SHAPES`; rms_norm and layer_norm make no search."""


# What is counted and forbidden ------------------------------------------------------------------


def count_searches() -> list[int]:
    """Collect the lengths of the spaces that cuTile itself searches from now on."""
    import cuda.tile.tune as tune

    own, searched = cutile.own_search(), list[int]()

    def search(search_space: Any, *args: Any, **kwargs: Any) -> Any:
        searched.append(len(search_space))
        return own(search_space, *args, **kwargs)

    if cutile.stands_in(tune.exhaustive_search):
        cutile.standing_in(tune.exhaustive_search, search)  # the function that it replaces
    else:
        tune.exhaustive_search = search
    return searched


class _NoCompiler(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "cuda.tile._compile":
            raise CompilerMissingError("the compiler was asked for")


class _Compiler:
    """Hides the compiler, and restores it."""

    def __init__(self) -> None:
        self._finder, self._asked = _NoCompiler(), cutile.may_have_compiler
        sys.meta_path.insert(0, self._finder)
        cutile.may_have_compiler = lambda: False

    def back(self) -> None:
        """Restore the compiler."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            cutile.may_have_compiler = self._asked


# The process ------------------------------------------------------------------------------------


class Served:
    """The operation in this process, controlled by commands.

    Args:
        name: The operation.
        options: ``--no-compiler``.
    """

    def __init__(self, name: str, options: Sequence[str] = ()) -> None:
        self._name = name
        self._compiler = _Compiler() if "--no-compiler" in options else None
        self._searched = count_searches()
        self._library = importlib.import_module(f"tilegym.ops.cutile.{OPERATIONS[name].module}")
        self._calls: list[Call] = []
        self._round: Any = None

    def prepare(self) -> dict[str, Any]:
        """Make the context, and the tensors of all shapes."""
        torch.manual_seed(0)
        self._calls = [OPERATIONS[self._name].make(self._library, *shape) for shape in SHAPES[self._name]]
        torch.cuda.synchronize()
        return {}

    def first(self, shape: int) -> dict[str, Any]:
        """Time the first call, waited for."""
        before = len(self._searched)
        try:
            answer: dict[str, Any] = {"ms": self._ms(shape)}
        except CompilerMissingError as error:
            if self._compiler is None:
                raise
            self._compiler.back()
            answer = {"ms": self._ms(shape), "missing": str(error)}
        return {**answer, "searches": len(self._searched) - before}

    def later(self, shape: int) -> dict[str, Any]:
        """Time calls one after another on the host."""
        return {"us": launch_us(self._calls[shape], launches=_LAUNCHES)}

    def gpu(self, shape: int) -> dict[str, Any]:
        """Time calls on the GPU, each with none of its data in the L2 cache."""
        if self._round is None:
            from aot_tune.tuner.measure.worker.clock import EventRound

            self._round = EventRound()
        call = self._calls[shape]
        call()
        return {"us": statistics.median(self._round([call] * _SAMPLES))}

    def _ms(self, shape: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._calls[shape]()
        torch.cuda.synchronize()
        return round((time.perf_counter() - started) * 1e3, 3)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command; an exception is an answer too."""
        do = command.pop("do")
        try:
            answer: dict[str, Any] = getattr(self, do)(**command)
        except Exception as error:  # reported to the parent, which ends this process
            message = " ".join(str(error).split())
            return {"failed": f"{type(error).__name__}: {message:.300}"}
        return answer


def main(words: Sequence[str]) -> None:
    """Import the library, and answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    name, *options = words
    served = Served(name, options)
    for line in sys.stdin:
        answers.write(json.dumps(served.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
