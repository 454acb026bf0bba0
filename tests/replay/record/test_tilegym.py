"""TileGym's sites recorded, and replayed in another process, by the command line: its code unchanged.

Each runs on the stand-in driver, compiling for real. `make test` does two sites, `make test-slow` all.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from aot_tune.replay.document import parse
from aot_tune.replay.table import RecordedEntry
from tests.support import library_sites, tilegym_sites
from tests.support.library_sites import Ran
from tests.support.tilegym_sites import FOLDER, MISSING, SITES

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (FOLDER / "tilegym").is_dir(), reason=MISSING),
]

SMALL = ("silu_and_mul",)
"""The sites of `make test`: a first call searches few configs."""

EACH = [
    name if name in SMALL else pytest.param(name, marks=pytest.mark.slow, id=name.replace(" ", "_"))
    for name in SITES
]

NEAR = [one for one in EACH if SITES[one if isinstance(one, str) else str(one.values[0])].near is not None]


def ran(verb: str, folder: Path, name: str, size: int, *options: str, ahead: Path | None = None) -> Ran:
    """Call a site in a process of its own under ``aot-tune record`` or ``run``."""
    return library_sites.ran(verb, folder, tilegym_sites.__name__, name, size, *options, ahead=ahead)


def entries(folder: Path) -> list[RecordedEntry]:
    return [
        one for path in (folder / "tables").glob("sm90/*.json") for one in parse(path.read_bytes()).entries
    ]


def constants(ran: Ran) -> list[list[str]]:
    """The compiled-in numbers of each launch."""
    return [re.findall(r"_([IB]\d+)", str(one["symbol"])) for one in ran.launches]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Ran]]:
    """Sites that were recorded, each once in this module: the folder, and what the library launched."""
    return _Recorded(tmp_path_factory)


class _Recorded(dict[str, tuple[Path, Ran]]):
    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> tuple[Path, Ran]:
        folder = self._factory.mktemp("site")
        self[name] = folder, ran("record", folder, name, SITES[name].size)
        return self[name]


@pytest.mark.parametrize("name", EACH)
def test_a_site_is_replayed_in_another_process_without_a_search(
    name: str, recorded: dict[str, tuple[Path, Ran]]
) -> None:
    site, (folder, first) = SITES[name], recorded[name]
    found = entries(folder)
    assert len(found) == site.searches
    assert max(one.gain or 0 for one in found) > 1  # another config than the first won
    again = ran("run", folder, name, site.size)
    assert (again.searched, again.warnings) == ([], [])
    assert again.launches == first.launches
    (launched,) = again.launches
    best = min(found, key=lambda one: one.mean_us)
    grid = [*best.grid, 1, 1][:3]
    winner = {"grid": grid, "symbol": best.signature, "hints": dict(best.hints)}
    assert {key: launched[key] for key in site.as_found} == {key: winner[key] for key in site.as_found}


@pytest.mark.parametrize("name", NEAR)
def test_a_site_is_replayed_at_a_size_that_was_not_recorded(
    name: str, recorded: dict[str, tuple[Path, Ran]]
) -> None:
    site, (folder, first) = SITES[name], recorded[name]
    assert site.near is not None
    near = ran("run", folder, name, site.near)
    assert (near.searched, near.warnings) == ([], [])
    assert [one["hints"] for one in near.launches] == [one["hints"] for one in first.launches]
    assert constants(near) == constants(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("attention", "attention.py:799: it is launched with hints that no search measured: occupancy=2"),
        ("attention", "attention.py:799: 2 of 4 configs are the same launch as another: same grid"),
        ("cross_entropy", "cross_entropy.py:84: it is launched with arguments that no search was for: input"),
    ],
)
def test_the_librarys_author_is_told(name: str, remark: str, recorded: dict[str, tuple[Path, Ran]]) -> None:
    assert remark in recorded[name][1].told


def test_at_least_four_sites_have_a_size_that_is_near() -> None:
    assert len(NEAR) >= 4
    assert len(EACH) >= 12


@pytest.mark.slow
def test_a_shorter_space_is_searched(recorded: dict[str, tuple[Path, Ran]]) -> None:
    folder, _ = recorded["silu_and_mul"]
    size = SITES["silu_and_mul"].size
    assert ran("run", folder, "silu_and_mul", size, "--shorter").searched == [6]


@pytest.mark.slow
def test_another_version_of_the_library_is_searched(
    recorded: dict[str, tuple[Path, Ran]], tmp_path: Path
) -> None:
    info = tmp_path / "tilegym-1.5.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilegym\nVersion: 1.5.2\n")
    folder, _ = recorded["silu_and_mul"]
    other = ran("run", folder, "silu_and_mul", SITES["silu_and_mul"].size, ahead=tmp_path)
    assert other.searched == [7]
    (said,) = other.warnings
    assert "it was recorded with tilegym 1.5.1, and 1.5.2 is installed; record again: aot-tune record" in said


@pytest.mark.slow
def test_other_code_of_the_kernel_is_searched(recorded: dict[str, tuple[Path, Ran]], tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "tilegym", tmp_path / "tilegym")
    path = tmp_path / "tilegym" / "ops" / "cutile" / "silu_and_mul.py"
    text = path.read_text()
    path.write_text(text.replace("row_idx = bid\n", "row_idx = bid + 0\n"))
    folder, _ = recorded["silu_and_mul"]
    other = ran("run", folder, "silu_and_mul", SITES["silu_and_mul"].size, ahead=tmp_path)
    assert other.searched == [7]
    (said,) = other.warnings
    assert "the code of _silu_and_mul_kernel_row_wise changed since it was recorded" in said
