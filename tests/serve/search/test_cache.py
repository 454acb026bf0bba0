"""The user's cache: one file an entry, looked up without writing, never trusted further than it should be."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from aot_tune import environment
from aot_tune.errors import CacheWarning, StoreError
from aot_tune.serve.search import cache
from aot_tune.serve.search.cache import Key, UserCache, folder_here, kernel_folder
from aot_tune.values.config import Config
from tests.support.samples import DEFAULT, scale
from tests.support.user_cache import CONFIG, KEY


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    cache._warned.clear()


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


def test_a_config_that_names_its_kernel_is_read_again(folder: Path) -> None:
    named = Config(constants=CONFIG.constants, hints=CONFIG.hints, kernel="other")
    UserCache(folder).write(KEY, named, 12.5)
    assert UserCache(folder).read(KEY) == named


@pytest.mark.parametrize("field", Key._fields)
def test_an_entry_is_found_by_nothing_but_its_whole_key(folder: Path, field: str) -> None:
    UserCache(folder).write(KEY, CONFIG, 12.5)
    other = (("M", 128), ("dtype", "bfloat16")) if field == "bucket" else "other"
    assert UserCache(folder).read(KEY._replace(**{field: other})) is None


def test_places_are_those_of_the_releases_before() -> None:
    assert KEY.place == "v1/sm90/scale/6883f3d7f07992050a70a76fafdc8385.json"


def test_what_another_process_remembers_is_seen_a_second_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, where = UserCache(folder), kernel_folder(KEY.arch, KEY.kernel)
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
        with UserCache(folder).locked(KEY, 0.5) as state:
            assert state == "busy"
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
    with UserCache(folder).locked(KEY._replace(kernel="other"), 0.5) as state:
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
        lambda text: "[" * 300 + "]" * 300,
        lambda text: text.replace('"tile_m": 64', '"tile_m": ' + "[" * 500 + "]" * 500),
        lambda text: '{"a":' * 1000 + "1" + "}" * 1000,
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
    key = KEY._replace(bucket=(("dtype", "../../../x"), ("layout", "\0" + "y" * 300)))
    UserCache(folder).write(key, CONFIG, 1.0)
    assert UserCache(folder).read(key) == CONFIG
    assert everything(tmp_path) == sorted([folder, *everything(folder)])


def test_b16_a_newer_file_at_our_own_path_is_neither_replaced_nor_removed(folder: Path) -> None:
    """B16: the schema in the file counts too."""
    UserCache(folder).write(KEY, CONFIG, 12.5)
    path = folder / KEY.place
    theirs = path.read_bytes().replace(b'"schema": 1', b'"schema": 7, "more": [1]')
    path.write_bytes(theirs)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert UserCache(folder).read(KEY) is None
            UserCache(folder).write(KEY, Config(hints={"occupancy": 1}), 1.0)
    assert path.read_bytes() == theirs
    (one,) = seen
    assert "a later release of aot_tune wrote it: schema 7" in str(one.message)
    assert "remove" not in str(one.message)


def test_a_file_that_no_release_could_read_is_replaced(folder: Path) -> None:
    UserCache(folder).write(KEY, CONFIG, 12.5)
    (folder / KEY.place).write_bytes(b"{")
    UserCache(folder).write(KEY, CONFIG, 12.5)
    assert UserCache(folder).read(KEY) == CONFIG


@pytest.mark.parametrize("constants", [{}, {"tile_x": 1, "tile_n": 64}, {"tile_m": 16}])
def test_b3_an_entry_of_other_constants_than_the_declaration_s_is_left_out(
    folder: Path, constants: dict[str, int]
) -> None:
    """B3: `legal` would be asked for a constant that is not there; the search is made again instead."""
    UserCache(folder).write(KEY, Config(constants=constants), 12.5)
    with pytest.warns(CacheWarning, match=r"expected tile_m tile_n, got .*: remove the file"):
        assert UserCache(folder, scale).read(KEY) is None
    UserCache(folder, scale).write(KEY, DEFAULT, 12.5)
    assert UserCache(folder, scale).read(KEY) == DEFAULT


# The folders of a file's path -------------------------------------------------------------------------------


INSIDE = ["v1", "v1/sm90", "v1/sm90/scale"]


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777])
def test_b15_every_folder_is_made_for_this_user_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "above" / "mine"
    before = os.umask(umask)
    try:
        UserCache(folder).write(KEY, CONFIG, 12.5)
    finally:
        os.umask(before)
    made = [folder.parent, folder, *(folder / name for name in INSIDE)]
    assert [oct(path.stat().st_mode & 0o7777) for path in made] == ["0o700"] * 5


@pytest.mark.parametrize("inside", ["", *INSIDE, KEY.place])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_b15_what_others_may_write_to_on_the_way_is_left_out(folder: Path, inside: str, mode: int) -> None:
    """B15: the folder itself may be looked into by all, as one that a user made has it."""
    UserCache(folder).write(KEY, CONFIG, 12.5)
    for name in ("", *INSIDE):
        (folder / name).chmod(0o755)
    assert UserCache(folder).read(KEY) == CONFIG
    place = folder / inside
    place.chmod(place.stat().st_mode | mode)
    text = (folder / KEY.place).read_text()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert UserCache(folder).read(KEY) is None
            UserCache(folder).write(KEY, Config(hints={"occupancy": 1}), 1.0)
    (one,) = seen
    assert "may write to it" in str(one.message)
    assert inside in str(one.message)
    assert (folder / KEY.place).read_text() == text


def test_b15_modes_below_a_folder_that_nobody_else_may_enter_do_no_harm(folder: Path) -> None:
    """Earlier releases made the inner folders with the process's umask."""
    UserCache(folder).write(KEY, CONFIG, 12.5)
    for name in INSIDE:
        (folder / name).chmod(0o775)
    assert UserCache(folder).read(KEY) == CONFIG


