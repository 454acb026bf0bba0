"""Fetch FlashInfer's cuTile code: its wheel's folders of cuTile kernels, unchanged, and stubs of the rest.

The wheel has 62 MB of CUDA sources and headers that cuTile kernels do not need, and the modules beside them
import packages that a GPU host may lack. The stubs hold the few host functions that the cuTile code calls.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from aot_tune.errors import UsageError

VERSION = "0.7.2.post1"
"""Release of flashinfer-python."""

FOLDER = Path("build/third-party/flashinfer")
"""Where it is put, next to TileGym."""

TILEGYM = Path("build/third-party/tilegym")
"""Where `make third-party` puts TileGym."""

_UNCHANGED = (
    "flashinfer/attention/kernels/",
    "flashinfer/cutile/",
    "flashinfer/gemm/kernels/cutile/",
    "flashinfer/quantization/kernels/cutile/",
    "flashinfer/fused_moe/cutile/",
    "flashinfer/quantization/nvfp4_quantization_utils.py",
    "flashinfer/fused_moe/api.py",
    "flashinfer/fused_moe/utils.py",
    "flashinfer/tllm_enums.py",
    f"flashinfer_python-{VERSION}.dist-info/METADATA",
    f"flashinfer_python-{VERSION}.dist-info/top_level.txt",
)
"""Beginnings of the names of files that are taken as they are."""

_STUBS = {
    "__init__.py": f'__version__ = "{VERSION}"\n',
    "api_logging.py": """\
def flashinfer_api(function=None, **options):
    return function or flashinfer_api
""",
    "utils.py": """\
import torch


def get_compute_capability(device):
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def ceil_div(a, b):
    return -(-a // b)


def round_up(a, b):
    return ceil_div(a, b) * b


def next_positive_power_of_2(x):
    return 1 << max(x - 1, 0).bit_length()
""",
    "attention/__init__.py": "",
    "gemm/__init__.py": "",
    "gemm/kernels/__init__.py": "",
    "quantization/__init__.py": "",
    "quantization/kernels/__init__.py": "",
    "fused_moe/__init__.py": "",
}
"""Modules that are replaced, below ``flashinfer``."""


def fetch(folder: Path = FOLDER) -> None:
    """Download the wheel with pip, and take what is needed of it. Nothing is done where that is there.

    Raises:
        UsageError: The wheel cannot be had.
    """
    if (folder / f"flashinfer_python-{VERSION}.dist-info").is_dir():
        return
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as downloads:
        wanted = f"flashinfer-python=={VERSION}"
        if subprocess.run([*command, "--dest", downloads, wanted], check=False).returncode:
            raise UsageError(f"pip cannot download {wanted}; run this where it can, and carry {folder} over")
        (wheel,) = Path(downloads).glob("*.whl")
        unpack(wheel, folder)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are there, by distribution."""
    return {one.name: one.version for one in metadata.distributions(path=[str(FOLDER), str(TILEGYM)])}


def unpack(wheel: Path, folder: Path) -> None:
    """Put what is needed of FlashInfer's wheel into a folder, which is complete once it exists."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unfinished, [name for name in archive.namelist() if name.startswith(_UNCHANGED)])
    for name, text in _STUBS.items():
        path = unfinished / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    unfinished.rename(folder)
