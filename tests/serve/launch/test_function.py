"""A launch function finds the plans filed under `CallPattern.key`, and calls `slow` for the rest."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest

from aot_tune.errors import CompilerMissingError
from aot_tune.serve.launch.function import CallPattern, Kind, LaunchFunction
from aot_tune.serve.launch.reads import Read
from aot_tune.values.config import Config
from tests.support.driver import FakeTensor

X, B = FakeTensor((4, 8)), FakeTensor((8,))


class Called:
    """A launch function whose launches and slow calls are noted."""

    def __init__(
        self,
        pattern: CallPattern,
        *args: Any,
        index: int = 0,
        fails: Exception | None = None,
        config: Config | None = None,
    ) -> None:
        self.fired: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.recording = False
        function = LaunchFunction("sample", lambda x, b, by: {}, lambda args, *rest: self.asked.append(args))
        names = {
            "ct_launch": self._launch, "raw_stream": lambda index: 100 + index, "current_device": lambda: 0,
            "grad_enabled": lambda: self.recording, "tensors": frozenset({FakeTensor}),
        }  # fmt: skip
        self.fails = fails
        memo = function.rewrite(pattern, names)
        memo[pattern.key(index, args, (FakeTensor,), config)] = ("grid", "kernel", 7)
        self.launch = MethodType(function.call, self)

    def _launch(self, *passed: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.fired.append(passed)


def pattern(*kinds: Kind, reads: set[Read], several: bool = False) -> CallPattern:
    return CallPattern(kinds=kinds, reads=frozenset(reads), layout=(0, 1, 2, None), several_devices=several)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("known", "args", "other"),
    [
        (pattern("tensor", "tensor", "plain", reads={(0, "shape")}), (X, B, 1.0), (B, B, 1.0)),
        (pattern("tensor", "tensor", "plain", reads={(0, "stride"), (2, "value")}), (X, B, 2), (X, B, 3)),
        (pattern("tensor", "mixed", "plain", reads={(1, "shape"), (0, "dtype")}), (X, None, 1), (X, B, 1)),
        (pattern("tensor", "mixed", "plain", reads={(1, "shape"), (0, "device")}), (X, B, 1), (X, X, 1)),
        (pattern("tensor", "mixed", "plain", reads={(1, "value")}), (X, B, 1), (X, 4, 1)),
        (pattern("tensor", "mixed", "plain", reads={(1, "value")}), (X, 4, 1), (X, 5, 1)),
        (pattern("tensor", "tensor", "plain", reads=set()), (X, B, 1), (X, B, 1.0)),
        (pattern("list", "tensor", "plain", reads={(0, "arrays")}), ([X, B], B, 1), ([X, X], B, 1)),
        (pattern("list", "tensor", "plain", reads={(0, "arrays")}), ([X, B], B, 1), ([X], B, 1)),
        (pattern("list", "tensor", "plain", reads={(0, "arrays")}), (None, B, 1), ([X], B, 1)),
        (pattern("list", "tensor", "plain", reads={(0, "shape")}), (X, B, 1), (B, B, 1)),
    ],
    ids=[
        "shape", "stride and value", "absent", "there", "no value", "value", "type",
        "list", "length of a list", "no list", "a tensor in place of a list",
    ],
)  # fmt: skip
def test_what_was_filed_under_a_patterns_key_is_found_and_nothing_else_is(
    known: CallPattern, args: tuple[Any, ...], other: tuple[Any, ...], several: bool
) -> None:
    known = pattern(*known.kinds, reads=set(known.reads), several=several)
    called = Called(known, *args)
    called.launch(*args)
    assert called.fired == [(100, "grid", "kernel", (*args, 7))]
    called.launch(*other)
    assert called.asked == [other]


def test_the_key_of_what_only_stands_for_tensors_of_a_gpu_is_theirs() -> None:
    there = FakeTensor((4, 8), device=1)
    known = pattern("tensor", "tensor", "plain", reads={(0, "shape")}, several=True)
    called = Called(known, X, X, 1, index=1)  # X is not on GPU 1
    called.launch(there, there, 1)
    assert [passed[0] for passed in called.fired] == [101]


@pytest.mark.parametrize(
    ("fails", "again"),
    [
        (TypeError("an argument cuTile does not take"), True),
        (ValueError("an argument cuTile does not take"), True),
        (CompilerMissingError("no code for these"), True),
        (RuntimeError("the driver: the launch may have begun"), False),
    ],
    ids=["type", "value", "compiler", "driver"],
)
def test_only_what_was_not_launched_is_asked_for_again(fails: Exception, again: bool) -> None:
    called = Called(pattern("tensor", "tensor", "plain", reads=set()), X, B, 1, fails=fails)
    if again:
        called.launch(X, B, 1)
    else:
        with pytest.raises(RuntimeError, match="may have begun"):
            called.launch(X, B, 1)
    assert called.asked == ([(X, B, 1)] if again else [])


def given(tile: int) -> Config:
    return Config(constants={"tile": tile})


@pytest.mark.parametrize("several", [False, True])
def test_a_plan_filed_with_a_config_is_of_calls_that_give_an_equal_one(several: bool) -> None:
    known = pattern("tensor", "tensor", "plain", reads={(0, "shape")}, several=several)
    called = Called(known._replace(given=True), X, B, 1, config=given(1))
    called.launch(X, B, 1, config=given(1))
    assert called.fired == [(100, "grid", "kernel", (X, B, 1, 7))]
    called.launch(X, B, 1)
    called.launch(X, B, 1, config=given(2))
    called.launch(B, B, 1, config=given(1))
    called.launch(X, B, 1, config={"tile": 1})
    assert len(called.fired) == 1
    assert called.asked == [(X, B, 1), (X, B, 1), (B, B, 1), (X, B, 1)]


@pytest.mark.parametrize("config", [None, given(1)], ids=["chosen", "given"])
def test_a_tensor_that_autograd_would_record_is_not_looked_up(config: Config | None) -> None:
    known = pattern("tensor", "tensor", "plain", reads=set())._replace(given=config is not None)
    called = Called(known, X, B, 1, config=config)
    recorded = FakeTensor((4, 8))
    recorded.requires_grad = True
    called.launch(recorded, B, 1, config)
    called.recording = True
    called.launch(X, B, 1, config)
    called.launch(recorded, B, 1, config)
    assert len(called.fired) == 2
    assert called.asked == [(recorded, B, 1)]
