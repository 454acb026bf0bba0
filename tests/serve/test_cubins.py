"""Which cubins a process serves: only those of this arch, this code, this signature, these hints; else one
warning."""

from __future__ import annotations

import dataclasses
import os
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch

from aot_tune import environment
from aot_tune.choose.choice import Choice
from aot_tune.choose.legality import Legality
from aot_tune.cubins import archive
from aot_tune.cubins.archive import FILE_NAME, CubinKey, Hints
from aot_tune.cubins.origin import declared_code
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.errors import CompilerMissingError, CubinWarning, LaunchError
from aot_tune.kernels import rms_norm_tunable
from aot_tune.nvidia import cutile
from aot_tune.serve import kernels as serving
from aot_tune.serve.kernels import declared_cubins
from aot_tune.serve.launch import dispatch
from aot_tune.serve.launch.dispatch import Dispatcher, dispatcher_of
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support import driver as fake_driver
from tests.support.samples import DEFAULT, SM90, SPACE, scale, scale_table, write

SM100 = Arch.parse("sm100")
HINTS: Hints = tuple(DEFAULT.hints.items())
AT_64, AT_256 = scale_table().portfolio
RAGGED, ALIGNED, UNIT = (
    cutile.signature_of(
        scale.kernel, (tensor := torch.empty(rows, 64, dtype=torch.bfloat16, device="meta"), tensor, 16, 64)
    )
    for rows in (50, 64, 1)
)
WEAKEST = cutile.weakest_signature(scale.kernel, RAGGED)


@pytest.fixture(autouse=True)
def _opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_archives", {})
    monkeypatch.setattr(serving, "_refused", set())
    serving._warn_untested.cache_clear()


@pytest.fixture
def tunable(tmp_path: Path) -> Tunable:
    """The sample kernel, its tables' folder empty."""
    return dataclasses.replace(scale, tables=tmp_path / "tables")


def put(folder: Path, *, arch: Arch = SM90, inside: Arch | None = None, **changed: str) -> Path:
    """An archive of made-up code for two signatures, as `arch` keeps it."""
    origin = dataclasses.replace(origin_of(declared_code(scale), "13.4.92"), **changed)  # type: ignore[arg-type]
    held = {(HINTS, ALIGNED): b"aligned", (HINTS, UNIT): b"unit", (HINTS, WEAKEST): b"weakest"}
    path = folder / str(arch) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel = KernelCubins(kernel="scale", symbol="_scale_kernel", origin=origin, cubins=held)
    path.write_bytes(pack(inside or arch, [kernel]))
    return path


def folder_of(tunable: Tunable) -> Path:
    assert tunable.tables is not None
    return tunable.tables


