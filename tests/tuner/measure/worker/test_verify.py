"""Poisoning, comparing and restoring, on CPU tensors; a Python function stands for the kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.declare import comparison
from aot_tune.declare.comparison import bits, compare, poison, same_bits, words
from aot_tune.declare.declaration import Close
from aot_tune.errors import ArgumentsError, DeclarationError
from aot_tune.tuner.measure.worker.backend import SEEDS
from aot_tune.tuner.measure.worker.verify import Case, digests
from aot_tune.values.problem import Problem

CPU = torch.device("cpu")
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def close(value: torch.Tensor, rtol: float = 1e-2, atol: float = 1e-3) -> Close:
    return Close(value=value, rtol=rtol, atol=atol)


def declared(**changes: Any) -> Any:
    """``out = x * scale``, ``state += 1`` in place, ``total`` added to; as a Tunable's checks see it."""

    def make_args(problem: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(problem.size("M"), 8, generator=generator)
        return x, torch.empty(problem.size("M"), 8), torch.ones(4), torch.full((1,), 7.0), 2.0

    def reference(x: Any, out: Any, state: Any, total: Any, scale: float) -> dict[str, Close]:
        return {
            "out": close(x.double() * scale),
            "state": close(state.double() + 1),
            "total": close(x.double().sum().reshape(1) + total),
        }

    fields = {
        "name": "scripted",
        "parameters": ("x", "out", "state", "total", "scale"),
        "outputs": ("out",),
        "inplace": ("state",),
        "reset": ("total",),
        "make_args": make_args,
        "reference": reference,
        **changes,
    }
    mutated = (*fields["outputs"], *fields["inplace"], *fields["reset"])
    return SimpleNamespace(**fields, output_names=fields["outputs"], mutated=mutated)


def right_kernel(x: Any, out: Any, state: Any, total: Any, scale: float) -> None:
    out.copy_(x * scale)
    state.add_(1)
    total.add_(x.sum())


def verdict(kernel: Callable[..., None], tunable: Any = None, seed: int = 0) -> str | None:
    case = Case.make(tunable or declared(), Problem({"M": 6}), CPU, seed)
    case.prepare()
    kernel(*case.args)
    return case.check()


# Poison -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_two_seeds_poison_every_element_and_differently(dtype: torch.dtype) -> None:
    one, two = (torch.zeros(5, 3).to(dtype) for _ in range(2))
    poison(one, SEEDS[0])
    poison(two, SEEDS[1])
    assert bool((bits(one) != bits(two)).all())
    if dtype.is_floating_point:
        assert bool(one.float().isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_poison_is_a_huge_finite_number(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    poison(tensor, 1)
    assert bool(tensor.isfinite().all())
    assert bool((tensor > 1e38).all())


def test_poison_stays_inside_a_strided_view() -> None:
    whole = torch.zeros(6, 10)
    poison(whole[:, 2:5], 0)
    assert bool(whole[:, 2:5].isnan().all())
    assert bool((whole[:, :2] == 0).all())
    assert bool((whole[:, 5:] == 0).all())


# Comparing --------------------------------------------------------------------------------------------------


def test_an_output_within_tolerance_is_right() -> None:
    assert (
        compare("out", torch.tensor([1.0, 100.9, 0.0005]), close(torch.tensor([1.0, 100.0, 0.0]).double()))
        is None
    )


def test_what_is_wrong_is_counted_and_the_first_place_told() -> None:
    right = torch.ones(3, 4)
    output = right.clone()
    output[1, 2], output[2, 0] = 1.5, -1.0
    assert compare("out", output, close(right)) == (
        "out: 2 of 12 elements are wrong, first out[1, 2] is 1.5 and should be 1 (rtol 0.01, atol 0.001)"
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_right_for_one_that_is(bad: float) -> None:
    assert "1 of 3" in str(compare("out", torch.tensor([1.0, bad, 1.0]), close(torch.ones(3), atol=1e30)))


def test_an_infinity_equals_the_same_infinity_alone() -> None:
    infinite = close(torch.tensor([float("inf")]))
    assert compare("out", torch.tensor([float("inf")]), infinite) is None
    assert compare("out", torch.tensor([-float("inf")]), infinite) is not None
    assert compare("out", torch.tensor([3.0]), infinite) is not None


def test_an_output_without_dimensions_is_compared() -> None:
    assert compare("out", torch.tensor(1.0), close(torch.tensor(1.0))) is None
    assert "first out is 2 and should be 1" in str(
        compare("out", torch.tensor(2.0), close(torch.tensor(1.0)))
    )


def test_integers_are_compared_exactly_where_no_tolerance_is_given() -> None:
    right = close(torch.tensor([16777217], dtype=torch.int64), rtol=0, atol=0)
    assert compare("out", torch.tensor([16777217], dtype=torch.int32), right) is None
    assert compare("out", torch.tensor([16777216], dtype=torch.int32), right) is not None


@given(rows=st.integers(0, 30), cols=st.integers(1, 5), chunk=st.integers(1, 40), data=st.data())
def test_comparing_in_chunks_finds_what_comparing_at_once_finds(
    rows: int, cols: int, chunk: int, data: st.DataObject
) -> None:
    output, right = torch.zeros(rows, cols), torch.zeros(rows, cols)
    wrong = (
        data.draw(st.lists(st.integers(0, max(rows * cols - 1, 0)), unique=True, max_size=3)) if rows else []
    )
    output.view(-1)[wrong] = 1.0
    whole = compare("out", output, close(right))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CHUNK", chunk)
        assert compare("out", output, close(right)) == whole
    assert (whole is None) == (not wrong)


# Cases ------------------------------------------------------------------------------------------------------


def test_a_right_kernel_passes_again_and_again() -> None:
    case = Case.make(declared(), Problem({"M": 6}), CPU, 0)
    for _ in range(3):  # in place and reset: without a restore, the second launch would find its own result
        case.prepare()
        right_kernel(*case.args)
        assert case.check() is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_that_does_nothing_fails_even_after_a_right_one(seed: int) -> None:
    case = Case.make(declared(), Problem({"M": 6}), CPU, seed)
    case.prepare()
    right_kernel(*case.args)
    case.prepare()
    assert f"48 of 48 elements are wrong, first out[0, 0] is {'nan' if seed == 0 else '3.39615e+38'}" in str(
        case.check()
    )


def test_a_partial_write_fails_after_a_right_one() -> None:
    def last_row_missing(x: Any, out: Any, state: Any, total: Any, scale: float) -> None:
        kept = out[-1].clone()
        right_kernel(x, out, state, total, scale)
        out[-1] = kept

    assert "8 of 48 elements are wrong, first out[5, 0]" in str(verdict(last_row_missing))


def test_a_wrong_in_place_result_fails_and_names_the_argument_and_the_seed() -> None:
    def twice(x: Any, out: Any, state: Any, total: Any, scale: float) -> None:
        right_kernel(x, out, state, total, scale)
        state.add_(1)

    found = str(verdict(twice, seed=1))
    assert found.startswith("state: 4 of 4")
    assert found.endswith("seed 1")


def test_a_reset_argument_is_zero_at_each_launch_and_when_the_reference_sees_it() -> None:
    seen: list[float] = []

    def kernel(x: Any, out: Any, state: Any, total: Any, scale: float) -> None:
        seen.append(float(total))
        right_kernel(x, out, state, total, scale)

    assert verdict(kernel) is None  # make_args gave 7.0
    assert seen == [0.0]


def test_renewing_restores_in_place_arguments_and_leaves_outputs() -> None:
    case = Case.make(declared(), Problem({"M": 6}), CPU, 0)
    case.prepare()
    right_kernel(*case.args)
    before = case.tensor("out").clone()
    case.renew()
    assert case.tensor("state").tolist() == [1.0] * 4
    assert case.tensor("total").tolist() == [0.0]
    assert torch.equal(case.tensor("out"), before)


def test_a_change_of_an_undeclared_argument_is_an_error_that_names_it() -> None:
    def kernel(x: Any, out: Any, state: Any, total: Any, scale: float) -> None:
        right_kernel(x, out, state, total, scale)
        x[3, 3] = 0.0

    with pytest.raises(
        DeclarationError, match=r"changes its argument x, .*add 'x' to outputs, inplace or reset"
    ):
        verdict(kernel)


def test_a_nan_in_an_input_is_not_taken_for_a_change() -> None:
    def make_args(problem: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
        return torch.tensor([1.0, float("nan")]), torch.empty(1)

    tunable = declared(
        parameters=("x", "out"), inplace=(), reset=(), make_args=make_args,
        reference=lambda x, out: close(x[:1].double()),
    )  # fmt: skip
    assert verdict(lambda x, out: out.copy_(x[:1]), tunable) is None


def test_strides_and_offset_are_those_that_make_args_gave() -> None:
    def make_args(problem: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
        return torch.ones(8, 9)[:, 1:5], torch.empty(9, 9)[1:, 1:5]

    tunable = declared(
        parameters=("x", "out"), outputs=(), inplace=("x", "out"), reset=(), make_args=make_args,
        reference=lambda x, out: {"x": close(x.double()), "out": close(out.double().nan_to_num())},
    )  # fmt: skip
    case = Case.make(tunable, Problem({"M": 8}), CPU, 0)
    case.prepare()
    assert case.args[0].stride() == (9, 1)
    assert case.args[1].storage_offset() == 10


# Memory that no argument covers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reach", "what"),
    [
        (lambda case: case.expected["out"].value, "the expected out changed, seed 1"),
        (lambda case: case.saved["state"], "the saved copy of state changed, seed 1"),
        (lambda case: case.saved["x"], "the saved copy of x changed, seed 1"),
        (lambda case: case.tensor("x"), "its argument x changed, seed 1"),
    ],
)
def test_damage_anywhere_that_a_check_reads_is_noticed(
    reach: Callable[[Case], torch.Tensor], what: str
) -> None:
    case = Case.make(declared(), Problem({"M": 6}), CPU, 1)
    case.prepare()
    right_kernel(*case.args)
    assert case.check() is None
    assert case.damage() is None
    bits(reach(case)).view(-1)[-1] += 1
    assert case.damage() == what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_of_every_dtype_and_of_strided_views(dtype: torch.dtype) -> None:
    whole = torch.zeros(6, 10).to(dtype)
    view = whole[:, 2:5]
    before = digests([view, torch.zeros(0)])
    bits(whole)[:, 0] = 1
    assert digests([view, torch.zeros(0)]) == before == [0, 0]
    bits(whole)[5, 4] = 1
    assert digests([view]) == [1]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in order": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2),
    "in another order": lambda t: t.permute(2, 0, 1),
    "padded rows": lambda t: t[:, :, :5],
    "every second": lambda t: t[::2],
    "one row": lambda t: t[:1],
    "off a word": lambda t: t.view(-1)[1:-7].view(-1, 8),
    "an odd count": lambda t: t.view(-1)[:-1],
    "expanded": lambda t: t[:1].expand(3, 4, 8),
    "empty": lambda t: t[:0],
    "one number": lambda t: t[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_changed_bit_is_found_in_every_layout_and_equal_bits_are_equal(
    dtype: torch.dtype, layout: str
) -> None:
    memory = torch.arange(96, dtype=torch.int32).to(torch.uint8).view(3, 4, 8).to(torch.float32).to(dtype)
    one = LAYOUTS[layout](memory.clone())
    for copy in (one.clone(), one.contiguous().clone(), LAYOUTS[layout](memory.clone())):
        assert same_bits(one, copy)
        for place in range(one.numel()):
            changed = LAYOUTS[layout](memory.clone()) if copy.stride() == one.stride() else copy.clone()
            at = torch.unravel_index(torch.tensor(place), one.shape) if one.dim() else ()
            bits(changed)[at] ^= 1
            assert not same_bits(one, changed)


def test_elements_without_gaps_are_read_eight_bytes_at_a_time() -> None:
    rows = torch.zeros(6, 4, 16, dtype=torch.bfloat16)
    assert words(rows.transpose(1, 2)).shape == (96,)
    assert words(rows[:, :, :8]).dtype == torch.int16


def test_a_damaged_copy_is_not_taken_for_a_changed_argument() -> None:
    """The declaration is right, and the config is what failed."""
    case = Case.make(declared(), Problem({"M": 6}), CPU, 0)
    case.prepare()
    right_kernel(*case.args)
    case.saved["x"][0, 0] += 1
    assert case.check() == "the saved copy of x changed, seed 0"


def test_a_launch_with_the_same_bits_is_not_compared_with_the_reference() -> None:
    case = Case.make(declared(), Problem({"M": 6}), CPU, 0)
    case.prepare()
    right_kernel(*case.args)
    results = case.results()
    case.prepare()
    right_kernel(*case.args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aot_tune.tuner.measure.worker.verify.compare", None)
        assert case.repeated(results) is None


def test_a_launch_with_other_bits_may_differ_within_the_tolerance() -> None:
    case = Case.make(declared(), Problem({"M": 6}), CPU, 0)
    case.prepare()
    right_kernel(*case.args)
    results = case.results()
    case.tensor("out").mul_(1 + 1e-5)
    assert case.repeated(results) is None
    case.tensor("out")[2, 3] += 1
    assert str(case.repeated(results)).startswith("out: 1 of 48 elements are wrong, first out[2, 3]")
    case.prepare()  # and nothing is launched
    assert "48 of 48" in str(case.repeated(results))


# Declarations that contradict themselves --------------------------------------------------------------------


def wrong_shape(x: Any, out: Any, state: Any, total: Any, scale: float) -> dict[str, Close]:
    return {"out": close(x.T), "state": close(state + 1), "total": close(total)}


def changes_x(x: Any, out: Any, state: Any, total: Any, scale: float) -> dict[str, Close]:
    x.mul_(2)
    return {"out": close(x.clone()), "state": close(state + 1), "total": close(total + 1)}


def returns_itself(x: Any, out: Any, state: Any, total: Any, scale: float) -> dict[str, Close]:
    return {"out": close(x * scale), "state": close(state.add_(1)), "total": close(total + 1)}


def has_nan(x: Any, out: Any, state: Any, total: Any, scale: float) -> dict[str, Close]:
    return {"out": close(x * float("nan")), "state": close(state + 1), "total": close(total + 1)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": wrong_shape}, r"gives out the shape \(8, 6\), the argument has \(6, 8\)"),
        ({"reference": changes_x}, "reference changes its argument x"),
        ({"reference": returns_itself}, "returns the argument state itself"),
        ({"reference": has_nan}, "gives out a NaN"),
        ({"reference": lambda *args: close(args[0])}, "one Close and 3 arguments are mutated"),
        (
            {"reference": lambda *args: {"out": close(args[0])}},
            "a dict of one for each of out, state, total",
        ),
        ({"reference": lambda *args: None}, "returns a NoneType"),
        ({"reference": lambda *args: {}}, "returns an empty dict; return a dict of one for each of out"),
        (
            {"reference": lambda *args: dict.fromkeys(("out", "state", "total"), 1.0)},
            "reference gives out a float; write a tensor, or Close",
        ),
        ({"reference": lambda x: None}, r"reference raises TypeError: .*\(.*test_verify.py, line \d+\)"),
        (
            {"make_args": lambda problem, device, seed: (torch.ones(2),)},
            "returns 1 arguments and launch takes 5",
        ),
        ({"make_args": lambda problem, device, seed: (torch.ones(2), 1, 2, 3, 4)}, "no tensor for out"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused_with_what_to_return(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        Case.make(declared(**changes), Problem({"M": 6}), CPU, 0)


def test_a_problem_whose_arguments_raise_is_told_from_a_wrong_declaration() -> None:
    def make_args(problem: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
        raise ValueError("no such size")

    with pytest.raises(ArgumentsError, match=r"make_args raises ValueError: no such size"):
        Case.make(declared(make_args=make_args), Problem({"M": 6}), CPU, 0)
    with pytest.raises(ArgumentsError, match="reference raises TypeError"):
        Case.make(declared(reference=lambda x: None), Problem({"M": 6}), CPU, 0)


def test_running_out_of_memory_is_not_taken_for_a_wrong_declaration() -> None:
    def reference(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Case.make(declared(reference=reference), Problem({"M": 6}), CPU, 0)


# Lists, and arguments that are absent -----------------------------------------------------------------------


def listed(**changes: Any) -> Any:
    """``outs[i] = xs[i] * 2``, ``states[i] += 1`` in place, and the largest of each where it is wanted."""

    def make_args(problem: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        xs = [torch.randn(4 + place, generator=generator) for place in range(2)]
        largest = torch.empty(2) if problem["largest"] else None
        return xs, [torch.empty_like(x) for x in xs], [torch.ones(3), torch.ones(2)], largest

    def reference(xs: Any, outs: Any, states: Any, largest: Any) -> dict[str, Any]:
        most = None if largest is None else torch.stack([x.max() for x in xs]).double()
        return {"outs": [x.double() * 2 for x in xs], "states": [s + 1 for s in states], "largest": most}

    fields = {
        "parameters": ("xs", "outs", "states", "largest"),
        "outputs": ("outs", "largest"),
        "inplace": ("states",),
        "reset": (),
        "make_args": make_args,
        "reference": reference,
        **changes,
    }
    return declared(**fields)


def list_kernel(xs: Any, outs: Any, states: Any, largest: Any) -> None:
    for x, out, state in zip(xs, outs, states, strict=True):
        out.copy_(x * 2)
        state.add_(1)
    if largest is not None:
        largest.copy_(torch.stack([x.max() for x in xs]))


def checked(kernel: Callable[..., None], *, largest: bool, tunable: Any = None) -> str | None:
    case = Case.make(tunable or listed(), Problem({"M": 6, "largest": largest}), CPU, 0)
    verdicts = []
    for _ in range(2):  # the second finds in-place members as the first did
        case.prepare()
        kernel(*case.args)
        verdicts.append(case.check())
    assert case.repeated(case.results()) is None or verdicts[0] is not None
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


@pytest.mark.parametrize("largest", [True, False])
def test_members_of_lists_and_an_output_that_may_be_absent_are_verified(largest: bool) -> None:
    assert checked(list_kernel, largest=largest) is None


def test_a_wrong_member_of_a_list_is_named() -> None:
    def one_only(xs: Any, outs: Any, states: Any, largest: Any) -> None:
        list_kernel(xs, outs, states, largest)
        outs[1].fill_(float("nan"))

    assert str(checked(one_only, largest=False)).startswith("outs[1]: 5 of 5 elements are wrong")


def test_a_member_that_the_kernel_changes_and_nothing_names_is_found() -> None:
    def changing(xs: Any, outs: Any, states: Any, largest: Any) -> None:
        list_kernel(xs, outs, states, largest)
        xs[0].add_(1)

    with pytest.raises(DeclarationError, match=r"changes its argument xs\[0\].*add 'xs' to outputs"):
        checked(changing, largest=False)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"outs": [torch.ones(4)]}, r"gives outs a list of 1; return a list of 2"),
        ({"outs": torch.ones(4)}, r"gives outs a Tensor; return a list of 2"),
        ({"outs": [torch.ones(4), torch.ones(9)]}, r"gives outs\[1\] the shape \(9,\)"),
        ({}, r"returns an empty dict; .*one for each of outs"),
    ],
)
def test_a_reference_unlike_a_list_is_refused(found: Any, told: str) -> None:
    tunable = listed(reference=lambda *args: found, outputs=("outs",), inplace=())
    with pytest.raises(DeclarationError, match=told):
        Case.make(tunable, Problem({"M": 6, "largest": False}), CPU, 0)
