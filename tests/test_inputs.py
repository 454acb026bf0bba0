"""aot_tune.inputs: random tensors for make_args."""

from __future__ import annotations

import re

import pytest
import torch

from aot_tune import inputs

DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_seeds_give_equal_values_and_others_do_not(dtype):
    one, again, other = (inputs.randn((64, 3), dtype, "cpu", seed).float() for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_meta_gives_shapes_and_strides_without_storage(dtype):
    real, meta = (inputs.randn((5, 7), dtype, device, 0) for device in ("cpu", torch.device("meta")))
    assert meta.is_meta
    assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
    assert inputs.empty((5, 7), dtype, "meta").is_meta
    assert inputs.randint((5,), 0, 9, "int32", "meta", 0).is_meta


def test_the_scale_is_the_standard_deviation():
    assert inputs.randn((100_000,), "float32", "cpu", 0, scale=0.02).std().item() == pytest.approx(
        0.02, rel=0.02
    )


def test_values_do_not_depend_on_what_was_drawn_before():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    inputs.randn((8,), "float32", "cpu", 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_integers_keep_their_bounds():
    values = inputs.randint((10_000,), 3, 7, torch.int64, "cpu", 0)
    assert (values.min().item(), values.max().item(), values.dtype) == (3, 6, torch.int64)


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "float8_e4m3fn"])
def test_zeros_and_full_hold_one_value_in_any_dtype(dtype):
    for made, value in ((inputs.zeros((2, 3), dtype, "cpu"), 0), (inputs.full((2, 3), 1, dtype, "cpu"), 1)):
        assert (made.shape, str(made.dtype)) == ((2, 3), f"torch.{dtype}")
        assert made.to(torch.float32).eq(value).all()
    assert inputs.zeros((2,), dtype, "meta").is_meta


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("FLOAT32", "float32"),
        ("fp8", "float8_e4m3fn"),
        ("float8_e5", "float8_e5m2' or 'float8_e5m2fnuz"),
        ("flaot16", "float16"),
        ("?", "bfloat16"),
        ("", "bfloat16"),
    ],
)
def test_a_name_that_is_no_dtype_is_told_the_nearest(name, right):
    with pytest.raises(ValueError, match=f"no dtype called '{re.escape(name)}'; write '{right}'$"):
        inputs.named_dtype(name)


def test_half_a_name_is_told_all_that_begin_so():
    with pytest.raises(ValueError, match=r"write 'float8_e4m3fn' or .*'float8_e5m2' or ") as refusal:
        inputs.named_dtype("float8")
    assert str(refusal.value).count("'float8_") >= 4


@pytest.mark.parametrize("name", ["int4", "uint1", "bits8", "quint8"])
def test_a_dtype_that_torch_cannot_compute_in_is_refused(name):
    with pytest.raises(ValueError, match=f"cannot compute in '{name}'; pack such values into 'uint8'"):
        inputs.named_dtype(name)


@pytest.mark.parametrize("name", ["float31", "nn", "", "zeros"])
def test_a_name_that_is_no_dtype_is_refused(name):
    with pytest.raises(ValueError, match="no dtype called"):
        inputs.named_dtype(name)
