"""The user's cache: one file an entry, looked up without writing, never trusted further than it should be."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune import environment
from aot_tune.errors import CacheWarning
from aot_tune.serve.search import cache
from aot_tune.serve.search.cache import Key, Places, UserCache, folder_here
from aot_tune.values.config import Config
from tests.support.user_cache import CONFIG, KEY


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    cache._warn_once.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mine"


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_what_is_written_is_read_again(folder: Path) -> None:
    UserCache(folder).write(KEY, CONFIG, 12.5)
    found = UserCache(folder).read(KEY)
    assert found == CONFIG
    assert found.constants["fast"] is True


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Key)])
def test_an_entry_is_found_by_nothing_but_its_whole_key(folder: Path, field: str) -> None:
    UserCache(folder).write(KEY, CONFIG, 12.5)
    other = (("M", 128), ("dtype", "bfloat16")) if field == "bucket" else "other"
    assert UserCache(folder).read(dataclasses.replace(KEY, **{field: other})) is None


NAMES = st.text("abcMNK_0123456789", min_size=1)
VALUES = st.one_of(st.integers(0, 2**40), st.booleans(), st.text())


@given(bucket=st.dictionaries(NAMES, VALUES), device=st.text())
def test_a_place_told_from_the_bucket_alone_is_the_key_s(
    bucket: dict[str, int | str | bool], device: str
) -> None:
    key = dataclasses.replace(KEY, device_name=device, bucket=tuple(sorted(bucket.items())))
    assert Places(dataclasses.replace(KEY, device_name=device)).of(bucket) == key.place


def test_places_are_those_of_the_releases_before() -> None:
    assert KEY.place == "v1/sm90/scale/6883f3d7f07992050a70a76fafdc8385.json"


def test_what_another_process_remembers_is_seen_a_second_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, where = UserCache(folder), KEY.place.rpartition("/")[0]
    clock = [100.0]
    monkeypatch.setattr("aot_tune.serve.search.cache.time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert mine.places(where) == frozenset()
    UserCache(folder).write(KEY, CONFIG, 12.5)
    clock[0] += 0.9
    assert mine.places(where) == frozenset()
    clock[0] += 0.2
    assert KEY.place in mine.places(where)
    assert mine.places(where) is mine.places(where), "the folder is listed at each look-up"
    assert UserCache(None).places(where) == frozenset()


def test_b4_looking_up_writes_nothing_and_makes_no_folder(folder: Path) -> None:
    """B4."""
    assert UserCache(folder).read(KEY) is None
    assert not folder.exists()
    UserCache(folder).write(KEY, CONFIG, 12.5)
    before = [(path, path.stat().st_mtime_ns) for path in everything(folder)]
    assert UserCache(folder).read(KEY) == CONFIG
    assert [(path, path.stat().st_mtime_ns) for path in everything(folder)] == before


@pytest.mark.process
def test_b4_a_process_without_home_or_user_has_no_cache_and_looks_up_all_the_same() -> None:
    """B4: no HOME, a uid that no file knows, no folder made in the working directory."""
    code = (
        "from aot_tune.serve.search.cache import UserCache, folder_here\n"
        "from tests.support.user_cache import KEY\n"
        "import os; folder_here()  # imports what this user may not be allowed to read\n"
        "os.setuid(54321) if os.getuid() == 0 else None\n"
        "print(folder_here(), UserCache(folder_here()).read(KEY), os.path.exists('~'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split()[1:] == ["None", "False"]


def test_b4_a_home_that_is_not_known_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4: what platformdirs leaves as ``~/.cache`` would be a folder of that name here."""
    monkeypatch.delenv(environment.CACHE_DIR)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *names, **options: "~/.cache/aot_tune")
    assert folder_here() is None
    assert UserCache(None).read(KEY) is None


