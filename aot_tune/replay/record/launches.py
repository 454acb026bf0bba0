"""Look at what a library launches beside its searches.

What no search measured is a remark for its author, and gets a cubin too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aot_tune.nvidia import cutile
from aot_tune.replay.answer.install import exchange
from aot_tune.replay.problem import Problem, read_problem
from aot_tune.replay.table import Launched
from aot_tune.serve.runtime import runtime

launch_passed_on = True
"""The functions here call cuTile's launch for others: see `aot_tune.nvidia.cutile.PASSED_ON`."""

HINTS = "launched with hints that no search measured"
ARGUMENTS = "launched with arguments that no search was for"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the searches of one kernel were for."""

    hints: list[Mapping[str, int]] = field(default_factory=list)
    """The hints of each config that was timed."""

    problems: list[Problem] = field(default_factory=list)
    """What each search was for."""


class Launches:
    """Watches the launches of kernels that were searched.

    Args:
        remark: Receives the kernel's function and a remark, the first of each kind for each kernel.
        launched: Receives the kernel's function and what it was launched with.
    """

    def __init__(self, remark: Callable[[Any, str], None], launched: Callable[[Any, Launched], None]) -> None:
        self._remark = remark
        self._launched = launched
        self._measured: dict[Any, Measured] = {}
        self._said: set[tuple[Any, str]] = set()
        self._original: Any = None
        self._watching: Any = None

    def searched(self, kernel: Any, hints: Sequence[Mapping[str, int]], problem: Problem) -> None:
        """Watch a kernel's launches from now on."""
        of_kernel = self._measured.setdefault(cutile.python_function(kernel), Measured())
        of_kernel.hints.extend(one for one in hints if one not in of_kernel.hints)
        of_kernel.problems.append(problem)
        if self._original is None:
            self._original = cutile.launching()
            self._watching = self._watched(self._original)
            exchange(self._original, self._watching)

    def end(self) -> None:
        """Watch no longer."""
        if self._original is not None:
            exchange(self._watching, self._original)
            self._original = self._watching = None

    def _watched(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = launch(*args, **kwargs)
            ours = str(sys._getframe(1).f_globals.get("__name__", "")).startswith("aot_tune.")
            if not ours and len(args) == 4:
                with suppress(Exception):  # a remark is no reason to disturb the program
                    self._look(args[2], args[3])
            return result

        return watched

    def _look(self, kernel: Any, args: Sequence[Any]) -> None:
        function = cutile.python_function(kernel)
        measured = self._measured.get(function)
        if measured is None:
            return
        hints = cutile.hints_of(kernel, runtime().device(runtime().current_device()).arch)
        self._launched(function, Launched(tuple(hints.items()), cutile.signature_of(kernel, args)))
        for kind, remark in self._remarks(kernel, args, measured):
            if (function, kind) not in self._said:
                self._said.add((function, kind))
                self._remark(function, remark)

    def _remarks(self, kernel: Any, args: Sequence[Any], measured: Measured) -> Iterator[tuple[str, str]]:
        here = runtime()
        device = here.device(here.current_device())
        hints = cutile.hints_of(kernel, device.arch)
        if hints not in measured.hints:
            named = ", ".join(f"{name}={value}" for name, value in hints.items())
            yield HINTS, f"it is {HINTS}: {named}"
        constants = set(cutile.constant_parameters(kernel))
        parameters = [(name, name in constants) for name, _ in cutile.parameters(kernel)]
        nearest: list[str] | None = None
        for problem in measured.problems:
            asked = read_problem(parameters, args, problem.varying, device.sm_count)
            other = [
                name
                for name, one, its in zip(asked.names, asked.arguments, problem.arguments, strict=True)
                if one != its
            ]
            if nearest is None or len(other) < len(nearest):
                nearest = other
        if nearest:
            coarse = "the key of the library's own cache may be too coarse"
            yield ARGUMENTS, f"it is {ARGUMENTS}: {', '.join(nearest)}; {coarse}"
