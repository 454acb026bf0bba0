"""Searches recorded on the stand-in driver: tables written, read in a fresh process's way, replayed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.tile.tune
import pytest
import torch

from aot_tune import environment
from aot_tune.errors import CutileError, MissWarning, StoreError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer import places, searches
from aot_tune.replay.answer.cubins import LaunchCall
from aot_tune.replay.answer.install import install, uninstall
from aot_tune.replay.document import dump, parse
from aot_tune.replay.problem import Whole
from aot_tune.replay.record import recorder as recording
from aot_tune.replay.record import turn as turns
from aot_tune.replay.record.recorder import Recorder, Site, equal_to_a_size, following
from aot_tune.replay.record.search import LibrarySearch
from aot_tune.replay.table import Launched, RecordedTable, file_name
from aot_tune.tables.table import SCHEMA
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.values.arch import Arch
from tests.support import served_library, tuned_once
from tests.support.driver import Driver, FakeTensor, ForeignArray, stream_on
from tests.support.tuned_once import SPACE, launch, scale_kernel, tuned

pytestmark = pytest.mark.process  # searches compile


def tensors(rows: int, dtype: torch.dtype = torch.float16) -> tuple[FakeTensor, FakeTensor]:
    return FakeTensor((rows,), dtype), FakeTensor((rows,), dtype)


@pytest.fixture
def recorder(driver: Driver, tmp_path: Path) -> Iterator[Recorder]:
    """Records into a folder; the tile of 32 is the fastest."""
    driver.elapsed_ms = lambda symbol: 0.01 if "_I32" in symbol else 0.05
    recorder = Recorder(out=tmp_path / "tables", journals=tmp_path / "journals")
    install(tables=tmp_path / "tables")
    places.record_with(recorder)
    yield recorder
    while others:
        others.pop().end()
    recorder.end()
    places.record_with(None)
    uninstall()
    searches.forget()


others: list[Recorder] = []


def another(**changes: Any) -> Recorder:
    """Record with another recorder from now on, as another process would."""
    others.append(Recorder(**changes))
    places.record_with(others[-1])
    return others[-1]


@pytest.fixture
def replayed() -> Iterator[list[int]]:
    """From now on searches are replayed; the lengths of the spaces that were searched after all."""
    calls: list[int] = []
    own = cutile.own_search()

    def counted(search_space: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(search_space))
        return own(search_space, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutile, "own_search", lambda: counted)
        yield calls


def replay() -> None:
    places.record_with(None)
    searches.forget()


def read(tmp_path: Path) -> RecordedTable:
    path = tmp_path / "tables" / "sm90" / file_name(tuned_once.__name__, "scale_kernel")
    return parse(path.read_bytes())


def site(recorder: Recorder) -> Site:
    (one,) = recorder.sites.values()
    return one


def test_a_recorded_search_is_replayed_without_a_search(
    recorder: Recorder, tmp_path: Path, replayed: list[int]
) -> None:
    result = tuned(*tensors(1024))
    assert result.best.config.TILE == 32
    assert len(result.successes) == 9
    replay()
    replayed.clear()
    again = tuned(*tensors(1024))
    assert again.best.config is result.best.config
    assert tuned(*tensors(1500)).best.config is result.best.config
    assert replayed == []
    (entry,) = read(tmp_path).entries
    assert entry.signature == "scale_kernel_Kt1_A1f16_1i16t1_p16_A1f16_1i16t1_p16_Si32_Sf32_I32"
    assert (entry.grid, entry.hints, entry.count) == ((32, 1, 1), {"opt_level": 3}, 1)
    assert entry.gain == pytest.approx(5)
    table = read(tmp_path)
    assert (table.module, table.kernel, str(table.arch)) == (tuned_once.__name__, "scale_kernel", "sm90")
    assert table.built_with.device_name == "NVIDIA H200"


class CuPyStream:
    """What cuTile reads of a stream of CuPy."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def test_another_library_s_arrays_and_streams_are_recorded_and_replayed(
    recorder: Recorder, tmp_path: Path, replayed: list[int], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "cuda", SimpleNamespace(Stream=CuPyStream), raising=False)
    x, out = map(ForeignArray, tensors(1024))
    best = launch(x, out, stream=CuPyStream(stream_on(0)))
    assert best.TILE == 32
    (entry,) = read(tmp_path).entries
    assert entry.signature == "scale_kernel_Kt1_A1f16_1i16t1_p16_A1f16_1i16t1_p16_Si32_Sf32_I32"
    assert not site(recorder).remarks  # the library's own launch is the winner's
    replay()
    replayed.clear()
    assert launch(x, out, stream=CuPyStream(stream_on(0))) is tuned(*tensors(1024)).best.config is best
    assert tuned(ForeignArray(x.tensor, "__dlpack__"), out.tensor).best.config is best
    assert replayed == []
    assert {launched.stream for launched in driver.launches} == {stream_on(0)}


