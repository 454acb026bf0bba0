"""aot_tune.declare.kernel_source.outputs: what kernels only store to, through the arguments of a launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct
import pytest

from aot_tune.declare.checks import declaration_problems
from aot_tune.declare.kernel_source import outputs
from aot_tune.declare.kernel_source.outputs import written
from aot_tune.tunable import Tunable
from tests.support import example_kernels
from tests.support.samples import SM90, scale


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


# Declarations that leave outputs out ------------------------------------------------------------------------


@ct.kernel
def _double_in_place_kernel(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    at = (ct.bid(0), ct.bid(1))
    ct.store(target, at, ct.load(source, at, (tile_m, tile_n)) + ct.load(target, at, (tile_m, tile_n)))


@ct.kernel
def _count_kernel(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    tile = ct.load(source, (ct.bid(0), ct.bid(1)), (tile_m, tile_n))
    ct.atomic_add(target, (0, 0), ct.sum(tile))


@ct.kernel
def _nothing_kernel(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    ct.load(source, (ct.bid(0), ct.bid(1)), (tile_m, tile_n))


def without_outputs(**changes: Any) -> Tunable:
    return dataclasses.replace(scale, **{"outputs": None, **changes})


def test_outputs_that_are_left_out_are_what_the_kernel_stores_to() -> None:
    tunable = without_outputs()
    assert (tunable.output_names, tunable.mutated) == (("target",), ("target",))
    assert declaration_problems(tunable, SM90) == []


def test_no_source_is_read_when_a_declaration_is_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(kernel: object) -> None:
        raise AssertionError("a kernel's source was read")

    monkeypatch.setattr(outputs, "facts_of", read)
    tunable = without_outputs()
    with pytest.raises(AssertionError, match="source was read"):
        _ = tunable.mutated


def test_an_output_that_is_named_elsewhere_is_not_inferred_too() -> None:
    assert without_outputs(reset=("target",)).mutated == ("target",)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (_double_in_place_kernel, "the kernel loads target and stores to it; name it in inplace"),
        (_count_kernel, "the kernel adds to target; name it in reset"),
        (_nothing_kernel, "as far as the kernel's source tells, no argument is written; name the arguments"),
    ],
)
def test_what_is_written_and_neither_inferred_nor_named_is_a_mistake(kernel: Any, said: str) -> None:
    (mistake, *_) = declaration_problems(without_outputs(kernel=kernel), SM90)
    assert mistake.startswith(f"scale: {said}")


@pytest.mark.parametrize(
    ("kernel", "field"), [(_double_in_place_kernel, "inplace"), (_count_kernel, "reset")]
)
def test_once_it_is_named_it_is_none(kernel: Any, field: str) -> None:
    assert declaration_problems(without_outputs(kernel=kernel, **{field: ("target",)}), SM90) == []
