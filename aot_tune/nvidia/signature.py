"""The JIT signature of kernel arguments in plain Python, and its weakest form. Public names of cuTile only.

A *signature* is cuTile's own mangled symbol, such as ``matmul_kernel_Kt1_A2bf16_...``: a text that says all
the compiler assumes of the arguments. The rule is that of cuda-tile 1.6 and 1.7, which a test holds against
cuTile's own on random arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from aot_tune.errors import CutileError

_ALIGNMENT = 16
"""cuTile specialises on divisibility by this: bytes of addresses and strides, elements of shapes."""

_MOST_SPECIALISED_DIMENSIONS = 5

_MOST_SIGNATURES = 4096
"""Mangled symbols kept: mangling checks itself by parsing its result, 0.7 ms."""


class _Array(NamedTuple):
    """An array by what its signature says; arrays that agree here share a compilation."""

    dtype: str
    index_dtype: str
    stride_constant: tuple[int | None, ...]
    shape_constant: tuple[int | None, ...]
    stride_divisible: tuple[int, ...]
    shape_divisible: tuple[int, ...]
    overlaps: bool
    alignment: int


class _Scalar(NamedTuple):
    """A number known at launch."""

    dtype: str


class _Constant(NamedTuple):
    """A number compiled in; kind and text tell 1, 1.0 and True apart, and the zeros."""

    kind: str
    text: str
    value: Any


_Parameter = _Array | _Scalar | _Constant


def signature_of(name: str, parameters: Sequence[tuple[str, Any]], kernel_args: Sequence[Any]) -> str:
    """The signature cuTile would compile for these kernel arguments.

    Tensors may be on device "meta"; their storage is then taken to be aligned as an allocator aligns it.

    Args:
        name: The kernel function's.
        parameters: The name and cuTile's annotation node of each parameter.
        kernel_args: Tensors and numbers.

    Raises:
        CutileError: An argument of a kind that has no signature here, or too many or few of them.
    """
    if len(kernel_args) != len(parameters):
        names = ", ".join(parameter for parameter, _ in parameters)
        raise CutileError(
            f"{name} takes {len(parameters)} arguments ({names}), args_fn returned {len(kernel_args)}"
        )
    # The smallest convention that fits: the second only where a static shape (a size of 1, say) is present.
    static = any(_static_shape(node) for _, node in parameters)
    unit = any(1 in arg.shape for arg in kernel_args if _is_array(arg))
    return _mangled(name, unit or static, _told(parameters, kernel_args, unit))


def check_arguments(parameters: Sequence[tuple[str, Any]], kernel_args: Sequence[Any]) -> None:
    """Refuse kernel arguments, one for each parameter, that have no signature: far quicker than to make it.

    Raises:
        CutileError: It names the parameter and what to pass.
    """
    _told(parameters, kernel_args, unit=False)


def weakest(signature: str, parameters: Sequence[tuple[str, Any]]) -> str:
    """The signature of the same kernel and constants that assumes nothing of its arrays.

    That is no alignment, no divisibility, no stride or size of 1, no elements that never share memory.
    A kernel compiled for it may be launched in place of one compiled for `signature`. What is passed at a
    launch follows from the arguments and the kernel's annotations alone: for each array its address, then
    every size and every stride that no annotation makes static, stride 1 and size 1 among them, in either
    calling convention. cuTile's compiler declares the same parameters whatever a signature assumes of their
    values (`_compile._get_array_ty` drops assumed constants of dimensions that are not annotated), and the
    launcher knows of a cubin only its symbol. Sizes and strides that an annotation makes static are kept,
    since those are not passed. Index widths are kept too: they come from annotations, and 64-bit ones would
    be passed in 64 bits.

    Args:
        signature: As `signature_of` gives it.
        parameters: As for `signature_of`.
    """
    from cuda.tile.compilation import (
        ArrayConstraint,
        CallingConvention,
        KernelSignature,
        demangle_kernel_name,
    )

    name, parsed = demangle_kernel_name(signature)
    weak: list[Any] = []
    for constraint, (_, node) in zip(parsed.parameters, parameters, strict=True):
        if not isinstance(constraint, ArrayConstraint):
            weak.append(constraint)
            continue
        kept_shape = {axis % constraint.ndim for axis in _static_shape(node)}
        kept_stride = {axis % constraint.ndim for axis in _static_stride(node)}
        weak.append(
            ArrayConstraint(
                constraint.dtype,
                constraint.ndim,
                index_dtype=constraint.index_dtype,
                stride_constant=[
                    v if i in kept_stride else None for i, v in enumerate(constraint.stride_constant)
                ],
                shape_constant=[
                    v if i in kept_shape else None for i, v in enumerate(constraint.shape_constant)
                ],
                stride_lower_bound_incl=0,
                alias_groups=constraint.alias_groups,
                may_alias_internally=True,
            )
        )
    static = any(_static_shape(node) for _, node in parameters)
    convention = CallingConvention.cutile_python_v2() if static else CallingConvention.cutile_python_v1()
    symbol: str = KernelSignature(weak, convention).with_mangled_symbol(name).symbol
    return symbol


# The rule ---------------------------------------------------------------------------------------------------


def _told(
    parameters: Sequence[tuple[str, Any]], kernel_args: Sequence[Any], unit: bool
) -> tuple[_Parameter, ...]:
    return tuple(
        _parameter(arg, node, parameter, unit)
        for arg, (parameter, node) in zip(kernel_args, parameters, strict=True)
    )


def _is_array(arg: object) -> bool:
    return hasattr(arg, "shape") and hasattr(arg, "dtype") and hasattr(arg, "stride")


def _parameter(arg: Any, node: Any, name: str, unit: bool) -> _Parameter:
    if getattr(node, "constant", False):
        _check_constant(arg, name)
        return _Constant(type(arg).__name__, repr(arg), arg)
    if _is_array(arg):
        return _array(arg, node, unit)
    if isinstance(arg, bool):
        return _Scalar("bool_")
    if isinstance(arg, int):
        return _Scalar("int32" if getattr(node, "scalar", None) is None else "int64")
    if isinstance(arg, float):
        return _Scalar("float32")
    raise CutileError(
        f"kernel argument {name} is a {type(arg).__name__}; pass a tensor, an int, a float or a bool"
    )


def _check_constant(arg: object, name: str) -> None:
    if type(arg) in (int, bool, float):
        return
    from cuda.tile.compilation import ConstantConstraint

    try:
        ConstantConstraint(arg)
    except TypeError:
        raise CutileError(
            f"kernel argument {name}, a constant, is {arg!r:.80}, a {type(arg).__name__}; "
            "pass an int, a float or a bool"
        ) from None


def _array(arg: Any, node: Any, unit: bool) -> _Array:
    import cuda.tile as ct

    dtype = {"bool": "bool_"}.get(name := str(arg.dtype).removeprefix("torch."), name)
    bits = getattr(ct, dtype).bitwidth
    shape, strides = tuple(arg.shape), tuple(arg.stride())
    rank = len(shape)
    static_shape, static_stride = _static_shape(node), _static_stride(node)
    stride_constant: list[int | None] = [None] * rank
    shape_constant: list[int | None] = [None] * rank
    stride_divisible, shape_divisible = [1] * rank, [1] * rank
    if rank <= _MOST_SPECIALISED_DIMENSIONS:
        for i, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            if (stride * bits) % (8 * _ALIGNMENT) == 0:
                stride_divisible[i] = max(8 * _ALIGNMENT // bits, 1)
            if (size * bits) % 8 == 0 and size % _ALIGNMENT == 0:
                shape_divisible[i] = _ALIGNMENT
            if stride == 1 and not static_stride:
                stride_constant[i] = 1
            if unit and size == 1 and not static_shape:
                shape_constant[i] = 1
    for i in static_shape:
        shape_constant[i % rank] = shape[i % rank]
    for i in static_stride:
        stride_constant[i % rank] = strides[i % rank]
    index_dtype = getattr(getattr(node, "array", None), "index_dtype", None)
    address = 0 if getattr(arg, "is_meta", False) else arg.data_ptr()
    return _Array(
        dtype=dtype,
        index_dtype="int32" if index_dtype is None else index_dtype.name,
        stride_constant=tuple(stride_constant),
        shape_constant=tuple(shape_constant),
        stride_divisible=tuple(stride_divisible),
        shape_divisible=tuple(shape_divisible),
        overlaps=not _disjoint(shape, strides),
        alignment=_ALIGNMENT if address % _ALIGNMENT == 0 else 1,
    )


def _static_shape(node: Any) -> tuple[int, ...]:
    return tuple(getattr(getattr(node, "array", None), "static_shape_dims", None) or ())


def _static_stride(node: Any) -> tuple[int, ...]:
    return tuple(getattr(getattr(node, "array", None), "static_stride_dims", None) or ())


def _disjoint(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two indices can share memory, by cuTile's sufficient test on the ascending strides."""
    if not shape:
        return True
    ordered = sorted(zip(strides, shape, strict=True))
    return ordered[0][0] > 0 and all(
        outer > 0 and outer >= inner * size for (inner, size), (outer, _) in pairwise(ordered)
    )


@lru_cache(maxsize=_MOST_SIGNATURES)
def _mangled(name: str, second_convention: bool, parameters: tuple[_Parameter, ...]) -> str:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    convention = (
        CallingConvention.cutile_python_v2() if second_convention else CallingConvention.cutile_python_v1()
    )
    constraints = [_constraint(parameter) for parameter in parameters]
    symbol: str = KernelSignature(constraints, convention).with_mangled_symbol(name).symbol
    return symbol


def _constraint(told: _Parameter) -> Any:
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ScalarConstraint

    if isinstance(told, _Constant):
        return ConstantConstraint(told.value)
    if isinstance(told, _Scalar):
        return ScalarConstraint(getattr(ct, told.dtype))
    return ArrayConstraint(
        getattr(ct, told.dtype),
        len(told.stride_constant),
        index_dtype=getattr(ct, told.index_dtype),
        stride_constant=told.stride_constant,
        shape_constant=told.shape_constant,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=told.overlaps,
        stride_divisible_by=told.stride_divisible,
        shape_divisible_by=told.shape_divisible,
        base_addr_divisible_by=told.alignment,
    )