def test_each_config_is_compiled_once(recorder: Recorder, driver: Driver) -> None:
    driver.elapsed_ms = lambda symbol: 0.02 + 0.001 * (len(driver.launches) % 3)
    tuned(*tensors(1024))
    assert len(driver.compiled) == len(SPACE)


def test_what_was_recorded_is_told(recorder: Recorder, tmp_path: Path) -> None:
    tuned(*tensors(1024))
    tuned(*tensors(4096))
    told = site(recorder)
    assert told.place.rpartition(":")[0].endswith("tuned_once.py")
    assert told.kernel == "tests.support.tuned_once.scale_kernel"
    assert (len(told.problems), told.searches, told.failures, told.wrong) == (2, 2, 0, 0)
    assert told.gains == pytest.approx([5, 5])
    assert list(recorder.tables) == [
        tmp_path / "tables" / "sm90" / file_name(tuned_once.__name__, "scale_kernel")
    ]
    assert len(read(tmp_path).entries) == 2


def test_recording_again_gives_the_same_bytes(recorder: Recorder, tmp_path: Path, driver: Driver) -> None:
    tuned(*tensors(1024))
    (path,) = recorder.tables
    before = path.read_bytes()
    driver.elapsed_ms = lambda symbol: 0.0101 if "_I32" in symbol else 0.05
    another(out=tmp_path / "tables", journals=tmp_path / "other journals")
    tuned(*tensors(1024))
    assert path.read_bytes() == before
    driver.elapsed_ms = lambda symbol: 0.005 if "_I64" in symbol else 0.05
    another(out=tmp_path / "tables", journals=tmp_path / "third journals")
    tuned(*tensors(1024))
    assert read(tmp_path).entries[0].config == {"SimpleNamespace": {"TILE": 64, "occupancy": None}}


def test_what_two_processes_record_is_kept(recorder: Recorder, tmp_path: Path) -> None:
    other = Recorder(out=tmp_path / "tables", journals=tmp_path / "journals")
    tuned(*tensors(1024))
    places.record_with(other)
    tuned(*tensors(5000))
    other.end()
    places.record_with(recorder)
    tuned(*tensors(300))
    assert {entry.problem.arguments[2] for entry in read(tmp_path).entries} == {
        Whole(1024),
        Whole(5000),
        Whole(300),
    }


def launched(occupancy: int) -> LaunchCall:
    """A launch without a search that cuTile compiled."""
    made = Launched((("occupancy", occupancy),), "scale_kernel_Kt1")
    return LaunchCall(kernel=scale_kernel, arch=Arch(9, 0), launched=made)


