"""No file can crash, hang or misconfigure a server: every fault of a table is one warning and a miss."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import aot_tune.kernels
from aot_tune import environment
from aot_tune.choose.batch import BatchInvariant
from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import resolve
from aot_tune.errors import DeclarationError, TableWarning
from aot_tune.replay.answer.records import folders_of
from aot_tune.serve import loader
from aot_tune.serve.kernels import declared_cubins
from aot_tune.serve.loader import load
from aot_tune.tables import writer
from aot_tune.tables.reader import parse
from aot_tune.tables.store import read_table
from aot_tune.tables.table import StateTimes, Table
from aot_tune.tables.writer import dump
from aot_tune.tunable import Tunable
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config, Constant
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, scale, scale_table, with_entry, write

ROOT = Path(__file__).parents[3]

WHOLE = writer.dump(scale_table())


def spoil(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(WHOLE)) and None


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


FAULTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(WHOLE[: len(WHOLE) // 2]),
    "nuls": lambda path: path.write_bytes(bytes(4096)),
    "directory": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "10^5 levels": lambda path: path.write_bytes(b"[" * 100_000),
    "1 GB": sparse,
    "NaN": spoil(lambda text: text.replace(b'"portfolio_regret": 0', b'"portfolio_regret": NaN', 1)),
    "true for 2": lambda path: path.write_bytes(WHOLE.replace(b'"schema": 2', b'"schema": true', 1)),
    "30-digit int": lambda path: path.write_bytes(
        WHOLE.replace(b'"num_ctas": 1', b'"num_ctas": ' + b"9" * 30, 1)
    ),
    "duplicate keys": lambda path: path.write_bytes(WHOLE.replace(b'"arch":', b'"kernel": "x", "arch":', 1)),
    "BOM": lambda path: path.write_bytes(b"\xef\xbb\xbf" + WHOLE),
    "lone surrogate": lambda path: path.write_bytes(WHOLE.replace(b"NVIDIA", b"\\ud800", 1)),
    "newer schema": lambda path: path.write_bytes(WHOLE.replace(b'"schema": 2', b'"schema": 3', 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_b1_b2_a_faulty_table_is_a_miss_with_one_warning_and_the_rest_is_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, B2: the warning names the path; bounded in time; the next folder's table still serves."""
    bad, good = tmp_path / "bad", tmp_path / "good"
    (bad / "sm90").mkdir(parents=True)
    FAULTS[fault](bad / "sm90" / "scale.json")
    write(good, scale_table())
    monkeypatch.setenv(environment.TABLES, str(bad))
    started = time.process_time()
    with pytest.warns(TableWarning) as seen:
        index = load(dataclasses.replace(scale, tables=good), SM90)
    assert time.process_time() - started < 5  # CPU time; an endless file takes for ever
    assert len(seen) == 1
    assert str(bad / "sm90" / "scale.json") in str(seen[0].message)
    assert [path.parent.parent for path in index.tables] == [good]


FIGURES: dict[str, Callable[[bytes], bytes]] = {
    "NaN": lambda line: line.replace(b'"mean_us": 10', b'"mean_us": NaN', 1),
    "a time of 0": lambda line: line.replace(b'"us": [', b'"us": [0.0, ', 1),
    "two keys": lambda line: line.replace(b'"regret"', b'"regret": 0.1, "regret"', 1),
    "nuls": lambda line: line.replace(b'"points"', b"\0\0\0"),
    "cut off": lambda line: line[: line.index(b'"points"') + 30] + line[-1:],
}


