"""Call cuTile. The only module that uses its private names: on tested releases, each with a public fallback.

The module imports neither cuda.tile nor torch; each function does, when it is called.

A *signature* is cuTile's own mangled symbol, such as ``matmul_kernel_Kt1_A2bf16_...``: a text of all that the
compiler assumes of the arguments, so that a cubin can be compiled in one process and launched in another.
`aot_tune.nvidia.signature` derives it from the arguments.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from aot_tune.errors import CompilerMissingError, CutileError, LaunchError
from aot_tune.nvidia import signature
from aot_tune.nvidia.nvml import driver_version
from aot_tune.values.arch import Arch
from aot_tune.values.config import HINTS

TESTED_VERSIONS = ((1, 6), (1, 7))
"""Releases of cuda-tile whose private names were checked. On other releases public names are used."""

TUNE_SINCE = (1, 7)
"""First release whose ``exhaustive_search`` takes ``flush_l2=False``, which leaves the L2 cache alone."""

_DEPENDENT_ARCH = Arch(9, 0)
"""First arch with programmatic dependent launches."""

_OWN = "_own_of_cutile"
"""Attribute of a function that replaces one of cuTile's; it holds cuTile's function."""

TEMP_DIR = "CUDA_TILE_TEMP_DIR"
"""Environment variable that names the folder for the compiler's files. Without it, importing cuda.tile makes
a temporary folder, which is removed at exit."""

_NOT_FOR_FILES = str(Path(__file__).parent)
"""Value of `TEMP_DIR` where no folder can be written to. Nothing is written there."""

_COMPILER_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""pip packages of cuTile's compiler, first the compiler itself. Used where all are of one major.minor."""

PASSED_ON = "launch_passed_on"
"""Global variable of modules whose functions replace cuTile's launch and call it."""

UNCHECKED = "arguments_unchecked"
"""Global variable of functions that launch without checking the arguments again: see `with_hints`."""

T = TypeVar("T")


class Cubin(NamedTuple):
    """Compiled code that can be loaded."""

    code: bytes
    """Content of the ELF file."""

    symbol: str
    """Kernel's name in that file."""


CubinSource = Callable[[str, Arch], "Cubin | None"]
"""Function from (signature, arch of the GPU) to their cubin, or None to let cuTile compile."""


def allow_no_temporary_folder() -> None:
    """Let cuda.tile be imported where no folder can be written to. Call it before that import.

    The import would fail without a temporary folder, which only compiling needs. Where a folder can be
    written to nothing is changed: in a folder that cuTile did not make, it would leave the compiler's files
    behind.
    """
    if "cuda.tile" in sys.modules or os.environ.get(TEMP_DIR):
        return
    try:
        tempfile.gettempdir()  # cuTile's import calls it too; Python keeps the answer
    except FileNotFoundError:
        os.environ[TEMP_DIR] = _NOT_FOR_FILES


# What is installed ------------------------------------------------------------------------------------------


@cache
def version() -> str:
    """Return the installed cuda-tile's version; empty when it is not installed.

    The imported module knows it. To find its package's metadata, Python lists every folder of `sys.path`.
    """
    known = getattr(sys.modules.get("cuda.tile"), "__version__", None)
    if type(known) is str:
        return known
    try:
        return metadata.version("cuda-tile")
    except metadata.PackageNotFoundError:
        return ""


def release() -> tuple[int, int]:
    """Return the installed cuda-tile's version as (major, minor); (0, 0) when it is not installed."""
    numbers = version().split(".")[:2]
    known = len(numbers) == 2 and all(map(str.isdigit, numbers))
    return (int(numbers[0]), int(numbers[1])) if known else (0, 0)


def private_names_known() -> bool:
    """Whether the private names below were checked against the installed release."""
    return release() in TESTED_VERSIONS