def test_b5_a_cache_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    """B5: a file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    there = UserCache(tmp_path / "file" / "mine")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with there.locked(KEY, 1) as state:
            assert state == "none"
        there.write(KEY, CONFIG, 12.5)
    assert [one.category for one in seen] == [CacheWarning]
    assert "cannot be written" in str(seen[0].message)


def test_b5_without_a_folder_the_warning_says_what_to_name() -> None:
    """B5."""
    with pytest.warns(CacheWarning, match="name a folder in AOT_TUNE_CACHE_DIR"):
        UserCache(None).write(KEY, CONFIG, 12.5)


HOLDER = """
import sys, time
from pathlib import Path
from aot_tune.serve.search.cache import UserCache
from tests.support.user_cache import KEY
with UserCache(Path(sys.argv[1])).locked(KEY, 5) as state:
    print(state, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process  # type: ignore[misc]
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.process
def test_b7_a_stopped_holder_is_waited_for_with_a_bound_and_keeps_its_lock(
    folder: Path, holder: subprocess.Popen[str]
) -> None:
    """B7: wedged; never stolen."""
    holder.send_signal(signal.SIGSTOP)
    for _ in range(2):
        started = time.monotonic()
        with UserCache(folder).locked(KEY, 0.5) as state:
            assert state == "busy"
        assert 0.4 < time.monotonic() - started < 5
    holder.send_signal(signal.SIGCONT)


@pytest.mark.process
def test_b7_the_lock_of_a_killed_holder_is_free(folder: Path, holder: subprocess.Popen[str]) -> None:
    """B7: killed."""
    holder.kill()
    holder.wait()
    with UserCache(folder).locked(KEY, 5) as state:
        assert state == "held"


@pytest.mark.process
def test_b7_another_entry_is_not_held_up(folder: Path, holder: subprocess.Popen[str]) -> None:
    """B7: one lock an entry."""
    with UserCache(folder).locked(dataclasses.replace(KEY, kernel="other"), 0.5) as state:
        assert state == "held"


def _write_many(folder: Path, occupancy: int) -> None:
    config = Config(constants={"tile_m": 64}, hints={"occupancy": occupancy})
    for _ in range(50):
        UserCache(folder).write(KEY, config, 12.5)


@pytest.mark.process
def test_b8_writers_without_any_lock_leave_whole_entries(folder: Path) -> None:
    """B8: the lock lies; each reader sees one writer's entry or the other's, and never parts."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(folder, occupancy)) for occupancy in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        found = UserCache(folder).read(KEY)  # a torn file would warn, and warnings are errors here
        seen.add(found.hints["occupancy"] if found else None)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {None, 1, 2}
    assert not [path for path in everything(folder) if path.name.endswith(".tmp")]


@pytest.mark.parametrize("kind", ["symlink", "world-writable", "other owner", "no folder"])
def test_b15_a_folder_that_is_not_ours_alone_is_left_out_with_a_warning(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B15: what others can write would choose what this process runs."""
    UserCache(folder).write(KEY, CONFIG, 12.5)
    place = folder
    if kind == "symlink":
        place = tmp_path / "link"
        place.symlink_to(folder)
    elif kind == "world-writable":
        folder.chmod(0o777)
    elif kind == "other owner":
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    else:
        monkeypatch.setattr("aot_tune.serve.search.cache.stat.S_ISDIR", lambda mode: False)
    before = everything(folder)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert UserCache(place).read(KEY) is None
        UserCache(place).write(KEY, Config(hints={"occupancy": 1}), 1.0)
        assert UserCache(place).read(KEY) is None
    assert [one.category for one in seen] == [CacheWarning]
    assert "is left out" in str(seen[0].message)
    assert everything(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:40],
        lambda text: "\0" * 100,
        lambda text: "[" * 100_000,
        lambda text: text.replace('"schema": 1', '"schema": true'),
        lambda text: text.replace('"schema": 1', '"schema": 1, "module": "os"'),
        lambda text: text.replace('"mean_us": 12.5', '"mean_us": NaN'),
        lambda text: text.replace('"occupancy": 2', '"occupancy": 33'),
        lambda text: text.replace('"tile_m": 64', '"tile_m": ["__import__(1)"]'),
        lambda text: text.replace("mylib 1.0", "mylib 2.0"),
        lambda text: json.dumps([text]),
    ],
)
def test_b15_a_file_that_is_no_entry_is_a_miss_with_a_warning(folder: Path, change: object) -> None:
    """B15, B2: nothing in a file is run, imported or guessed at."""
    UserCache(folder).write(KEY, CONFIG, 12.5)
    path = folder / KEY.place
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.warns(CacheWarning, match=r"is left out: remove the file"):
        assert UserCache(folder).read(KEY) is None


def test_b16_the_entries_of_a_newer_release_are_neither_read_nor_touched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16: the schema is in the path."""
    with monkeypatch.context() as newer:
        newer.setattr(cache, "SCHEMA", 2)
        UserCache(folder).write(KEY, CONFIG, 12.5)
    theirs = [(path, path.read_bytes()) for path in everything(folder) if path.is_file()]
    assert UserCache(folder).read(KEY) is None
    UserCache(folder).write(KEY, Config(hints={"occupancy": 1}), 1.0)
    assert [(path, path.read_bytes()) for path, _ in theirs] == theirs


def test_b14_a_bucket_with_a_path_in_it_stays_inside_the_folder(folder: Path, tmp_path: Path) -> None:
    """B14: only the digest of a bucket is in a path."""
    key = dataclasses.replace(KEY, bucket=(("dtype", "../../../x"), ("layout", "\0" + "y" * 300)))
    UserCache(folder).write(key, CONFIG, 1.0)
    assert UserCache(folder).read(key) == CONFIG
    assert everything(tmp_path) == sorted([folder, *everything(folder)])
