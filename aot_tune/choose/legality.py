"""Decide whether a config may run for a problem; warn once where the declaration raises for it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import TableWarning
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Classes, classes_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import described, shortened
from aot_tune.warn import warn

Unfit = Callable[[Config], "str | None"]
"""Function that returns why a config cannot run on this particular GPU; None where it can."""


class Legality:
    """Decides whether a config is legal and in the search space. One per declaration and arch.

    A config counts as in the search space where it is in the space of the problem itself or of any declared
    problem with the same classes (dtypes), because sizes without an entry run configs tuned for other sizes.
    Problems launched before do not matter, so that ranks agree.

    Attributes:
        tunable: The declaration.
        arch: The arch.
        unfit: Returns why a legal config cannot run on this particular GPU; None without this check.
    """

    def __init__(self, tunable: Declaration, arch: Arch) -> None:
        self.tunable = tunable
        self.arch = arch
        self.unfit: Unfit | None = None
        self._declared: dict[Classes, _Space] = {}
        self._last: tuple[Problem | None, frozenset[Config]] = (None, frozenset())
        self._last_classes: tuple[Problem | None, Classes] = (None, frozenset())
        self._failures: set[str] = set()

    def fitting(self, unfit: Unfit) -> Legality:
        """Return a copy for a GPU that may be smaller than others of its arch, such as a MIG slice."""
        smaller = copy(self)
        smaller.unfit = unfit
        return smaller

    def allows(self, config: Config, problem: Problem) -> bool:
        """Whether a config may run for a problem and fits this GPU; False where the declaration raises."""
        try:
            if self.refusal(config, problem) is not None:
                return False
            return self.unfit is None or self.unfit(config) is None
        except Exception as error:
            self.failed(error, problem, str(config))
            return False

    def refusal(self, config: Config, problem: Problem) -> str | None:
        """Return why a config may not run for a problem; None where it may."""
        # First, because `legal` may only be called with configs of a search space.
        if not self._in_space(config, problem):
            return "it is not in the search space"
        return self.tunable.refusal(config, self.arch, problem)

    def failed(self, error: Exception, problem: Problem, what: str) -> None:
        """Warn once of a function of the declaration that raised for a config from a file."""
        reason = described(error)
        if reason not in self._failures and len(self._failures) < _MOST_FAILURES:
            self._failures.add(reason)
            warn(
                f"{self.tunable.name}: {shortened(what)} is passed over for {shortened(str(problem))} on "
                f"{self.arch}, because the declaration raises {shortened(reason, 400)}; correct it, or tune "
                "again",
                TableWarning,
            )

    def _in_space(self, config: Config, problem: Problem) -> bool:
        last, classes = self._last_classes
        if last is not problem:
            classes = classes_of(self.tunable.axes, problem)
            self._last_classes = (problem, classes)
        space = self._declared.get(classes)
        if space is None:
            space = _Space()
            if len(self._declared) < _MOST_SPACES:
                self._declared[classes] = space
        return self._is_declared(config, classes, space) or config in self._own_space(problem)

    def _is_declared(self, config: Config, classes: Classes, space: _Space) -> bool:
        """Read the declared problems' spaces up to the first that holds the config; keep them.

        Two threads may read a space twice; no space is left out.
        """
        declared = self.tunable.typical_problems
        while config not in space.configs:
            if (place := space.read) >= len(declared):
                return False
            if classes_of(self.tunable.axes, declared[place]) == classes:
                space.configs.update(self.tunable.declared_space(self.arch, declared[place]))
            space.read = place + 1
        return True

    def _own_space(self, problem: Problem) -> frozenset[Config]:
        """Return the problem's own space; the last answer is kept, since a choice needs it several times."""
        last, configs = self._last
        if last is not problem:
            configs = frozenset(self.tunable.declared_space(self.arch, problem))
            self._last = (problem, configs)
        return configs


_MOST_FAILURES = 8
"""Most warnings of functions that raise."""

_MOST_SPACES = 64
"""Most sets of classes whose search space is kept: more than any kernel has dtypes."""


class _Space:
    """Configs of the declared problems of some classes, of which the first `read` were read."""

    def __init__(self) -> None:
        self.configs: set[Config] = set()
        self.read = 0
