"""aot_tune.declare.kernel_source.outputs: what kernels only store to, through the arguments of a launch."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import pytest

from aot_tune.declare.kernel_source.outputs import written
from tests.support import example_kernels


def found(name: str, args_fn: Any, *parameters: str) -> tuple[tuple[str, ...], ...]:
    one = written(getattr(example_kernels, f"{name}_kernel"), args_fn, parameters)
    return one.whole, one.changed, one.added


def test_what_is_only_stored_to_is_an_output() -> None:
    rows = found("scale_rows", lambda config, x, out, f: (x, out, f, config["TILE"]), "x", "out", "f")
    assert rows == (("out",), (), ())


def test_a_launchs_own_names_count_and_views_are_followed() -> None:
    rows = found(
        "scale_rows",
        lambda config, source, result: (source.view(-1, 8), result.view(-1, 8), 2.0, config["TILE"]),
        "source",
        "result",
    )
    assert rows == (("result",), (), ())


def test_one_tensor_passed_twice_is_changed_in_place() -> None:
    assert found("scale_rows", lambda config, x: (x, x, 2.0, config["TILE"]), "x") == ((), ("x",), ())


def test_what_a_helper_loads_and_stores_is_changed_in_place() -> None:
    assert found("add_in_helper", lambda config, x, y: (x, y, 16), "x", "y") == ((), ("x",), ())


def test_what_is_added_to_is_no_output() -> None:
    assert found("count", lambda config, x, counts: (x, counts, 16), "x", "counts") == ((), (), ("counts",))


def test_an_argument_that_escapes_is_no_output() -> None:
    assert found("handed_away", lambda config, x, out: (x, out, 16), "x", "out")[0] == ()


def test_lists_and_an_args_fn_that_asks_for_the_device_are_followed() -> None:
    def args_fn(config: Any, xs: Any, ws: Any, outs: Any, *, device: Any) -> Any:
        return xs, ws, outs, config["TM"], config["TN"], device.sm_count

    assert found("lists", args_fn, "xs", "ws", "outs") == (("outs",), (), ())


def test_an_args_fn_that_cannot_be_followed_is_taken_by_name() -> None:
    def args_fn(config: Any, x: Any, out: Any, factor: Any) -> Any:
        return (x, out, factor, config["TILE"]) if bool(x) else ()

    assert found("scale_rows", args_fn, "x", "out", "factor") == (("out",), (), ())


@ct.kernel
def _scale_in_place_kernel(x, out, factor, TILE: ct.Constant[int]):
    at = (ct.bid(0), ct.bid(1))
    ct.store(out, at, ct.load(out, at, (1, TILE)) * factor)


@pytest.mark.parametrize(
    ("second", "whole", "changed"),
    [(example_kernels.scale_rows_kernel, ("out",), ()), (_scale_in_place_kernel, (), ("out",))],
)
def test_of_several_kernels_an_output_is_one_that_none_of_them_loads(
    second: Any, whole: tuple[str, ...], changed: tuple[str, ...]
) -> None:
    kernels = {"one": example_kernels.scale_rows_kernel, "other": second}
    one = written(kernels, lambda config, x, out: (x, out, 1.0, 16), ("x", "out"))
    assert (one.whole, one.changed) == (whole, changed)
