"""The contract with cuTile on which prebuilt cubins rest, held against each release in the supported range.

A cubin compiled by the installed release is launched, on the stand-in driver, in a process that runs each
release: with no compiler imported, from an archive, for signatures that it has a cubin for and for others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aot_tune.cubins.archive import Archive, Section
from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia import cubin, cutile
from aot_tune.tuner.archives.build import build
from aot_tune.tuner.archives.report import CubinRequest
from tests.support.other_releases import OTHERS, other_release
from tests.support.samples import MODULE, SM90, scale

ROOT = Path(__file__).parents[2]
ADDRESS, APART = 0x7F00_0000_0000, 1 << 20

EXACT = {
    "aligned": ([64, 1024], [1024, 1], 0),
    "ragged": ([50, 1024], [1024, 1], 0),
    "of one row": ([1, 1024], [1024, 1], 0),
}
"""Shape, strides and misalignment of what an archive has cubins for."""

OTHERWISE = {
    "of odd rows": ([50, 1000], [1001, 1], 0),
    "transposed": ([64, 64], [1, 64], 0),
    "broadcast": ([64, 1024], [0, 1], 0),
    "of one column": ([64, 1], [3, 5], 0),
    "unaligned": ([64, 1024], [1024, 1], 2),
    "strided": ([64, 64], [200, 3], 0),
}
"""What it has none for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of the sample kernel's default, in a folder of tables."""
    folder = tmp_path_factory.mktemp("contract")
    tunable = dataclasses.replace(
        scale, tables=folder, typical=[{"dtype": "float16", "M": [1, 64], "N": 1024}]
    )
    found = FoundKernel(module=MODULE, tunable=tunable)
    (report,) = build(
        CubinRequest(kernels=(found,), archs=(SM90,), jobs=2, cubins=folder / "cubins"), lambda line: None
    )
    assert not report.failures
    return folder


def section(folder: Path) -> Section:
    found = Archive(folder / "sm90" / "cubins.aot").section("scale")
    assert found is not None
    return found


_ran: dict[str, dict[str, Any]] = {}


def ran(release: str, folder: Path) -> dict[str, Any]:
    """What a process under this release did, by the case's name."""
    if release not in _ran:
        installed = release == "installed"
        paths = [*([] if installed else [str(other_release(release))]), str(ROOT)]
        cases = [
            {
                "source": {"address": ADDRESS + off, "shape": shape, "strides": strides},
                "target": {"address": ADDRESS + APART, "shape": shape, "strides": strides},
            }
            for shape, strides, off in (EXACT | OTHERWISE).values()
        ]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.children.cutile_contract", str(folder), json.dumps(cases)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["version"] == (cutile.version() if installed else release)
        _ran[release] = dict(zip(EXACT | OTHERWISE, answer["answers"], strict=True))
    return _ran[release]


RELEASES = pytest.mark.parametrize("release", ["installed", *OTHERS])


def test_every_release_that_is_said_to_be_tested_is_tested_here() -> None:
    tested = {cutile.release(), *(tuple(map(int, version.split(".")[:2])) for version in OTHERS)}
    assert tested == set(cutile.TESTED_VERSIONS)


@pytest.mark.process
@RELEASES
@pytest.mark.parametrize("case", EXACT)
def test_an_array_of_a_compiled_class_is_launched_with_the_cubin_of_its_signature(
    release: str, case: str, folder: Path
) -> None:
    did = ran(release, folder)[case]
    ((signature, arch),) = did["asked"]  # three launches ask once: the loaded cubin is kept
    assert arch == "sm90"
    assert did["exact"]
    code = section(folder).cubin(tuple(_default_hints()), signature)
    assert code is not None
    # A process loads the first cubin of an archive twice: it asks the driver whether it takes them.
    assert did["loaded"] == [_digest(code)] * (2 if case == next(iter(EXACT)) else 1)
    assert did["symbols"] == ["_scale_kernel"]


@pytest.mark.process
@RELEASES
@pytest.mark.parametrize("case", OTHERWISE)
def test_any_other_array_is_launched_with_the_weakest_cubin(release: str, case: str, folder: Path) -> None:
    did = ran(release, folder)[case]
    ((signature, _),) = did["asked"]
    assert not did["exact"]
    weakest = cutile.weakest_signature(scale.kernel, signature)
    code = section(folder).cubin(tuple(_default_hints()), weakest)
    assert code is not None
    assert did["loaded"] == [_digest(code)]
    assert len(did["passed"]) == 3


@pytest.mark.process
@RELEASES
@pytest.mark.parametrize("case", EXACT | OTHERWISE)
def test_a_launch_passes_address_sizes_and_strides_whatever_the_signature_assumes(
    release: str, case: str, folder: Path
) -> None:
    shape, strides, off = (EXACT | OTHERWISE)[case]
    first = [ADDRESS + off, *shape, *strides]
    second = [ADDRESS + APART, *shape, *strides]
    assert ran(release, folder)[case]["passed"] == [first + second] * 3


@pytest.mark.process
def test_every_cubin_declares_the_same_parameters(folder: Path) -> None:
    keys = section(folder).keys
    declared = {_parameters(section(folder).cubin(*key) or b"") for key in keys}
    assert len(keys) == 4
    assert declared == {
        ((0, 8), (8, 4), (12, 4), (16, 4), (20, 4), (24, 8), (32, 4), (36, 4), (40, 4), (44, 4))
    }


@pytest.mark.process
def test_both_releases_ask_for_the_same_signatures(folder: Path) -> None:
    installed = ran("installed", folder)
    for version in OTHERS:
        assert {case: did["asked"] for case, did in ran(version, folder).items()} == {
            case: did["asked"] for case, did in installed.items()
        }


def _default_hints() -> list[tuple[str, int]]:
    from tests.support.samples import DEFAULT

    return list(DEFAULT.hints.items())


def _digest(code: bytes) -> str:
    """Of the ELF up to its section headers' end, which is as much as a loaded image tells of its length."""
    headers, size, count = struct.unpack_from("<40xQ10xHH", code)
    return hashlib.sha256(code[: headers + size * count]).hexdigest()


def _parameters(code: bytes) -> tuple[tuple[int, int], ...]:
    """Offset and bytes of each kernel parameter (EIATTR_KPARAM_INFO)."""
    infos = [
        struct.unpack_from("<IHHI", value)
        for attribute, value in cubin._attributes(code)
        if attribute == 0x17
    ]
    return tuple(sorted((offset, bits >> 18) for _, _, offset, bits in infos))
