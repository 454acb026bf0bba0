"""The cuTile adapter against cuTile itself: signatures, compiled code, cubins handed over. Runs on the
stand-in driver."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_tune.errors import CutileError
from aot_tune.nvidia import cutile
from aot_tune.values.arch import Arch
from tests.support import driver

driver.install()

import cuda.tile as ct  # noqa: E402 - after the stand-in
from cuda.tile.compilation import CallingConvention, KernelSignature  # noqa: E402

SM90 = Arch.parse("sm90")


@ct.kernel
def _copy(source, target, count, factor, width: ct.Constant[int]):
    row = ct.bid(0)
    ct.store(target, (row, 0), ct.load(source, (row, 0), (1, width)))


class _Array:
    """A tensor's layout at a made-up address, as cuTile's array interface sees it."""

    def __init__(self, layout: torch.Tensor, address: int = 4096) -> None:
        size = layout.element_size()
        kind = {torch.float16: "<f2", torch.float32: "<f4", torch.int64: "<i8", torch.uint8: "|u1"}[
            layout.dtype
        ]
        self.__cuda_array_interface__ = {
            "typestr": kind,
            "shape": tuple(layout.shape),
            "strides": tuple(stride * size for stride in layout.stride()),
            "data": (address, False),
            "version": 3,
        }


def _random_layout(choose: random.Random) -> torch.Tensor:
    rank = choose.randint(0, 6)
    shape = [choose.choice([1, 1, 2, 3, 8, 16, 24, 32, 100, 1024]) for _ in range(rank)]
    strides, step = [0] * rank, 1
    for place in choose.sample(range(rank), rank):
        strides[place] = step
        step = step * shape[place] + choose.choice([0, 0, 0, 1, 8])
    if rank and choose.random() < 0.1:
        strides[choose.randrange(rank)] = 0
    dtype = choose.choice([torch.float16, torch.float32, torch.int64, torch.uint8])
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@pytest.mark.long
def test_signatures_of_random_arrays_equal_cutiles_own() -> None:
    choose = random.Random(0)
    other = torch.empty((32, 32), dtype=torch.float16, device="meta")
    checked = 0
    while checked < 4000:
        layout = _random_layout(choose)
        if any(stride >= 2**31 for stride in layout.stride()):
            continue
        convention = (
            CallingConvention.cutile_python_v2()
            if 1 in layout.shape
            else CallingConvention.cutile_python_v1()
        )
        own = KernelSignature.from_kernel_args(_copy, (_Array(layout), _Array(other), 3, 1.5, 32), convention)
        assert cutile.signature_of(_copy, (layout, other, 3, 1.5, 32)) == own.symbol
        checked += 1


def test_signatures_of_random_lists_equal_cutiles_own() -> None:
    choose = random.Random(1)
    other = torch.empty((32, 32), dtype=torch.float16, device="meta")
    checked = 0
    while checked < 500:
        first = _random_layout(choose)
        more = [_random_layout(choose) for _ in range(40)]
        same = [one for one in more if (one.dtype, one.dim()) == (first.dtype, first.dim())]
        layouts = [first, *same[: choose.randint(0, 2)]]
        if any(stride >= 2**31 for layout in layouts for stride in layout.stride()):
            continue
        unit = any(set(sizes) == {1} for sizes in zip(*(one.shape for one in layouts), strict=True))
        convention = CallingConvention.cutile_python_v2() if unit else CallingConvention.cutile_python_v1()
        arrays = [_Array(layout) for layout in layouts]
        own = KernelSignature.from_kernel_args(_copy, (arrays, _Array(other), 3, 1.5, 32), convention)
        assert cutile.signature_of(_copy, (layouts, other, 3, 1.5, 32)) == own.symbol
        checked += 1


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "pass one or more tensors in it"),
        ([3], "pass one or more tensors in it"),
        ([torch.empty(8, device="meta"), torch.empty(8, 8, device="meta")], "of one dtype and rank in it"),
    ],
)
def test_a_list_that_has_no_signature_is_refused(items: list[object], said: str) -> None:
    with pytest.raises(CutileError, match=f"kernel argument source is a list; .*{said}"):
        cutile.signature_of(_copy, (items, torch.empty(8, device="meta"), 3, 1.5, 32))


@pytest.mark.parametrize(("value", "mark"), [(3, "Si32"), (1.5, "Sf32"), (True, "Sb8")])
def test_scalars_have_cutiles_own_types(value: object, mark: str) -> None:
    array = torch.empty((32, 32), dtype=torch.float16, device="meta")
    own = KernelSignature.from_kernel_args(
        _copy, (_Array(array), _Array(array), value, 1.5, 32), CallingConvention.cutile_python_v1()
    )
    assert f"_{mark}_" in own.symbol
    assert cutile.signature_of(_copy, (array, array, value, 1.5, 32)) == own.symbol


def test_a_wrong_number_of_arguments_names_the_kernels_parameters() -> None:
    with pytest.raises(CutileError, match=r"_copy takes 5 arguments .*width.*args_fn returned 1"):
        cutile.signature_of(_copy, (1,))


def test_constant_parameters_are_named_in_order() -> None:
    assert cutile.constant_parameters(_copy) == ("width",)


@pytest.mark.process
def test_a_kernel_the_compiler_refuses_says_so_in_the_compilers_words() -> None:
    array = torch.empty((32, 32), dtype=torch.float16, device="meta")
    signature = cutile.signature_of(_copy, (array, array, 3, 1.5, 33))  # a tile size must be a power of two
    with pytest.raises(CutileError, match="power"):
        cutile.compile_cubin(_copy, {}, signature, SM90)


_KERNEL_FILE = """
import cuda.tile as ct
@ct.kernel
def double(source, target, width: ct.Constant[int]):
    row = ct.bid(0)
    ct.store(target, (row, 0), ct.load(source, (row, 0), (1, width)) * 2)