@pytest.mark.parametrize("fault", FIGURES)
def test_b2_a_bucket_with_faulty_figures_is_a_miss_with_one_warning_whatever_is_asked_first(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: it is found when the bucket is used, and counts as absent, of two tables too."""
    path = write(tmp_path / "bad", scale_table())
    head, first, second, third = WHOLE.partition(b'    {"bucket"')[0], *WHOLE.splitlines(keepends=True)[-5:-2]
    path.write_bytes(head + first + FIGURES[fault](second) + third + b"  ]\n}\n")
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "bad"))
    for own in ("good", "none"):
        if own == "good":
            write(tmp_path / own, scale_table())
        tunable = dataclasses.replace(scale, tables=tmp_path / own)
        asked = [scale.buckets[1], scale.buckets[1].replaced(M=40), scale.buckets[1].replaced(M=128)]
        answers = []
        for problems in (asked, asked[::-1]):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                index, legality = load(tunable, SM90), Legality(tunable, SM90)
                assert not seen
                chosen = {str(problem): resolve(problem, index, legality) for problem in problems}
            match = index.nearest(problems[0], 4.0)
            assert match is not None
            assert len(index.estimator(match, lambda problem: DEFAULT).table.entries) == 3
            (warning,) = (one for one in seen if one.category is TableWarning)
            assert f"{path}: " in str(warning.message)
            assert "entries[1]" in str(warning.message)
            answers.append({problem: (choice.config, choice.source) for problem, choice in chosen.items()})
        assert answers[0] == answers[1]
        sources = [answers[0][str(problem)][1] for problem in asked]
        assert sources == (["own", "own", "nearest"] if own == "good" else ["nearest"] * 3)


@pytest.mark.parametrize("asked_before", [False, True])
def test_b2_faulty_buckets_are_absent_where_one_config_serves_every_batch(
    asked_before: bool, tmp_path: Path
) -> None:
    """B2: ranks agree, whatever each of them was asked before."""
    path = write(tmp_path, scale_table())
    head, lines = WHOLE.partition(b'    {"bucket"')[0], WHOLE.splitlines(keepends=True)[-5:-2]
    path.write_bytes(head + b"".join(map(FIGURES["a time of 0"], lines)) + b"  ]\n}\n")
    batched = dataclasses.replace(scale, tables=tmp_path, batch_axes=("M",))
    index, legality = load(batched, SM90), Legality(batched, SM90)
    if asked_before:
        with pytest.warns(TableWarning, match="entries"):
            resolve(scale.buckets[1], index, legality)
    with nullcontext() if asked_before else pytest.warns(TableWarning, match="entries"):
        choice = resolve(scale.buckets[1], index, legality, every_batch=BatchInvariant(index, legality))
    assert (choice.source, choice.missed) == ("default", True)


def test_b1_a_table_that_may_not_be_read_is_a_miss_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: whatever reading raises, the process that serves goes on."""
    path = write(tmp_path, scale_table())
    monkeypatch.setattr(loader, "read_table", lambda path, **how: (_ for _ in ()).throw(RuntimeError("odd")))
    with pytest.warns(TableWarning, match=r"RuntimeError: odd") as seen:
        index = load(dataclasses.replace(scale, tables=tmp_path), SM90)
    assert str(path) in str(seen[0].message)
    assert index.tables == {}


def test_a_table_that_was_never_made_is_no_fault(tmp_path: Path) -> None:
    assert load(dataclasses.replace(scale, tables=tmp_path), SM90).tables == {}


def _renamed_constants(table: Table) -> Table:
    def other(config: Config) -> Config:
        return Config(constants={"tile_x": 16, "tile_n": 64}, hints=config.hints)

    entries = tuple(dataclasses.replace(entry, config=other(entry.config)) for entry in table.entries)
    return dataclasses.replace(table, portfolio=tuple(map(other, table.portfolio)), entries=entries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: dataclasses.replace(t, arch=Arch.parse("sm100")),
            "it is the table of sm100, not of sm90; .*: move it to sm100/scale.json, or remove it",
        ),
        (
            lambda t: dataclasses.replace(t, kernel="other"),
            "it is the table of 'other', not of 'scale'; .*: move it to sm90/other.json, or remove it",
        ),
        (
            _renamed_constants,
            "its configs have the constants tile_x tile_n, .* tile_m tile_n; .*: tune it again",
        ),
    ],
    ids=["arch", "kernel", "constants"],
)
def test_b3_a_well_formed_table_of_something_else_is_never_used(
    change: Callable[[Table], Table], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: other arch, other kernel, constants the kernel does not take."""
    write(tmp_path, scale_table())
    monkeypatch.setattr(loader, "read_table", lambda path, **how: change(scale_table()))
    with pytest.warns(TableWarning, match=message):
        assert load(dataclasses.replace(scale, tables=tmp_path), SM90).tables == {}


def test_predicted_entries_are_read_only_from_a_folder_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, with_entry(scale_table(), 1, evidence="predicted"))
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with pytest.warns(TableWarning, match="1 of its entries are predicted and left out"):
        assert len(next(iter(load(tunable, SM90).tables.values())).entries) == 2
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    elsewhere = dataclasses.replace(scale, tables=tmp_path / "none")
    assert len(next(iter(load(elsewhere, SM90).tables.values())).entries) == 3
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(environment.TABLES, f"{tmp_path / 'other' / '..'}")
    (named,) = load(tunable, SM90).tables.values()  # its own folder, read once and as a named one
    assert len(named.entries) == 3


def test_a_named_folder_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "gone"))
    with pytest.warns(TableWarning, match=r"AOT_TUNE_TABLES names .*gone, which is not a folder"):
        load(dataclasses.replace(scale, tables=tmp_path), SM90)


def test_nvml_is_not_asked_where_no_folder_could_hold_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "gpus", lambda: pytest.fail("NVML was asked, 58 ms"))
    assert loader.archs_to_load(scale) == ()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\0b", "x" * 300, "", ".", "X", "con fig"])
def test_b14_a_name_that_is_no_file_name_is_refused_when_declared_and_nothing_is_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B14: the whole path, from a declaration to tables, archive and cache."""
    inside = tmp_path / "root" / "tables"
    inside.mkdir(parents=True)
    monkeypatch.setenv(environment.CACHE_DIR, str(tmp_path / "root" / "cache"))
    monkeypatch.setattr(loader, "gpus", lambda: pytest.fail("it was loaded"))
    with pytest.raises(DeclarationError, match="name"):
        dataclasses.replace(scale, name=name, tables=inside)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "root", inside]


