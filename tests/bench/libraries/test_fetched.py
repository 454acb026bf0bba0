"""FlashInfer's cuTile code, taken out of a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aot_tune.bench.libraries import fetched
from aot_tune.errors import UsageError

CODE = "flashinfer/gemm/kernels/cutile/mm_bf16_cutile.py"
INFO = f"flashinfer_python-{fetched.VERSION}.dist-info"


def wheel(folder: Path) -> Path:
    path = folder / "flashinfer.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(CODE, "from ....utils import round_up\n\nAREA = round_up(5, 4)\n")
        archive.writestr("flashinfer/gemm/kernels/__init__.py", "import cutlass\n")
        archive.writestr("flashinfer/data/csrc/large.cu", "")
        archive.writestr(f"{INFO}/METADATA", f"Name: flashinfer-python\nVersion: {fetched.VERSION}\n")
    return path


@pytest.mark.process
def test_kernels_are_taken_unchanged_and_the_rest_is_stubbed(tmp_path: Path) -> None:
    folder = tmp_path / "flashinfer"
    fetched.unpack(wheel(tmp_path), folder)
    assert not (folder / "flashinfer" / "data").exists()
    code = "import flashinfer.gemm.kernels.cutile.mm_bf16_cutile as m; from importlib import metadata; "
    code += "print(m.AREA, metadata.version('flashinfer-python'))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["8", fetched.VERSION]


@pytest.mark.process
def test_what_is_there_is_not_fetched_and_what_cannot_be_had_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(UsageError, match="pip cannot download flashinfer-python=="):
        fetched.fetch(tmp_path / "flashinfer")
    (tmp_path / "flashinfer" / INFO).mkdir(parents=True)
    fetched.fetch(tmp_path / "flashinfer")
