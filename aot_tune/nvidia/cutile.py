"""The one module that uses cuTile's private names: only on tested releases, each with a public way as well.

Importing it imports neither cuda.tile nor torch; each function does, when it is called.

A *signature* is cuTile's own mangled symbol, such as ``matmul_kernel_Kt1_A2bf16_...``: a text that says all
the compiler assumes of the arguments, so that a cubin can be compiled in one process and launched in another.
`aot_tune.nvidia.signature` derives it from the arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from aot_tune.errors import CompilerMissingError, CutileError
from aot_tune.nvidia import signature
from aot_tune.values.arch import Arch
from aot_tune.values.config import HINTS

TESTED_VERSIONS = ((1, 6), (1, 7))
"""The releases of cuda-tile whose private names were checked; on others the public way is taken."""

TUNE_SINCE = (1, 7)
"""The first release whose ``exhaustive_search`` takes ``flush_l2=False``, which leaves the L2 cache alone."""

DEPENDENT_SINCE = (1, 6)
"""The first release whose ``launch`` is known to take ``programmatic_dependent_launch``."""

_DEPENDENT_ARCH = Arch(9, 0)
"""The first arch with programmatic dependent launches."""

_OWN = "_own_of_cutile"
"""The attribute of a function in the place of one of cuTile's that holds cuTile's own."""

TEMP_DIR = "CUDA_TILE_TEMP_DIR"
"""The environment variable that names the folder for the compiler's files. Without it, importing cuda.tile
makes one among the temporary files, which is removed at exit."""

_NOT_FOR_FILES = str(Path(__file__).parent)
"""The folder that `TEMP_DIR` names where none can be written to. Nothing is written there."""

_COMPILER_PACKAGE = "nvidia-cuda-tileiras"
"""The pip package of cuTile's compiler."""

PASSED_ON = "launch_passed_on"
"""A global variable of modules whose functions stand in the place of cuTile's launch and call it."""

UNCHECKED = "arguments_unchecked"
"""A global variable of functions that launch without looking at the arguments again: see `with_hints`."""

T = TypeVar("T")


class Cubin(NamedTuple):
    """Compiled code that can be loaded."""

    code: bytes
    """The content of the ELF file."""

    symbol: str
    """The kernel's name in that file."""


CubinSource = Callable[[str, Arch], "Cubin | None"]
"""A function from (signature, arch of the GPU) to the cubin made for them, or None to let cuTile compile."""


def allow_no_temporary_folder() -> None:
    """Let cuda.tile be imported where no folder can be written to; to be called before it is.

    Its import would fail for want of a temporary folder, which only compiling needs. Elsewhere nothing is
    changed: in a folder that cuTile did not make, it would leave the compiler's files behind.
    """
    if "cuda.tile" in sys.modules or os.environ.get(TEMP_DIR):
        return
    try:
        tempfile.gettempdir()  # cuTile's import asks the same, and this answer is kept
    except FileNotFoundError:
        os.environ[TEMP_DIR] = _NOT_FOR_FILES


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
    except Exception:  # not installed, not executable, another layout: each means that none can be used
        return None
    numbers = re.findall(r"\bV?(\d+(?:\.\d+)+)", answer)
    return numbers[-1] if numbers else answer.strip() or None


