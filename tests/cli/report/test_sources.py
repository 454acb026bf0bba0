"""Which tables a report shows, and what it says of those that lack something."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune.cli.report.sources import shown_tables
from aot_tune.errors import UsageError
from aot_tune.values.arch import Arch
from tests.support.samples import MODULE, scale_table, with_entry, write

SM90 = Arch.parse("sm90")


def test_a_folder_is_shown_with_the_memorys_share_of_declared_kernels(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    [shown], remarks, unreadable = shown_tables([tmp_path], SM90, [MODULE])
    assert (shown.name, shown.old, remarks, unreadable) == ("sm90/scale", None, [], [])
    assert shown.least_us is not None
    assert set(shown.least_us) == {entry.bucket for entry in scale_table().entries}


def test_why_the_memorys_share_is_lacking_is_said_once(tmp_path: Path) -> None:
    for name in ("mine", "yours"):
        write(tmp_path, dataclasses.replace(scale_table(), kernel=name))
    other = dataclasses.replace(scale_table().built_with, device_name="NVIDIA H100 PCIe")
    write(tmp_path, dataclasses.replace(scale_table(), built_with=other))
    shown, remarks, _ = shown_tables([tmp_path], None, [MODULE])
    assert [each.least_us for each in shown] == [None] * 3
    assert remarks == [
        "Without the memory's share (no such kernel is declared here): sm90/mine, sm90/yours.",
        "Without the memory's share (the bandwidth of NVIDIA H100 PCIe is not known): sm90/scale.",
    ]


def test_tables_are_drawn_where_no_kernel_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(modules: object) -> None:
        raise UsageError("module aot_tune.kernels needs 'torch', which is not installed")

    monkeypatch.setattr("aot_tune.cli.documents.find.declared", cannot)
    write(tmp_path, scale_table())
    for folder in (tmp_path, tmp_path / "sm90"):
        [shown], [remark], _ = shown_tables([folder], None, [])
        assert shown.least_us is None
        assert remark == (
            "Without the memory's share (module aot_tune.kernels needs 'torch', which is not installed): "
            "sm90/scale."
        )
    with pytest.raises(UsageError, match="needs 'torch'"):
        shown_tables([tmp_path], None, [MODULE])


def test_of_two_folders_the_tables_that_differ_are_shown(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, scale_table())
    write(old, dataclasses.replace(scale_table(), kernel="gone"))
    for folder in (old, new):
        write(folder, dataclasses.replace(scale_table(), kernel="same"))
    write(new, with_entry(scale_table(), 1, mean_us=5.0))
    [shown], remarks, _ = shown_tables([old, new], None, [MODULE])
    assert shown.old is not None
    assert (shown.old.table.entries[1].mean_us, shown.new.table.entries[1].mean_us) == (10.0, 5.0)
    assert remarks == [
        "Not drawn, as they are equal on both sides: 1 table.",
        "sm90/gone was removed.",
    ]


def test_a_damaged_table_is_left_out_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path, dataclasses.replace(scale_table(), kernel="broken"))
    path.write_bytes(b"{")
    write(tmp_path, scale_table())
    shown, _, [error] = shown_tables([tmp_path], None, [MODULE])
    assert [each.name for each in shown] == ["sm90/scale"]
    assert str(path) in str(error)


def test_an_arch_without_tables_is_refused(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    with pytest.raises(UsageError, match="no table for sm100"):
        shown_tables([tmp_path], Arch.parse("sm100"), [MODULE])


def test_a_share_above_one_means_that_arguments_are_read_in_part(tmp_path: Path) -> None:
    write(tmp_path, with_entry(scale_table(), 1, mean_us=0.01))
    [shown], remarks, _ = shown_tables([tmp_path], SM90, [MODULE])
    assert shown.least_us is None
    assert remarks == [
        "Without the memory's share (a launch reads only a part of the arguments): sm90/scale."
    ]
