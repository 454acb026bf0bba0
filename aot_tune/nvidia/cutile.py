"""The one module that knows cuTile's private names, guarded by version, each with a public way beside it.

Importing it imports neither cuda.tile nor torch; each function does, when it is called.
What a *signature* is, says `aot_tune.nvidia.signature`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from aot_tune.errors import CompilerMissingError, CutileError
from aot_tune.nvidia import signature
from aot_tune.values.arch import Arch
from aot_tune.values.config import HINTS

TESTED_VERSIONS = ((1, 6), (1, 7))
"""Releases of cuda-tile whose private names were checked; others take the public way."""

TUNE_SINCE = (1, 7)
"""The first release whose ``exhaustive_search`` can be told to leave the L2 cache alone."""


class Cubin(NamedTuple):
    """Compiled code that can be loaded."""

    code: bytes
    """The file, an ELF."""

    symbol: str
    """What the kernel is called inside."""


CubinSource = Callable[[str, Arch], "Cubin | None"]
"""(signature, arch of the GPU) -> the cubin compiled for it, or None to let cuTile compile."""


# What is installed ------------------------------------------------------------------------------------------


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
    known = len(numbers) == 2 and all(map(str.isdigit, numbers))
    return (int(numbers[0]), int(numbers[1])) if known else (0, 0)


def private_names_known() -> bool:
    """Whether the private names below were checked against the installed release."""
    return release() in TESTED_VERSIONS


@cache
def compiler_version() -> str | None:
    """The version of cuTile's compiler, ``13.4.92``; None when no compiler is installed."""
    try:
        from cuda.tile._compile import _find_compiler_bin

        path = _find_compiler_bin().path
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
        answer = asked.stdout
    except Exception:  # not installed, not executable, another layout: all mean there is none to use
        return None
    numbers = re.findall(r"\bV?(\d+(?:\.\d+)+)", answer)
    return numbers[-1] if numbers else answer.strip() or None


def may_have_compiler() -> bool:
    """Whether a compiler seems to be installed, told without importing cuTile's compiling half (143 ms).

    Looks where cuTile does: its pip package, PATH, CUDA_HOME and the toolkit's usual folder.
    """
    try:
        metadata.version("nvidia-cuda-tileiras")
        return True
    except metadata.PackageNotFoundError:
        home = os.environ.get("CUDA_HOME")
        folders = [*([Path(home, "bin")] if home else ()), *Path("/usr/local").glob("cuda*/bin")]
        found = shutil.which("tileiras") or any(shutil.which("tileiras", path=str(f)) for f in folders)
        return bool(found)


# Kernels ----------------------------------------------------------------------------------------------------


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
    return tuple(name for name, node in parameters(kernel) if getattr(node, "constant", False))


