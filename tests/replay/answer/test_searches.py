"""A library's searches answered from recorded tables, on the stand-in driver."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.tile as ct
import pytest
import torch

from aot_tune import environment
from aot_tune.declare.fingerprint.hashing import kernel_hash
from aot_tune.errors import MissError, MissWarning, TableWarning
from aot_tune.nvidia import cutile
from aot_tune.replay.answer import records, searches
from aot_tune.replay.answer.install import install, uninstall
from aot_tune.replay.answer.records import ByCode
from aot_tune.replay.document import dump
from aot_tune.replay.files import read_recorded
from aot_tune.replay.problem import read_problem
from aot_tune.replay.spelling import space_hash, spelled, texts_of
from aot_tune.replay.table import Library, RecordedEntry, RecordedTable, file_name
from aot_tune.serve.rank import set_primed
from aot_tune.tables import store
from tests.support import recorded_tables, tuned_once
from tests.support.driver import Driver, FakeTensor
from tests.support.tuned_once import SPACE, hints_of, launch, scale_kernel, tuned

pytestmark = pytest.mark.process  # what is not answered compiles

PARAMETERS = [("x", False), ("out", False), ("n", False), ("factor", False), ("TILE", True)]


def tensors(rows: int, dtype: torch.dtype = torch.float16) -> tuple[FakeTensor, FakeTensor]:
    return FakeTensor((rows,), dtype), FakeTensor((rows,), dtype)


def recorded(rows: int, winner: SimpleNamespace, **changes: Any) -> RecordedEntry:
    x, out = tensors(rows)
    problem = read_problem(PARAMETERS, (x, out, rows, 2.0, winner.TILE), (4,), 132)
    arch = recorded_tables.TABLE.arch
    space = space_hash(texts_of(SPACE), cutile.hints_of(scale_kernel, arch))
    hints = cutile.hints_of(scale_kernel.replace_hints(**hints_of(winner)), arch)
    values = {"space": space, "config": spelled(winner), "problem": problem, "hints": hints, **changes}
    return recorded_tables.entry(**values)


def table(*entries: RecordedEntry, **changes: Any) -> RecordedTable:
    values: dict[str, Any] = {
        "module": tuned_once.__name__,
        "kernel": "scale_kernel",
        "source_hash": kernel_hash(scale_kernel)[0],
        "library": Library(name="", version=""),
        "entries": entries,
    }
    return dataclasses.replace(recorded_tables.TABLE, **{**values, **changes})


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Write a recorded table into the folder that `install` is given."""

    def write(*entries: RecordedEntry, **changes: Any) -> Path:
        path = tmp_path / "recorded" / "sm90" / file_name(tuned_once.__name__, "scale_kernel")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump(table(*entries, **changes)))
        searches.forget()
        return path

    return write