def packaged_compiler() -> str | None:
    """The version of the compiler's pip package, which is the compiler's; None where it is not installed.

    It takes 1 ms. Asking the compiler itself, which may be a toolkit's, takes 190 ms (`compiler_version`).
    """
    try:
        return metadata.version(_COMPILER_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def may_have_compiler() -> bool:
    """Whether there seems to be a compiler. Spares importing cuTile's compiling half, which takes 143 ms.

    It looks where cuTile looks: its pip package, PATH, CUDA_HOME and the toolkit's usual folder. One that has
    no folder for its files does not count.
    """
    if os.environ.get(TEMP_DIR) == _NOT_FOR_FILES:
        return False
    if packaged_compiler() is not None:
        return True
    home = os.environ.get("CUDA_HOME")
    folders = [*([Path(home, "bin")] if home else ()), *Path("/usr/local").glob("cuda*/bin")]
    found = shutil.which("tileiras") or any(shutil.which("tileiras", path=str(f)) for f in folders)
    return bool(found)


# Kernels ----------------------------------------------------------------------------------------------------


def is_kernel(kernel: object) -> bool:
    """Whether an object is a ``@ct.kernel``."""
    import cuda.tile as ct

    return isinstance(kernel, ct.kernel)


def public_names() -> dict[int, str]:
    """The public names of cuda.tile by the identity of what they name."""
    import cuda.tile as ct

    return {id(getattr(ct, name)): name for name in ct.__all__ if hasattr(ct, name)}


def public_object(name: str) -> Any:
    """What a public name of cuda.tile names: a function, a dtype or a class."""
    import cuda.tile as ct

    return getattr(ct, name)


def python_function(kernel: Any) -> Any:
    """The Python function a kernel was made of."""
    return kernel._annotated_function.pyfunc


def is_kernel_like(value: object) -> bool:
    """Whether an object looks like a ``@ct.kernel``; unlike `is_kernel` it does not import cuda.tile."""
    return hasattr(value, "_annotated_function")


def default_hints(kernel: Any) -> dict[str, object]:
    """The hints written in a kernel's decorator."""
    options = getattr(kernel, "_compiler_options", None)
    return {name: value for name in HINTS if (value := getattr(options, name, None)) is not None}


def constant_parameters(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's ``ct.Constant`` parameters, in order."""
    return tuple(name for name, node in parameters(kernel) if getattr(node, "constant", False))


def with_hints(kernel: Any, hints: Mapping[str, int | None], cubins: CubinSource | None = None) -> Any:
    """Make a kernel with these hints and an empty JIT cache of its own. Takes 52 to 65 us.

    Where `cubins` is given and heeded, a function with a true global `UNCHECKED` cannot make the kernel load
    code for an array whose own elements may share memory, as those of an expanded view do: its launch raises
    a TypeError. This costs other launches nothing, because cuTile's JIT key says of each array whether its
    elements may share memory. So a caller that checked the arguments of one launch need not look at those of
    the next: code for such arrays is there only if it was loaded for checked ones.

    Args:
        kernel: A ``@ct.kernel``.
        hints: The hints that ``replace_hints`` takes; None takes one of the decorator's away.
        cubins: Called before each compilation; ignored on a cuda-tile release that was not tested.
    """
    hinted = kernel.replace_hints(**hints)
    if cubins is None or not private_names_known():
        return hinted
    return _prebuilt_class()(hinted, cubins)


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
        """A kernel whose cubins were compiled elsewhere; cuTile calls `_compile` for code not yet loaded."""

        def __new__(cls, hinted: Any, cubins: CubinSource) -> Any:
            return super().__new__(cls, hinted._pyfunc)

        def __init__(self, hinted: Any, cubins: CubinSource) -> None:
            super().__init__(hinted._pyfunc)
            self._compiler_options = hinted._compiler_options
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
            # exhaustive_search calls this even without hints, and would get a plain kernel, which compiles
            # again.
            return super().replace_hints(**hints) if hints else self

    return PrebuiltKernel


def _may_overlap(parameter: Any) -> bool:
    """Whether the elements of an array, or of one in a list, may share memory."""
    return bool(getattr(getattr(parameter, "element", parameter), "may_alias_internally", False))


CubinsOf = Callable[[Any, Arch], "CubinSource | None"]
"""A function from (kernel, arch of the GPU) to the source of its cubins; None to leave the kernel alone."""

_cubins_of: list[CubinsOf] = []
"""What `let_kernels_ask` was given last."""


def let_kernels_ask(cubins_of: CubinsOf | None) -> None:
    """Let every kernel of this process ask for a cubin before code of it is compiled; None ends that.

    A launch of code that is loaded costs what it always did. On a cuda-tile release that was not tested
    nothing is changed.
    """
    if not private_names_known():
        return
    from cuda.tile._execution import kernel  # cuda.tile itself may be half imported

    own = _own_compile()
    _cubins_of[:] = [] if cubins_of is None else [cubins_of]
    if cubins_of is not None and kernel._compile is own:
        kernel._compile = _asking(own)
    elif cubins_of is None and hasattr(kernel._compile, _OWN):
        kernel._compile = own


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    """The method in the place of cuTile's own."""

    def _compile(self: Any, signature: Any, context: Any, compute_capability: Any = None) -> Any:
        for cubins_of in _cubins_of:  # none, where another's method stands before this one for good
            arch = _arch_of(compute_capability)
            cubins = cubins_of(self, arch)
            if cubins is not None:
                return _code(own, self, cubins, signature, context, arch)
        return own(self, signature, context, compute_capability)

    setattr(_compile, _OWN, own)
    return _compile


def _own_compile() -> Callable[..., Any]:
    """CuTile's method that compiles, also where another stands in its place."""
    from cuda.tile._execution import kernel

    own: Callable[..., Any] = getattr(kernel._compile, _OWN, kernel._compile)
    return own


def _arch_of(compute_capability: tuple[int, int] | None) -> Arch:
    """The arch that cuTile asks for code for."""
    from cuda.tile._cext import get_compute_capability

    return Arch(*(compute_capability or get_compute_capability()))


def _code(
    own: Callable[..., Any], kernel: Any, cubins: CubinSource, signature: Any, context: Any, arch: Arch
) -> Any:
    """What cuTile loads for a signature: the cubin that was made for it, else what `own` compiles.

    Raises:
        CompilerMissingError: There is neither a cubin nor a compiler.
    """
    symbol = _mangled(signature, symbol_of(kernel))
    cubin = cubins(symbol, arch)
    if cubin is not None:
        return cubin.code, cubin.symbol, None, () if release() >= (1, 7) else []
    # Asked this way because the compiling half of cuTile is missing from a serving image.
    if not may_have_compiler():
        raise CompilerMissingError(
            f"no cubin was shipped for {symbol}, and no compiler (tileiras) is here to make one; "
            "ship it (aot-tune compile), or install the compiler: pip install 'aot-tune[tune]'"
        )
    capability = arch.major, arch.minor
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


def _mangled(signature: Any, name: str) -> str:
    """The text that ``with_mangled_symbol`` makes, which parses it as a check: 0.7 ms of a launch's 2 ms."""
    from cuda.tile.compilation import _name_mangling as names

    groups, _ = names._map_alias_groups(signature.parameters)
    collected = names._CollectedGlobals(dataclasses=set(), enums=set())
    parts = (names._mangle_constraint(one, groups, collected) for one in signature.parameters)
    return "_".join([f"{name}_K{signature.calling_convention.code}", *parts])


# Signatures -------------------------------------------------------------------------------------------------


def signature_of(kernel: Any, kernel_args: Sequence[Any]) -> str:
    """The signature that cuTile would compile for these kernel arguments, derived without a GPU or a driver.

    Tensors may be on device "meta"; they are then taken to start at an address that an allocator would give.

    Raises:
        CutileError: An argument is of a kind that has no signature.
    """
    return signature.signature_of(symbol_of(kernel), parameters(kernel), kernel_args)


def weakest_signature(kernel: Any, strong: str) -> str:
    """The signature that assumes nothing of the arrays; a kernel compiled for it serves `strong` as well."""
    return signature.weakest(strong, parameters(kernel))


def symbol_of(kernel: Any) -> str:
    """The name of the function a kernel was made of: also the kernel's name in the cubins of an archive."""
    return str(python_function(kernel).__name__)


def parameters(kernel: Any) -> list[tuple[str, Any]]:
    """Name and annotation of each parameter."""
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
    hints_of: Callable[[T], dict[str, Any]] | None = None,
    flush_l2: bool = True,
) -> Any:
    """Time configs with ``cuda.tile.tune.exhaustive_search``, which prints nothing here.

    Args:
        configs: The configs to time, one or more.
        stream: The handle of the CUDA stream to launch on.
        kernel: A ``@ct.kernel``, or a function from a config to one.
        grid_of: A function from a config to its grid.
        args_of: A function from a config to the kernel's arguments; called before every launch.
        hints_of: A function from a config to compiler hints, where `kernel` does not have them already.
        flush_l2: Whether cuTile writes to all of the L2 cache before each sample, as release 1.6 always does.

    Returns:
        cuTile's ``TuningResult``: ``best`` and ``successes`` with the mean in microseconds, and ``failures``.

    Raises:
        CutileError: `flush_l2` is False and the installed release cannot leave the cache alone.
        ValueError: No config ran.
    """
    exhaustive_search = own_search()
    options: dict[str, Any] = {} if hints_of is None else {"hints_fn": hints_of}
    if not flush_l2:
        if release() < TUNE_SINCE:
            since = ".".join(map(str, TUNE_SINCE))
            raise CutileError(
                f"cuda-tile {version()} always writes to the L2 cache before it times a launch; "
                f"install cuda-tile {since} or later: pip install 'cuda-tile>={since}'"
            )
        options["flush_l2"] = False
    return exhaustive_search(configs, stream, grid_of, kernel, args_of, quiet=True, **options)


def own_search() -> Callable[..., Any]:
    """The ``exhaustive_search`` of cuTile, also where another function stands in its place."""
    from cuda.tile.tune import exhaustive_search

    original: Callable[..., Any] = getattr(exhaustive_search, _OWN, exhaustive_search)
    return original


def stands_in(function: object) -> bool:
    """Whether a function was marked by `standing_in`."""
    return hasattr(function, _OWN)


def standing_in(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that stands in the place of cuTile's ``exhaustive_search``, and return it."""
    setattr(function, _OWN, original)
    return function


def measurement(config: Any, *, mean_us: float, error_margin_us: float, num_samples: int) -> Any:
    """A ``Measurement`` of cuTile: a config of a library with its time in microseconds."""
    from cuda.tile.tune import Measurement

    return Measurement(
        config=config, mean_us=mean_us, num_samples=num_samples, error_margin_us=error_margin_us
    )


def result_of(best: Any, successes: tuple[Any, ...], failures: tuple[Any, ...] = ()) -> Any:
    """A ``TuningResult`` of cuTile, made of measurements and of (config, type of exception, message)."""
    from cuda.tile.tune import TuningResult

    return TuningResult(best=best, successes=successes, failures=failures)


def launch(stream: Any, grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
    """Launch a kernel of somebody else's."""
    launching()(stream, grid, kernel, args)


def launching() -> Callable[..., Any]:
    """The function that launches a kernel: ``cuda.tile.launch``, or what a library put in its place."""
    import cuda.tile as ct

    function: Callable[..., Any] = ct.launch
    return function


def launcher(*, programmatic_dependent_launch: bool, arch: Arch) -> Callable[..., Any]:
    """The function that launches a kernel of a declaration on an arch: ``cuda.tile.launch``.

    Args:
        programmatic_dependent_launch: Whether the kernel may begin before the one before it in its stream has
            ended. Where the arch, the installed release, or what a library put in the place of
            ``cuda.tile.launch`` has no such launches it begins after it, which is right too.
        arch: The arch of the GPU.
    """
    function = launching()
    known = arch >= _DEPENDENT_ARCH and release() >= DEPENDENT_SINCE
    if programmatic_dependent_launch and known and _takes(function, "programmatic_dependent_launch"):
        return partial(function, programmatic_dependent_launch=True)
    return function


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function takes a keyword, as far as its signature tells."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C without one
        return True
    return any(one.name == keyword or one.kind is one.VAR_KEYWORD for one in parameters)


def hints_of(kernel: Any, arch: Arch) -> dict[str, int]:
    """The hints with which a kernel is compiled for an arch, those of its decorator among them."""
    found: dict[str, int] = {}
    for name, value in default_hints(kernel).items():
        number: Any = _for_target(value, arch)
        if number is not None:
            found[name] = int(number)
    return found


def _for_target(value: object, arch: Arch) -> object:
    """The number that a hint has on an arch: a ``ByTarget`` lists archs and may have a default."""
    if isinstance(value, int):
        return value
    by_target: Mapping[str, object] = getattr(value, "_by_target", {})
    if arch.cutile_name in by_target:
        return by_target[arch.cutile_name]
    default = getattr(value, "_default", None)
    return default if isinstance(default, int) else None


def hint_on(value: object, arch: Arch) -> object:
    """The value that a hint has on an arch: a ``ByTarget`` gives the arch's, or its default, or None."""
    by_target: Mapping[str, object] | None = getattr(value, "_by_target", None)
    if by_target is None:
        return value
    default = getattr(value, "_default", None)
    absent = type(default).__name__ == "_UnspecifiedType"
    return by_target.get(arch.cutile_name, None if absent else default)


def compiler_limit() -> float | None:
    """The compiler's limit here, seconds, as ``ct.compiler_timeout`` sets it; None where there is none.

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
) -> bytes:
    """Compile one kernel for one signature, without a GPU.

    On a tested release, source paths and line numbers are left out, so that equal code gives equal bytes in
    any directory. It holds a lock of cuTile that is process-wide: run it in several processes, not threads.

    Args:
        kernel: A ``@ct.kernel``.
        hints: The compiler hints, beside those of the decorator.
        signature: A signature that `signature_of` returned.
        arch: The arch to compile for.
        timeout_s: The longest time that the compiler may run, seconds.
        symbol: The kernel's name in the cubin; without one the signature is its name.

    Raises:
        CutileError: The compiler refused it, crashed or ran too long; the message starts with cuTile's own.
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
