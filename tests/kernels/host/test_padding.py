"""Factors whose rows do not start at multiples of 16 bytes: what is copied, and what is launched."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aot_tune.kernels import gate_up_swiglu_tunable, grouped_matmul_tunable, linear_tunable, matmul_tunable
from aot_tune.kernels.host.padding import padded
from aot_tune.kernels.products.matmul import matmul
from aot_tune.nvidia import cutile
from aot_tune.tunable import Tunable
from aot_tune.values.problem import Problem
from tests.support.agree import problem
from tests.support.samples import SM90


def numbered(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    count = torch.Size(sizes).numel()
    return (torch.arange(count) % 251).to(dtype).view(sizes)


FINE = {
    "rows": numbered(3, 8),
    "columns": numbered(5, 8).mT,
    "padded": numbered(3, 16)[:, :9],
    "float32": numbered(5, 4, dtype=torch.float32),
    "a row again and again": numbered(1, 8).expand(6, 8),
    "a column again and again": numbered(3, 1).expand(3, 8),
    "experts": numbered(2, 5, 8),
    "experts' columns": numbered(2, 8, 8)[:, :5].mT,
    "meta": torch.empty(3, 8, dtype=torch.bfloat16, device="meta"),
    "what no launch takes": FakeTensorMode().from_tensor(numbered(3, 9)),
    # Padded, a stride would be 2^31, which a kernel cuts to 32 bits.
    "experts too large": torch.empty(2, 65536, 32767, dtype=torch.bfloat16, device="meta"),
    "rows too large": torch.empty(2, 2**31 - 1, dtype=torch.bfloat16, device="meta"),
}


@pytest.mark.parametrize("factor", FINE.values(), ids=FINE)
def test_what_is_loaded_well_is_passed_as_it_is(factor: torch.Tensor) -> None:
    assert padded(factor) is factor


ODD = {
    "odd rows": numbered(3, 9),
    "rows of 4": numbered(3, 12),
    "odd columns": numbered(9, 3).mT,
    "a start beside 16 bytes": numbered(3, 16)[:, 1:9],
    "every second column": numbered(3, 16)[:, ::2],
    "every second column, transposed": numbered(16, 6)[::2, ::2].mT,
    "float32": numbered(3, 6, dtype=torch.float32),
    "one row": numbered(1, 9),
    "experts": numbered(2, 5, 9),
    "experts' columns": numbered(2, 9, 5).mT,
    "experts that start anywhere": numbered(2, 44)[:, :40].view(2, 5, 8),
    "meta": torch.empty(3, 9, dtype=torch.bfloat16, device="meta"),
}


@pytest.mark.parametrize("factor", ODD.values(), ids=ODD)
def test_what_is_not_is_copied_to_rows_that_are_and_lies_as_before(factor: torch.Tensor) -> None:
    copy = padded(factor)
    assert copy is not factor
    assert copy.is_meta or torch.equal(copy, factor)
    assert padded(copy) is copy
    along = -2 if factor.stride(-2) == 1 != factor.stride(-1) else -1
    assert copy.stride(along) == 1
    assert all(
        s * copy.element_size() % 16 == 0 for i, s in enumerate(copy.stride()) if i != copy.dim() + along
    )


def test_a_copy_of_one_column_is_hardly_larger_than_the_column() -> None:
    column = numbered(4097, 1)
    copy = padded(column)
    assert torch.equal(copy, column)
    assert copy.stride() == (1, 4104)
    assert padded(copy) is copy


PRODUCTS: list[tuple[Tunable, Callable[[int], Problem]]] = [
    (linear_tunable, lambda k: problem(dtype="float32", activation="none", M=40, N=k, K=k)),
    (matmul_tunable, lambda k: problem(dtype="bfloat16", M=40, N=k, K=k)),
    (gate_up_swiglu_tunable, lambda k: problem(dtype="float16", tokens=40, N=k, K=k)),
    (grouped_matmul_tunable, lambda k: problem(dtype="bfloat16", tokens=40, experts=4, N=k, K=k)),
]


@pytest.mark.parametrize(("tunable", "of"), PRODUCTS, ids=[tunable.name for tunable, _ in PRODUCTS])
def test_a_sweep_of_odd_sizes_times_what_the_host_function_launches(
    tunable: Tunable, of: Callable[[int], Problem]
) -> None:
    one = of(1001)
    config = tunable.default_config(SM90, one)
    args = tunable.args_fn(config, *tunable.make_args(one, torch.device("cpu"), 0))
    factors = [value for value in args if isinstance(value, torch.Tensor)][:2]
    assert [padded(factor) is factor for factor in factors] == [True, True]
    assert all(factor.shape[-1] == 1001 for factor in factors)
    assert cutile.signature_of(tunable.kernel, args)


def test_a_product_launches_a_copy_of_the_factor_whose_rows_are_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(
        importlib.import_module("aot_tune.kernels.products.matmul"),
        "matmul_tunable",
        SimpleNamespace(launch=lambda *args: launched.append(args)),
    )
    a, b = numbered(5, 24), numbered(24, 7)
    matmul(a, b)
    [(left, right, out, _)] = launched
    assert left is a
    assert right is not b
    assert torch.equal(right, b)
    assert right.stride() == (8, 1)
    assert out.shape == (5, 7)