"""
_COMPILE_THERE = """
import hashlib, torch, double_kernel
from aot_tune.nvidia import cutile
from aot_tune.values.arch import Arch
array = torch.empty((32, 32), dtype=torch.float16, device="meta")
signature = cutile.signature_of(double_kernel.double, (array, array, 32))
cubin = cutile.compile_cubin(double_kernel.double, {}, signature, Arch.parse("sm90"))
print(hashlib.sha256(cubin).hexdigest())
"""


@pytest.mark.process
def test_equal_code_gives_equal_bytes_from_any_directory_and_line(tmp_path: Path) -> None:
    digests = set()
    for place, blank_lines in (("here", 0), ("there", 7)):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "double_kernel.py").write_text("\n" * blank_lines + _KERNEL_FILE)
        code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(Path.cwd())!r}]\n" + textwrap.dedent(
            _COMPILE_THERE
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


@pytest.mark.process
def test_a_prebuilt_cubin_is_launched_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    array = torch.empty((32, 32), dtype=torch.float16, device="meta")
    arguments = (_Array(array), _Array(array), 3, 1.5, 32)
    signature = cutile.signature_of(_copy, (array, array, 3, 1.5, 32))
    cubin = cutile.compile_cubin(_copy, {"occupancy": 2}, signature, SM90)
    asked = []

    def source(wanted: str, arch: Arch) -> cutile.Cubin:
        asked.append((wanted, arch))
        return cutile.Cubin(cubin, wanted)

    kernel = cutile.with_hints(_copy, {"occupancy": 2}, source)
    usual = _copy.replace_hints(occupancy=2)
    assert vars(kernel).keys() == {*vars(usual), "_cubins"}
    assert kernel._compiler_options == usual._compiler_options
    with pytest.raises(ValueError, match="occupancy"):
        cutile.with_hints(_copy, {"occupancy": 99}, source)
    from cuda.tile import _compile

    monkeypatch.setattr(_compile, "compile_tile", lambda *a, **k: pytest.fail("it compiled"))
    ct.launch(0, (1,), kernel, arguments)
    ct.launch(0, (1,), kernel, arguments)
    assert asked == [(signature, SM90)]
    # exhaustive_search asks for the same kernel without hints: it must not lose its cubins.
    assert kernel.replace_hints() is kernel


@pytest.mark.process
def test_a_signature_without_a_cubin_is_compiled_by_cutile() -> None:
    array = torch.empty((48, 32), dtype=torch.float16, device="meta")
    kernel = cutile.with_hints(_copy, {}, lambda signature, arch: None)
    before = len(driver.DRIVER.launches)
    ct.launch(0, (1,), kernel, (_Array(array), _Array(array), 3, 1.5, 32))
    assert len(driver.DRIVER.launches) == before + 1


def test_the_version_is_the_package_s_and_asked_of_the_imported_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version, ask = metadata.version("cuda-tile"), cutile.version.__wrapped__
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "cuda.tile")
        assert ask() == version
    monkeypatch.setattr(metadata, "version", lambda name: pytest.fail("all packages were searched"))
    assert ask() == version


@pytest.mark.process
def test_an_untested_release_takes_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "version", lambda: "9.9.0")
    array = torch.empty((32, 32), dtype=torch.float16, device="meta")
    signature = cutile.signature_of(_copy, (array, array, 3, 1.5, 32))
    assert cutile.compile_cubin(_copy, {}, signature, SM90)[:4] == b"\x7fELF"
    assert type(cutile.with_hints(_copy, {}, lambda signature, arch: None)) is ct.kernel


def test_the_installed_compiler_is_found() -> None:
    assert shutil.which("tileiras") or (cutile.compiler_version() or "").startswith("13.")


@pytest.mark.parametrize("nvvm", ["13.0.88", None])
def test_a_compiler_beside_parts_of_another_release_is_none(
    nvvm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of torch for CUDA 13.0 brings nvvm 13.0, and cuTile then takes none of the packages."""
    versions = {"nvidia-cuda-tileiras": "13.4.92", "nvidia-cuda-nvcc": "13.4.91", "nvidia-nvvm": "13.4.1"}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(cutile.shutil, "which", lambda name, path=None: None)
    assert (cutile.packaged_compiler(), cutile.may_have_compiler()) == ("13.4.92", True)
    del versions["nvidia-nvvm"]
    versions |= {"nvidia-nvvm": nvvm} if nvvm is not None else {}
    assert (cutile.packaged_compiler(), cutile.may_have_compiler()) == (None, False)


