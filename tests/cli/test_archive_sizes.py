"""What archives take, as a table of kernels and archs."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot_tune.cli import archive_sizes
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.values.arch import Arch
from tests.support.samples import scale


def put(folder: Path, arch: str, **codes: int) -> int:
    """An archive of one cubin a kernel, of so many bytes; returns the file's size."""
    kernels = [
        KernelCubins(kernel=name, symbol="s", origin=origin_of(scale, ""), cubins={((), "a"): bytes(size)})
        for name, size in codes.items()
    ]
    path = folder / arch / "cubins.aot"
    path.parent.mkdir()
    path.write_bytes(pack(Arch.parse(arch), kernels))
    return path.stat().st_size


def test_sizes_stand_by_kernel_and_arch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = put(tmp_path, "sm100", matmul=20_000, rope=3_000)
    second = put(tmp_path, "sm90", matmul=1_500_000)
    assert archive_sizes.main([str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["KB", "sm90", "sm100"],
        ["matmul", "1,500", "20"],
        ["rope", "-", "3"],
        ["the", "file", f"{second / 1000:,.0f}", f"{first / 1000:,.0f}"],
    ]


def test_a_folder_without_archives_or_with_a_damaged_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive_sizes.main([str(tmp_path)]) == 1
    assert f"aot-tune compile --out {tmp_path}" in capsys.readouterr().err
    put(tmp_path, "sm90", matmul=1)
    (tmp_path / "sm90" / "cubins.aot").write_bytes(b"nothing")
    assert archive_sizes.main([str(tmp_path)]) == 1
    assert "archive-sizes: " in capsys.readouterr().err
