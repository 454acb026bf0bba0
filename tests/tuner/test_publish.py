"""A table that would be worse is not published, and the old file stays byte for byte (A15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot_tune.errors import StoreError, TableError, TuneError
from aot_tune.tables import reader, store, writer
from aot_tune.tables.table import StateTimes, Table
from aot_tune.tuner.publish import decide_and_publish, locked, publish, refusals, worse_entries
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import samples

SCALE = samples.scale


def illegal(table: Table) -> Table:
    config = Config(constants={"tile_m": 64, "tile_n": 128}, hints={"occupancy": 1, "num_ctas": 1})
    return samples.with_entry(
        dataclasses.replace(table, portfolio=(config, table.portfolio[1])), 1, config=config
    )


def foreign(table: Table) -> Table:
    config = Config(constants={"tile_m": 8, "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    return samples.with_entry(
        dataclasses.replace(table, portfolio=(config, table.portfolio[1])), 1, config=config
    )


def test_a_sound_table_is_not_refused() -> None:
    table = samples.scale_table()
    assert refusals(table, None, SCALE) == []
    assert refusals(table, table, SCALE) == []


WORSE: dict[str, tuple[Callable[[Table], Table], str]] = {
    "empty": (lambda t: dataclasses.replace(t, entries=()), "no entries"),
    "fewer entries": (lambda t: dataclasses.replace(t, entries=t.entries[1:]), "lacks 1 of the 3 entries"),
    "slower than the default": (
        lambda t: samples.with_entry(t, 1, mean_us=10.1, default_us=10.0),
        "slower than the default",
    ),
    "illegal": (illegal, "64 x 128 does not fit"),
    "outside its space": (foreign, "outside the search space"),
    "a portfolio no entry may run": (foreign, "portfolio: tile_m=8"),
    "a config of neither portfolio nor default": (
        lambda t: samples.with_entry(t, 1, config=samples.SPACE[-3]),
        "neither in the portfolio nor the default",
    ),
    "predictions with measurements": (
        lambda t: samples.with_entry(t, 0, evidence="predicted"),
        "predictions with measurements",
    ),
    "measurements by predictions": (
        lambda t: dataclasses.replace(
            t, entries=tuple(dataclasses.replace(e, evidence="predicted") for e in t.entries)
        ),
        "measurements by predictions",
    ),
    "another source": (lambda t: dataclasses.replace(t, source_hash="0" * 16), "code has changed"),
    "another kernel": (lambda t: dataclasses.replace(t, kernel="other"), "the table of other, not of scale"),
    "another arch": (lambda t: dataclasses.replace(t, arch=Arch.parse("sm100")), "replace a table for sm90"),
    "other axes": (
        lambda t: dataclasses.replace(t, axes={"M": Exact(), "N": Exact()}),
        "M:exact N:exact, the declaration has M:pow2 N:exact",
    ),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_table_that_would_be_worse_is_refused_with_the_reason(name: str) -> None:
    spoil, reason = WORSE[name]
    old = samples.scale_table()
    reasons = refusals(spoil(old), old, SCALE)
    assert any(reason in line for line in reasons), reasons


def test_all_reasons_are_listed_and_name_their_entry() -> None:
    old = samples.scale_table()
    new = dataclasses.replace(
        samples.with_entry(old, 1, mean_us=10.1, default_us=10.0),
        entries=samples.with_entry(old, 1, mean_us=10.1, default_us=10.0).entries[1:],
        source_hash="0" * 16,
    )
    reasons = refusals(new, old, SCALE)
    assert len(reasons) == 3
    assert any(line.startswith(str(new.entries[0].bucket)) for line in reasons)


def test_entries_of_shapes_that_are_no_longer_declared_may_go() -> None:
    new = samples.scale_table()
    undeclared = dataclasses.replace(
        new.entries[2], bucket=Problem({"dtype": "bfloat16", "M": 512, "N": 1024}), points=()
    )
    old = dataclasses.replace(new, entries=(*new.entries, undeclared))
    assert refusals(new, old, SCALE) == []


def test_a_bucket_that_time_did_not_suffice_for_may_lack_its_entry() -> None:
    old = samples.scale_table()
    new = dataclasses.replace(old, entries=old.entries[1:])
    assert refusals(new, old, SCALE, unreached=[old.entries[0].bucket]) == []
    (reason,) = refusals(new, old, SCALE, unreached=[old.entries[1].bucket])
    assert "lacks 1 of the 3 entries" in reason


def test_predictions_may_replace_predictions() -> None:
    old = samples.scale_table()
    predicted = dataclasses.replace(
        old, entries=tuple(dataclasses.replace(e, evidence="predicted") for e in old.entries)
    )
    assert refusals(predicted, None, SCALE) == []
    assert refusals(predicted, predicted, SCALE) == []
    assert refusals(old, predicted, SCALE) == []


def test_code_that_can_not_be_hashed_is_refused_with_what_stands_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aot_tune.tuner.publish.unhashable", lambda tunable: ("a lock: threading.Lock",))
    (reason,) = refusals(samples.scale_table(), None, SCALE)
    assert "cannot be hashed" in reason
    assert "a lock" in reason


@pytest.mark.parametrize("name", ["default", "search_space", "legal"])
def test_a_function_of_the_declaration_that_raises_only_now_is_a_reason(name: str) -> None:
    """For an entry that was not swept, it is called here for the first time."""

    def raising(*args: Any) -> Any:
        if args[-1].size("M") == 64:
            raise ZeroDivisionError("M of 64")
        return getattr(SCALE, name)(*args)

    table = samples.scale_table()
    raises = dataclasses.replace(SCALE, **{name: raising})
    complaint = "a function of the declaration raises ZeroDivisionError: M of 64"
    assert refusals(table, table, raises) == [f"{table.entries[1].bucket}: {complaint}"]


# Entries that would be worse --------------------------------------------------------------------------------


def _gaining(gain: float, **values: object) -> Table:
    """A table whose second entry gains `gain` over its default."""
    return samples.with_entry(samples.scale_table(), 1, default_us=10.0 * gain, **values)


def test_an_entry_that_gains_less_for_no_reason_is_refused_unless_allowed() -> None:
    old, new = _gaining(1.5), _gaining(1.4)
    (reason,) = refusals(new, old, SCALE)
    assert "M=64 N=1024: its gain over the default falls from 1.50x with tile_m=32" in reason
    assert "--allow-worse" in reason
    assert refusals(new, old, SCALE, allow_worse=True) == []
    assert refusals(old, new, SCALE) == [], "more is no fault"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (_gaining(1.5), _gaining(1.48)),
        (_gaining(1.5, error_margin_us=0.5), _gaining(1.4, error_margin_us=0.5)),
        (dataclasses.replace(_gaining(1.5), source_hash="0" * 16), _gaining(1.4)),
        (
            dataclasses.replace(
                _gaining(1.5), built_with=dataclasses.replace(_gaining(1.5).built_with, driver="590.2")
            ),
            _gaining(1.4),
        ),
        (_gaining(1.5, evidence="predicted"), _gaining(1.4)),
        (_gaining(1.5, config=Config(constants={"tile_m": 8, "tile_n": 64})), _gaining(1.4)),
    ],
    ids=[
        "a tie",
        "noise",
        "another source",
        "another driver",
        "a prediction",
        "a config gone from the space",
    ],
)
def test_a_smaller_gain_that_something_explains_is_no_reason(old: Table, new: Table) -> None:
    assert refusals(new, old, SCALE) == []


def test_an_entry_whose_old_winner_is_wrong_may_gain_less() -> None:
    old, new = _gaining(1.5), _gaining(1.4)
    assert refusals(new, old, SCALE, wrong={old.entries[1].config}) == []
    assert list(worse_entries(new, old, SCALE)) == [new.entries[1].bucket]


def _in_states(table: Table, mean_us: float, **states: tuple[float, float]) -> Table:
    times = {name: StateTimes(mean_us=us, default_us=default) for name, (us, default) in states.items()}
    return samples.with_entry(table, 1, mean_us=mean_us, states=times)


def test_gains_are_compared_over_the_states_that_both_have() -> None:
    table = _gaining(1.5)
    default_us = table.entries[1].default_us
    old = _in_states(table, default_us / 1.5, written=(20.0, 20.0))
    assert refusals(_in_states(table, default_us / 1.2, written=(16.0, 20.0)), old, SCALE) == []
    [reason] = refusals(_in_states(table, default_us / 1.2, written=(20.0, 20.0)), old, SCALE)
    assert "falls from 1.22x" in reason
    [reason] = refusals(_in_states(table, default_us / 1.2, written=(16.0, 20.0)), table, SCALE)
    assert "falls from 1.50x" in reason, "the old table has no other state"


@pytest.mark.parametrize("longer", [True, False])
def test_a_time_that_crosses_the_limit_of_long_kernels_is_compared_as_any_other(longer: bool) -> None:
    table = samples.scale_table()
    short = _in_states(table, 198.0, written=(200.0, 300.0), tight=(200.0, 300.0))
    short = samples.with_entry(short, 1, default_us=300.0)
    long = _in_states(table, 201.0, read=(200.0, 300.0), written=(200.0, 300.0), tight=(200.0, 300.0))
    long = samples.with_entry(long, 1, default_us=300.0)

    def slower(table: Table) -> Table:
        entry = table.entries[1]
        states = {
            name: dataclasses.replace(times, mean_us=times.mean_us * 1.25)
            for name, times in entry.states.items()
        }
        return samples.with_entry(table, 1, mean_us=entry.mean_us * 1.25, states=states)

    old, new = (short, long) if longer else (long, short)
    assert refusals(new, old, SCALE) == []
    [reason] = refusals(slower(new), old, SCALE)
    assert "gain over the default falls from 1.5" in reason


@pytest.mark.parametrize(
    ("us", "worse"), [(10.0, False), (10.4, False), (12.5, True)], ids=["the same", "clocks", "slower"]
)
def test_where_the_default_changed_times_are_compared(us: float, worse: bool) -> None:
    old = _gaining(1.5)
    winner = old.entries[1].config
    points = tuple(
        dataclasses.replace(point, us=(point.us[0], point.us[1], point.us[0]))
        for point in old.entries[1].points
    )
    new = samples.with_entry(old, 1, mean_us=us, default_us=us, points=points)
    new = dataclasses.replace(new, entries=(new.entries[1],))
    old = dataclasses.replace(old, entries=(old.entries[1],))
    faster = dataclasses.replace(SCALE, default=lambda arch, problem: winner)
    assert list(worse_entries(new, old, SCALE)) == [new.entries[0].bucket], "of the same default"
    told = worse_entries(new, old, faster)
    assert list(told) == ([new.entries[0].bucket] if worse else [])
    # Back again: the old default is known by its entry.
    back = dataclasses.replace(old, portfolio=())
    assert list(worse_entries(new, back, SCALE)) == list(told)


def test_a_winner_may_be_slower_than_the_default_in_one_state_and_not_in_each() -> None:
    table = samples.scale_table()
    default_us = table.entries[1].default_us
    assert refusals(_in_states(table, default_us * 1.01, written=(10.0, 20.0)), None, SCALE) == []
    [reason] = refusals(_in_states(table, default_us * 1.01, written=(21.0, 20.0)), None, SCALE)
    assert "slower than the default" in reason
    assert "in each other state" in reason


# Writing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return store.table_path(tmp_path / "tuned_configs", samples.SM90, "scale")


def test_a_published_table_is_read_back_equal(path: Path) -> None:
    assert publish(path, samples.scale_table()) is True
    assert store.read_table(path) == reader.parse(writer.dump(samples.scale_table()))
    assert [file.name for file in path.parent.iterdir()] == ["scale.json"]


def test_the_same_bytes_are_not_written_again(path: Path) -> None:
    publish(path, samples.scale_table())
    before = path.stat()
    assert publish(path, samples.scale_table()) is False
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_table_that_would_not_come_back_leaves_the_old_file_as_it_was(path: Path) -> None:
    publish(path, samples.scale_table())
    before = path.read_bytes()
    with pytest.raises(TableError):
        publish(path, samples.with_entry(samples.scale_table(), 1, mean_us=float("nan")))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["scale.json"]


def test_what_is_there_is_read_again_while_no_other_can_write_it(path: Path) -> None:
    table = samples.scale_table()

    def read(path: Path) -> None:
        with pytest.raises(TuneError, match="another process has held"), locked(path, 0.0):
            pass

    published = decide_and_publish(path, None, read=read, decide=lambda there: (table, []))
    assert (published.table, published.old, published.refusals) == (table, None, ())
    assert path.exists()


def test_a_table_is_decided_again_beside_the_one_that_came_meanwhile(path: Path) -> None:
    table = reader.parse(writer.dump(samples.scale_table()))
    other = samples.with_entry(table, 1, mean_us=9.0)
    publish(path, other)
    seen: list[Table | None] = []

    def decide(there: Table | None) -> tuple[Table, list[str]]:
        seen.append(there)
        return table, []

    published = decide_and_publish(path, None, read=store.read_table, decide=decide)
    assert seen == [None, other]
    assert published.old == other
    assert store.read_table(path) == table


def test_a_refused_table_leaves_the_file_as_it_was(path: Path) -> None:
    published = decide_and_publish(
        path, None, read=store.read_table, decide=lambda there: (samples.scale_table(), ["it is worse"])
    )
    assert published.refusals == ("it is worse",)
    assert not path.exists()


@pytest.mark.parametrize("failing", ["os.write", "os.fsync", "os.replace"])
def test_a_disk_that_fails_leaves_the_old_file_as_it_was(
    path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(path, samples.scale_table())
    before = path.read_bytes()

    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    # The store writes through a file object, which no patch of os.write would reach.
    monkeypatch.setattr("aot_tune.tables.files._write_new" if failing == "os.write" else failing, broken)
    with pytest.raises(StoreError, match="No space left"):
        publish(path, samples.with_entry(samples.scale_table(), 1, mean_us=9.0))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["scale.json"]
