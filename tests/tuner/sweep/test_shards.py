"""Parts of a sweep and their merge: in any order and any number of rounds the tables of one machine."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError, UsageError
from aot_tune.tables.table import Table
from aot_tune.tuner import publish
from aot_tune.tuner.sweep import decision, shards
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.merge import Merged, merge, merged_lines
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import Shard, SweepRequest
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import hashed_sessions
from tests.support.hashed_sessions import HashedSession
from tests.support.samples import SM90, scale_in

TYPICAL = [{"dtype": "bfloat16", "M": [1, 16, 64, 128, 256, 512], "N": 1024}]


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hashed_sessions.measuring(monkeypatch):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def _found(folder: Path, **changes: Any) -> FoundKernel:
    found = scale_in(folder / "tables")["scale"]
    return dataclasses.replace(found, tunable=dataclasses.replace(found.tunable, typical=TYPICAL, **changes))


def _request(folder: Path, **values: Any) -> SweepRequest:
    return SweepRequest(kernels=(_found(folder),), arch=SM90, gpus=(0,), jobs=2, **values)


def _progress() -> PlainProgress:
    return PlainProgress(io.StringIO())


def _measure(folder: Path, number: int, of: int, **changes: Any) -> None:
    request = _request(folder, shard=Shard(number, of), part=folder / f"part{number}", **changes)
    shards.measure(request, _progress())


def _merge(folder: Path, *numbers: int, allow_worse: bool = False) -> Merged:
    folders = [folder / f"part{number}" for number in numbers]
    kernels = {"scale": _found(folder)}
    return merge(folders, kernels, _progress(), folder / "out", allow_worse=allow_worse)


def _table(folder: Path) -> bytes:
    return (folder / "out" / "sm90" / "scale.json").read_bytes()


@pytest.fixture
def one(tmp_path: Path) -> bytes:
    """The table of one machine."""
    request = _request(tmp_path / "one", out=tmp_path / "one" / "out", journal=tmp_path / "one" / "journal")
    assert sweep.run(request, _progress()).complete
    HashedSession.reset()
    return _table(tmp_path / "one")


def _rounds(folder: Path, of: int, order: list[int]) -> list[set[int]]:
    """Do rounds until the merge is complete; the numbers of the parts that ran in each."""
    ran = [set(order)]
    for number in order:
        _measure(folder, number, of)
    while not (merged := _merge(folder, *order)).complete:
        assert len(ran) < 6, merged_lines(merged)
        assert not merged.refused
        ran.append(set(merged.commands))
        for number in merged.commands:
            assert f"--shard {number}/{of} --out {folder}/part{number}" in merged.commands[number]
            _measure(folder, number, of)
    return ran


@pytest.mark.process
@pytest.mark.parametrize(
    ("of", "order"),
    [
        (2, [2, 1]),
        pytest.param(3, [2, 3, 1], marks=pytest.mark.slow),
        pytest.param(8, [8, 1, 7, 2, 6, 3, 5, 4], marks=pytest.mark.slow),
    ],
)
def test_parts_in_any_order_give_the_table_of_one_machine_again_and_again(
    one: bytes, folder: Path, of: int, order: list[int]
) -> None:
    assert len(_rounds(folder, of, order)) >= 2
    assert _table(folder) == one
    made = len(HashedSession.told)
    again = _merge(folder, *order[::-1])
    assert again.complete
    assert (again.changed, _table(folder)) == (0, one), "it is idempotent"
    assert len(HashedSession.told) == made, "it measures nothing"


@pytest.mark.process
def test_a_merge_publishes_entries_that_gain_less_only_when_allowed(
    one: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(new: Table, *given: object) -> dict[Problem, str]:
        return {new.entries[0].bucket: "its gain over the default falls from 1.50x to 1.20x"}

    monkeypatch.setattr(publish, "worse_entries", worse)
    for number in (1, 2):
        _measure(folder, number, 2)
    while (merged := _merge(folder, 1, 2)).missing:
        for number in merged.commands:
            _measure(folder, number, 2)
    [reason] = merged.refused["scale"]
    assert "falls from 1.50x to 1.20x" in reason
    assert "--allow-worse" in reason
    assert not (folder / "out").exists()
    assert _merge(folder, 1, 2, allow_worse=True).complete
    assert _table(folder) == one


@pytest.mark.process
def test_a_merge_tells_that_a_declaration_raises_between_its_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*args: object) -> None:
        raise ZeroDivisionError("no tiles")

    monkeypatch.setattr(decision, "near_exponent", raising)
    _rounds(folder, 2, [1, 2])
    shutil.rmtree(folder / "out")
    told = io.StringIO()
    parts = [folder / "part1", folder / "part2"]
    assert merge(parts, {"scale": _found(folder)}, PlainProgress(told), folder / "out").complete
    assert "scale: near_exponent is not chosen, because the declaration raises Zero" in told.getvalue()


@pytest.mark.process
@pytest.mark.slow
def test_without_members_that_fall_two_rounds_are_enough(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HashedSession, "wrong_part", 0.0)
    assert len(_rounds(folder, 3, [1, 2, 3])) == 2


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("after_rounds", [1, 2])
def test_a_part_that_was_lost_is_made_again_to_the_same_bytes(
    one: bytes, folder: Path, after_rounds: int
) -> None:
    for _ in range(after_rounds):
        for number in (1, 2, 3):
            _measure(folder, number, 3)
        _merge(folder, 1, 2, 3)
    shutil.rmtree(folder / "part2")
    merged = _merge(folder, 3, 1)
    assert set(merged.commands) >= {2}
    assert "--shard 2/3 --out part2" in merged.commands[2]
    _measure(folder, 2, 3)
    _rounds(folder, 3, [1, 2, 3])
    assert _table(folder) == one


@pytest.mark.process
@pytest.mark.slow
def test_parts_of_other_conditions_are_refused_with_what_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _measure(folder, 1, 2)
    identity = HashedSession.identity
    with monkeypatch.context() as patch:
        patch.setattr(HashedSession, "identity", lambda self: {**identity(self), "driver": "590.2"})
        _measure(folder, 2, 2)
    with pytest.raises(TuneError, match=r"part1 and .*part2 were .* scale: driver was 580\.1, is 590\.2"):
        _merge(folder, 1, 2)
    shutil.rmtree(folder / "part2")
    HashedSession.devices[0] = dataclasses.replace(Device.reference(SM90), sm_count=78)
    _measure(folder, 2, 2)
    with pytest.raises(TuneError, match=r"the GPU and its multiprocessors differ.*132.*78"):
        _merge(folder, 1, 2)
    HashedSession.devices.clear()
    shutil.rmtree(folder / "part2")
    _measure(folder, 2, 2)
    other = {"scale": _found(folder, grid_fn=lambda config, device, problem: (1, 1))}
    with pytest.raises(TuneError, match="made from another source of scale: source_hash was"):
        merge([folder / "part1", folder / "part2"], other, _progress())
    shutil.copytree(folder / "part1", folder / "part9")
    with pytest.raises(TuneError, match=r"part1 and .*part9 are both shard 1/2"):
        _merge(folder, 1, 9)
    with pytest.raises(TuneError, match="part1 holds shard 1/2 of another sweep"):
        shards.measure(_request(folder, shard=Shard(2, 2), part=folder / "part1"), _progress())


@pytest.mark.process
@pytest.mark.parametrize(
    "damage",
    [
        "empty",
        pytest.param("garbage", marks=pytest.mark.slow),
        pytest.param("without its first line", marks=pytest.mark.slow),
    ],
)
def test_a_journal_without_a_header_counts_as_absent_and_is_named(
    one: bytes, folder: Path, damage: str
) -> None:
    for number in (1, 2):
        _measure(folder, number, 2)
    _merge(folder, 1, 2)
    journal = _journal(folder, 2)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes({"empty": b"", "garbage": b"\0" * 99}.get(damage, b"".join(lines[1:])))
    told = io.StringIO()
    merged = merge([folder / "part1", folder / "part2"], {"scale": _found(folder)}, PlainProgress(told))
    command = merged.commands[2]
    assert set(merged.missing["scale"]) == {2}
    assert f"{journal} holds no readable header; run again: {command}" in told.getvalue()
    shared = folder / "part1" / "others" / "sm90" / "scale" / "2.jsonl"
    assert shared.read_bytes() == b"".join(lines), "the last good copy is kept"
    shared.write_bytes(b"")
    _rounds(folder, 2, [2, 1])
    assert _table(folder) == one


@pytest.mark.process
def test_what_is_in_the_way_of_a_merge_is_named_with_what_to_do(folder: Path) -> None:
    _rounds(folder, 2, [1, 2])
    command = _part(folder, 2).command
    journal, kept = _journal(folder, 2), folder / "kept"
    journal.rename(kept)
    journal.mkdir()
    with pytest.raises(
        TuneError, match=rf"{journal}: is not a plain file; move it away and make this part ag"
    ) as told:
        _merge(folder, 1, 2)
    assert str(told.value).endswith(command)
    journal.rmdir()
    kept.rename(journal)
    table = folder / "out" / "sm90" / "scale.json"
    table.unlink()
    table.mkdir()
    with pytest.raises(TuneError, match=r"not a file; remove it, or name another folder with --out$"):
        _merge(folder, 1, 2)
    began = shards.incumbent_path(folder / "part2", SM90, "scale")
    began.mkdir(parents=True)
    with pytest.raises(TuneError, match=r"scale\.json: it is a directory, .* that part, and make it again$"):
        _merge(folder, 1, 2)
    (folder / "part3").write_text("")
    with pytest.raises(
        TuneError, match=r"part3 is not a folder; name folders that aot-tune tune --shard made$"
    ):
        _merge(folder, 1, 3)


def _journal(folder: Path, number: int) -> Path:
    [path] = (shards.journal_folder(folder / f"part{number}") / "sm90").glob("scale*.jsonl")
    return path


def _part(folder: Path, number: int) -> shards.Part:
    return shards.Part.read(folder / f"part{number}")


@pytest.mark.process
def test_all_buckets_are_dealt_each_to_one_part_of_equal_length(folder: Path) -> None:
    found = _found(folder)
    owners = shards.assigned([found], SM90, lambda found: found.tunable.buckets, 3)["scale"]
    assert list(owners) == list(found.tunable.buckets)
    assert list(owners.values()) == sorted(owners.values())
    assert [list(owners.values()).count(number) for number in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("text", ["", "3", "0/8", "9/8", "a/8", "3/8/2", "-1/8"])
def test_a_shard_of_another_form_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(UsageError, match="write for example 3/8"):
        Shard.parse(text)
    assert str(Shard.parse(" 3 / 8")) == "3/8"


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"schema": 7}', '{"schema": 1, "device": 3}'])
def test_a_damaged_description_is_an_error_that_names_it(folder: Path, damage: str) -> None:
    (folder / shards.DESCRIPTION).write_text(damage)
    with pytest.raises(TuneError, match=r"part\.json cannot be used: .*make this part again"):
        shards.Part.read(folder)
    with pytest.raises(TuneError, match=r"is no part of a sweep: it has no part.json"):
        shards.Part.read(folder / "nowhere")
    (folder / shards.DESCRIPTION).unlink()
    (folder / shards.DESCRIPTION).mkdir()
    with pytest.raises(TuneError, match=r"part\.json cannot be used: Is a directory; make this part again"):
        shards.Part.read(folder)
