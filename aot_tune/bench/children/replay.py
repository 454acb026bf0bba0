"""Call one operation of TileGym or FlashInfer, at the commands of the section `replay`.

``python -m aot_tune.bench.children.replay OPERATION`` reads commands from stdin, each a line of JSON that is
answered by one:

======================================  ====================================================================
``{"do": "prepare"}``                   imports the library, makes the context and all tensors
``{"do": "first", "shape": 0}``         calls it: milliseconds until the GPU is done, those of our parts where
                                        it is replayed, cuTile's searches, and a hash of the results' bits
``{"do": "later", "shape": 0}``         microseconds of a call on the host
``{"do": "gpu", "shape": 0}``           microseconds of a call on the GPU
======================================  ====================================================================

With ``--no-compiler`` nothing can be compiled. Where a call needs that, the answer has the key ``missing``,
and its time is that of a second call, with the compiler.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import torch

from aot_tune.bench.children.client import Profile
from aot_tune.bench.children.operations import OPERATIONS, Call
from aot_tune.bench.host import launch_us
from aot_tune.bench.sections.replay import SHAPES
from aot_tune.declare.comparison import bits
from aot_tune.errors import CompilerMissingError
from aot_tune.nvidia import cutile

_LAUNCHES = 100
"""Calls in one measurement of the host's time."""

_SAMPLES = 15
"""Calls in one measurement of the GPU's time; the median counts."""


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
    """Leaves cuTile's compiling half to other finders, and takes the compiler from it after its import."""

    def __init__(self, hide: Callable[[], None]) -> None:
        self._hide = hide

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See the base class."""
        if name != cutile.COMPILING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            own: Any = spec.loader
            execute = own.exec_module

            def executed(module: Any) -> None:
                execute(module)
                self._hide()

            own.exec_module = executed
        return spec


class _Compiler:
    """Hides the compiler as an image without one does, and restores it."""

    def __init__(self) -> None:
        self._is_hidden, self._asked = True, cutile.may_have_compiler
        cutile.may_have_compiler = lambda: False
        sys.meta_path.insert(0, _NoCompiler(self._hide))

    def _hide(self) -> None:
        compiling: Any = sys.modules[cutile.COMPILING]
        found = compiling._find_compiler_bin

        def find() -> Any:
            if self._is_hidden:
                raise FileNotFoundError("the compiler was asked for")
            return found()

        compiling._find_compiler_bin = find

    def back(self) -> None:
        """Restore the compiler."""
        self._is_hidden = False
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
        self._calls: list[Call] = []
        self._round: Any = None
        self._profile = Profile()

    def prepare(self) -> dict[str, Any]:
        """Import the library, which may ask for the compiler; make the context, and all shapes' tensors."""
        import cuda.tile.tune as tune

        operation = OPERATIONS[self._name]
        library = importlib.import_module(operation.module)
        torch.manual_seed(0)
        self._calls = [operation.make(library, *shape) for shape in SHAPES[self._name]]
        if cutile.stands_in(tune.exhaustive_search):
            self._profile.measure_replay()
        torch.cuda.synchronize()
        return {}

    def first(self, shape: int) -> dict[str, Any]:
        """Time the first call, waited for."""
        before = len(self._searched)
        try:
            answer: dict[str, Any] = self._first(shape)
        except (CompilerMissingError, FileNotFoundError) as error:
            if self._compiler is None:
                raise
            self._compiler.back()
            answer = {**self._first(shape), "missing": str(error)}
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

    def _first(self, shape: int) -> dict[str, Any]:
        torch.cuda.synchronize()
        self._profile.taken()
        started = time.perf_counter()
        result = self._calls[shape]()
        torch.cuda.synchronize()
        ms = round((time.perf_counter() - started) * 1e3, 3)
        return {"ms": ms, "ours_ms": self._profile.taken(), "bits": _bits(result)}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command; an exception is an answer too."""
        do = command.pop("do")
        try:
            answer: dict[str, Any] = getattr(self, do)(**command)
        except Exception as error:  # reported to the parent, which ends this process
            message = " ".join(str(error).split())
            return {"failed": f"{type(error).__name__}: {message:.300}"}
        return answer


def _bits(result: object) -> str:
    """Return a hash of the bits of a call's tensors."""
    digest = sha256()
    for tensor in result if isinstance(result, list | tuple) else (result,):
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            digest.update(bits(tensor.detach().contiguous()).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main(words: Sequence[str]) -> None:
    """Answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    name, *options = words
    served = Served(name, options)
    for line in sys.stdin:
        answers.write(json.dumps(served.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
