"""Watch a library's launches. A launch that no search measured gives a remark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aot_tune.nvidia import cutile
from aot_tune.replay.answer.install import exchange
from aot_tune.replay.problem import Problem, parameters_of, read_problem
from aot_tune.serve.runtime import runtime, with_tensors
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device

launch_passed_on = True
"""Marks that functions of this module call cuTile's launch for others: `aot_tune.nvidia.cutile.PASSED_ON`."""

HINTS = "launched with hints that no search measured"
ARGUMENTS = "launched with arguments that no search was for"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured hints and problems of one kernel."""

    hints: list[Mapping[str, int]] = field(default_factory=list)
    """Hints of each config that was timed."""

    problems: list[Problem] = field(default_factory=list)
    """Problem of each search."""

    in_parts: set[str] = field(default_factory=set)
    """Parameters with parts of sums. The library makes them anew for the chosen config, in its size."""


class Launches:
    """Watches the launches of kernels that were searched.

    Args:
        remark: Receives the kernel's function and a remark, once for each kind and kernel.
        elsewhere: Receives each launch of a problem that no search was for: kernel, arguments and arch.
    """

    def __init__(
        self,
        remark: Callable[[Any, str], None],
        elsewhere: Callable[[Any, Sequence[Any], Arch], None],
    ) -> None:
        self._remark, self._elsewhere = remark, elsewhere
        self._measured: dict[Any, Measured] = {}
        self._remarked: set[tuple[Any, str]] = set()
        self._original: Any = None
        self._watching: Any = None

    def searched(
        self, kernel: Any, hints: Sequence[Mapping[str, int]], problem: Problem, in_parts: Set[str]
    ) -> None:
        """Watch a kernel's launches from now on."""
        measured = self._measured.setdefault(cutile.python_function(kernel), Measured())
        measured.hints.extend(hint for hint in hints if hint not in measured.hints)
        measured.problems.append(problem)
        measured.in_parts.update(in_parts)
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
                with suppress(Exception):  # a remark must not disturb the program
                    self._look(args[2], args[3])
            return result

        return watched

    def _look(self, kernel: Any, args: Sequence[Any]) -> None:
        function = cutile.python_function(kernel)
        measured = self._measured.get(function)
        if measured is None:
            return
        here = runtime()
        args, device = with_tensors(tuple(args), here), here.device(here.current_device())
        for kind, remark in self._remarks(kernel, args, measured, device):
            if kind == ARGUMENTS:
                self._elsewhere(kernel, args, device.arch)
            if (function, kind) not in self._remarked:
                self._remarked.add((function, kind))
                self._remark(function, remark)

    def _remarks(
        self, kernel: Any, args: Sequence[Any], measured: Measured, device: Device
    ) -> Iterator[tuple[str, str]]:
        hints = cutile.hints_of(kernel, device.arch)
        if hints not in measured.hints:
            named = ", ".join(f"{name}={value}" for name, value in hints.items())
            yield HINTS, f"it is {HINTS}: {named}"
        parameters = parameters_of(kernel)
        fewest: list[str] | None = None
        for problem in measured.problems:
            asked = read_problem(parameters, args, problem.varying, device.sm_count)
            arguments = zip(asked.names, asked.arguments, problem.arguments, strict=True)
            pairs = ((name, launched != searched) for name, launched, searched in arguments)
            differing = [name for name, differs in pairs if differs and name not in measured.in_parts]
            if fewest is None or len(differing) < len(fewest):
                fewest = differing
        if fewest:
            coarse = "the key of the library's own cache may be too coarse"
            yield ARGUMENTS, f"it is {ARGUMENTS}: {', '.join(fewest)}; {coarse}"