def with_compiler(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(cutile, "may_have_compiler", lambda: there)


def test_the_cubin_of_exactly_this_signature_is_served_with_its_symbol(tunable: Tunable) -> None:
    put(folder_of(tunable))
    cubins = declared_cubins(tunable)
    assert cubins.find(HINTS, ALIGNED, SM90) == cutile.Cubin(b"aligned", "_scale_kernel")
    assert cubins.find(HINTS, UNIT, SM90) == cutile.Cubin(b"unit", "_scale_kernel")
    assert cubins.has(HINTS, ALIGNED, SM90)
    assert not cubins.has(HINTS, RAGGED, SM90)


def test_other_hints_are_another_kernel(tunable: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder_of(tunable))
    for compiler in (True, False):
        with_compiler(monkeypatch, compiler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CubinWarning)
            assert declared_cubins(tunable).find((("num_ctas", 2), ("occupancy", 1)), ALIGNED, SM90) is None


def test_another_archs_archive_is_not_read(tunable: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder_of(tunable))
    monkeypatch.setattr(archive, "_read", lambda *a: pytest.fail("it was read"))
    assert declared_cubins(tunable).find(HINTS, ALIGNED, SM100) is None


def test_an_archive_in_the_wrong_archs_folder_is_left_out(tunable: Tunable) -> None:
    put(folder_of(tunable), arch=SM100, inside=SM90)
    with pytest.warns(CubinWarning, match="is for sm90, not for sm100"):
        assert declared_cubins(tunable).find(HINTS, ALIGNED, SM100) is None


def test_without_any_archive_nothing_is_said(tunable: Tunable) -> None:
    assert declared_cubins(tunable).find(HINTS, ALIGNED, SM90) is None


def test_a_release_whose_contract_was_not_tested_gets_no_cubin(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(folder_of(tunable))
    monkeypatch.setattr(cutile, "version", lambda: "9.9.0")
    several = [declared_cubins(tunable) for _ in range(2)]  # as of two declarations of a package
    with pytest.warns(CubinWarning) as told:
        assert [cubins.find(HINTS, ALIGNED, SM90) for cubins in several * 2] == [None] * 4
    assert not any(cubins.has(HINTS, ALIGNED, SM90) for cubins in several)
    [line] = [str(one.message) for one in told]
    assert line == (
        f"{path} is left out because loading cubins was not tested with cuda-tile 9.9.0 (1.6 and 1.7 were); "
        "kernels are compiled at their first launch: install a tested release of cuda-tile"
    )


def test_a_release_that_was_not_tested_is_told_of_where_tables_are_loaded_and_only_of_an_archive(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutile, "version", lambda: "9.9.0")
    Dispatcher(tunable).load(SM90)  # there is none
    put(folder_of(tunable))
    Dispatcher(tunable).load(SM100)  # another arch's
    with pytest.warns(CubinWarning, match=r"cuda-tile 9\.9\.0"):
        Dispatcher(tunable).load(SM90)


def test_other_source_is_left_out_with_one_warning(tunable: Tunable) -> None:
    put(folder_of(tunable), source_hash="0" * 16, files={"tests.support.samples": "0" * 64})  # type: ignore[arg-type]
    cubins = declared_cubins(tunable)
    with pytest.warns(
        CubinWarning, match="the file of tests.support.samples is not as it was compiled"
    ) as told:
        assert [cubins.find(HINTS, ALIGNED, SM90) for _ in range(3)] == [None] * 3
    assert len(told) == 1


def test_an_edited_comment_does_not_cost_the_cubins(tunable: Tunable) -> None:
    put(folder_of(tunable), files={"tests.support.samples": "0" * 64})  # type: ignore[arg-type]
    assert declared_cubins(tunable).find(HINTS, ALIGNED, SM90) is not None


# What is not there ------------------------------------------------------------------------------------------


def test_with_a_compiler_a_missing_class_is_compiled_and_said_once(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder_of(tunable))
    with_compiler(monkeypatch, True)
    cubins = declared_cubins(tunable)
    with pytest.warns(CubinWarning, match="cuTile compiles it") as told:
        assert [cubins.find(HINTS, RAGGED, SM90) for _ in range(2)] == [None] * 2
    assert len(told) == 1


def test_ever_new_signatures_of_a_kernel_are_told_with_their_count(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with a size as a constant: one signature a token."""
    put(folder_of(tunable))
    with_compiler(monkeypatch, True)
    cubins = declared_cubins(tunable)
    met = [RAGGED.replace("_I64", f"_I{1000 + size}") for size in range(250)]
    with pytest.warns(CubinWarning) as told:
        assert [cubins.find(HINTS, signature, SM90) for signature in met] == [None] * 250
    first, *counted = (str(one.message) for one in told)
    assert first.endswith("further ones are counted, and reported at 10, 100 and so on")
    assert ["it is the 10th of scale" in counted[0], "it is the 100th of scale" in counted[1]] == [True] * 2
    assert len(told) == 3


def test_without_a_compiler_a_missing_class_of_the_default_runs_the_weakest(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder_of(tunable))
    with_compiler(monkeypatch, False)
    cubins = declared_cubins(tunable)
    with pytest.warns(CubinWarning, match="no compiler here"):
        assert cubins.find(HINTS, RAGGED, SM90) == cutile.Cubin(b"weakest", "_scale_kernel")
    assert cubins.find(HINTS, ALIGNED, SM90) == cutile.Cubin(b"aligned", "_scale_kernel")


def test_a_folder_that_the_user_names_comes_first(
    tunable: Tunable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "mine")
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "mine"))
    assert declared_cubins(tunable).find(HINTS, ALIGNED, SM90) is not None


# Faults of the file: rows B1 and B2 of the fault list in spirit ---------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [_cut, _emptied, _fifo, _folder, _zeros, _dangling])
def test_a_broken_archive_is_a_miss_with_one_warning(
    tunable: Tunable, damage: Callable[[Path], None]
) -> None:
    path = put(folder_of(tunable))
    damage(path)
    cubins = declared_cubins(tunable)
    with pytest.warns(CubinWarning, match=r"cubins\.aot.*aot-tune compile") as told:
        assert [cubins.find(HINTS, ALIGNED, SM90) for _ in range(3)] == [None] * 3
    assert len(told) == 1


def test_a_damaged_cubin_is_a_miss_and_the_others_are_served(tunable: Tunable) -> None:
    path = put(folder_of(tunable))
    data = bytearray(path.read_bytes())
    # The first block is stored whole and the dictionary of the rest: damage the last one.
    section = archive.Archive(path).section("scale")
    assert section is not None
    last = section._blocks[-1]
    start = archive.Archive(path)._body + last.offset
    data[start + last.stored - 3] ^= 0xFF
    path.write_bytes(data)
    cubins = declared_cubins(tunable)
    wanted = {ALIGNED: b"aligned", UNIT: b"unit"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = {signature: cubins.find(HINTS, signature, SM90) for signature in wanted}
        weakest = cubins.find(HINTS, WEAKEST, SM90)
    codes = [*found.values(), weakest]
    assert sum(code is None for code in codes) == 1
    assert sum("is damaged" in str(one.message) for one in told) == 1
    assert all(code is None or code.code == wanted.get(name, b"weakest") for name, code in found.items())


@pytest.mark.parametrize("byte", [0, 1000], ids=["cannot be unpacked", "unpacks to something else"])
@pytest.mark.parametrize("compiler", [True, False])
def test_a_damaged_dictionary_is_one_fault_and_told_once(
    tunable: Tunable, byte: int, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler(monkeypatch, compiler)
    like = random.Random(0).randbytes(archive.WINDOW + 1000)  # longer than what is used as a dictionary
    keys: list[CubinKey] = [
        ((("occupancy", number),), signature)
        for number in range(1, 14)
        for signature in (ALIGNED, RAGGED, UNIT)
    ]
    held = {key: like + bytes([number]) for number, key in enumerate(keys)}
    kernel = KernelCubins(
        kernel="scale", symbol="_scale_kernel", origin=origin_of(declared_code(scale), "1"), cubins=held
    )
    path = folder_of(tunable) / str(SM90) / FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(pack(SM90, [kernel]))
    assert all(declared_cubins(tunable).find(*key, SM90) for key in keys)
    section = archive.Archive(path).section("scale")
    assert section is not None
    data = bytearray(path.read_bytes())
    data[archive.Archive(path)._body + section._blocks[0].offset + byte] ^= 0xFF
    path.write_bytes(data)
    serving._archives.clear()
    cubins = declared_cubins(tunable)
    with pytest.warns(CubinWarning, match="is damaged.*aot-tune compile") as told:
        assert not any(cubins.find(*key, SM90) for key in keys)
    assert len(told) == 1


def test_a_file_removed_while_serving_is_a_miss(tunable: Tunable) -> None:
    path = put(folder_of(tunable))
    cubins = declared_cubins(tunable)
    assert cubins.has(HINTS, ALIGNED, SM90)
    path.unlink()
    with pytest.warns(CubinWarning, match="No such file"):
        assert cubins.find(HINTS, ALIGNED, SM90) is None


def _replace(path: Path, origin: object = None) -> None:
    """Another build of the same code, in whose file each cubin lies elsewhere."""
    held = {(HINTS, signature): b"newer " * 50 + signature.encode() for signature in (RAGGED, ALIGNED, UNIT)}
    kernel = KernelCubins(
        kernel="scale",
        symbol="_newer",
        origin=origin or origin_of(declared_code(scale), "13.4.92"),
        cubins=held,
    )  # type: ignore[arg-type]
    new = path.with_suffix(".new")
    new.write_bytes(pack(SM90, [kernel]))
    os.replace(new, path)


def test_an_archive_that_is_replaced_while_serving_is_opened_again(tunable: Tunable) -> None:
    path = put(folder_of(tunable))
    cubins = declared_cubins(tunable)
    assert cubins.find(HINTS, ALIGNED, SM90) == cutile.Cubin(b"aligned", "_scale_kernel")
    _replace(path)
    for signature in (UNIT, ALIGNED):  # a warning would be an error
        found = cubins.find(HINTS, signature, SM90)
        assert found is not None
        assert found.symbol == "_newer"
        assert found.code.endswith(signature.encode())
    assert cubins.has(HINTS, RAGGED, SM90)
    assert len(serving._archives) == 1


def test_an_archive_replaced_by_that_of_other_code_is_left_out_with_the_reason(tunable: Tunable) -> None:
    path = put(folder_of(tunable))
    cubins = declared_cubins(tunable)
    assert cubins.has(HINTS, UNIT, SM90)
    _replace(
        path,
        dataclasses.replace(
            origin_of(declared_code(scale), "13.4.92"),
            source_hash="0" * 16,
            files={"tests.support.samples": "0" * 64},
        ),
    )
    with pytest.warns(CubinWarning) as told:
        assert cubins.find(HINTS, UNIT, SM90) is None
    assert any("is left out for scale because" in str(one.message) for one in told)


def test_nothing_is_written_and_no_descriptor_stays_open(tunable: Tunable) -> None:
    path = put(folder_of(tunable))
    before = sorted(os.listdir("/proc/self/fd"))
    tree = sorted(path.parent.parent.rglob("*"))
    assert declared_cubins(tunable).find(HINTS, ALIGNED, SM90) is not None
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert sorted(path.parent.parent.rglob("*")) == tree


# At a launch ------------------------------------------------------------------------------------------------


def test_without_cubin_and_compiler_nothing_is_launched_and_the_next_step_is_named(
    driver: fake_driver.Driver, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler(monkeypatch, False)
    cubins = declared_cubins(tunable)
    kernel = cutile.with_hints(scale.kernel, DEFAULT.hints, partial(cubins.find, HINTS))
    array = fake_driver.FakeTensor((50, 64), torch.bfloat16)
    with pytest.raises(CompilerMissingError, match=r"aot-tune compile.*pip install"):
        ct.launch(0, (1,), kernel, (array, array, 16, 64))
    assert driver.launches == []


def test_a_launch_takes_the_archives_cubin_and_its_symbol(
    driver: fake_driver.Driver, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.tile import _compile

    monkeypatch.setattr(_compile, "compile_tile", lambda *a, **k: pytest.fail("it compiled"))
    put(folder_of(tunable))
    cubins = declared_cubins(tunable)
    kernel = cutile.with_hints(scale.kernel, DEFAULT.hints, partial(cubins.find, HINTS))
    for rows in (64, 1):
        array = fake_driver.FakeTensor((rows, 64), torch.bfloat16)
        ct.launch(0, (1,), kernel, (array, array, 16, 64))
    assert [launch.symbol for launch in driver.launches] == ["_scale_kernel", "_scale_kernel"]


INVALID_IMAGE = 200  # CUDA_ERROR_INVALID_IMAGE


def _warnings_of(launch: Callable[[], None], error: type[Exception] | None = None) -> tuple[list[str], str]:
    """The CubinWarnings of two launches, and the error that each raises."""
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with nullcontext() if error is None else pytest.raises(error) as raised:
                launch()
            message = "" if error is None else str(raised.value)
    return [str(w.message) for w in caught if issubclass(w.category, CubinWarning)], message


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
@pytest.mark.parametrize("lazy", [True, False])  # as drivers load, but where CUDA_MODULE_LOADING=EAGER
def test_b18_a_cubin_that_the_driver_refuses_is_one_warning_and_the_kernel_is_compiled(
    lazy: bool, driver: fake_driver.Driver, tunable: Tunable
) -> None:
    path, driver.lazy = put(folder_of(tunable)), lazy
    driver.refuses = lambda head: 0 if head == b"\x7fELF" else INVALID_IMAGE
    array = fake_driver.FakeTensor((64, 64), torch.bfloat16)
    told, _ = _warnings_of(lambda: tunable.launch(array, array))
    assert len(driver.launches) == 2
    assert len(told) == 1
    reason = "no kernel found, error 500" if lazy else "invalid image, error 200"
    assert told[0].startswith(
        f"no cubin of scale in {path} can be loaded on sm90: the driver (CUDA 13.4) refuses it: {reason}; "
        "tileiras 13.4.92 compiled it; "
    )
    cubins = declared_cubins(dataclasses.replace(tunable))
    assert (cubins.find(HINTS, ALIGNED, SM90), cubins.has(HINTS, ALIGNED, SM90)) == (None, False)


@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_b18_without_a_compiler_a_refused_cubin_is_an_error_that_says_so(
    driver: fake_driver.Driver, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(folder_of(tunable))
    driver.refuses = lambda head: INVALID_IMAGE
    with_compiler(monkeypatch, False)
    array = fake_driver.FakeTensor((64, 64), torch.bfloat16)
    told, error = _warnings_of(lambda: tunable.launch(array, array), LaunchError)
    assert (driver.launches, len(told)) == ([], 1)
    assert f"no cubin of scale in {path} can be loaded on sm90: the driver (CUDA 13.4) refuses" in error
    assert "no compiler is here: install a newer driver, or the compiler" in error


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_b18_what_was_just_compiled_and_is_refused_is_an_error_that_names_the_driver(
    driver: fake_driver.Driver,
) -> None:
    driver.refuses = lambda head: INVALID_IMAGE
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 4096), (4096,)))
    fresh = dataclasses.replace(rms_norm_tunable)  # a checkout has no archive
    told, error = _warnings_of(lambda: fresh.launch(x, weight, torch.empty_like(x), 1e-6), LaunchError)
    assert (driver.launches, told) == ([], [])
    assert error.startswith("rms_norm_kernel_K")
    assert "for sm90 by tileiras 13." in error
    assert "but the driver (CUDA 13.4) refuses it: invalid image, error 200; install a newer driver" in error


def test_code_that_fails_to_load_for_another_reason_is_left_to_its_launch(
    driver: fake_driver.Driver, tunable: Tunable
) -> None:
    put(folder_of(tunable))
    driver.refuses = lambda head: 2  # CUDA_ERROR_OUT_OF_MEMORY
    assert declared_cubins(tunable).find(HINTS, ALIGNED, SM90) == cutile.Cubin(b"aligned", "_scale_kernel")


@pytest.mark.parametrize("differs_in", ["strides", "alignment"])
def test_a_layout_without_a_cubin_of_the_tuned_config_runs_the_defaults_weakest(
    differs_in: str, driver: fake_driver.Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: layouts are no part of a plan's key until one has no code, and an image may have no compiler."""
    from cuda.tile import _compile

    monkeypatch.setattr(_compile, "compile_tile", lambda *a, **k: pytest.fail("it compiled"))
    tuned = next(config for config in SPACE if config.hints != DEFAULT.hints and config["tile_m"] != 16)
    chosen = cutile.signature_of(
        scale.kernel,
        (
            tensor := torch.empty(64, 64, dtype=torch.bfloat16, device="meta"),
            tensor,
            tuned["tile_m"],
            tuned["tile_n"],
        ),
    )
    odd = torch.empty_strided((64, 64), (65, 1), dtype=torch.bfloat16, device="meta")
    weak = cutile.weakest_signature(
        scale.kernel, cutile.signature_of(scale.kernel, (odd, odd, 16, DEFAULT["tile_n"]))
    )
    held = {(tuple(tuned.hints.items()), chosen): b"exact", (HINTS, weak): b"weakest"}
    path = tmp_path / "tables" / str(SM90) / FILE_NAME
    path.parent.mkdir(parents=True)
    kernel = KernelCubins(
        kernel="scale", symbol="_scale_kernel", origin=origin_of(declared_code(scale), "13.4.92"), cubins=held
    )
    path.write_bytes(pack(SM90, [kernel]))
    with_compiler(monkeypatch, False)
    here = dataclasses.replace(scale, tables=tmp_path / "tables", default=scale.default)

    def resolve(problem: object, index: object, legality: Legality, *args: object, **named: object) -> Choice:
        lacks = legality.unfit is not None and legality.unfit(tuned) is not None
        return Choice(config=DEFAULT if lacks else tuned, source="own", why=lambda: "scripted")

    monkeypatch.setattr("aot_tune.serve.launch.dispatch.resolve", resolve)
    even = fake_driver.FakeTensor((64, 64), torch.bfloat16)
    if differs_in == "strides":
        ragged = fake_driver.FakeTensor((64, 64), torch.bfloat16, strides=(65, 1))
    else:
        ragged = fake_driver.FakeTensor((64, 64), torch.bfloat16)
        monkeypatch.setattr(ragged, "data_ptr", lambda: even.data_ptr() + 2)
    slow: list[tuple[Any, ...]] = []
    known = dispatcher_of(here)._function.globals
    known["slow"] = lambda *call, own=known["slow"]: slow.append(call[0]) or own(*call)
    here.launch(even, even)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        here.launch(ragged, ragged)  # the memo knows the shape but not the strides
    assert sum(f"{DEFAULT} runs" in str(one.message) for one in told) == 1
    here.launch(even, even)  # whose key tells strides from here on
    assert len(slow) == 3
    driver.capturing = True
    for _ in range(2):
        here.launch(even, even)
        here.launch(ragged, ragged)
    assert len(slow) == 3
    grids = [launch.grid for launch in driver.launches]
    assert len(grids) == 7
    tuned_grid, default_grid = grids[:2]
    assert grids == [tuned_grid, default_grid, tuned_grid, *(tuned_grid, default_grid) * 2]
    assert tuned_grid != default_grid


@pytest.mark.parametrize(("rows", "chosen"), [(64, AT_64), (1, DEFAULT)])
def test_without_a_compiler_the_best_config_that_has_a_cubin_runs(
    rows: int, chosen: Config, driver: fake_driver.Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default that depends on the size has no cubin far from all declared sizes, not even the weakest."""
    write(tmp_path, scale_table())
    here = dataclasses.replace(scale, tables=tmp_path)
    with_compiler(monkeypatch, False)
    array = fake_driver.FakeTensor((rows, 1024), torch.bfloat16)
    assert here.config_for(array, array) == chosen
    with pytest.raises(CompilerMissingError, match=r"aot-tune compile.*pip install"):
        here.launch(array, array)
    args = (array, array, AT_256["tile_m"], AT_256["tile_n"])
    held = {(tuple(AT_256.hints.items()), cutile.signature_of(scale.kernel, args)): b"exact"}
    kernel = KernelCubins(
        kernel="scale", symbol="_scale_kernel", origin=origin_of(declared_code(scale), "13.4.92"), cubins=held
    )
    (tmp_path / str(SM90) / FILE_NAME).write_bytes(pack(SM90, [kernel]))
    here = dataclasses.replace(here)
    with pytest.warns(CubinWarning, match=f"there is no cubin of {chosen} .*; {AT_256} runs: make") as told:
        here.launch(array, array)
    assert len(told) == 1
    monkeypatch.setattr(dispatch, "follow_problem", lambda *args: pytest.fail("the slow path was taken"))
    here.launch(array, array)
    assert [launch.grid for launch in driver.launches] == [
        (-(-rows // AT_256["tile_m"]), 1024 // AT_256["tile_n"], 1)
    ] * 2