def _search_that_never_settles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Samples that ``exhaustive_search`` takes of a kernel whose times scatter widely."""
    from itertools import cycle

    from cuda.tile.tune import _tune, exhaustive_search

    times = cycle([10.0, 1000.0])
    monkeypatch.setattr(_tune, "_benchmark", lambda *args: next(times))
    result = exhaustive_search([0], 0, lambda c: (1,), _copy, lambda c: (), quiet=True)
    return result.best.num_samples


def test_a_search_that_never_settles_stops_at_the_limit_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.tile.tune import _tune

    monkeypatch.setattr(_tune, "_MAX_REPEATS", _tune._MAX_REPEATS)  # brought back after the test
    assert _search_that_never_settles(monkeypatch) > 25
    cutile.limit_samples(25)
    assert _search_that_never_settles(monkeypatch) == 25


def test_an_untested_release_keeps_its_own_limit_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.tile.tune import _tune

    own = _tune._MAX_REPEATS
    monkeypatch.setattr(cutile, "version", lambda: "9.9.0")
    cutile.limit_samples(25)
    assert own == _tune._MAX_REPEATS


_FINDER = """
import sys, torch, cuda.tile as ct
from aot_tune.nvidia import cutile
class Finder:
    def find_spec(self, name, path, target=None):
        if name in ("cuda.tile._load_libcuda", "ml_dtypes"):
            print("asked for", name)
            raise OSError("libcuda.so.1: no such file") if "cuda" in name else RuntimeError("another numpy")
sys.meta_path.insert(0, Finder())
@ct.kernel
def empty(): pass
cutile.with_hints(empty, {})
print("so far nobody")
for occupancy in (1, 2):
    cutile.with_hints(empty, {"occupancy": occupancy}, lambda signature, arch: None)