@pytest.mark.parametrize("inside", [*INSIDE, KEY.place])
def test_b15_a_link_on_the_way_is_neither_read_nor_written_through(
    folder: Path, tmp_path: Path, inside: str
) -> None:
    UserCache(folder).write(KEY, CONFIG, 12.5)
    elsewhere = tmp_path / "elsewhere"
    (folder / inside).rename(elsewhere)
    (folder / inside).symlink_to(elsewhere)
    before = [(path, path.stat().st_mtime_ns) for path in everything(tmp_path)]
    with pytest.warns(CacheWarning, match=f"{inside} in it: it is a symbolic link") as seen:
        assert UserCache(folder).read(KEY) is None
    UserCache(folder).write(KEY, Config(hints={"occupancy": 1}), 1.0)
    with UserCache(folder).locked(KEY, 0.1) as state:
        assert state == "none"
    assert len(seen) == 1
    assert [(path, path.stat().st_mtime_ns) for path in everything(tmp_path)] == before


@pytest.mark.parametrize("inside", [*INSIDE, KEY.place])
def test_b15_what_another_user_owns_on_the_way_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    UserCache(folder).write(KEY, CONFIG, 12.5)
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        status = real(path)
        if Path(path) == folder / inside:
            status = os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))
        return status

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.warns(CacheWarning, match="it belongs to user"):
        assert UserCache(folder).read(KEY) is None


# Warnings ---------------------------------------------------------------------------------------------------


OTHER_KEYS = [KEY._replace(bucket=(("M", m), ("dtype", "bfloat16"))) for m in (64, 128, 256)]


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), OSError(28, "No space left")])
def test_b5_a_folder_that_cannot_be_written_is_one_warning_for_all_winners(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """B5: the file's path and the system's words differ from bucket to bucket."""

    def refuse(path: Path, data: bytes) -> None:
        raise StoreError(f"cannot write {path}: {error.strerror}")

    monkeypatch.setattr(cache, "write_atomic", refuse)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for key in OTHER_KEYS:
            UserCache(folder).write(key, CONFIG, 12.5)
    (one,) = seen
    assert "are kept for this process only" in str(one.message)


def test_b8_where_only_the_lock_fails_the_warning_says_that_winners_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquired(path: Path, timeout: float) -> object:
        raise OSError(f"no locks for {path.name}")

    monkeypatch.setattr(cache, "_acquired", acquired)
    there = UserCache(folder)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for key in OTHER_KEYS:
            with there.locked(key, 1) as state:
                assert state == "none"
            there.write(key, CONFIG, 12.5)
            assert there.read(key) == CONFIG
    (one,) = seen
    assert "supports no locks" in str(one.message)
    assert "winners of live searches are written" in str(one.message)
    assert "this process only" not in str(one.message)


def test_b5_without_a_folder_all_winners_are_one_warning() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for key in OTHER_KEYS:
            UserCache(None).write(key, CONFIG, 12.5)
    assert len(seen) == 1
