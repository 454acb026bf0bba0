"""Derive the JIT signature of kernel arguments, and its weakest form. Uses public names of cuTile only.

A *signature* is cuTile's own mangled symbol, such as ``matmul_kernel_Kt1_A2bf16_...``: a text of all that the
compiler assumes of the arguments. The rule is cuda-tile's of releases 1.6 and 1.7; a test compares the
signatures with cuTile's own on random arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from aot_tune.errors import CutileError

_ALIGNMENT = 16
"""Divisor that cuTile specialises on: of addresses and strides in bytes, of shapes in elements."""

_MOST_SPECIALISED_DIMENSIONS = 5
"""Most dimensions of an array that cuTile specialises."""

_MOST_SIGNATURES = 4096
"""Most mangled symbols kept in memory. Making a symbol takes 0.7 ms, because cuTile parses it as a check."""


class _Array(NamedTuple):
    """Properties of an array in a signature; arrays with equal properties share a compilation."""

    dtype: str
    index_dtype: str
    stride_constant: tuple[int | None, ...]
    shape_constant: tuple[int | None, ...]
    stride_divisible: tuple[int, ...]
    shape_divisible: tuple[int, ...]
    overlaps: bool
    alignment: int


class _List(NamedTuple):
    """A list of arrays of one dtype and rank."""

    element: _Array
    """Properties that all arrays of the list have."""


class _Scalar(NamedTuple):
    """A number passed at launch."""

    dtype: str


class _Constant(NamedTuple):
    """A number compiled in; `kind` and `text` distinguish 1, 1.0 and True, and 0.0 from -0.0."""

    kind: str
    text: str
    value: Any


_Parameter = _Array | _List | _Scalar | _Constant


def signature_of(name: str, parameters: Sequence[tuple[str, Any]], kernel_args: Sequence[Any]) -> str:
    """Derive the signature that cuTile would compile for these kernel arguments.

    Tensors may be on device "meta"; their addresses are then assumed to be aligned, as an allocator's are.

    Args:
        name: The name of the kernel's function.
        parameters: The name and cuTile's annotation node of each parameter.
        kernel_args: The tensors, lists of tensors and numbers that the kernel takes.

    Raises:
        CutileError: An argument is of a kind that has no signature, or their number is wrong.
    """
    if len(kernel_args) != len(parameters):
        names = ", ".join(parameter for parameter, _ in parameters)
        raise CutileError(
            f"{name} takes {len(parameters)} arguments ({names}), args_fn returned {len(kernel_args)}"
        )
    # cuTile uses the second calling convention only for static shapes and sizes of 1.
    static = any(_static_shape(node) for _, node in parameters)
    unit = any(map(_has_unit_size, kernel_args))
    return _mangled(name, unit or static, _specialised(parameters, kernel_args, unit))


def check_arguments(parameters: Sequence[tuple[str, Any]], kernel_args: Sequence[Any]) -> None:
    """Refuse kernel arguments that have no signature; far quicker than making a signature.

    Raises:
        CutileError: An argument has no signature; the message names the parameter and what to pass.
    """
    _specialised(parameters, kernel_args, unit=False)


def weakest(signature: str, parameters: Sequence[tuple[str, Any]]) -> str:
    """Return the weakest signature of the kernel and constants: it assumes nothing of the arrays.

    It assumes no alignment, no divisibility, no stride or size of 1, and not that elements never overlap.
    Code compiled for it may be launched in place of code compiled for `signature`, because the values passed
    at a launch depend on the arguments and the kernel's annotations alone. For each array they are its
    address, then every size and every stride that no annotation makes static, stride 1 and size 1 included,
    in either calling convention. cuTile's compiler declares the same parameters whatever a signature assumes
    of their values (`_compile._get_array_ty` drops assumed constants of dimensions that are not annotated),
    and the launcher reads only a cubin's symbol. Sizes and strides that an annotation makes static are kept,
    because they are not passed. Index widths are kept too: they come from annotations, and 64-bit indices
    are passed in 64 bits.

    Args:
        signature: A signature of cuTile's. With a parameter that `signature_of` refuses, such as a library's
            tuple, it is returned as it is.
        parameters: As for `signature_of`.
    """
    import cuda.tile.compilation as ct

    name, parsed = ct.demangle_kernel_name(signature)
    known = ct.ArrayConstraint, ct.ListConstraint, ct.ScalarConstraint, ct.ConstantConstraint
    if not all(isinstance(constraint, known) for constraint in parsed.parameters):
        return signature
    weak = [
        _weak(constraint, getattr(node, "array", None), getattr(node, "list", None))
        for constraint, (_, node) in zip(parsed.parameters, parameters, strict=True)
    ]
    static = any(_static_shape(node) for _, node in parameters)
    convention = (
        ct.CallingConvention.cutile_python_v2() if static else ct.CallingConvention.cutile_python_v1()
    )
    symbol: str = ct.KernelSignature(weak, convention).with_mangled_symbol(name).symbol
    return symbol


def constants_of(signature: str) -> tuple[object, ...]:
    """Return the value compiled in for each parameter of a signature; None where it is passed at launch.

    Raises:
        CutileError: The text is not a signature.
    """
    from cuda.tile.compilation import ConstantConstraint, demangle_kernel_name

    try:
        _, parsed = demangle_kernel_name(signature)
    except ValueError as error:
        raise CutileError(str(error)) from error
    return tuple(
        constraint.value if isinstance(constraint, ConstantConstraint) else None
        for constraint in parsed.parameters
    )


def _weak(constraint: Any, array: Any, of_list: Any = None) -> Any:
    """Return the weakest constraint of an array or list, by its annotation."""
    from cuda.tile.compilation import ArrayConstraint, ListConstraint

    if isinstance(constraint, ListConstraint):
        element = _weak(constraint.element, getattr(of_list, "element", None))
        return ListConstraint(element, alias_groups=constraint.alias_groups, elements_may_alias=True)
    if not isinstance(constraint, ArrayConstraint):
        return constraint
    kept_shape = {axis % constraint.ndim for axis in getattr(array, "static_shape_dims", None) or ()}
    kept_stride = {axis % constraint.ndim for axis in getattr(array, "static_stride_dims", None) or ()}
    strides = [v if i in kept_stride else None for i, v in enumerate(constraint.stride_constant)]
    sizes = [v if i in kept_shape else None for i, v in enumerate(constraint.shape_constant)]
    return ArrayConstraint(
        constraint.dtype,
        constraint.ndim,
        index_dtype=constraint.index_dtype,
        stride_constant=strides,
        shape_constant=sizes,
        stride_lower_bound_incl=0,
        alias_groups=constraint.alias_groups,
        may_alias_internally=True,
    )


# The rule ---------------------------------------------------------------------------------------------------


def _specialised(
    parameters: Sequence[tuple[str, Any]], kernel_args: Sequence[Any], unit: bool
) -> tuple[_Parameter, ...]:
    return tuple(
        _parameter(arg, node, parameter, unit)
        for arg, (parameter, node) in zip(kernel_args, parameters, strict=True)
    )


def _is_array(arg: object) -> bool:
    return hasattr(arg, "shape") and hasattr(arg, "dtype") and hasattr(arg, "stride")


def _has_unit_size(arg: Any) -> bool:
    """Whether a size of an array, or of all arrays of a list, is 1."""
    if isinstance(arg, list):
        shapes = [array.shape for array in arg if _is_array(array)]
        return any(set(sizes) == {1} for sizes in zip(*shapes, strict=False))
    return _is_array(arg) and 1 in arg.shape


def _parameter(arg: Any, node: Any, name: str, unit: bool) -> _Parameter:
    if getattr(node, "constant", False):
        _check_constant(arg, name)
        return _Constant(type(arg).__name__, repr(arg), arg)
    if _is_array(arg):
        return _array(arg, getattr(node, "array", None), unit)
    if isinstance(arg, list):
        return _list(arg, node, name, unit)
    if isinstance(arg, bool):
        return _Scalar("bool_")
    if isinstance(arg, int):
        return _Scalar("int32" if getattr(node, "scalar", None) is None else "int64")
    if isinstance(arg, float):
        return _Scalar("float32")
    raise _no_signature(name, arg)


def _no_signature(name: str, arg: object) -> CutileError:
    return CutileError(
        f"kernel argument {name} is a {type(arg).__name__}; "
        "pass a tensor, a list of tensors, an int, a float or a bool"
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


def _list(arg: list[Any], node: Any, name: str, unit: bool) -> _List:
    annotation = getattr(getattr(node, "list", None), "element", None)
    if not arg or not all(map(_is_array, arg)):
        raise CutileError(f"kernel argument {name} is a list; pass one or more tensors in it")
    arrays = [_array(tensor, annotation, unit) for tensor in arg]
    first = arrays[0]
    if len({(array.dtype, len(array.stride_constant)) for array in arrays}) > 1:
        raise CutileError(f"kernel argument {name} is a list; pass tensors of one dtype and rank in it")
    return _List(
        first._replace(
            stride_constant=_shared([array.stride_constant for array in arrays]),
            shape_constant=_shared([array.shape_constant for array in arrays]),
            stride_divisible=tuple(map(min, zip(*(array.stride_divisible for array in arrays), strict=True))),
            shape_divisible=tuple(map(min, zip(*(array.shape_divisible for array in arrays), strict=True))),
            overlaps=any(array.overlaps for array in arrays),
            alignment=min(array.alignment for array in arrays),
        )
    )


def _shared(constants: Sequence[tuple[int | None, ...]]) -> tuple[int | None, ...]:
    """Keep the constants that all arrays have."""
    return tuple(axis[0] if len(set(axis)) == 1 else None for axis in zip(*constants, strict=True))


def _array(arg: Any, annotation: Any, unit: bool) -> _Array:
    import cuda.tile as ct

    dtype = {"bool": "bool_"}.get(name := str(arg.dtype).removeprefix("torch."), name)
    bits = getattr(ct, dtype).bitwidth
    shape, strides = tuple(arg.shape), tuple(arg.stride())
    rank = len(shape)
    static_shape = tuple(getattr(annotation, "static_shape_dims", None) or ())
    static_stride = tuple(getattr(annotation, "static_stride_dims", None) or ())
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
    index_dtype = getattr(annotation, "index_dtype", None)
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


def _constraint(parameter: _Parameter) -> Any:
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ListConstraint, ScalarConstraint

    if isinstance(parameter, _Constant):
        return ConstantConstraint(parameter.value)
    if isinstance(parameter, _Scalar):
        return ScalarConstraint(getattr(ct, parameter.dtype))
    if isinstance(parameter, _List):
        return ListConstraint(_constraint(parameter.element), alias_groups=(), elements_may_alias=True)
    return ArrayConstraint(
        getattr(ct, parameter.dtype),
        len(parameter.stride_constant),
        index_dtype=getattr(ct, parameter.index_dtype),
        stride_constant=parameter.stride_constant,
        shape_constant=parameter.shape_constant,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=parameter.overlaps,
        stride_divisible_by=parameter.stride_divisible,
        shape_divisible_by=parameter.shape_divisible,
        base_addr_divisible_by=parameter.alignment,
    )