@cache
def compiler_version() -> str | None:
    """Return the version of cuTile's compiler, ``13.4.92``; None when no compiler is installed."""
    try:
        from cuda.tile._compile import _find_compiler_bin

        path = _find_compiler_bin().path
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
        answer = asked.stdout
    except Exception:  # not installed, not executable, another layout: no compiler can be used
        return None
    numbers = re.findall(r"\bV?(\d+(?:\.\d+)+)", answer)
    return numbers[-1] if numbers else answer.strip() or None


def packaged_compiler() -> str | None:
    """Return the version of the compiler's pip package, which is the compiler's; None where it is not used.

    CuTile uses it where all of its packages are installed in one major.minor: a build of torch may bring
    another nvvm. It takes 1 ms, the first time 2 ms. Running the compiler, which may be a toolkit's, takes
    190 ms (`compiler_version`).
    """
    try:
        versions = [metadata.version(package) for package in _COMPILER_PACKAGES]
    except metadata.PackageNotFoundError:
        return None
    return versions[0] if len({tuple(one.split(".")[:2]) for one in versions}) == 1 else None


def may_have_compiler() -> bool:
    """Whether a compiler seems to be installed. Spares the import of cuTile's compiling half, 143 ms.

    The places are cuTile's: the pip packages, PATH, CUDA_HOME and the toolkit's usual folder. A compiler
    without a folder for its files does not count.
    """
    if os.environ.get(TEMP_DIR) == _NOT_FOR_FILES:
        return False
    if packaged_compiler() is not None:
        return True
    home = os.environ.get("CUDA_HOME")
    folders = [*([Path(home, "bin")] if home else ()), *Path("/usr/local").glob("cuda*/bin")]
    return bool(shutil.which("tileiras")) or any(shutil.which("tileiras", path=str(f)) for f in folders)


# Kernels ----------------------------------------------------------------------------------------------------


def is_kernel(kernel: object) -> bool:
    """Whether an object is a ``@ct.kernel``."""
    import cuda.tile as ct

    return isinstance(kernel, ct.kernel)


def public_names() -> dict[int, str]:
    """Return the public names of cuda.tile by the identity of their objects."""
    import cuda.tile as ct

    return {id(getattr(ct, name)): name for name in ct.__all__ if hasattr(ct, name)}


def public_object(name: str) -> Any:
    """Return the object of a public name of cuda.tile: a function, a dtype or a class."""
    import cuda.tile as ct

    return getattr(ct, name)


def python_function(kernel: Any) -> Any:
    """Return the Python function of a kernel."""
    return kernel._annotated_function.pyfunc


def is_kernel_like(value: object) -> bool:
    """Whether an object looks like a ``@ct.kernel``; unlike `is_kernel` it does not import cuda.tile."""
    return hasattr(value, "_annotated_function")


def default_hints(kernel: Any) -> dict[str, object]:
    """Return the hints of a kernel's decorator."""
    options = getattr(kernel, "_compiler_options", None)
    return {name: value for name in HINTS if (value := getattr(options, name, None)) is not None}


