"""Launches of recorded kernels load the cubins that were compiled for them, on the stand-in driver."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch

from aot_tune import environment
from aot_tune.cubins.archive import FILE_NAME
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.errors import CompilerMissingError, CubinWarning, LaunchError, MissError, TableWarning
from aot_tune.nvidia import cutile
from aot_tune.replay.answer import places, records, searches
from aot_tune.replay.answer.install import install, uninstall
from aot_tune.replay.answer.records import KernelRecords
from aot_tune.replay.archives import tabled_kernel, tabled_kernels
from aot_tune.replay.fit import recorded_code
from aot_tune.replay.table import file_name
from aot_tune.serve.kernels import Cubins
from aot_tune.serve.rank import priming, set_primed
from aot_tune.tables import store
from aot_tune.tuner.archives.build import build
from aot_tune.tuner.archives.report import CubinRequest
from tests.support import recorded_launches, tuned_once
from tests.support.driver import Driver, FakeTensor
from tests.support.other_releases import OTHERS, other_release
from tests.support.recorded_launches import NAME, SM90
from tests.support.tuned_once import SPACE, launch, scale_kernel

ROOT = Path(__file__).parents[3]
SYMBOL = "from_the_archive"


def fake_archive(folder: Path, **origin: Any) -> Path:
    """An archive of no code for the winners of the recorded table in a folder."""
    table = tabled_kernel(recorded_launches.write(folder))
    assert not isinstance(table, str)
    packed = KernelCubins(
        kernel=table.code.name,
        symbol=SYMBOL,
        origin=dataclasses.replace(origin_of(table.code, ""), **origin),
        cubins={(one.hints, one.signature): b"code" for one in table.compilations},
    )
    path = folder / str(SM90) / FILE_NAME
    path.write_bytes(pack(SM90, [packed]))
    return path


def launch_with(rows: int, TILE: int, **hints: int) -> None:
    """Launch as a library does that knows its config: no search is asked."""
    x, out = (FakeTensor((rows,), torch.float16) for _ in range(2))
    kernel = scale_kernel.replace_hints(**hints)
    ct.launch(0, (-(-rows // TILE), 1, 1), kernel, (x, out, rows, 2.0, TILE))


@pytest.fixture(autouse=True)
def _replayed(tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(environment.TABLES, raising=False)
    install(tables=tmp_path)
    yield
    uninstall()
    searches.forget()
    set_primed(False)


def test_a_replayed_launch_loads_its_cubin(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    assert launch(*(FakeTensor((1024,), torch.float16) for _ in range(2))) is SPACE[7]
    assert (driver.compiled, [one.grid for one in driver.launches]) == ([SYMBOL], [(16, 1, 1)])


def test_code_that_an_archive_proves_unchanged_is_not_hashed(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Any] = []
    own = records.hash_now
    monkeypatch.setattr(records, "hash_now", lambda kernel: hashed.append(kernel) or own(kernel))
    fake_archive(tmp_path)
    assert len(KernelRecords(scale_kernel, SM90).tables) == 1
    assert hashed == []
    fake_archive(tmp_path, files={recorded_launches.MODULE: "0" * 64})
    assert len(KernelRecords(scale_kernel, SM90).tables) == 1  # another file, the same code
    fake_archive(tmp_path, complete=False)
    assert len(KernelRecords(scale_kernel, SM90).tables) == 1
    assert len(hashed) == 2


def test_no_function_of_this_package_runs_in_a_later_launch(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    x, out = (FakeTensor((1024,), torch.float16) for _ in range(2))
    kernel = scale_kernel.replace_hints(occupancy=1)
    called: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        called.add(str(frame.f_globals.get("__name__")).partition(".")[0])

    def launched() -> bool:
        called.clear()
        sys.setprofile(note)
        try:
            ct.launch(0, (16, 1, 1), kernel, (x, out, 1024, 2.0, 64))
        finally:
            sys.setprofile(None)
        return "aot_tune" in called

    assert [launched(), launched()] == [True, False]


def test_hints_that_the_library_set_itself_find_the_cubin_too(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    launch_with(1024, 64, occupancy=1)
    launch_with(4096, 32, opt_level=ct.ByTarget(sm_90=3, default=2))
    assert driver.compiled == [SYMBOL, SYMBOL]


@pytest.mark.process
def test_other_hints_or_signatures_are_compiled_with_one_warning(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    with pytest.warns(CubinWarning, match=f"no cubin of {NAME} for scale_kernel_.* on sm90; cuTile compiles"):
        launch_with(1024, 64, occupancy=4)
    assert len(driver.compiled) == 1
    assert driver.compiled[0].startswith("scale_kernel_K")


@pytest.mark.process
def test_code_that_changed_is_compiled_with_a_warning(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path, source_hash="0" * 16, files={recorded_launches.MODULE: "0" * 64})
    with pytest.warns(CubinWarning, match=f"is left out for {NAME} because the file of .* is not as it was"):
        launch_with(1024, 64, occupancy=1)
    assert driver.compiled[0].startswith("scale_kernel_K")


def test_the_module_s_other_kernels_of_the_function_share_its_cubins(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    made_anew = ct.kernel(scale_kernel._pyfunc, occupancy=1)
    x, out = (FakeTensor((1024,), torch.float16) for _ in range(2))
    ct.launch(0, (16, 1, 1), made_anew, (x, out, 1024, 2.0, 64))
    assert driver.compiled == [SYMBOL]


def test_a_load_during_capture_is_refused_before_the_stream_is_touched(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_archive(tmp_path)
    kernel = scale_kernel.replace_hints(occupancy=1)
    x, out = (FakeTensor((1024,), torch.float16) for _ in range(2))
    driver.capturing = True
    with pytest.raises(LaunchError, match=f"{NAME} would be loaded during graph capture, .*; load it before"):
        ct.launch(0, (16, 1, 1), kernel, (x, out, 1024, 2.0, 64))
    assert (driver.compiled, driver.launches) == ([], [])
    driver.capturing = False
    ct.launch(0, (16, 1, 1), kernel, (x, out, 1024, 2.0, 64))
    driver.capturing = True
    ct.launch(0, (16, 1, 1), kernel, (x, out, 1024, 2.0, 64))
    assert (driver.compiled, len(driver.launches)) == ([SYMBOL], 2)


@ct.kernel
def unrecorded_kernel(x):
    ct.store(x, index=(0,), tile=ct.zeros((16,), x.dtype))


@pytest.mark.process
def test_after_prime_with_error_nothing_is_compiled(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_archive(tmp_path)
    monkeypatch.setenv(environment.ON_MISS, "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CubinWarning)
        launch_with(1024, 64, occupancy=3)  # before prime
        set_primed(True)
        launch_with(1024, 64, occupancy=1)  # has a cubin
        with pytest.raises(MissError, match=f"{NAME} would be compiled for the signature scale_kernel_K"):
            launch_with(1024, 64, occupancy=4)
        name = f"{__name__}.unrecorded_kernel"
        x = FakeTensor((16,), torch.float16)
        with pytest.raises(
            MissError, match=f"{name} would be compiled for the signature unrecorded_kernel_K"
        ):
            ct.launch(0, (1, 1, 1), unrecorded_kernel, (x,))
        with priming():
            launch_with(1024, 64, occupancy=5)
    assert len(driver.compiled) == 3


@pytest.mark.process
def test_a_kernel_that_the_archive_lacks_is_compiled_with_one_warning(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    said = f"no cubin of {__name__}.unrecorded_kernel for unrecorded_kernel_K.* on sm90; cuTile compiles it"
    half, single = (FakeTensor((16,), dtype) for dtype in (torch.float16, torch.float32))
    with pytest.warns(CubinWarning, match=said):
        ct.launch(0, (1, 1, 1), unrecorded_kernel.replace_hints(), (half,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ct.launch(0, (1, 1, 1), unrecorded_kernel.replace_hints(), (single,))
    assert len(driver.compiled) == 2


def cubins_of(name: str, folder: Path) -> Cubins:
    return Cubins(dataclasses.replace(recorded_code(scale_kernel), name=name), lambda: [folder])


def test_nobody_is_warned_of_another_package_s_archive(tmp_path: Path) -> None:
    fake_archive(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins_of("otherlib.scale_kernel", tmp_path).find((), "a signature", SM90) is None
        assert cubins_of("scale", tmp_path).find((), "a signature", SM90) is None  # a declared kernel
    with pytest.warns(CubinWarning, match="no cubin of tests.other_kernel for a signature on sm90"):
        assert cubins_of("tests.other_kernel", tmp_path).find((), "a signature", SM90) is None


def test_many_launches_without_cubins_are_to_be_recorded(tmp_path: Path) -> None:
    fake_archive(tmp_path)
    cubins = cubins_of(NAME, tmp_path)
    with pytest.warns(CubinWarning) as warned:
        _ = [cubins.find((), f"signature {number}", SM90) for number in range(10)]
    assert str(warned[-1].message).endswith(
        f"it is the 10th of {NAME}: record these launches (aot-tune record), then aot-tune compile"
    )


def test_a_user_s_archive_serves_the_launches_of_a_shipped_table(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`aot-tune compile` writes there: installed packages are read-only in many images."""
    monkeypatch.setattr(store, "libraries_folder", lambda: tmp_path / "libraries")
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "ours"))
    fake_archive(tmp_path / "ours")
    (tmp_path / "ours" / str(SM90) / file_name(recorded_launches.MODULE, "scale_kernel")).unlink()
    recorded_launches.write(tmp_path / "libraries")
    assert launch(*(FakeTensor((1024,), torch.float16) for _ in range(2))) is SPACE[7]
    assert driver.compiled == [SYMBOL]