def with_hints(kernel: Any, hints: Mapping[str, int], cubins: CubinSource | None = None) -> Any:
    """A kernel with these hints and an empty JIT cache of its own (52-65 us); not for the launch path.

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
    from cuda.tile._cext import TileContext, get_compute_capability
    from cuda.tile.compilation import _name_mangling as names

    for name in ("cuda.tile._load_libcuda", "ml_dtypes"):  # no driver here; not installed, or unfit
        with suppress(Exception):
            import_module(name)  # else a part of the first launch; neither makes a context

    def symbol_of(signature: Any, name: str) -> str:
        # As `with_mangled_symbol` has it, which then parses the result to check it: 0.7 ms of a launch's 2.
        groups, _ = names._map_alias_groups(signature.parameters)
        told = names._CollectedGlobals(dataclasses=set(), enums=set())
        parts = (names._mangle_constraint(one, groups, told) for one in signature.parameters)
        return "_".join([f"{name}_K{signature.calling_convention.code}", *parts])

    class PrebuiltKernel(ct.kernel):
        """A kernel whose cubins were compiled elsewhere; `_compile` is called for what is not yet loaded."""

        def __new__(cls, hinted: Any, cubins: CubinSource) -> Any:
            return super().__new__(cls, hinted._pyfunc)

        def __init__(self, hinted: Any, cubins: CubinSource) -> None:
            super().__init__(hinted._pyfunc)
            self._compiler_options = hinted._compiler_options
            self._cubins = cubins

        def _compile(self, signature: Any, context: Any, compute_capability: Any = None) -> Any:
            symbol = symbol_of(signature, self._pyfunc.__name__)
            cubin = self._cubins(symbol, Arch(*(compute_capability or get_compute_capability())))
            if cubin is not None:
                return cubin.code, cubin.symbol, None, () if release() >= (1, 7) else []
            if not may_have_compiler():  # told without importing the compiling half
                raise CompilerMissingError(
                    f"no cubin was shipped for {symbol}, and no compiler (tileiras) is here to make one; "
                    "ship it (aot-tune compile), or install the compiler: pip install 'aot-tune[tune]'"
                )
            try:
                return super()._compile(signature, context, compute_capability)
            except Exception as error:
                of_disk_cache = isinstance(error, OSError) or type(error).__module__ == "sqlite3"
                if context.config.cache_dir is None or not of_disk_cache:
                    raise
                # Its folder cannot be made, or its database is broken; compiling needs neither.
                config = dataclasses.replace(context.config, cache_dir=None)
                return super()._compile(signature, TileContext(config=config), compute_capability)

        def replace_hints(self, **hints: Any) -> Any:
            # exhaustive_search calls this even without hints; a plain kernel would compile again.
            return super().replace_hints(**hints) if hints else self

    return PrebuiltKernel


# Signatures -------------------------------------------------------------------------------------------------


def signature_of(kernel: Any, kernel_args: Sequence[Any]) -> str:
    """The signature cuTile would compile for these kernel arguments, derived without a GPU or a driver.

    Tensors may be on device "meta"; their storage is then taken to be aligned as an allocator aligns it.

    Raises:
        CutileError: An argument of a kind that has no signature here.
    """
    return signature.signature_of(symbol_of(kernel), parameters(kernel), kernel_args)


def weakest_signature(kernel: Any, strong: str) -> str:
    """The signature that assumes nothing of the arrays; a kernel compiled for it serves `strong` as well."""
    return signature.weakest(strong, parameters(kernel))


def symbol_of(kernel: Any) -> str:
    """The name of the function a kernel was made of: what a cubin of an archive calls the kernel inside."""
    return str(python_function(kernel).__name__)


def parameters(kernel: Any) -> list[tuple[str, Any]]:
    """Name and annotation of each parameter."""
    annotated = kernel._annotated_function
    return list(zip(annotated.pysig.parameters, annotated.parameter_annotations, strict=True))


def limit_samples(most: int) -> None:
    """Let ``exhaustive_search`` take at most `most` samples of a config in this process, not up to 1000."""
    if private_names_known():
        from cuda.tile.tune import _tune

        _tune._MAX_REPEATS = most


# Compiling --------------------------------------------------------------------------------------------------


def compile_cubin(
    kernel: Any,
    hints: Mapping[str, int],
    signature: str,
    arch: Arch,
    *,
    timeout_s: float | None = None,
    symbol: str | None = None,
) -> bytes:
    """Compile one kernel for one signature, without a GPU.

    On a tested release, source paths and line numbers are left out, so that equal code gives equal bytes from
    any directory. Holds a process-wide lock inside cuTile: run it in several processes, not threads.

    Args:
        kernel: A ``@ct.kernel``.
        hints: Compiler hints.
        signature: As `signature_of` gives it.
        arch: Target.
        timeout_s: Limit for the compiler's run, seconds.
        symbol: What the kernel is called inside; the signature itself where none is given.

    Raises:
        CutileError: The compiler refused it, crashed or ran too long; the message starts with its own words.
    """
    from cuda.tile import TileError
    from cuda.tile.compilation import demangle_kernel_name, export_kernel

    hinted = kernel.replace_hints(**hints)
    parsed = demangle_kernel_name(signature)[1].with_symbol(symbol or signature)
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
            code, options, context = arch.cutile_name, hinted._compiler_options, TileContext(config=config)
            result = _compile.compile_tile(hinted._annotated_function, (signature,), code, options, context)
        finally:
            _compile._get_bytecode = named
    return bytes(result.cubin)