@pytest.fixture(autouse=True)
def asked(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Replay from a folder; the lengths of the spaces that cuTile's own search was asked to search."""
    driver.elapsed_ms = lambda symbol: 0.01 if "_I32" in symbol else 0.05
    calls: list[int] = []
    own = cutile.own_search()

    def counted(search_space: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(search_space))
        return own(search_space, *args, **kwargs)

    monkeypatch.setattr(cutile, "own_search", lambda: counted)
    install(tables=tmp_path / "recorded")
    yield calls
    monkeypatch.undo()
    uninstall()
    searches.forget()
    set_primed(False)


def test_the_same_problem_is_answered_with_what_was_recorded(
    put: Callable[..., Path], asked: list[int], driver: Driver
) -> None:
    put(recorded(1024, SPACE[7]))
    result = tuned(*tensors(1024))
    assert result.best.config is SPACE[7]
    assert (result.best.mean_us, result.best.error_margin_us, result.best.num_samples) == (12.5, 0.25, 40)
    assert (list(result.successes), list(result.failures)) == ([result.best], [])
    assert "12.5" in result.summary()
    assert asked == []
    assert launch(*tensors(1024)) is SPACE[7]
    (launched,) = driver.launches
    assert launched.grid == (16, 1, 1)
    assert "_I64" in launched.symbol


def test_a_recorded_problem_is_found_without_measuring_distances_to_others(
    put: Callable[..., Path], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(*(recorded(rows, SPACE[7]) for rows in (1024, 512, 900)))  # in the order of their text
    monkeypatch.setattr(records, "distance", None)
    assert tuned(*tensors(900)).best.config is SPACE[7]
    assert asked == []


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a table where aot_tune ships those of other libraries."""
    monkeypatch.setattr(store, "libraries_folder", lambda: tmp_path / "libraries")

    def write(*entries: RecordedEntry, **changes: Any) -> None:
        recorded_tables.write(tmp_path / "libraries", table(*entries, **changes))
        searches.forget()

    return write


def test_a_shipped_table_is_read_after_the_user_s_own(
    put: Callable[..., Path], shipped: Callable[..., None], asked: list[int]
) -> None:
    shipped(recorded(1024, SPACE[7]), recorded(8192, SPACE[2]))
    assert tuned(*tensors(1024)).best.config is SPACE[7]
    put(recorded(1024, SPACE[4]))
    assert tuned(*tensors(1024)).best.config is SPACE[4]
    assert tuned(*tensors(8192)).best.config is SPACE[2]
    assert asked == []


def test_a_shipped_table_of_another_version_answers_where_the_code_is_the_same(
    shipped: Callable[..., None], asked: list[int]
) -> None:
    shipped(recorded(1024, SPACE[7]), library=Library(name="pytest", version="0.1"))
    with pytest.warns(TableWarning, match="answers where the code is the same: .* with pytest 0.1, and"):
        assert tuned(*tensors(1024)).best.config is SPACE[7]
    shipped(recorded(1024, SPACE[7]), source_hash="0" * 16)
    tuned(*tensors(1024))  # nobody is warned of tables that are not theirs
    assert asked == [9]


def test_other_tables_are_read_after_the_first_search(
    put: Callable[..., Path], asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(recorded(1024, SPACE[7]))
    install()
    tuned(*tensors(1024))
    assert asked == [9]
    monkeypatch.chdir(tmp_path)
    install(tables="recorded")
    monkeypatch.chdir("/")
    assert tuned(*tensors(1024)).best.config is SPACE[7]
    assert asked == [9]
    install()
    tuned(*tensors(1024))
    assert asked == [9, 9]


def test_a_near_problem_is_answered_and_a_far_one_is_searched(
    put: Callable[..., Path], asked: list[int], driver: Driver
) -> None:
    put(recorded(1024, SPACE[7]), recorded(8192, SPACE[8]))
    assert tuned(*tensors(1500)).best.config is SPACE[7]
    assert tuned(*tensors(5000)).best.config is SPACE[8]
    assert asked == []
    with pytest.warns(MissWarning):
        far = tuned(*tensors(100))
    assert (asked, far.best.config.TILE) == ([9], 32)
    assert len(far.successes) == 9


def test_of_two_equally_near_the_larger_is_taken(put: Callable[..., Path]) -> None:
    put(recorded(1024, SPACE[0]), recorded(4096, SPACE[8]))
    assert tuned(*tensors(2048)).best.config is SPACE[8]


def test_of_two_equally_near_that_of_the_first_folder_is_taken(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "ours"))
    recorded_tables.write(tmp_path / "ours", table(recorded(1024, SPACE[4]), recorded(256, SPACE[5])))
    put(recorded(4096, SPACE[8]), recorded(512, SPACE[0]))
    assert tuned(*tensors(2048)).best.config is SPACE[4]
    assert tuned(*tensors(500)).best.config is SPACE[0]  # nearer


def test_the_first_of_several_winners_counts(put: Callable[..., Path]) -> None:
    put(recorded(1024, SPACE[5], count=1), recorded(1024, SPACE[2], count=7))
    assert tuned(*tensors(1024)).best.config is SPACE[5]


def test_a_changed_space_dtype_or_number_is_a_miss(put: Callable[..., Path], asked: list[int]) -> None:
    put(recorded(1024, SPACE[7]))
    with pytest.warns(MissWarning, match="this search space, .*, was not recorded") as warned:
        tuned(*tensors(1024), space=SPACE[:8])
    tuned(*tensors(1024, torch.bfloat16))
    tuned(*tensors(1024), space=[*SPACE, SimpleNamespace(TILE=128, occupancy=1)])
    assert (len(warned), asked) == (1, [8, 9, 10])
    tuned(*tensors(1024), factor=3.0)
    assert asked == [8, 9, 10]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source_hash": "0" * 16}, "the code of scale_kernel changed since it was recorded"),
        ({"library": Library(name="pytest", version="0.1")}, "it was recorded with pytest 0.1, and"),
        ({"library": Library(name="no-such-library", version="1")}, "which is not installed"),
        ({"kernel": "other_kernel"}, "it is of tests.support.tuned_once.other_kernel"),
    ],
)
def test_a_table_of_something_else_is_left_out_with_one_warning(
    changes: dict[str, Any], said: str, put: Callable[..., Path], asked: list[int]
) -> None:
    put(recorded(1024, SPACE[7]), **changes)
    with pytest.warns(TableWarning, match=said) as warned:
        tuned(*tensors(1024))
    tuned(*tensors(1024))
    assert (len(warned), asked) == (1, [9, 9])


def test_a_miss_gives_the_reason_why_a_table_is_left_out(
    put: Callable[..., Path], shipped: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(recorded(1024, SPACE[7]), source_hash="0" * 16)
    monkeypatch.setenv(environment.ON_MISS, "error")
    reason = "is left out: the code of scale_kernel changed since it was recorded .0{16}."
    with pytest.warns(TableWarning), pytest.raises(MissError, match=rf"call \({path} {reason}\), and"):
        tuned(*tensors(1024))
    shipped(recorded(64, SPACE[7]))
    with pytest.raises(
        MissError, match=rf"x=float16\[64\] is x=float16\[1024\] here.*; {path} {reason}\), and"
    ):
        tuned(*tensors(1024))


def test_a_damaged_table_is_left_out_with_one_warning(put: Callable[..., Path], asked: list[int]) -> None:
    put(recorded(1024, SPACE[7])).write_bytes(b"{")
    with pytest.warns(TableWarning, match="not JSON: .*; it is left out: restore"):
        tuned(*tensors(1024))
    assert asked == [9]


def test_a_miss_names_the_nearest_recorded_problem_and_what_differs(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(recorded(8192, SPACE[7]), recorded(1024, SPACE[7]))
    monkeypatch.setattr(searches.SearchCall, "search", lambda call: None)
    with pytest.warns(MissWarning) as warned:
        tuned(*tensors(1000, torch.bfloat16))
    tuned(*tensors(100))
    assert [str(one.message) for one in warned] == [
        "no recorded search of tests.support.tuned_once.scale_kernel answers this call (nearest recorded: "
        "x=float16[1024] out=float16[1024] n=1024 factor=float; x=float16[1024] is x=bfloat16[1000] here; "
        "out=float16[1024] is out=bfloat16[1000] here); its 9 configs are searched"
    ]


def test_a_miss_of_another_search_space_names_the_nearest_problem_too(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(recorded(8192, SPACE[7]), recorded(512, SPACE[7]))
    monkeypatch.setattr(searches.SearchCall, "search", lambda call: None)
    with pytest.warns(MissWarning) as warned:
        tuned(*tensors(512, torch.bfloat16), space=SPACE[:2])
    assert [str(one.message) for one in warned] == [
        "no recorded search of tests.support.tuned_once.scale_kernel answers this call (this search space, "
        "its 2 configs and hints, was not recorded; nearest recorded in another: x=float16[512] "
        "out=float16[512] n=512 factor=float; x=float16[512] is x=bfloat16[512] here; out=float16[512] is "
        "out=bfloat16[512] here); its 2 configs are searched"
    ]


def test_a_miss_beside_an_entry_with_other_parameters_is_told(put: Callable[..., Path]) -> None:
    entry = recorded(1024, SPACE[7])
    edited = entry.problem._replace(names=("x",), arguments=entry.problem.arguments[:1])
    put(dataclasses.replace(entry, problem=edited))
    with pytest.warns(MissWarning, match="this search space, .*, was not recorded"):
        tuned(*tensors(1024))


def restrict_by_rank(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setenv(environment.RANKED, "8")


def restrict_by_capture(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(driver.runtime, "capturing", lambda: True)


def restrict_by_prime(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    set_primed(True)


def restrict_by_variable(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setenv(environment.DISABLE, "1")


RESTRICTED = [restrict_by_rank, restrict_by_capture, restrict_by_prime, restrict_by_variable]


@pytest.mark.parametrize("restrict", RESTRICTED)
@pytest.mark.parametrize("mode", ["search", "nearest"])
def test_a_process_that_may_not_search_takes_the_nearest_at_any_distance(
    restrict: Callable[..., None], mode: str, put: Callable[..., Path], asked: list[int],
    monkeypatch: pytest.MonkeyPatch, driver: Driver,
) -> None:  # fmt: skip
    put(recorded(1024, SPACE[7]))
    monkeypatch.setenv(environment.ON_MISS, mode)
    restrict(monkeypatch, driver)
    assert tuned(*tensors(64)).best.config is SPACE[7]
    assert asked == []


@pytest.mark.parametrize("restrict", RESTRICTED)
def test_where_nothing_is_comparable_it_takes_the_first_with_infinity(
    restrict: Callable[..., None], put: Callable[..., Path], asked: list[int],
    monkeypatch: pytest.MonkeyPatch, driver: Driver,
) -> None:  # fmt: skip
    put(recorded(1024, SPACE[7]))
    restrict(monkeypatch, driver)
    with pytest.warns(MissWarning, match="no recorded search of tests.support.tuned_once.scale_kernel"):
        best = tuned(*tensors(1024, torch.float32)).best
    assert (best.config, best.mean_us, best.num_samples) == (SPACE[0], math.inf, 0)
    assert asked == []


def test_the_modes_of_a_miss_in_a_process_that_may_search(
    put: Callable[..., Path], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(recorded(1024, SPACE[7]))
    far = tensors(64)
    monkeypatch.setenv(environment.ON_MISS, "nearest")
    assert tuned(*far).best.config is SPACE[7]
    monkeypatch.setenv(environment.ON_MISS, "default")
    with pytest.warns(MissWarning):
        assert tuned(*far).best.config is SPACE[0]
    assert tuned(*tensors(1500)).best.config is SPACE[7]
    monkeypatch.setenv(environment.ON_MISS, "error")
    with pytest.raises(MissError, match="AOT_TUNE_ON_MISS=error: record it with aot-tune record"):
        tuned(*far)
    assert asked == []


def test_one_warning_a_kernel_and_then_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.ON_MISS, "default")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rows in range(1, 101):
            tuned(*tensors(rows))
    said = [str(one.message) for one in warned]
    assert len(said) == 3
    assert said[1:] == [
        f"{count} searches of tests.support.tuned_once.scale_kernel were not recorded" for count in (10, 100)
    ]


def unspelled(put: Callable[..., Path]) -> Any:
    put(recorded(1024, SPACE[7]))
    return tuned(*tensors(1024), space=[Opaque(16)])


class Opaque:
    __slots__ = ("TILE", "occupancy")

    def __init__(self, tile: int) -> None:
        self.TILE, self.occupancy = tile, 1


def test_what_cannot_be_told_is_searched_as_if_nothing_stood_between(
    put: Callable[..., Path], asked: list[int]
) -> None:
    with pytest.warns(MissWarning, match="config 0 of 1: a .*Opaque cannot be spelled"):
        assert unspelled(put).best.config.TILE == 16
    with pytest.raises(ValueError, match=r"^Search space is empty\.$"):
        tuned(*tensors(1024), space=[])
    with pytest.raises(TypeError, match=r"^exhaustive_search\(\) missing 4 required positional"):
        tuned_once.exhaustive_search(SPACE)
    with pytest.raises(AttributeError):
        tuned(*tensors(1024), kernel=lambda config: None)
    assert asked == [1, 0, 9]


def test_a_kernel_that_depends_on_the_config_is_answered_too(
    put: Callable[..., Path], asked: list[int]
) -> None:
    import cuda.tile as ct

    put(recorded(1024, SPACE[7]))
    result = tuned(*tensors(1024), kernel=lambda config: ct.kernel(scale_kernel._pyfunc))
    assert (result.best.config, asked) == (SPACE[7], [])


def test_a_library_that_imported_it_by_name_gets_cutiles_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # else `uninstall` would leave what counts in cuTile's place
    replaced = tuned_once.exhaustive_search
    assert cutile.stands_in(replaced)
    uninstall()
    assert not cutile.stands_in(tuned_once.exhaustive_search)
    assert not cutile.stands_in(sys.modules["cuda.tile.tune"].exhaustive_search)
    install()
    assert cutile.stands_in(tuned_once.exhaustive_search)


def made_anew(factor: Any, helper: Any = None) -> Any:
    """A kernel of a closure, as a library makes it in each call."""

    @ct.kernel
    def closed_kernel(x, out, n, scale, TILE: ct.Constant[int]):
        tile = ct.load(x, index=(ct.bid(0),), shape=(TILE,)) * factor
        ct.store(out, index=(ct.bid(0),), tile=ct.astype(tile if helper is None else helper(tile), out.dtype))

    return closed_kernel


def test_a_kernel_that_is_made_anew_is_read_hashed_and_warned_of_once(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "made_anew.<locals>.closed_kernel"
    path = put(recorded(1024, SPACE[7])).with_name(file_name(__name__, name))
    path.write_bytes(dump(table(recorded(1024, SPACE[7]), module=__name__, kernel=name)))
    read: list[Path] = []
    monkeypatch.setattr(records, "read_recorded", lambda path: read.append(path) or read_recorded(path))
    monkeypatch.setenv(environment.ON_MISS, "default")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(20):
            tuned(*tensors(1024), kernel=made_anew(2))
            assert read == [path]
        for factor, helper in ((3, None), (2, hints_of), (2, made_anew), (object(), None)) * 2:
            tuned(*tensors(1024), kernel=made_anew(factor, helper))
    assert read == [path] * 6  # another closure is other code, and an object has no spelling
    said = [str(one.message) for one in warned if one.category is TableWarning]
    assert all("the code of made_anew.<locals>.closed_kernel c" in one for one in said)
    assert len(said) == len(set(said)) == 2  # it changed, or cannot be hashed


def test_records_are_forgotten_with_the_code_that_they_are_for(put: Callable[..., Path]) -> None:
    put(recorded(1024, SPACE[7]))
    texts = dict(vars(sys.modules[__name__]))
    exec(inspect.getsource(made_anew), texts)
    kept = ByCode()
    kept.of(texts["made_anew"](2))["a"] = 1
    assert kept.of(texts["made_anew"](2)) == {"a": 1}
    assert kept.of(texts["made_anew"](True)) == {}
    assert kept.of(made_anew(2)) == {}
    del texts
    gc.collect()
    for factor in range(1000):
        kept.of(made_anew(factor))["a"] = factor
    assert kept.of(made_anew(999)) == {"a": 999}
    assert [len(closures) <= 64 for closures in kept._values.values()] == [True]