print(torch.cuda.is_initialized())
"""


@pytest.mark.process
def test_what_cutile_imports_with_a_launch_is_imported_before_and_need_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(_FINDER)
    told = subprocess.run(
        [sys.executable, str(tmp_path / "found.py")], capture_output=True, text=True, check=True
    )
    asked = ["asked for cuda.tile._load_libcuda", "asked for ml_dtypes"]
    assert told.stdout.splitlines() == ["so far nobody", *asked, "False"]


def _options_of_a_search(monkeypatch: pytest.MonkeyPatch, **options: object) -> dict[str, object]:
    """What `cutile.search` passes to ``exhaustive_search`` beside the configs and functions."""
    passed: dict[str, object] = {}
    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", lambda *args, **given: passed.update(given))
    functions = {"grid_of": lambda config: (1,), "args_of": lambda config: ()}
    cutile.search([0], 0, kernel=_copy, **functions, **options)
    return passed


def test_a_search_passes_only_options_that_release_1_6_knows_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _options_of_a_search(monkeypatch) == {"quiet": True}
    assert _options_of_a_search(monkeypatch, flush_l2=False) == {"quiet": True, "flush_l2": False}


# What a declaration may ask for -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "arch", "passed"),
    [
        (True, "sm90", {"programmatic_dependent_launch": True}),
        (True, "sm100", {"programmatic_dependent_launch": True}),
        (False, "sm90", {}),
        (True, "sm80", {}),
    ],
)
def test_a_dependent_launch_is_asked_for_where_the_arch_has_it(
    monkeypatch: pytest.MonkeyPatch, asked: bool, arch: str, passed: dict[str, bool]
) -> None:
    given: list[dict[str, bool]] = []
    monkeypatch.setattr(ct, "launch", lambda *args, **options: given.append(options))
    launch = cutile.launcher(programmatic_dependent_launch=asked, arch=Arch.parse(arch))
    launch(0, (1,), "kernel", ())
    assert given == [passed]


def test_a_launch_that_a_library_put_there_is_not_asked_for_what_it_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(ct, "launch", lambda stream, grid, kernel, args: given.append((grid, kernel)))
    cutile.launcher(programmatic_dependent_launch=True, arch=Arch(9, 0))(0, (1,), "kernel", ())
    assert given == [((1,), "kernel")]


def test_a_hint_by_target_has_the_archs_value_the_default_or_none() -> None:
    sm90, sm100 = Arch.parse("sm90"), Arch.parse("sm100")
    both, one = ct.ByTarget(sm_100=2, default=1), ct.ByTarget(sm_100=2)
    assert [cutile.hint_on(both, arch) for arch in (sm90, sm100)] == [1, 2]
    assert [cutile.hint_on(one, arch) for arch in (sm90, sm100)] == [None, 2]
    assert cutile.hint_on(4, sm90) == 4


@pytest.mark.process
def test_an_absent_compiler_is_answered_for_by_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.tile import _compile

    def find() -> None:
        raise FileNotFoundError("'tileiras' compiler not found")

    def newest() -> Any:
        return _compile._get_max_supported_bytecode_version(str(tmp_path / f"{len(asking)}"))

    def version_of(module: str) -> str | None:
        asking.append(module)
        return versions.pop()

    asking: list[str] = []
    (tmp_path / "0").mkdir()
    here, version = newest(), cutile.compiler_version()
    versions = [None, "13.0.1", "13.2.91", version, version]
    cutile.answer_for_compiler(version_of)
    try:
        assert (newest(), asking) == (here, [])  # a compiler that is here answers for itself
        monkeypatch.setattr(_compile, "_find_compiler_bin", find)
        _compile._get_max_supported_bytecode_version._own_of_cutile.cache_clear()  # type: ignore[attr-defined]
        assert newest() == newest() == here
        assert newest().as_string() == "13.2"
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match="compiler not found"):
                newest()
    finally:
        cutile.answer_for_compiler(None)
    assert (asking, versions) == ([__name__] * 5, [])
    with pytest.raises(FileNotFoundError, match="compiler not found"):
        newest()