def test_b14_a_table_that_names_a_kernel_elsewhere_is_a_miss(tmp_path: Path) -> None:
    """B14: a name in a file leads nowhere."""
    write(tmp_path, scale_table())
    path = tmp_path / "sm90" / "scale.json"
    path.write_bytes(WHOLE.replace(b'"kernel": "scale"', b'"kernel": "../../scale"'))
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with pytest.warns(TableWarning, match="scale.json"):
        assert load(tunable, SM90).tables == {}


# Configs of no search space ---------------------------------------------------------------------------------


def _hostile(table: Table, value: Constant) -> Table:
    """The table with each constant of each config replaced by a value that no search space has."""

    def other(config: Config, place: int = 0) -> Config:
        constants = {**dict.fromkeys(config.constants, value)}
        return Config(constants=constants, hints={"occupancy": 1 + place})

    portfolio = tuple(other(config, place) for place, config in enumerate(table.portfolio))
    entries = tuple(dataclasses.replace(entry, config=portfolio[0]) for entry in table.entries)
    return dataclasses.replace(table, portfolio=portfolio, entries=entries)


@pytest.mark.parametrize("value", [0, -1, "x", 1e308, True, 2**63 - 1])
@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("tuned_configs/sm90/*.json")))
def test_b3_constants_of_no_search_space_reach_no_function_of_a_declaration(
    name: str, value: Constant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: `tiles` and `legal` divide by constants and count with them; sizes between points ask them all."""
    tunable: Tunable = getattr(aot_tune.kernels, f"{name}_tunable")
    table = read_table(ROOT / "tuned_configs" / "sm90" / f"{name}.json")
    write(tmp_path, _hostile(table, value))
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    with pytest.warns(TableWarning, match="in no search space of") as seen:
        index = load(dataclasses.replace(tunable, tables=tmp_path / "none"), SM90)
    assert len(seen) == 1
    assert next(iter(index.tables.values())).portfolio == ()
    legality = Legality(tunable, SM90)
    for entry in table.entries[:: max(len(table.entries) // 8, 1)]:
        for problem in (entry.bucket, *sizes_inside(tunable.axes, entry.bucket)):
            choice = resolve(problem, index, legality)
            assert choice.config in tunable.space(SM90, problem)


def test_b3_the_other_configs_of_a_table_keep_their_times(tmp_path: Path) -> None:
    bad = Config(constants={"tile_m": 0, "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    table = scale_table()
    good = table.portfolio[1]
    entries = tuple(
        dataclasses.replace(
            entry,
            config=good,
            states={"cool": StateTimes(mean_us=1.0, default_us=2.0)},
            points=tuple(
                dataclasses.replace(point, states={"cool": (1.0, 2.0, 3.0)}) for point in entry.points
            ),
        )
        for entry in table.entries
    )
    write(tmp_path, dataclasses.replace(table, portfolio=(bad, good), entries=entries))
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with pytest.warns(TableWarning, match=r"1 config in no search space of scale.*tile_m=0") as seen:
        index = load(tunable, SM90)
    assert len(seen) == 1
    (read,) = index.tables.values()
    assert read.portfolio == (good,)
    written = parse(dump(table)).entries[1].points  # with rounded times
    assert [point.us for point in read.entries[1].points] == [point.us[1:] for point in written]
    assert {point.states["cool"] for point in read.entries[1].points} == {(2.0, 3.0)}
    choice = resolve(table.entries[1].bucket.replaced(M=40), index, Legality(tunable, SM90))
    assert choice.config in (good, DEFAULT)
    assert choice.source == "own"


def test_a_table_of_shapes_that_are_not_declared_keeps_their_configs(tmp_path: Path) -> None:
    """A user's own table may hold configs that only the space of its own buckets has."""
    wide = Config(constants={"tile_m": 128, "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    tunable = dataclasses.replace(scale, tables=tmp_path)
    spaces = lambda arch, problem: [DEFAULT, *([wide] if problem.size("N") == 8192 else [])]  # noqa: E731
    object.__setattr__(tunable, "search_space", spaces)
    table = scale_table()
    bucket = Problem({"dtype": "bfloat16", "M": 64, "N": 8192})
    own = dataclasses.replace(table.entries[1], bucket=bucket, config=wide)
    write(tmp_path, dataclasses.replace(table, portfolio=(wide, table.portfolio[1]), entries=(own,)))
    with pytest.warns(TableWarning, match=r"1 config in no search space"):
        index = load(tunable, SM90)
    assert next(iter(index.tables.values())).portfolio == (wide,)
    assert resolve(bucket, index, Legality(tunable, SM90)).config == wide


# Warnings ---------------------------------------------------------------------------------------------------


def test_b2_a_warning_is_short_whatever_the_file_holds(tmp_path: Path) -> None:
    names = {f"constant_{number}": 1 for number in range(20_000)}
    many = Config(constants=names)
    table = dataclasses.replace(scale_table(), portfolio=(many,), entries=())
    write(tmp_path, table)
    with pytest.warns(TableWarning, match="its configs have the constants") as seen:
        load(dataclasses.replace(scale, tables=tmp_path), SM90)
    assert [len(str(one.message)) < 1000 for one in seen] == [True]


def chained(path: Path) -> None:
    """2000 links, each to the next: more than the kernel follows, or a recursion that resolves them."""
    for number in range(2000):
        path.with_name(f"{path.name}{number or ''}").symlink_to(f"{path.name}{number + 1}")


def below_a_loop(path: Path) -> None:
    (path.parent / "loop").symlink_to("loop")
    path.symlink_to("loop/tables")


NO_FOLDERS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a file": lambda path: path.write_bytes(WHOLE),
    "FIFO": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "link to itself": lambda path: path.symlink_to(path.name),
    "below a link to itself": below_a_loop,
    "chain of links": chained,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/stdin": lambda path: path.symlink_to("/dev/stdin"),
    "/proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
}
FOLDERS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.mkdir(),
    "mode 000": lambda path: path.mkdir(0),
    "/proc": lambda path: path.symlink_to("/proc"),
    "/": lambda path: path.symlink_to("/"),
    "its own parent": lambda path: path.symlink_to("."),
    "an arch that is a file": lambda path: path.mkdir() or (path / "sm90").write_bytes(WHOLE),  # type: ignore[func-returns-value]
    "an arch that is a FIFO": lambda path: path.mkdir() or os.mkfifo(path / "sm90"),  # type: ignore[func-returns-value]
    "an arch that is a loop": lambda path: path.mkdir() or (path / "sm90").symlink_to("sm90"),  # type: ignore[func-returns-value]
}
NAMES = {
    "5000 characters": "x" * 5000,
    "escapes": "\x1b[31m",
    "no UTF-8": os.fsdecode(b"\xff"),
    "a home": "~nobody",
    "NUL": "a\0b",
    "a file's child": "/dev/null/tables",
    "removed current folder": ".",
}


@pytest.mark.parametrize("kind", [*NO_FOLDERS, *FOLDERS, *NAMES])
def test_b1_no_path_in_the_folders_of_tables_raises(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: whatever the user's folder is, it is one warning at most, and the others serve."""
    odd, good, here = tmp_path / "odd", tmp_path / "good", tmp_path / "here"
    write(good, scale_table())
    here.mkdir()
    monkeypatch.chdir(here)
    if kind in NAMES:
        odd = Path(NAMES[kind])
        here.rmdir()
    else:
        (NO_FOLDERS | FOLDERS)[kind](odd)
    monkeypatch.setattr(environment, "table_folders", lambda: (odd, good))  # no variable can have a NUL
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tunable = dataclasses.replace(scale, tables=tmp_path / "own")
        loader.archs_to_load(tunable)
        assert [path.parent.parent for path in load(tunable, SM90).tables] == [good]
        assert declared_cubins(tunable).sections(SM90) == ()
        assert list(folders_of(__name__))[:2] == [odd, good]
    assert len(seen) <= 1
    assert all(str(one.message).replace("\n", "").isascii() or kind == "no UTF-8" for one in seen)
    assert "\x1b" not in "".join(str(one.message) for one in seen)
    if kind in NO_FOLDERS:
        assert f"AOT_TUNE_TABLES names {odd}, which is not a folder" in str(seen[0].message)


def test_folders_that_are_not_there_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [str(tmp_path / f"gone{number}") for number in range(2000)]
    monkeypatch.setenv(environment.TABLES, os.pathsep.join(gone))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in ("scale", "another"):
            load(dataclasses.replace(scale, name=name, tables=tmp_path), SM90)
    (one,) = seen
    assert "gone0, which is not a folder" in str(one.message)
    assert "(and 1999 folders more)" in str(one.message)


@pytest.mark.parametrize("kind", ["no permission", "archive"])
def test_b1_a_folder_that_cannot_be_looked_into_is_said_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "archive":  # as where zipimport loads the package
        (tmp_path / "app.zip").write_bytes(b"PK")
        folder, said = tmp_path / "app.zip" / "mylib" / "tuned_configs", "app.zip is not a folder"
    else:
        folder, said = tmp_path, "Permission denied"
        real = os.lstat

        def lstat(path: str | Path) -> os.stat_result:
            if str(path).endswith(".json"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, "lstat", lstat)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in ("scale", "another"):
            assert load(dataclasses.replace(scale, name=name, tables=folder), SM90).tables == {}
    assert [said in str(one.message) for one in seen] == [True]
