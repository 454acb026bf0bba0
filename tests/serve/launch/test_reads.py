"""What declarations read is found by running them on stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.serve.launch.reads import follow_args, follow_problem
from aot_tune.values.config import Config

TYPES = (torch.Tensor, torch.nn.Parameter)
X = torch.empty(4, 8)
CONFIG = Config(constants={"tile": 16})


@pytest.mark.parametrize(
    ("problem", "reads"),
    [
        (lambda x, eps: {"N": x.shape[1]}, {(0, "shape")}),
        (lambda x, eps: {"N": x.size(1), "dtype": x.dtype}, {(0, "shape"), (0, "dtype")}),
        (lambda x, eps: {"N": x.numel(), "d": x.dim()}, {(0, "shape")}),
        (lambda x, eps: {"step": x.stride(0)}, {(0, "stride")}),
        (lambda x, eps: {"dense": x.is_contiguous()}, {(0, "shape"), (0, "stride")}),
        (lambda x, eps: {"on": str(x.device)}, {(0, "device")}),
        (lambda x, eps: {"N": x.shape[1], "eps": str(eps)}, {(0, "shape"), (1, "value")}),
        (lambda x, eps: {"N": x.shape[1], "small": eps < 1}, {(0, "shape"), (1, "value")}),
        (lambda x, eps: {"N": x.shape[1], "same": bool(eps)}, {(0, "shape"), (1, "value")}),
        (lambda x, eps: {"N": x.shape[1], "kind": isinstance(eps, float)}, {(0, "shape"), (1, "value")}),
        (lambda x, eps: {"N": x.shape[1] if isinstance(x, torch.Tensor) else 0}, {(0, "shape")}),
        (lambda x, eps: {"N": 1 if eps is None else 2}, set()),
    ],
)
def test_what_a_problem_reads_is_found(problem: Any, reads: set[Any]) -> None:
    followed = follow_problem(problem, (X, 0.5), TYPES)
    assert followed.reads == frozenset(reads)
    assert followed.problem == follow_problem(problem, (X, 0.5), ()).problem


def test_a_scalar_handed_on_as_a_class_is_read_by_value() -> None:
    followed = follow_problem(lambda x, causal: {"N": x.shape[0], "causal": causal}, (X, True), TYPES)
    assert followed.reads == {(0, "shape"), (1, "value")}
    assert followed.problem["causal"] is True


@pytest.mark.parametrize(
    "problem",
    [
        lambda x, eps: {"aligned": x.data_ptr() % 16 == 0},
        lambda x, eps: {"first": float(x.sum()) > 0},
        lambda x, eps: {"rows": x.view(-1, 2).shape[0]},
        lambda x, eps: {"kind": type(eps).__name__},
    ],
)
def test_what_cannot_be_followed_is_said_so(problem: Any) -> None:
    followed = follow_problem(problem, (X, 0.5), TYPES)
    assert followed.reads is None
    assert followed.problem


def test_a_refused_look_that_is_swallowed_is_noted_all_the_same() -> None:
    def problem(x: Any, eps: Any) -> dict[str, object]:
        try:
            return {"small": eps < 1}
        except Exception:
            return {"small": True}

    assert follow_problem(problem, (X, 0.5), TYPES).reads == {(1, "value")}


def test_the_errors_of_a_problem_are_its_own() -> None:
    def problem(x: Any) -> dict[str, object]:
        raise ValueError("x must have two dimensions")

    with pytest.raises(ValueError, match="two dimensions"):
        follow_problem(problem, (X,), TYPES)


def test_arguments_passed_on_are_places_and_the_rest_constants() -> None:
    real, passed = follow_args(lambda c, x, eps: (x, eps, x.shape[1], c["tile"]), CONFIG, (X, 0.5), TYPES)
    assert real[0] is X
    assert real[1:] == (0.5, 8, 16)
    assert passed is not None
    assert passed.layout == (0, 1, None, None)
    assert passed.constants == (8, 16)
    assert passed.reads == {(0, "shape")}


def test_a_scalar_whose_value_poses_the_problem_may_be_looked_at_for_constants() -> None:
    def args_fn(config: Any, x: Any, window: Any) -> tuple[Any, ...]:
        return x, window, window < x.shape[1]

    for window in (5, 50):
        real, passed = follow_args(args_fn, CONFIG, (X, window), TYPES, frozenset({(1, "value")}))
        assert real == (X, window, window < 8)
        assert passed is not None
        assert passed.layout == (0, None, None)
        assert passed.constants == (window, window < 8)
        assert passed.reads == {(0, "shape")}
    _, passed = follow_args(args_fn, CONFIG, (X, 5), TYPES, frozenset({(1, "shape"), (0, "value")}))
    assert passed is None
    _, passed = follow_args(args_fn, CONFIG, (X, 5.0), TYPES, frozenset({(1, "value")}))
    assert passed is None, "0.0 and -0.0 have one key"
    _, passed = follow_args(lambda c, x, beta: (x, beta), CONFIG, (X, 0.0), TYPES, frozenset({(1, "value")}))
    assert passed is not None
    assert passed.layout == (0, 1)


@pytest.mark.parametrize(
    "args_fn",
    [
        lambda c, x, eps: (x, eps * 2),
        lambda c, x, eps: (x, float(eps)),
        lambda c, x, eps: (x.view(-1), eps),
        lambda c, x, eps: ([x, x], eps),
        lambda c, x, eps: (x, 1 if eps > 0 else 0),
        lambda c, x, eps: (x, type(eps) is float),
    ],
)
def test_arguments_that_are_made_anew_are_made_at_each_launch(args_fn: Any) -> None:
    real, passed = follow_args(args_fn, CONFIG, (X, 0.5), TYPES)
    assert len(real) == 2
    assert passed is None


# Lists of tensors -------------------------------------------------------------------------------------------

LIST = [torch.empty(4, 8), torch.empty(2, 8)]


@pytest.mark.parametrize(
    ("problem", "reads"),
    [
        (lambda xs, eps: {"groups": len(xs)}, {(0, "arrays")}),
        (lambda xs, eps: {"N": xs[0].shape[1], "dtype": xs[0].dtype}, {(0, "arrays")}),
        (lambda xs, eps: {"M": max(x.shape[0] for x in xs)}, {(0, "arrays")}),
        (lambda xs, eps: {"M": sum(x.numel() for x, _ in zip(xs, xs, strict=True))}, {(0, "arrays")}),
        (lambda xs, eps: {"on": str(xs[1].device)}, {(0, "arrays"), (0, "devices")}),
        (lambda xs, eps: {"listed": isinstance(xs, list)}, set()),
    ],
)
def test_what_a_problem_reads_of_a_list_is_found(problem: Any, reads: set[Any]) -> None:
    followed = follow_problem(problem, (LIST, 0.5), TYPES)
    assert followed.reads == frozenset(reads)
    assert followed.problem == follow_problem(problem, (LIST, 0.5), ()).problem


def test_values_of_a_list_s_members_are_not_followed() -> None:
    assert follow_problem(lambda xs, eps: {"up": bool((xs[0] >= 0).all())}, (LIST, 0.5), TYPES).reads is None
    assert follow_problem(lambda xs, eps: {"n": len(xs.copy())}, (LIST, 0.5), TYPES).reads is None


def test_a_list_is_handed_on_by_its_place_and_a_member_or_a_copy_is_not() -> None:
    _, passed = follow_args(lambda config, xs, eps: (xs, len(xs)), CONFIG, (LIST, 0.5), TYPES)
    assert passed is not None
    assert (passed.layout, passed.constants, passed.reads) == ((0, None), (2,), {(0, "arrays")})
    for args_fn in (lambda config, xs, eps: (xs[0],), lambda config, xs, eps: ([*xs],)):
        real, passed = follow_args(args_fn, CONFIG, (LIST, 0.5), TYPES)
        assert passed is None
        assert real[0] is LIST[0] or real[0] == LIST
