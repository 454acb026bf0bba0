"""FlashInfer's sites recorded, compiled and run from cubins where no compiler is: its code unchanged.

Each runs on the stand-in driver, compiling for real, with four configs at most. `make test-slow` does the
sites of `FEW`, `make third-party-all` all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from aot_tune.replay.document import parse
from tests.support import flashinfer_sites, library_sites
from tests.support.flashinfer_sites import FOLDER, MISSING, SITES
from tests.support.library_sites import Ran
from tests.support.make import planned_commands

pytestmark = pytest.mark.process

FEW = ("moe", "group quantize", "decode split", "decode paged", "bmm bf16", "gemm beta", "ragged bmm swapped",
       "rope quantize")  # fmt: skip
"""The sites of `make test-slow`: two that search nothing, the decodes, and one of each other family."""

EACH = SITES if os.environ.get("FLASHINFER_SITES") == "all" else FEW


def ran(verb: str, folder: Path, name: str, size: int, *options: str) -> Ran:
    return library_sites.ran(verb, folder, flashinfer_sites.__name__, name, size, "--four", *options)


def launched(ran: Ran, *, shapes: bool = True) -> list[tuple[object, ...]]:
    """The kernels that were launched, with their hints, without what is derived from arguments."""
    return [
        (re.sub(r"_Kt\d+_.*", "", str(one["symbol"])), one["hints"], *([one["grid"]] if shapes else []))
        for one in ran.launches
    ]


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / "flashinfer").is_dir(), reason=MISSING)
@pytest.mark.parametrize("name", EACH)
def test_every_launch_of_a_site_runs_from_cubins_without_a_compiler(name: str, tmp_path: Path) -> None:
    site = SITES[name]
    recorded = ran("record", tmp_path, name, site.size)
    tables = tmp_path / "tables"
    compiled = ("compile", "--arch", site.arch, "--module", "flashinfer")
    library_sites.aot_tune(tmp_path, *compiled, ahead=FOLDER, AOT_TUNE_TABLES=str(tables))

    paths = (tables / site.arch).glob("*.json")
    cubins = sum(len(parse(path.read_bytes()).compilations) for path in paths)
    probes = "bf16" in name  # the library launches each measured config, and looks for NaN
    assert cubins == (
        1 if probes else len({(str(one["symbol"]), str(one["hints"])) for one in recorded.launches})
    )

    served = ran("run", tmp_path, name, site.size, "--without-compiler")
    assert (served.searched, served.warnings) == ([], [])
    assert {str(one["symbol"]) for one in served.launches} == {symbol for symbol, *_ in launched(recorded)}
    if probes:
        assert launched(served)[-1] == launched(recorded)[-1]
    else:
        assert launched(served) == launched(recorded)

    if site.near is not None:
        near = ran("run", tmp_path, name, site.near, "--without-compiler")
        assert near.searched == []
        assert launched(near, shapes=False) == launched(served, shapes=False)


def test_make_fetches_the_library_before_its_sites_are_tested() -> None:
    for target in ("test-slow", "third-party-all"):
        text = "\n".join(planned_commands(target))
        assert 0 < text.index("aot_tune.bench.libraries --fetch") < text.index("-m pytest")
    assert "FLASHINFER_SITES=all" in text
