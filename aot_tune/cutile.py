"""The one module that knows cuTile's private names, each guarded by version and with the public way it falls back to.

Importing it imports neither cuda.tile nor torch; each function does, when it is called.

A *signature* here is cuTile's own mangled symbol, such as ``matmul_kernel_Kt1_A2bf16_...``: a text that says
all the compiler assumes of the arguments, so that a cubin can be compiled in one process and launched in another.
"""

from __future__ import annotations

import dataclasses
import io
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from aot_tune.arch import Arch
from aot_tune.config import HINTS
from aot_tune.errors import CutileError

TESTED_VERSIONS = ((1, 6), (1, 7))
"""Releases of cuda-tile whose private names were checked; others take the public way."""

TUNE_SINCE = (1, 7)
"""The first release whose ``exhaustive_search`` flushes the L2 cache."""

CubinSource = Callable[[str], "bytes | None"]
"""Signature -> the cubin compiled for it, or None to let cuTile compile."""


# What is installed ----------------------------------------------------------------------------------------------


@cache
def version() -> str:
    """The installed cuda-tile's version; empty when it is not installed."""
    try:
        return metadata.version("cuda-tile")
    except metadata.PackageNotFoundError:
        return ""


def release() -> tuple[int, int]:
    """The installed cuda-tile's version as (major, minor); (0, 0) when it is not installed."""
    numbers = version().split(".")[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else (0, 0)


def private_names_known() -> bool:
    """Whether the private names below were checked against the installed release."""
    return release() in TESTED_VERSIONS


@cache
def compiler_version() -> str | None:
    """The version of cuTile's compiler, ``13.4.92``; None when no compiler is installed."""
    try:
        from cuda.tile._compile import _find_compiler_bin

        path = _find_compiler_bin().path
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except Exception:  # not installed, not executable, another layout: all mean there is none to use
        return None
    numbers = [word.strip(",V") for word in answer.split() if word.strip(",V").replace(".", "").isdigit() and "." in word]
    return numbers[-1] if numbers else answer.strip() or None


# Kernels --------------------------------------------------------------------------------------------------------


def is_kernel(kernel: object) -> bool:
    """Whether an object is a ``@ct.kernel``."""
    import cuda.tile as ct

    return isinstance(kernel, ct.kernel)


def python_function(kernel: Any) -> Any:
    """The Python function a kernel was made of."""
    return kernel._annotated_function.pyfunc


def is_kernel_like(value: object) -> bool:
    """Whether an object is a ``@ct.kernel``, told without importing cuda.tile."""
    return hasattr(value, "_annotated_function")


def default_hints(kernel: Any) -> dict[str, object]:
    """The hints written in a kernel's decorator."""
    options = getattr(kernel, "_compiler_options", None)
    return {name: value for name in HINTS if (value := getattr(options, name, None)) is not None}


def constant_parameters(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's ``ct.Constant`` parameters, in order."""
    annotated = kernel._annotated_function
    return tuple(
        name
        for name, node in zip(annotated.pysig.parameters, annotated.parameter_annotations, strict=True)
        if getattr(node, "constant", False)
    )


def with_hints(kernel: Any, hints: Mapping[str, int], cubins: CubinSource | None = None) -> Any:
    """A kernel with these hints and an empty JIT cache of its own (52-65 us); never call it on the launch path.

    Args:
        kernel: A ``@ct.kernel``.
        hints: As ``replace_hints`` takes them.
        cubins: Asked before each compilation; ignored on a cuda-tile release that was not tested.
    """
    hinted = kernel.replace_hints(**hints)
    if cubins is None or not private_names_known():
        return hinted
    return _prebuilt_class()(hinted, cubins)


@cache
def _prebuilt_class() -> Any:
    import cuda.tile as ct
    from cuda.tile._cext import TileContext

    class PrebuiltKernel(ct.kernel):
        """A kernel whose cubins were compiled elsewhere. cuTile calls `_compile` for a signature not yet loaded."""

        def __new__(cls, hinted: Any, cubins: CubinSource) -> Any:
            return super().__new__(cls, hinted._pyfunc)

        def __init__(self, hinted: Any, cubins: CubinSource) -> None:
            super().__init__(hinted._pyfunc)
            self._compiler_options = hinted._compiler_options
            self._cubins = cubins

        def _compile(self, signature: Any, context: Any, compute_capability: Any = None) -> Any:
            symbol = signature.with_mangled_symbol(self._pyfunc.__name__).symbol
            cubin = self._cubins(symbol)
            if cubin is None:
                try:
                    return super()._compile(signature, context, compute_capability)
                except Exception as error:
                    of_disk_cache = isinstance(error, OSError) or type(error).__module__ == "sqlite3"
                    if context.config.cache_dir is None or not of_disk_cache:
                        raise
                    # Its folder cannot be made, or its database is broken; compiling needs neither.
                    config = dataclasses.replace(context.config, cache_dir=None)
                    return super()._compile(signature, TileContext(config=config), compute_capability)
            return cubin, symbol, None, () if release() >= (1, 7) else []

        def replace_hints(self, **hints: Any) -> Any:
            # exhaustive_search calls this even without hints, and would get a plain kernel that compiles again.
            return super().replace_hints(**hints) if hints else self

    return PrebuiltKernel


# Signatures -----------------------------------------------------------------------------------------------------


def signature_of(kernel: Any, kernel_args: Sequence[Any]) -> str:
    """The signature cuTile would compile for these kernel arguments, derived without a GPU or a driver.

    Tensors may be on device "meta"; their storage is then taken to be aligned as an allocator aligns it.

    Raises:
        CutileError: An argument of a kind that has no signature here.
    """
    from cuda.tile.compilation import CallingConvention, KernelSignature

    annotated = kernel._annotated_function
    nodes = annotated.parameter_annotations
    names = tuple(annotated.pysig.parameters)
    if len(kernel_args) != len(nodes):
        raise CutileError(
            f"{annotated.pyfunc.__name__} takes {len(nodes)} arguments ({', '.join(names)}), "
            f"args_fn returned {len(kernel_args)}"
        )
    # The smallest convention that fits: the second one only where a static shape (a size of 1, say) is present.
    static = any(_static_dims(getattr(node, "array", None)) for node in nodes)
    unit = any(1 in arg.shape for arg in kernel_args if _is_array(arg))
    convention = (
        CallingConvention.cutile_python_v2() if unit or static else CallingConvention.cutile_python_v1()
    )
    constraints = [
        _constraint(arg, node, name, unit) for arg, node, name in zip(kernel_args, nodes, names, strict=True)
    ]
    signature = KernelSignature(constraints, convention)
    symbol: str = signature.with_mangled_symbol(annotated.pyfunc.__name__).symbol
    return symbol


def _is_array(arg: object) -> bool:
    return hasattr(arg, "shape") and hasattr(arg, "dtype") and hasattr(arg, "stride")


def _constraint(arg: Any, node: Any, name: str, unit: bool) -> Any:
    import cuda.tile as ct
    from cuda.tile.compilation import ConstantConstraint, ScalarConstraint

    if getattr(node, "constant", False):
        return ConstantConstraint(arg)
    if _is_array(arg):
        return _array_constraint(arg, node, unit)
    if isinstance(arg, bool):
        return ScalarConstraint(ct.bool_)
    if isinstance(arg, int):
        wide = getattr(node, "scalar", None)
        return ScalarConstraint(ct.int64 if wide is not None else ct.int32)
    if isinstance(arg, float):
        return ScalarConstraint(ct.float32)
    raise CutileError(f"kernel argument {name} is a {type(arg).__name__}; pass a tensor, an int, a float or a bool")


def _array_constraint(arg: Any, node: Any, unit: bool) -> Any:
    """The rule of cuda-tile 1.6 and 1.7 for one array; a test holds it against cuTile's own on random arrays."""
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint

    dtype = getattr(ct, {"bool": "bool_"}.get(name := str(arg.dtype).removeprefix("torch."), name))
    shape, strides = tuple(arg.shape), tuple(arg.stride())
    rank, bits = len(shape), dtype.bitwidth
    annotation = getattr(node, "array", None)
    static_shape, static_stride = _static_dims(annotation), tuple(getattr(annotation, "static_stride_dims", ()))
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
    index_dtype = getattr(annotation, "index_dtype", None) or ct.int32
    address = 0 if getattr(arg, "is_meta", False) else arg.data_ptr()
    return ArrayConstraint(
        dtype,
        rank,
        index_dtype=index_dtype,
        stride_constant=stride_constant,
        shape_constant=shape_constant,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=not _disjoint(shape, strides),
        stride_divisible_by=stride_divisible,
        shape_divisible_by=shape_divisible,
        base_addr_divisible_by=_ALIGNMENT if address % _ALIGNMENT == 0 else 1,
    )


def _static_dims(annotation: Any) -> tuple[int, ...]:
    return tuple(getattr(annotation, "static_shape_dims", None) or ())


_ALIGNMENT = 16
"""cuTile specialises on divisibility by this: bytes of addresses and strides, elements of shapes."""

_MOST_SPECIALISED_DIMENSIONS = 5


def _disjoint(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two indices can share memory, by cuTile's sufficient test on the strides in ascending order."""
    if not shape:
        return True
    ordered = sorted(zip(strides, shape, strict=True))
    return ordered[0][0] > 0 and all(
        outer > 0 and outer >= inner * size for (inner, size), (outer, _) in zip(ordered, ordered[1:], strict=False)
    )


# Compiling ------------------------------------------------------------------------------------------------------


def compile_cubin(
    kernel: Any, hints: Mapping[str, int], signature: str, arch: Arch, *, timeout_s: float | None = None
) -> bytes:
    """Compile one kernel for one signature, without a GPU.

    On a tested release, source paths and line numbers are left out, so that equal code gives equal bytes from any
    directory. Holds a process-wide lock inside cuTile: run it in several processes, not threads.

    Args:
        kernel: A ``@ct.kernel``.
        hints: Compiler hints.
        signature: As `signature_of` gives it.
        arch: Target.
        timeout_s: Limit for the compiler's run, seconds.

    Raises:
        CutileError: The compiler refused it, crashed or ran too long; the message starts with its own words.
    """
    from cuda.tile import TileError
    from cuda.tile.compilation import demangle_kernel_name, export_kernel

    hinted = kernel.replace_hints(**hints)
    parsed = demangle_kernel_name(signature)[1].with_symbol(signature)
    try:
        if private_names_known():
            return _compile_anonymous(hinted, parsed, arch, timeout_s)
        buffer = io.BytesIO()
        export_kernel(hinted, [parsed], buffer, gpu_code=arch.cutile_name, output_format="cubin")
        return buffer.getvalue()
    except TileError as error:
        raise CutileError(str(error)) from error


def _compile_anonymous(hinted: Any, signature: Any, arch: Arch, timeout_s: float | None) -> bytes:
    from cuda.tile import _compile
    from cuda.tile._cext import TileContext, default_tile_context

    config = dataclasses.replace(default_tile_context.config, compiler_timeout_sec=timeout_s, cache_dir=None)
    named = _compile._get_bytecode

    def anonymous(keeper: Any, options: Any, anonymize_debug_info: bool) -> Any:
        return named(keeper, options, anonymize_debug_info=True)

    with _compile._compiler_lock:
        _compile._get_bytecode = anonymous
        try:
            result = _compile.compile_tile(
                hinted._annotated_function,
                (signature,),
                arch.cutile_name,
                hinted._compiler_options,
                TileContext(config=config),
            )
        finally:
            _compile._get_bytecode = named
    cubin: bytes = result.cubin
    return cubin
