"""What is read of a search's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.errors import NotRecordableError
from aot_tune.replay.problem import Array, Fixed, Items, Problem, Real, Varying, Whole, read_problem
from tests.support.driver import FakeTensor

PARAMETERS = [("x", False), ("n", False), ("eps", False), ("flag", False), ("TILE", True), ("parts", False)]


def read(*args: Any, varying: tuple[int, ...] = ()) -> Problem:
    return read_problem(PARAMETERS, args, varying, 132)


def test_each_argument_counts_as_its_kind_says() -> None:
    x = FakeTensor((4, 1024), torch.bfloat16)
    problem = read(x, 4, 1e-6, True, 64, [x, x])
    tensor = Array(dtype="bfloat16", shape=(4, 1024), layout="contiguous", aligned=True)
    assert problem.arguments == (
        tensor,
        Whole(4),
        Real(),
        Fixed("true"),
        Fixed("64"),
        Items((tensor, tensor)),
    )
    assert problem.names == ("x", "n", "eps", "flag", "TILE", "parts")
    assert read(x, 4, 2e-6, True, 64, [x, x]) == problem
    assert read(x, 5, 1e-6, True, 64, [x, x]) != problem
    assert read(x, 4, 1e-6, 1, 64, [x, x]) != problem
    assert read(x, 4, 1e-6, True, 64.0, [x, x]) != problem


def test_an_argument_that_varies_is_not_read() -> None:
    problem = read(None, object(), 1.0, None, 64, (), varying=(1, 4))
    assert problem.arguments == (Fixed("null"), Varying(), Real(), Fixed("null"), Varying(), Items(()))
    assert problem.varying == (1, 4)


def test_layout_and_alignment_count() -> None:
    def layout(*shape: int, strides: tuple[int, ...] | None = None) -> str:
        tensor = FakeTensor(shape, torch.float16, strides=strides)
        (argument, *_) = read(tensor, 0, 0.0, 0, 0, ()).arguments
        assert isinstance(argument, Array)
        return argument.layout

    assert layout(8, 16) == "contiguous"
    assert layout(1, 16, strides=(999, 1)) == "contiguous"
    assert layout(8, 16, strides=(1, 8)) == "1,16"
    assert layout(8, 16, strides=(24, 1)) == "16,1"
    assert layout(8, 16, strides=(17, 1)) == "-,1"
    assert layout(8, 16, strides=(0, 1)) == "0,1"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((1, 2), "args_fn gives 2 arguments, the kernel takes 6"),
        ((object(), 1, 1.0, 1, 1, ()), "argument x is a object, which cannot be identified"),
        ((None, 1, 1.0, 1, object(), ()), "a builtins.object cannot be spelled"),
        ((None, 1, 1.0, 1, 1, [None] * 5000), "argument parts has 5000 items, more than 4096"),
    ],
)
def test_what_cannot_be_told_is_refused(args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(NotRecordableError, match=said):
        read(*args)
