"""The comparison of a kernel's outputs with its declaration's reference, as tests make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aot_tune.declare.declaration import Close
from aot_tune.tunable import Tunable
from aot_tune.values.problem import Problem


def expected(tunable: Tunable, args: Sequence[Any]) -> Mapping[str, Close]:
    """The reference by argument name; ask before the kernel runs."""
    answer = tunable.reference(*args)
    return {tunable.mutated[0]: answer} if isinstance(answer, Close) else answer


def poison(tunable: Tunable, args: Sequence[Any]) -> None:
    """Fill the outputs with what no kernel may leave, and zero what a kernel adds to."""
    for name, arg in zip(tunable.parameters, args, strict=True):
        if name in tunable.output_names:
            arg.fill_(torch.nan)
        elif name in tunable.reset:
            arg.zero_()


def assert_agrees(
    tunable: Tunable, args: Sequence[Any], wanted: Mapping[str, Close], what: object = ""
) -> None:
    """Compare every mutated argument with what was expected of it."""
    assert wanted.keys() == set(tunable.mutated)
    for name, arg in zip(tunable.parameters, args, strict=True):
        if name in wanted:
            close = wanted[name]
            assert arg.shape == close.value.shape
            error = (arg.double() - close.value).abs_().sub_(close.atol + close.rtol * close.value.abs())
            right = error <= 0
            if not bool(right.all()):
                right |= arg == close.value  # equal infinities have no difference
            wrong = right.numel() - int(right.sum())
            assert wrong == 0, f"{what}: {wrong} of {right.numel()} elements of {name} are wrong"


def problem(**values: object) -> Problem:
    """A problem by keywords."""
    return Problem(values)