def constant_parameters(kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's ``ct.Constant`` parameters, in order."""
    return tuple(name for name, node in parameters(kernel) if getattr(node, "constant", False))


def with_hints(kernel: Any, hints: Mapping[str, int | None], cubins: CubinSource | None = None) -> Any:
    """Make a kernel with these hints and an empty JIT cache of its own. Takes 10 us.

    Where `cubins` is given and used, a function with a true global `UNCHECKED` cannot make the kernel load
    code for an array whose elements may share memory, such as an expanded view: its launch raises a
    TypeError. Other launches cost nothing more, because cuTile's JIT key contains for each array whether its
    elements may share memory. So a caller that checked the arguments of one launch need not check those of
    the next: code for arrays that overlap is loaded only for checked arguments.

    Args:
        kernel: A ``@ct.kernel``.
        hints: The hints for ``replace_hints``; None removes a hint of the decorator.
        cubins: Called before each compilation; ignored on a cuda-tile release that was not tested.
    """
    if cubins is None or not private_names_known():
        return kernel.replace_hints(**hints)
    return _prebuilt_class()(kernel, hints, cubins)


@cache
def _prebuilt_class() -> Any:
    import cuda.tile as ct

    # cuTile would import these during the first launch. None of them makes a CUDA context.
    import_module("cuda.tile.compilation._name_mangling")
    with suppress(ImportError, OSError, AttributeError):  # this machine has no driver
        import_module("cuda.tile._load_libcuda")
    with suppress(
        Exception
    ):  # not installed, or built for another numpy, which raises errors of several types
        import_module("ml_dtypes")

    class PrebuiltKernel(ct.kernel):
        """A kernel with cubins compiled elsewhere; cuTile calls `_compile` for code not yet loaded."""

        def __new__(cls, plain: Any, hints: Mapping[str, int | None], cubins: CubinSource) -> Any:
            return super().__new__(cls, plain._pyfunc)

        def __init__(self, plain: Any, hints: Mapping[str, int | None], cubins: CubinSource) -> None:
            # In place of its class's own __init__, which reads the function's annotations again, 0.2 ms.
            super(ct.kernel, self).__init__(plain._annotated_function.parameter_annotations)
            self._annotated_function = plain._annotated_function
            self._compiler_options = dataclasses.replace(plain._compiler_options, **hints)
            self._cubins = cubins

        def _compile(self, signature: Any, context: Any, compute_capability: Any = None) -> Any:
            caller: FrameType | None = sys._getframe(1)  # cuTile's launch has no frame of its own
            while caller is not None and caller.f_globals.get(PASSED_ON):
                caller = caller.f_back
            unchecked = caller is not None and caller.f_globals.get(UNCHECKED)
            if unchecked and any(map(_may_overlap, signature.parameters)):
                raise TypeError("the elements of an argument may share memory, and it was not checked")
            arch = _arch_of(compute_capability)
            return _code(_own_compile(), self, self._cubins, signature, context, arch)

        def replace_hints(self, **hints: Any) -> Any:
            # exhaustive_search calls this without hints too; a plain kernel would compile again.
            return super().replace_hints(**hints) if hints else self

    return PrebuiltKernel


def _may_overlap(parameter: Any) -> bool:
    """Whether the elements of an array, or of an array in a list, may share memory."""
    return bool(getattr(getattr(parameter, "element", parameter), "may_alias_internally", False))


CubinsOf = Callable[[Any, Arch], CubinSource]
"""Function from (kernel, arch of the GPU) to the source of its cubins."""

Compiled = Callable[[Any, str, Arch], None]
"""Function that receives (kernel, signature, arch of the GPU) of code that was compiled."""

_asked: list[tuple[CubinsOf, Compiled]] = []
"""Last arguments of `let_kernels_ask`; empty for None."""


def let_kernels_ask(
    cubins_of: CubinsOf | None, compiled: Compiled = lambda kernel, signature, arch: None
) -> None:
    """Let every kernel of this process ask for a cubin before it is compiled; None ends that.

    Launches of loaded code cost nothing more. On a cuda-tile release that was not tested nothing is changed.

    Args:
        cubins_of: Returns the source of a kernel's cubins.
        compiled: Called after each compilation.
    """
    if not private_names_known():
        return
    from cuda.tile._execution import kernel  # cuda.tile itself may be half imported

    own = _own_compile()
    _asked[:] = [] if cubins_of is None else [(cubins_of, compiled)]
    if cubins_of is not None and kernel._compile is own:
        kernel._compile = _asking(own)
    elif cubins_of is None and hasattr(kernel._compile, _OWN):
        kernel._compile = own


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method that replaces cuTile's own."""

    def _compile(self: Any, signature: Any, context: Any, compute_capability: Any = None) -> Any:
        for cubins_of, compiled in _asked:  # empty where a library replaced this method for good
            arch = _arch_of(compute_capability)

            def reported(*args: Any, compiled: Compiled = compiled, arch: Arch = arch) -> Any:
                code = own(*args)
                compiled(self, _mangled(signature, symbol_of(self)), arch)
                return code

            return _code(reported, self, cubins_of(self, arch), signature, context, arch)
        return own(self, signature, context, compute_capability)

    setattr(_compile, _OWN, own)
    return _compile


def _own_compile() -> Callable[..., Any]:
    """Return cuTile's own method that compiles, also where it was replaced."""
    from cuda.tile._execution import kernel

    own: Callable[..., Any] = getattr(kernel._compile, _OWN, kernel._compile)
    return own


def _arch_of(compute_capability: tuple[int, int] | None) -> Arch:
    """Return the arch that cuTile requests code for."""
    from cuda.tile._cext import get_compute_capability

    return Arch(*(compute_capability or get_compute_capability()))


def _code(
    own: Callable[..., Any], kernel: Any, cubins: CubinSource, signature: Any, context: Any, arch: Arch
) -> Any:
    """Return the code that cuTile loads for a signature: its cubin, or else the result of `own`.

    Raises:
        CompilerMissingError: There is neither a cubin nor a compiler.
        LaunchError: The driver refuses what the compiler made.
    """
    symbol = _mangled(signature, symbol_of(kernel))
    cubin = cubins(symbol, arch)
    if cubin is not None:
        return cubin.code, cubin.symbol, None, () if release() >= (1, 7) else []
    # Not compiler_version(): the compiling half of cuTile is missing from a serving image.
    if not may_have_compiler():
        raise CompilerMissingError(
            f"no cubin was shipped for {symbol}, and no compiler (tileiras, with nvcc and nvvm of one "
            "release) is here to make one; ship it (aot-tune compile, for a library's launch after aot-tune "
            "record), or install the compiler: pip install 'aot-tune[tune]'"
        )
    capability = arch.major, arch.minor
    compiled = _compiled(own, kernel, signature, context, capability)
    reason = refusal(compiled[0])
    if reason is not None:
        raise LaunchError(
            f"{symbol} was compiled for {arch} by tileiras {compiler_version()}, but {reason}; install a "
            "newer driver, or an older compiler"
        )
    return compiled


def _compiled(
    own: Callable[..., Any], kernel: Any, signature: Any, context: Any, capability: tuple[int, int]
) -> Any:
    try:
        return own(kernel, signature, context, capability)
    except Exception as error:
        of_disk_cache = isinstance(error, OSError) or type(error).__module__ == "sqlite3"
        if context.config.cache_dir is None or not of_disk_cache:
            raise
        from cuda.tile._cext import TileContext

        # The disk cache's folder cannot be made, or its database is broken; compiling needs neither.
        config = dataclasses.replace(context.config, cache_dir=None)
        return own(kernel, signature, TileContext(config=config), capability)


_NOT_FOUND = 500
"""CUDA_ERROR_NOT_FOUND."""

_REFUSALS = {
    200: "invalid image",
    209: "no binary for this GPU",
    218: "invalid PTX",
    222: "unsupported PTX",
    _NOT_FOUND: "no kernel found",
}
"""Errors of the driver for code that it does not know (CUresult), such as that of a newer toolkit."""


def refusal(code: bytes) -> str | None:
    """Return why the driver refuses to load code, with the driver's version; None where it does not.

    A driver that loads lazily takes any code, and finds no kernel in what it does not know. Code that fails
    for another reason, such as memory, is left to its launch. Takes 0.03 ms on an H100, first 0.7 ms.
    """
    try:
        load, count, unload, version = _loading_functions()
    except Exception:  # there is no driver, or an old one
        return None
    library, number = ctypes.c_void_p(), ctypes.c_int()
    error = load(ctypes.byref(library), code, None, None, 0, None, None, 0)
    if not error:
        error = _NOT_FOUND if not count(ctypes.byref(number), library) and number.value == 0 else 0
        unload(library)
    if error not in _REFUSALS:
        return None
    version(ctypes.byref(number))
    driver = f"{driver_version() or ''} (CUDA {number.value // 1000}.{number.value % 1000 // 10})".strip()
    return f"the driver {driver} refuses it: {_REFUSALS[error]}, error {error}"


@cache
def _loading_functions() -> Sequence[Callable[..., int]]:
    """Return the driver's functions to load code, count its kernels, unload it and ask for the version."""
    from cuda.tile._load_libcuda import cuGetProcAddress_v2_ptrptr

    pointer, integer, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    types: dict[str, tuple[Any, ...]] = {
        "cuLibraryLoadData": (pointer, ctypes.c_char_p, *[pointer] * 2, unsigned, *[pointer] * 2, unsigned),
        "cuLibraryGetKernelCount": (pointer, pointer),
        "cuLibraryUnload": (pointer,),
        "cuDriverGetVersion": (pointer,),
    }
    finding = ctypes.CFUNCTYPE(integer, ctypes.c_char_p, pointer, integer, ctypes.c_uint64, pointer)
    find, functions = finding.from_address(cuGetProcAddress_v2_ptrptr), []
    for name, arguments in types.items():
        function = ctypes.CFUNCTYPE(integer, *arguments)()
        if find(name.encode(), ctypes.byref(function), 12040, 0, None) or not function:
            raise OSError(f"the driver has no {name}")
        functions.append(function)
    return functions


def _mangled(signature: Any, name: str) -> str:
    """Return the text of ``with_mangled_symbol`` without its check by parsing: 0.7 ms of a launch's 2 ms."""
    from cuda.tile.compilation import _name_mangling as names

    groups, _ = names._map_alias_groups(signature.parameters)
    collected = names._CollectedGlobals(dataclasses=set(), enums=set())
    parts = (names._mangle_constraint(parameter, groups, collected) for parameter in signature.parameters)
    return "_".join([f"{name}_K{signature.calling_convention.code}", *parts])


COMPILING = "cuda.tile._compile"
"""CuTile's compiling half, which the first compilation imports."""


def answer_for_compiler(compiler_of: Callable[[str], str | None] | None) -> None:
    """Let an absent compiler's newest bytecode be answered for a known version; None ends that.

    Libraries ask for it while they are imported, and compile the answer in. Nothing changes where there is a
    compiler, nor before cuTile's compiling half is imported.

    Args:
        compiler_of: Function from the module that asks to its compiler's version; None where unknown.
    """
    compiling: Any = sys.modules.get(COMPILING)
    replaced: Any = getattr(compiling, _ASKED, None)
    if replaced is None or not private_names_known():
        return
    own = getattr(replaced, _OWN, replaced)
    setattr(compiling, _ASKED, own)
    if compiler_of is None:
        return

    def newest(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except FileNotFoundError:  # no compiler is here
            version = compiler_of(str(sys._getframe(1).f_globals.get("__name__")))
            until = [int(number) for number in (version or "").split(".")[:2] if number.isdecimal()]
            known = [one for one in compiling._SUPPORTED_VERSIONS if [one.major(), one.minor()] <= until]
            if not known:
                raise
            return max(known)

    setattr(newest, _OWN, own)
    setattr(compiling, _ASKED, newest)


_ASKED = "_get_max_supported_bytecode_version"
"""CuTile's function that asks the compiler for its newest bytecode."""


def _wait_for_import() -> None:
    """Wait until another thread has imported cuTile's compiling half: a forked child would wait for ever."""
    if COMPILING in sys.modules:
        with suppress(Exception):
            import_module(COMPILING)


def _renew_lock() -> None:
    """Renew cuTile's lock in a forked child: the thread that compiles stays in the parent."""
    compiling: Any = sys.modules.get(COMPILING)
    if hasattr(compiling, "_compiler_lock") and private_names_known():
        compiling._compiler_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_import, after_in_child=_renew_lock)


# Signatures -------------------------------------------------------------------------------------------------


def signature_of(kernel: Any, kernel_args: Sequence[Any]) -> str:
    """Derive the signature that cuTile would compile for these arguments, without a GPU or a driver.

    Tensors may be on device "meta"; their addresses are then assumed to be aligned, as an allocator's are.

    Raises:
        CutileError: An argument is of a kind that has no signature.
    """
    return signature.signature_of(symbol_of(kernel), parameters(kernel), kernel_args)


def weakest_signature(kernel: Any, strong: str) -> str:
    """Return the signature that assumes nothing of the arrays. Its code serves `strong` as well."""
    return signature.weakest(strong, parameters(kernel))


def symbol_of(kernel: Any) -> str:
    """Return the name of a kernel's function, which is also its name in the cubins of an archive."""
    return str(python_function(kernel).__name__)


def parameters(kernel: Any) -> list[tuple[str, Any]]:
    """Return the name and annotation of each parameter."""
    annotated = kernel._annotated_function
    return list(zip(annotated.pysig.parameters, annotated.parameter_annotations, strict=True))


# Searching --------------------------------------------------------------------------------------------------


def search(
    configs: Sequence[T],
    stream: int,
    *,
    kernel: Any,
    grid_of: Callable[[T], tuple[int, ...]],
    args_of: Callable[[T], tuple[Any, ...]],
    flush_l2: bool = True,
) -> Any:
    """Time configs with ``cuda.tile.tune.exhaustive_search``, which prints nothing here.

    Args:
        configs: The configs to time, one or more.
        stream: The handle of the CUDA stream to launch on.
        kernel: A ``@ct.kernel``, or a function from a config to a kernel.
        grid_of: A function from a config to its grid.
        args_of: A function from a config to the kernel's arguments; called before every launch.
        flush_l2: Whether cuTile writes to all of the L2 cache before each sample, as release 1.6 always does;
            only releases since `TUNE_SINCE` take False.

    Returns:
        cuTile's ``TuningResult``: ``best`` and ``successes`` with the mean in microseconds, and ``failures``.

    Raises:
        ValueError: No config ran.
    """
    exhaustive_search = own_search()
    options: dict[str, Any] = {} if flush_l2 else {"flush_l2": False}
    return exhaustive_search(configs, stream, grid_of, kernel, args_of, quiet=True, **options)


def own_search() -> Callable[..., Any]:
    """Return cuTile's own ``exhaustive_search``, also where it was replaced."""
    from cuda.tile.tune import exhaustive_search

    original: Callable[..., Any] = getattr(exhaustive_search, _OWN, exhaustive_search)
    return original


def stands_in(function: object) -> bool:
    """Whether a function was marked by `standing_in`."""
    return hasattr(function, _OWN)


def standing_in(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that replaces cuTile's ``exhaustive_search``, and return it."""
    setattr(function, _OWN, original)
    return function


def measurement(config: Any, *, mean_us: float, error_margin_us: float, num_samples: int) -> Any:
    """Make cuTile's ``Measurement`` of a library's config, with its time in microseconds."""
    from cuda.tile.tune import Measurement

    return Measurement(
        config=config, mean_us=mean_us, num_samples=num_samples, error_margin_us=error_margin_us
    )


def result_of(best: Any, successes: tuple[Any, ...], failures: tuple[Any, ...] = ()) -> Any:
    """Make cuTile's ``TuningResult`` of measurements and of (config, type of exception, message)."""
    from cuda.tile.tune import TuningResult

    return TuningResult(best=best, successes=successes, failures=failures)


def launch(stream: Any, grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
    """Launch a kernel that no declaration has."""
    launching()(stream, grid, kernel, args)


def launching() -> Callable[..., Any]:
    """Return the function that launches a kernel: ``cuda.tile.launch``, or a library's replacement."""
    import cuda.tile as ct

    function: Callable[..., Any] = ct.launch
    return function


def launcher(*, programmatic_dependent_launch: bool, arch: Arch) -> Callable[..., Any]:
    """Return the function that launches a declaration's kernel on an arch: ``cuda.tile.launch``.

    Args:
        programmatic_dependent_launch: Whether the kernel may begin before the previous kernel in its stream
            has ended. It begins afterwards, which is right too, where the arch, the installed release, or a
            library's replacement of ``cuda.tile.launch`` has no such launches.
        arch: The arch of the GPU.
    """
    function = launching()
    known = arch >= _DEPENDENT_ARCH and _takes(function, "programmatic_dependent_launch")
    if programmatic_dependent_launch and known:
        return partial(function, programmatic_dependent_launch=True)
    return function


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function takes a keyword, by its Python signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C without a signature
        return True
    return any(
        parameter.name == keyword or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )


def hints_of(kernel: Any, arch: Arch) -> dict[str, int]:
    """Return the hints for compiling a kernel for an arch, with the decorator's."""
    on_arch = {name: hint_on(value, arch) for name, value in default_hints(kernel).items()}
    return {name: int(number) for name, number in on_arch.items() if number is not None}


def hint_on(value: Any, arch: Arch) -> Any:
    """Return a hint's value on an arch: of a ``ByTarget`` the arch's, or the default, or None."""
    by_target: Mapping[str, object] | None = getattr(value, "_by_target", None)
    if by_target is None:
        return value
    default = getattr(value, "_default", None)
    absent = type(default).__name__ == "_UnspecifiedType"
    return by_target.get(arch.cutile_name, None if absent else default)


def compiler_limit() -> float | None:
    """Return the compiler's time limit, seconds, as ``ct.compiler_timeout`` sets it; None without a limit.

    On a release that was not tested it is None.
    """
    if not private_names_known():
        return None
    from cuda.tile._cext import default_tile_context

    limit: float | None = default_tile_context.config.compiler_timeout_sec
    return limit


def limit_samples(most: int) -> None:
    """Let `search` take at most `most` samples of each config in this process, instead of up to 1000.

    On a release that was not tested it changes nothing.
    """
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
    remarks: Path | None = None,
) -> bytes:
    """Compile one kernel for one signature, without a GPU.

    On a tested release, source paths and line numbers are left out, so that equal code gives equal bytes in
    any directory. It holds a process-wide lock of cuTile: run it in several processes, not threads.

    Args:
        kernel: A ``@ct.kernel``.
        hints: The compiler hints, in addition to the decorator's.
        signature: A signature that `signature_of` returned.
        arch: The arch to compile for.
        timeout_s: The longest time that the compiler may run, seconds.
        symbol: The kernel's name in the cubin; by default the signature.
        remarks: A file for the compiler's remarks, which only a tested release writes.

    Raises:
        CutileError: The compiler refused the kernel, crashed or ran too long; cuTile's message comes first.
    """
    from cuda.tile import TileError
    from cuda.tile.compilation import demangle_kernel_name, export_kernel

    hinted = kernel.replace_hints(**hints)
    parsed = demangle_kernel_name(signature)[1].with_symbol(symbol or signature)
    try:
        if private_names_known():
            return _compile_anonymous(hinted, parsed, arch, timeout_s, remarks)
        buffer = io.BytesIO()
        export_kernel(hinted, [parsed], buffer, gpu_code=arch.cutile_name, output_format="cubin")
        return buffer.getvalue()
    except TileError as error:
        raise CutileError(str(error)) from error


def _compile_anonymous(
    hinted: Any, signature: Any, arch: Arch, timeout_s: float | None, remarks: Path | None
) -> bytes:
    from cuda.tile import _compile
    from cuda.tile._cext import TileContext, default_tile_context

    config = dataclasses.replace(default_tile_context.config, compiler_timeout_sec=timeout_s, cache_dir=None)
    named, run = _compile._get_bytecode, getattr(_compile, "compile_cubin", None)

    def reporting(*args: Any, **more: Any) -> Any:
        assert run is not None
        return run(*args, **{**more, "remarks_output_file": remarks})  # cuTile passes None

    def anonymous(keeper: Any, options: Any, anonymize_debug_info: bool) -> Any:
        return named(keeper, options, anonymize_debug_info=True)

    with _compile._compiler_lock:
        _compile._get_bytecode = anonymous
        if remarks is not None and release() >= TUNE_SINCE:
            _compile.compile_cubin = reporting
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
            if run is not None:
                _compile.compile_cubin = run
    cubin: bytes = result.cubin
    return cubin