def kernel_of(number: int) -> Any:
    """A kernel that a library makes anew for each size."""

    @ct.kernel
    def local_kernel(x):
        ct.store(x, index=(0,), tile=ct.full((16,), number, x.dtype))

    return local_kernel


@pytest.mark.process
def test_kernels_of_one_function_are_one_warning_for_all_closures(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    args = (FakeTensor((16,), torch.float16),)
    with pytest.warns(CubinWarning, match=r"no cubin of .*kernel_of\.<locals>\.local_kernel for"):
        ct.launch(0, (1, 1, 1), kernel_of(1), args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ct.launch(0, (1, 1, 1), kernel_of(2), args)


@pytest.mark.process
def test_a_kernel_of_generated_code_without_a_module_is_compiled(driver: Driver) -> None:
    ct.launch(0, (1, 1, 1), tuned_once.generated(), (FakeTensor((16,), torch.float16),))
    assert driver.compiled == ["generated_kernel_Kt1_A1f16_1i16t1_p16"]


def test_without_a_compiler_a_near_size_of_another_divisibility_is_launched(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_archive(tmp_path)
    monkeypatch.setattr(cutile, "may_have_compiler", lambda: False)
    with pytest.warns(CubinWarning, match="the cubin that assumes nothing of strides and alignment runs"):
        launch(*(FakeTensor((1001,), torch.float16) for _ in range(2)))
    assert (driver.compiled, driver.launches[-1].grid) == ([SYMBOL], (16, 1, 1))


@ct.kernel
def pair_kernel(x, pair):
    ct.store(x, index=(0,), tile=ct.full((16,), pair[0], x.dtype))


def test_without_cubin_and_compiler_the_error_says_what_to_ship(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_launches.write(tmp_path)
    monkeypatch.setattr(cutile, "may_have_compiler", lambda: False)
    remedy = "aot-tune compile, for a library's launch after aot-tune record"
    with pytest.raises(CompilerMissingError, match=f"no cubin was shipped for scale_kernel_K.*{remedy}"):
        launch_with(1024, 64, occupancy=1)
    with pytest.raises(CompilerMissingError, match=f"no cubin was shipped for unrecorded_kernel_K.*{remedy}"):
        ct.launch(0, (1, 1, 1), unrecorded_kernel, (FakeTensor((16,), torch.float16),))
    fake_archive(tmp_path)
    install(tables=[tmp_path, tmp_path / "none"])  # reads anew
    with pytest.raises(CompilerMissingError, match=f"no cubin was shipped for pair_kernel_K.*{remedy}"):
        ct.launch(0, (1, 1, 1), pair_kernel, (FakeTensor((16,), torch.float16), (1, 2)))
    assert driver.launches == []


def test_code_that_depends_on_an_absent_compiler_is_named_with_what_helps(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"source_hash": "0" * 16, "files": {}, "values": {f"{recorded_launches.MODULE}:NEW": "True"}}
    fake_archive(tmp_path, **origin)
    path = recorded_launches.write(tmp_path, recorded_launches.table(source_hash="0" * 16))
    monkeypatch.setattr(tuned_once, "NEW", False, raising=False)
    monkeypatch.setattr(cutile, "may_have_compiler", lambda: False)
    with pytest.warns(TableWarning) as warned:
        assert KernelRecords(scale_kernel, SM90).tables == ()
    assert str(warned[0].message) == (
        f"{path} is left out: the code of scale_kernel changed since it was recorded (0000000000000000), the "
        f"value of NEW in {recorded_launches.MODULE}; record again: aot-tune record, on a machine with a "
        "compiler; if the library asks for the compiler while it is imported, call aot_tune.install() before "
        "that import"
    )
    named = "the value of NEW in .*; if the library asks for the compiler while it is imported"
    with pytest.warns(CubinWarning, match=named), pytest.raises(CompilerMissingError):
        launch_with(1024, 64, occupancy=1)


@pytest.mark.process
def test_what_is_recorded_is_what_this_compiler_makes(tmp_path: Path, driver: Driver) -> None:
    fake_archive(tmp_path)
    places.record_with(lambda call: None)
    try:
        launch_with(1024, 64, occupancy=1)
    finally:
        places.record_with(None)
    assert driver.compiled[0].startswith("scale_kernel_K")


def test_uninstall_puts_cutile_s_method_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aot_tune.replay.answer.door", raising=False)
    assert ct.kernel._compile is not cutile._own_compile()
    install()
    uninstall()
    assert ct.kernel._compile is cutile._own_compile()


def test_uninstall_leaves_cubins_to_a_library_that_imports_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aot_tune.replay.answer.door", sys)
    install()
    uninstall()
    assert ct.kernel._compile is not cutile._own_compile()


def test_on_a_release_that_was_not_tested_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aot_tune.replay.answer.door", raising=False)
    uninstall()
    monkeypatch.setattr(cutile, "private_names_known", lambda: False)
    install()
    assert ct.kernel._compile is cutile._own_compile()


@pytest.mark.process
def test_where_another_s_method_stands_before_ours_it_stays_and_ours_rests(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_archive(tmp_path)
    ours = ct.kernel._compile

    def theirs(self: Any, *args: Any) -> Any:
        return ours(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ct.kernel, "_compile", theirs)
        uninstall()
        assert ct.kernel._compile is theirs
        launch_with(1024, 64, occupancy=1)
        assert driver.compiled[0].startswith("scale_kernel_K")
        install(tables=tmp_path)
        launch_with(1024, 64, occupancy=1)
        with pytest.warns(CubinWarning, match="cuTile compiles it"):
            launch_with(1024, 64, occupancy=2)
        assert driver.compiled[1] == SYMBOL
        uninstall()
    cutile.let_kernels_ask(None)


def test_the_authors_door_brings_the_cubins() -> None:
    uninstall()
    sys.modules.pop("aot_tune.replay.answer.door", None)
    from aot_tune.replay.answer import door

    assert callable(door.exhaustive_search)
    assert ct.kernel._compile is not cutile._own_compile()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded table and what the real compiler makes of it."""
    folder = tmp_path_factory.mktemp("compiled")
    path = recorded_launches.write(folder)
    request = CubinRequest(kernels=(), archs=(SM90,), jobs=2, cubins=folder / "cubins")
    (report,) = build(request, print, tabled_kernels([path], [SM90], print))
    assert report.failures == ()
    return folder


@pytest.mark.process
@pytest.mark.parametrize("release", ["installed", *OTHERS])
def test_a_fresh_process_without_compiler_replays_and_compiles_nothing(release: str, compiled: Path) -> None:
    paths = [*([] if release == "installed" else [str(other_release(release))]), str(ROOT)]
    child = [sys.executable, "-m", "tests.support.children.recorded_launch"]
    done = subprocess.run(
        [*child, str(compiled), "[1024, 4096, 8192]"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["errors"] == []
    assert [one[:1] for one in told["launched"]] == [[16], [16], [128], [128], [256], [256]]
    assert set(told["loaded"]) == {"scale_kernel"}