def test_two_runs_that_write_a_table_at_once_lose_nothing_of_each_other(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Recorder(out=tmp_path / "tables", journals=tmp_path / "another folder")
    own, thread = recording.dump, threading.Thread(target=other, args=(launched(2),))

    def dump(table: RecordedTable) -> bytes:
        if thread.ident is None:
            thread.start()
            thread.join(0.5)  # it waits until this table is written
        return own(table)

    monkeypatch.setattr(recording, "dump", dump)
    recorder(launched(1))
    thread.join()
    assert [dict(one.hints)["occupancy"] for one in read(tmp_path).launched] == [1, 2]


def test_a_launch_is_written_once_and_drops_no_time_of_another_machine(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(*tensors(1024))
    of_another = replace(read(tmp_path), built_with=replace(read(tmp_path).built_with, driver="1.2"))
    monkeypatch.setattr(recorder, "_table", lambda *args, **kwargs: of_another)
    recorder(launched(1))
    monkeypatch.undo()
    recorder(launched(2))
    assert (len(read(tmp_path).entries), len(read(tmp_path).launched)) == (1, 2)
    (path,) = recorder.tables
    path.unlink()
    recorder(launched(1))
    assert not path.exists()
    of_another = replace(of_another, built_with=replace(of_another.built_with, tileiras="1.2"))
    path.write_bytes(dump(replace(of_another, launched=(launched(2).launched,))))
    tuned(*tensors(5000))
    (remark,) = site(recorder).remarks
    assert "begins anew, without the 1 entry that it had: tileiras was 1.2, now " in remark
    assert (len(read(tmp_path).entries), len(read(tmp_path).launched)) == (1, 1)


def test_another_driver_drops_no_time_and_is_named_once_an_entry_changes(
    recorder: Recorder, tmp_path: Path
) -> None:
    tuned(*tensors(1024))
    table = read(tmp_path)
    (path,) = recorder.tables
    data = dump(replace(table, built_with=replace(table.built_with, driver="1.2")))
    path.write_bytes(data)
    another(out=tmp_path / "tables", journals=tmp_path / "other journals")
    tuned(*tensors(1024))
    assert path.read_bytes() == data  # the same winner
    tuned(*tensors(5000))
    assert (len(read(tmp_path).entries), read(tmp_path).built_with) == (2, table.built_with)
    assert [remark for one in others[0].sites.values() for remark in one.remarks] == []


def test_a_config_that_the_library_changes_is_replayed(
    recorder: Recorder, tmp_path: Path, replayed: list[int]
) -> None:
    x, out = tensors(1024)

    def search() -> Any:
        def args_of(config: Any) -> tuple[Any, ...]:
            config.programs = -(-1024 // config.TILE)
            return x, out, 1024, 2.0, config.TILE

        space = [SimpleNamespace(TILE=16), SimpleNamespace(TILE=32)]
        search = tuned_once.exhaustive_search
        return search(space, 0, lambda config: (config.programs,), scale_kernel, args_of, quiet=True)

    for _ in range(recording.MOST_SEARCHES_OF_ONE_PROBLEM + 1):
        assert search().best.config.TILE == 32
    assert read(tmp_path).entries[0].config == {"SimpleNamespace": {"TILE": 32}}
    replay()
    replayed.clear()
    assert search().best.config.TILE == 32
    assert replayed == []


def test_one_function_with_several_base_hints_keeps_an_entry_for_each(
    recorder: Recorder, tmp_path: Path, replayed: list[int]
) -> None:
    def by_config(config: Any) -> Any:
        return served_library.rows_kernel.replace_hints(occupancy=config.TILE // 16)

    kernels = (served_library.rows_kernel, served_library.hinted_kernel, by_config)
    searched = [*((kernel, 512) for kernel in kernels), (kernels[0], 4096)]

    def tuned_each() -> list[Any]:
        return [
            served_library.tuned(*tensors(rows), batch=1, longest=rows, kernel=kernel).best
            for kernel, rows in searched
        ]

    best = tuned_each()
    assert [remark for one in recorder.sites.values() for remark in one.remarks] == []
    (path,) = (tmp_path / "tables" / "sm90").glob("*.json")
    entries = parse(path.read_bytes()).entries
    assert len(entries) == len({(entry.space, entry.problem) for entry in entries}) == 4
    assert len({entry.space for entry in entries}) == 3
    replay()
    replayed.clear()
    assert [one.config for one in tuned_each()] == [one.config for one in best]
    assert replayed == []


def test_searches_that_differ_in_hints_by_config_have_an_entry_each(
    recorder: Recorder, tmp_path: Path, replayed: list[int]
) -> None:
    x, out = tensors(1024)
    plain = scale_kernel.replace_hints(occupancy=1)

    def hinted(first: int, *others: int) -> dict[str, Any]:
        return {"hints_fn": lambda config: {"occupancy": [first, *others][SPACE.index(config) % 3]}}

    searched: list[dict[str, Any]] = [
        {"kernel": plain},
        {"kernel": lambda config: scale_kernel.replace_hints(occupancy=config.TILE // 16)},
        {"kernel": scale_kernel},
        {"kernel": scale_kernel, **hinted(1, 1, 1)},
        {"kernel": scale_kernel, **hinted(4, 4, 4)},
        {"kernel": scale_kernel, **hinted(1, 4, 1)},
    ]

    def search(given: dict[str, Any]) -> Any:
        return tuned_once.exhaustive_search(
            SPACE, 0, lambda config: (-(-1024 // config.TILE), 1, 1),
            args_fn=lambda config: (x, out, 1024, 2.0, config.TILE), quiet=True, **given,
        ).best  # fmt: skip

    best = [search(given) for given in searched]
    entries = read(tmp_path).entries
    assert len(entries) == len({entry.space for entry in entries}) == len(searched)
    assert {entry.count for entry in entries} == {1}
    replay()
    replayed.clear()
    assert [search(given).config for given in searched] == [one.config for one in best]
    assert replayed == []
    with pytest.warns(MissWarning, match="this search space, its 9 configs and hints, was not recorded"):
        search({"kernel": scale_kernel, **hinted(4, 1, 1)})


def test_code_that_changed_since_is_recorded_anew(
    recorder: Recorder, tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(*tensors(1024))
    monkeypatch.setattr(recording, "kernel_hash", lambda kernel: ("feedfacefeedface", ()))
    driver.elapsed_ms = lambda symbol: 0.01 if "_I64" in symbol else 0.05
    again = Recorder(out=tmp_path / "tables", journals=tmp_path / "journals")
    places.record_with(again)
    tuned(*tensors(5000))
    again.end()
    name = file_name(tuned_once.__name__, "scale_kernel")
    assert list(site(again).remarks) == [
        f"{name} begins anew, without the 1 entry that it had: the code is another"
    ]
    assert read(tmp_path).source_hash == "feedfacefeedface"
    (entry,) = read(tmp_path).entries  # what was recorded of the other code is gone
    assert entry.config == {"SimpleNamespace": {"TILE": 64, "occupancy": None}}


def test_a_process_that_was_stopped_takes_its_measurements_over(
    recorder: Recorder, tmp_path: Path, driver: Driver
) -> None:
    first = tuned(*tensors(1024)).best
    another(out=tmp_path / "tables", journals=tmp_path / "journals")
    driver.elapsed_ms = lambda symbol: 0.001 if "_I64" in symbol else 0.05
    assert tuned(*tensors(1024)).best == first
    another(out=tmp_path / "again", journals=tmp_path / "journals")
    assert tuned(*tensors(1024)).best == first, "another folder of tables measures nothing anew"
    another(out=tmp_path / "again anew", journals=tmp_path / "other journals")
    assert tuned(*tensors(1024)).best != first


def test_one_problem_is_searched_three_times_and_then_answered(
    recorder: Recorder, tmp_path: Path, driver: Driver, replayed: list[int]
) -> None:
    tuned(*tensors(1024))
    driver.elapsed_ms = lambda symbol: 0.02 if "_I64" in symbol else 0.05
    for _ in range(3):
        tuned(*tensors(1024))
    winners = read(tmp_path).entries
    assert sorted(one.count for one in winners) == [1, 2]
    assert any("3 searches of one problem had 2 winners" in remark for remark in site(recorder).remarks)
    # 64 was slower by 5.0 where 32 won; 32 was slower by 2.5 where 64 won: 32 is the safer.
    assert winners[0].config == {"SimpleNamespace": {"TILE": 32, "occupancy": None}}
    assert site(recorder).searches == 4


def test_the_fourth_answer_is_the_winner_wherever_the_table_lies(
    recorder: Recorder,
    driver: Driver,
    tmp_path: Path,
    replayed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reader knows the folder. A near problem that was recorded as well does not answer either."""
    monkeypatch.setenv(environment.ON_MISS, "error")
    there = another(out=tmp_path / "elsewhere", journals=tmp_path / "journals")
    tuned(*tensors(1024))
    driver.elapsed_ms = lambda symbol: 0.02 if "_I64" in symbol else 0.05
    first, *_ = (tuned(*tensors(1030)).best for _ in range(3))
    replayed.clear()
    again = tuned(*tensors(1030)).best
    assert again.config.TILE == 64
    assert (again.mean_us, again.num_samples) == (first.mean_us, first.num_samples)
    assert replayed == []
    assert site(there).searches == 5


def test_a_rank_is_answered_and_records_nothing(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(environment.RANKED, "2")
    with pytest.warns(searches.MissWarning):
        assert tuned(*tensors(1024)).best.config is SPACE[0]
    told = site(recorder)
    assert list(told.remarks) == [
        "answered and not searched: this process is a rank by AOT_TUNE_RANKED=2; each rank records with "
        "AOT_TUNE_RANKED=1"
    ]
    assert (told.problems, recorder.tables) == ({}, {})


def test_what_cannot_be_recorded_is_searched_and_remarked(recorder: Recorder, replayed: list[int]) -> None:
    class Opaque:
        TILE, occupancy = 32, 1

    assert tuned(*tensors(1024), space=[Opaque()]).best.config.TILE == 32
    assert replayed == [1]
    (remark,) = site(recorder).remarks
    assert remark.startswith("not recorded: config 0 of 1: a tests.replay.record.test_recorder.")


def test_where_a_function_of_the_library_fails_cutile_decides(
    recorder: Recorder, replayed: list[int]
) -> None:
    def args_of(config: Any) -> tuple[Any, ...]:
        return (x, out, 1024, 2.0, {32: 32, 64: 64}[config.TILE])

    x, out = tensors(1024)
    grid_of = lambda config: (-(-1024 // config.TILE), 1, 1)  # noqa: E731
    result = cuda.tile.tune.exhaustive_search(SPACE, 0, grid_of, scale_kernel, args_of, quiet=True)
    assert (result.best.config.TILE, len(result.failures)) == (32, 3)
    assert replayed == [9]
    assert list(site(recorder).remarks) == ["not recorded: KeyError: 16"]


def test_a_folder_that_cannot_be_written_is_a_remark(
    recorder: Recorder, tmp_path: Path, replayed: list[int]
) -> None:
    (tmp_path / "file").write_text("")
    other = another(out=tmp_path / "file" / "tables", journals=tmp_path / "journals")
    tuned(*tensors(1024))
    assert replayed == [9]
    assert "not recorded: " in next(iter(site(other).remarks))


def test_a_package_that_cannot_be_written_in_needs_a_folder(
    recorder: Recorder, tmp_path: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(recording, "folder_of_package", lambda module: tmp_path / "file" / "tuned_configs")
    other = another(journals=tmp_path / "journals")
    tuned(*tensors(1024))
    assert replayed == [9]
    (remark,) = site(other).remarks
    assert remark.startswith("not recorded: ")
    assert remark.endswith(": aot-tune record --out DIR")


@pytest.mark.parametrize("kind", ["link", "folder", "damaged", "newer"])
def test_a_table_that_would_be_lost_is_kept_and_remarked(
    kind: str, recorder: Recorder, tmp_path: Path, replayed: list[int]
) -> None:
    tuned(*tensors(1024))
    (path,) = recorder.tables
    text = path.read_text()
    if kind == "link":
        path.rename(tmp_path / "elsewhere.json")
        path.symlink_to(tmp_path / "elsewhere.json")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        schema = f'"schema": {SCHEMA}'
        assert schema in text
        text = (
            f"<<<<<<< HEAD\n{text}" if kind == "damaged" else text.replace(schema, f'"schema": {SCHEMA + 1}')
        )
        path.write_text(text)
    again = another(out=tmp_path / "tables", journals=tmp_path / "journals")
    assert tuned(*tensors(5000)).best.config.TILE == 32
    assert replayed[-1] == 9
    (remark,) = site(again).remarks
    assert remark.startswith("not recorded: ")
    assert str(path) in remark
    assert {"link": "it is a link to", "folder": "it is a directory", "newer": "upgrade aot_tune"}.get(
        kind, "restore that table, or remove it"
    ) in remark
    if kind != "folder":
        assert path.read_text() == text


def test_a_program_that_goes_elsewhere_keeps_one_folder_of_journals(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = another(out=Path("tables"))
    tuned(*tensors(1024))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tuned(*tensors(5000))
    assert len(read(tmp_path).entries) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert list(site(relative).remarks) == []


def test_a_kernel_of_no_package_needs_a_folder(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayed: list[int]
) -> None:
    monkeypatch.setattr(cutile.python_function(scale_kernel), "__module__", "__main__")
    nowhere = another(journals=tmp_path / "journals")
    tuned(*tensors(1024))
    assert replayed == [9]
    (remark,) = site(nowhere).remarks
    assert "aot-tune record --out DIR" in remark
    somewhere = another(out=tmp_path / "tables", journals=tmp_path / "journals")
    tuned_once.launch(*tensors(1024))
    searched, launched = somewhere.sites.values()
    assert (searched.searches, searched.remarks, launched.searches) == (1, {}, 0)
    assert list(launched.remarks) == [
        "a launch of __main__.scale_kernel gets no cubin: its kernel is in a program's main module, which "
        "nothing else imports"
    ]
    (path,) = somewhere.tables
    assert path.name == "__main__.scale_kernel.json"


@pytest.mark.parametrize("function", ["args_fn", "grid_fn", "hints_fn"])
def test_the_function_that_fails_for_every_config_is_named(
    function: str, recorder: Recorder, replayed: list[int]
) -> None:
    def fails(config: Any) -> Any:
        raise LookupError(config.TILE)

    x, out = tensors(1024)
    given: dict[str, Any] = {
        "grid_fn": lambda config: (-(-1024 // config.TILE), 1, 1),
        "args_fn": lambda config: (x, out, 1024, 2.0, config.TILE),
        "hints_fn": lambda config: {},
    }
    given[function] = fails
    with pytest.raises((ValueError, LookupError)):
        cuda.tile.tune.exhaustive_search(SPACE, 0, kernel=scale_kernel, quiet=True, **given)
    (remark,) = site(recorder).remarks
    assert remark.startswith(f"not recorded: {function} raises LookupError: ")


def test_a_launch_without_a_signature_is_answered_and_remarked(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise CutileError("kernel argument x is a tuple")

    monkeypatch.setattr(cutile, "signature_of", refuse)
    assert tuned(*tensors(1024)).best.config.TILE == 32
    assert list(site(recorder).remarks) == ["not recorded: kernel argument x is a tuple"]
    assert recorder.tables == {}


def test_a_table_that_cannot_be_written_is_a_remark(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise StoreError(f"{path} cannot be written: the disk is full")

    monkeypatch.setattr(recording, "write_atomic", full)
    assert tuned(*tensors(1024)).best.config.TILE == 32
    (remark,) = site(recorder).remarks
    assert remark.startswith("not recorded: ")
    assert remark.endswith("the disk is full")


def test_another_package_is_left_alone(recorder: Recorder, tmp_path: Path, replayed: list[int]) -> None:
    other = another(out=tmp_path / "tables", journals=tmp_path / "journals", package="mylib")
    tuned(*tensors(1024))
    assert replayed == [9]
    assert list(site(other).remarks) == ["not recorded: it is not of the package mylib"]


def test_configs_that_failed_are_remarked_by_message(recorder: Recorder) -> None:
    def args(config: Any) -> tuple[Any, ...]:
        if config.TILE > 16:
            raise MemoryError("too large\nas ever")
        return (*tensors(1024), 1024, 2.0, config.TILE)

    space = SPACE[2:8]
    tuned_once.exhaustive_search(space, 0, lambda config: (1, 1, 1), scale_kernel, args, quiet=True)
    (remark,) = (one for one in site(recorder).remarks if "failed" in one)
    assert remark.startswith('config {"SimpleNamespace":{"TILE":32,')
    assert remark.endswith("}} and 4 more failed: MemoryError: too large")


def test_equal_launches_are_remarked(recorder: Recorder) -> None:
    tuned(*tensors(1024), space=[*SPACE[:4], SimpleNamespace(TILE=16, occupancy=None, unused=1)])
    assert list(site(recorder).remarks) == [
        "1 of 5 configs are the same launch as another: same grid, hints and arguments; leave them out"
    ]


def test_a_workspace_of_parts_is_remarked_and_may_be_launched_in_another_size(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LibrarySearch.run  # the stand-in stores nothing
    monkeypatch.setattr(LibrarySearch, "run", lambda search: replace(own(search), in_parts={"out"}))
    x, out = tensors(1024)
    best = tuned(x, out).best.config
    smaller, _ = tensors(512)
    tuned_once.ct.launch(0, (32, 1, 1), scale_kernel, (x, smaller, 1024, 2.0, best.TILE))
    assert list(site(recorder).remarks) == [f"out {recording.IN_PARTS}"]


def test_a_launch_of_what_no_search_measured_is_remarked(recorder: Recorder) -> None:
    x, out = tensors(1024)
    tuned_once.launch(x, out)
    tuned_once.launch(x, out, factor=3.0)
    assert list(site(recorder).remarks) == []
    other, its_out = tensors(4096)
    kernel = scale_kernel.replace_hints(occupancy=7)
    tuned_once.ct.launch(0, (128, 1, 1), kernel, (other, its_out, 4096, 2.0, 32))
    tuned_once.ct.launch(0, (128, 1, 1), kernel, (other, its_out, 4096, 2.0, 32))
    assert list(site(recorder).remarks) == [
        "it is launched with hints that no search measured: occupancy=7, opt_level=3",
        "it is launched with arguments that no search was for: x, out, n; "
        "the key of the library's own cache may be too coarse",
    ]


def test_a_launch_of_what_no_search_measured_is_in_the_table(recorder: Recorder, tmp_path: Path) -> None:
    x, out = tensors(1024)

    def launch(occupancy: int) -> None:
        kernel = scale_kernel.replace_hints(occupancy=occupancy)
        tuned_once.ct.launch(0, (32, 1, 1), kernel, (x, out, 1024, 2.0, 32))

    launch(5)  # nothing was searched yet
    assert [dict(one.hints)["occupancy"] for one in read(tmp_path).launched] == [5]
    tuned_once.launch(x, out)
    assert [dict(one.hints)["occupancy"] for one in read(tmp_path).launched] == [5]  # the winner's is known
    recorder = another(out=tmp_path / "tables", journals=tmp_path / "journals")
    launch(7)
    table = read(tmp_path)
    assert [dict(one.hints)["occupancy"] for one in table.launched] == [5, 7]
    assert {one.signature for one in table.launched} == {table.entries[0].signature}
    assert len(table.compilations) == 3
    assert (recorder.sites, list(recorder.tables.values())) == ({}, [table])


def test_a_config_that_lost_gets_no_cubin_where_the_library_launches_it(
    recorder: Recorder, tmp_path: Path
) -> None:
    x, out = tensors(1024)
    best = tuned(x, out).best.config
    for config in SPACE:  # as a library does that looks for NaN
        kernel = scale_kernel.replace_hints(**tuned_once.hints_of(config))
        tuned_once.ct.launch(0, (-(-1024 // config.TILE), 1, 1), kernel, (x, out, 1024, 2.0, config.TILE))
    (won,) = read(tmp_path).compilations
    assert f"_I{best.TILE}" in won.signature


def test_a_launch_of_another_size_is_in_the_table_although_its_config_lost(
    recorder: Recorder, tmp_path: Path
) -> None:
    best = tuned(*tensors(1024)).best.config
    kernel = scale_kernel.replace_hints()
    for rows in (1024, 64):  # the second does not compile again
        x, out = tensors(rows)
        tuned_once.ct.launch(0, (-(-rows // 16), 1, 1), kernel, (x, out, rows, 2.0, 16))
        assert len(read(tmp_path).launched) == (rows == 64)
    won, lost = (next(one for one in read(tmp_path).compilations if end in one.signature)
                 for end in (f"_I{best.TILE}", "_I16"))  # fmt: skip
    assert (won.hints, [lost]) == (lost.hints, [*read(tmp_path).launched])


def test_a_search_that_cutile_makes_leaves_its_configs_out_of_the_table(
    recorder: Recorder, tmp_path: Path
) -> None:
    class Opaque:
        TILE, occupancy = 32, 7

    x, out = tensors(1024)
    tuned(x, out, space=[Opaque()])
    assert recorder.tables == {}
    tuned_once.ct.launch(0, (32, 1, 1), scale_kernel.replace_hints(occupancy=6), (x, out, 1024, 2.0, 32))
    assert [dict(one.hints)["occupancy"] for one in read(tmp_path).launched] == [6]


def test_a_launch_that_gets_no_cubin_is_remarked_or_fails_as_ever(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    @cuda.tile.kernel
    def local_kernel(x, NONE: cuda.tile.Constant[int]):
        cuda.tile.store(x, index=(0,), tile=cuda.tile.zeros((16 // NONE,), x.dtype))

    (x, _) = tensors(16)
    with pytest.raises(cuda.tile.TileError):
        cuda.tile.launch(0, (1, 1, 1), local_kernel, (x, 3))
    assert (recorder.sites, recorder.tables) == ({}, {})
    cuda.tile.launch(0, (1, 1, 1), local_kernel, (x, 1))
    (remark,) = site(recorder).remarks
    assert remark.startswith("a launch of tests.replay.record.test_recorder.test_a_launch_that_gets_no_cubin")
    assert remark.endswith("no cubin: its kernel is made only when its library calls a function")
    recorder.sites.clear()
    recorder(replace(launched(1), kernel=tuned_once.generated()))
    assert "no cubin: its function was made without a module" in "".join(site(recorder).remarks)
    monkeypatch.setattr(recording, "MOST_LAUNCHED", 0)
    tuned_once.ct.launch(0, (32, 1, 1), scale_kernel.replace_hints(), (*tensors(1024), 1024, 2.0, 32))
    *_, full = recorder.sites.values()
    assert [remark.partition(": ")[2] for remark in full.remarks] == ["its table holds 0 launches already"]
    assert recorder.tables == {}


def test_a_constant_that_follows_a_size_is_found() -> None:
    from aot_tune.replay.problem import Array, Fixed, Problem

    def of(rows: int, constant: int) -> Problem:
        tensor = Array(dtype="float16", shape=(rows, 64), layout="contiguous", aligned=True)
        return Problem(names=("x", "N"), arguments=(tensor, Fixed(str(constant))), sm_count=132)

    assert following(of(128, 128), of(256, 256)) == ["N"]
    assert following(of(128, 128), of(256, 128)) == []
    assert following(of(128, 1), of(256, 2)) == []
    assert equal_to_a_size(of(128, 128)) == equal_to_a_size(of(2, 2)) == ["N"]
    assert equal_to_a_size(of(1, 1)) == equal_to_a_size(of(128, 127)) == []


def test_a_constant_that_equals_the_only_size_is_remarked(recorder: Recorder) -> None:
    def remarks(rows: int) -> list[str]:
        served_library.tuned(*tensors(rows), batch=1, longest=rows, limit=8)
        return list(site(recorder).remarks)

    (remark,) = remarks(8)
    assert remark.startswith("LIMIT is a Constant and equals a size: ")
    assert remarks(16) == []


def test_numbers_that_no_tensor_s_size_explains_are_sizes(recorder: Recorder, replayed: list[int]) -> None:
    served_library.tuned(*tensors(64 * 200), batch=64, longest=150)
    replay()
    replayed.clear()
    served_library.tuned(*tensors(64 * 180), batch=64, longest=130)  # other rows of a batch, another longest
    served_library.tuned(*tensors(64 * 200), batch=64, longest=128)
    assert replayed == []
    with pytest.warns(MissWarning, match=r"; longest=150 is longest=12 here\); its 2 configs"):
        served_library.tuned(*tensors(64 * 200), batch=64, longest=12)
    served_library.tuned(*tensors(64 * 200), batch=64, longest=150, limit=4097)
    assert replayed == [2, 2]


def test_configs_compile_while_another_process_searches(recorder: Recorder, tmp_path: Path) -> None:
    done: list[str] = []
    compiled = threading.Event()

    class Noting:
        def compile(self, call: Any, kernel: Any, digest: str, arch: Any, places: Sequence[int]) -> None:
            done.append(f"compiled {len(places)}")
            compiled.set()

        def tried(
            self, call: Any, kernel: Any, digest: str, arch: Any, places: Sequence[int]
        ) -> dict[int, Any]:
            done.append(f"tried {len(places)}")
            return {}

        def close(self) -> None:
            pass

    ahead: Any = Noting()
    another(out=tmp_path / "tables", journals=tmp_path / "journals", ahead=lambda index, cubins: ahead)
    searching = threading.Thread(target=lambda: tuned(*tensors(1024)))
    with turns.turn(tmp_path / "journals", "cuda-0"):
        searching.start()
        assert compiled.wait(30)
        assert done == ["compiled 9"]
    searching.join(60)
    assert done == ["compiled 9", "tried 9"]
    tuned(*tensors(1024))  # the same problem: nothing new compiles
    assert done == ["compiled 9", "tried 9", "tried 9"]


def test_an_interruption_while_configs_compile_is_reported(recorder: Recorder, tmp_path: Path) -> None:
    class Interrupted:
        def compile(self, *args: Any) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    ahead: Any = Interrupted()
    begun: list[str] = []
    other = another(
        out=tmp_path / "tables", journals=tmp_path / "journals", ahead=lambda index, cubins: ahead,
        begun=lambda: begun.extend(site(other).remarks),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        tuned(*tensors(1024))
    assert begun == [*site(other).remarks] == [recording._NOT_ENDED]


def test_a_search_waits_for_that_of_another_process(
    recorder: Recorder, tmp_path: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.2)
    with turns.turn(tmp_path / "journals", "cuda-0"):
        assert tuned(*tensors(1024)).best.config.TILE == 32
    assert replayed == [9]
    lock = tmp_path / "journals" / "cuda-0.lock"
    assert list(site(recorder).remarks) == [f"not recorded: another process has held {lock} for 0.2 s"]
    tuned(*tensors(1024))
    assert len(read(tmp_path).entries) == 1


def test_a_search_waits_for_that_of_the_same_kernel_on_another_gpu(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, first, second = LibrarySearch.run, tensors(1024), tensors(5000)
    other = Recorder(out=tmp_path / "tables", journals=tmp_path / "journals")
    others.append(other)

    def on_another_gpu() -> None:
        monkeypatch.setattr(gpu_state, "identity", lambda index: {"uuid": "GPU-1"})
        places.record_with(other)
        tuned(*second)

    searching = threading.Thread(target=on_another_gpu)

    def run(search: LibrarySearch) -> Any:
        if searching.ident is None:
            searching.start()
            searching.join(1)  # it waits for the journal
        return own(search)

    monkeypatch.setattr(LibrarySearch, "run", run)
    tuned(*first)
    searching.join(60)
    assert [site(one).remarks for one in (recorder, other)] == [{}, {}]
    assert {entry.problem.arguments[2] for entry in read(tmp_path).entries} == {Whole(1024), Whole(5000)}
