"""The journal under damage, kills, full disks, two openers and changed conditions (A8, A9, A10, A12, A14)."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aot_tune.errors import JournalMismatchError, TuneError
from aot_tune.tuner.sweep.journal import MOST_RECORD_BYTES, Journal, check_resumable
from aot_tune.tuner.sweep.journal import read as content

IDENTITY = {"driver": "580.159.04", "tileiras": "13.4.92", "source": "3f0c9a51d2e4b678"}


def records(count: int) -> list[dict[str, Any]]:
    return [
        {"n": i, "us": i / 7, "config": {"tile_m": 64 + i}, "message": "line\nend é \x00"}
        for i in range(count)
    ]


def write(path: Path, items: list[dict[str, Any]]) -> bytes:
    with Journal.open(path, IDENTITY) as journal:
        for item in items:
            journal.append(item)
    return path.read_bytes()


def read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    with Journal.open(path, IDENTITY) as journal:
        return journal.records, journal.damage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "build" / "matmul.journal"


# Whole ------------------------------------------------------------------------------------------------------


def test_records_come_back_in_order_and_a_whole_journal_is_not_rewritten(path: Path) -> None:
    before = write(path, records(5))
    assert read(path) == (records(5), None)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.damaged"))


def test_an_opened_journal_tells_what_was_there_and_goes_on_behind_it(path: Path) -> None:
    write(path, records(2))
    with Journal.open(path, IDENTITY) as journal:
        journal.append({"new": True})
        assert journal.records == records(2)
    assert read(path)[0] == [*records(2), {"new": True}]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.text(min_size=1), json_values, max_size=4), max_size=5))
def test_what_was_appended_comes_back_equal(items: list[dict[str, Any]]) -> None:
    items = [item for item in items if "made_with" not in item]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, items)
        back = read(path)[0]
        assert repr(back) == repr(items)


@pytest.mark.parametrize(
    "record",
    [
        {"us": float("nan")},
        {"us": [float("inf")]},
        {"us": -float("inf")},
        {1: "an int key"},
        {"a": (1, 2)},
        {"made_with": {}},
        {"message": "x" * MOST_RECORD_BYTES},
    ],
)
def test_a_record_that_would_not_come_back_is_refused_and_nothing_is_written(
    path: Path, record: dict[str, Any]
) -> None:
    with Journal.open(path, IDENTITY) as journal:
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"journal|JSON"):
            journal.append(record)
        assert path.read_bytes() == before
        journal.append({"good": 1})
    assert read(path)[0] == [{"good": 1}]


# A9: damage -------------------------------------------------------------------------------------------------


def damaged_bytes(path: Path) -> bytes:
    return path.with_name(path.name + ".damaged").read_bytes()


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_tail_loses_the_last_record_alone(path: Path, cut: int) -> None:
    whole = write(path, records(4))
    path.write_bytes(whole[:-cut])
    kept, damage = read(path)
    assert kept == (records(4) if cut == 1 else records(3))
    assert damage is not None
    assert "\n" not in damage
    if cut > 1:
        assert whole[:-cut].endswith(damaged_bytes(path).rstrip(b"\n"))
    assert read(path) == (kept, None), "opened again it is whole"


def test_two_lines_spliced_into_one_are_both_kept(path: Path) -> None:
    whole = write(path, records(3))
    path.write_bytes(whole.replace(b"\n", b"", 2).replace(b"\n", b"", 1))
    assert read(path)[0] == records(3)


def test_a_line_spliced_into_another_loses_the_outer_alone(path: Path) -> None:
    lines = write(path, records(3)).splitlines(keepends=True)
    middle = len(lines[1]) // 2
    path.write_bytes(lines[0] + lines[1][:middle] + lines[2] + lines[1][middle:] + lines[3])
    kept, damage = read(path)
    assert kept == records(3)[1:]
    assert damage is not None
    assert "2 places" in damage


def test_a_run_of_nuls_loses_what_it_covers_alone(path: Path) -> None:
    lines = write(path, records(4)).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], bytes(4096), *lines[3:], bytes(512)]))
    kept, damage = read(path)
    assert kept == [records(4)[0], *records(4)[2:]]
    assert damage is not None
    assert "4608 bytes" in damage


def test_changed_line_ends_lose_nothing(path: Path) -> None:
    whole = write(path, records(4))
    path.write_bytes(whole.replace(b"\n", b"\r\n"))
    kept, damage = read(path)
    assert kept == records(4)
    assert damage is not None
    assert path.read_bytes() == whole


def test_a_lost_first_line_loses_no_record(path: Path) -> None:
    lines = write(path, records(3)).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))
    kept, damage = read(path)
    assert kept == records(3)
    assert damage is not None


def test_a_file_of_rubbish_is_set_aside_whole(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a journal\n" + bytes(range(256)))
    kept, damage = read(path)
    assert kept == []
    assert damage is not None
    assert str(path) in damage
    assert damaged_bytes(path).startswith(b"not a journal\n" + bytes(range(256)))


def test_damage_of_earlier_openings_is_kept(path: Path) -> None:
    for rubbish in (b"first", b"second"):
        whole = write(path, records(1))
        path.write_bytes(whole + rubbish)
        read(path)
    assert damaged_bytes(path) == b"first\nsecond\n"


def test_an_empty_file_is_a_journal_just_begun(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"")
    assert read(path) == ([], None)


def test_a_record_whose_text_holds_a_record_is_one_record(path: Path) -> None:
    inner = write(path.with_name("inner"), [{}]).splitlines()[1].decode()
    write(path, [{"message": inner}, {"message": f"{inner}\n"}])
    assert [record["message"] for record in read(path)[0]] == [inner, f"{inner}\n"]


@st.composite
def damages(draw: st.DrawFn) -> tuple[list[tuple[int, int, bytes]], int]:
    """Cuts: (start, end, what is there instead), in thousandths of the file."""
    cuts = draw(
        st.lists(
            st.tuples(
                st.integers(0, 1000),
                st.integers(0, 40),
                st.sampled_from([b"", b"\0" * 17, b"\n", b"\r\n", b"{}", b"0" * 9]) | st.binary(max_size=30),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return [(start, start + length, text) for start, length, text in cuts], draw(st.integers(0, 7))


@pytest.mark.long
@example(([(301, 301, b"}")], 0))  # a line's last byte, put in again before what became of it
@settings(max_examples=300, deadline=None)
@given(damages())
def test_every_record_that_damage_did_not_touch_is_kept(
    damage: tuple[list[tuple[int, int, bytes]], int],
) -> None:
    cuts, bit = damage
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        whole = write(path, records(12))
        data: list[bytes] = [whole[i : i + 1] for i in range(len(whole))]
        for start, end, text in cuts:
            first, last = start * len(whole) // 1000, min(end * len(whole) // 1000, len(whole) - 1)
            for place in range(first, max(last, first)):
                data[place] = b""
            if first < len(whole):
                data[first] = text + (bytes([data[first][0] ^ (1 << bit)]) if data[first] else b"")
        path.write_bytes(b"".join(data))
        kept, told = read(path)
        again = read(path)
    # The line end may go, and what damage puts in may be what it took: what is intact is text that is there.
    left, lines = b"".join(data), whole.splitlines()[1:]
    expected = [record for line, record in zip(lines, records(12), strict=True) if line in left]
    assert kept == expected
    assert again == (kept, None)
    if left != whole:
        assert told is not None


def _sealed(text: bytes, digest: bytes) -> bytes:
    """A line with the right checksum, whatever its text is."""
    body = digest + b" " + text
    return b"%08x %d %b\n" % (zlib.crc32(body), len(body), body)


@pytest.mark.parametrize(
    "text",
    [
        b"{not json}",
        b'{"us":NaN}',
        b'{"n":1,"us":1e999}',
        b'{"n":1,"message":"' + "é".encode() * 5000 + b'"}',
        b'{"n":' + b"9" * 5000 + b"}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"message":"\xff"}',
        b'{"made_with":["driver"],"schema":2}',
        b'{"made_with":{"driver":1},"schema":2}',
        b'{"made_with":{"driver":"1"},"schema":"2"}',
        b'{"kind":"nothing that the reader knows"}',
    ],
)
def test_a_right_checksum_with_bad_content_is_damage_and_no_traceback(path: Path, text: bytes) -> None:
    whole = write(path, records(2))
    digest = whole.split(b" ")[2]
    path.write_bytes(whole + _sealed(text, digest) + whole.splitlines(keepends=True)[1])
    with Journal.open(path, IDENTITY, accepts=lambda record: "n" in record and record["n"] < 10) as journal:
        assert journal.records == [*records(2), records(2)[0]]
        assert journal.damage is not None
    assert text in damaged_bytes(path)


def test_false_starts_cost_no_more_than_the_size_allows(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"00000000 99999 0123456789abcdef {" * 30_000)
    started = time.process_time()
    assert read(path)[0] == []
    assert time.process_time() - started < 2.0  # CPU time; each start read to the end would take minutes


def test_a_journal_that_is_a_link_is_written_through(path: Path) -> None:
    path.parent.mkdir()
    target = path.parent.parent / "elsewhere" / "journal.jsonl"
    path.symlink_to(target)
    write(path, records(2))
    assert path.is_symlink()
    target.write_bytes(target.read_bytes() + b"rubbish")
    assert read(path)[0] == records(2)
    assert path.is_symlink()
    with Journal.open(path, IDENTITY) as journal:
        assert journal.retire() is None
    assert target.with_suffix(".done").exists()
    assert read(path) == ([], None)


def test_doubled_lines_are_told_as_what_they_are(path: Path) -> None:
    whole = write(path, records(1))
    path.write_bytes(whole * 2)
    kept, damage = read(path)
    assert kept == records(1) * 2
    assert damage == f"{path}: held its first line 2 times; 2 records are kept"


# A8: kill -9 ------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from pathlib import Path
from aot_tune.tuner.sweep.journal import MOST_RECORD_BYTES, Journal, check_resumable
from aot_tune.tuner.sweep.journal import read as content
journal = Journal.open(Path(sys.argv[1]), {"driver": "1"})
number = len(journal.records)
print("open", number, flush=True)
while True:
    journal.append({"n": number, "text": "x" * (number % 97 * 50)})
    print(number, flush=True)
    number += 1
"""


def _child(path: Path, code: str = _CHILD) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_a_killed_writer_loses_no_acknowledged_record_and_repeats_none(path: Path) -> None:
    acknowledged = -1
    for attempt in range(6):
        child = _child(path)
        assert child.stdout is not None
        first = child.stdout.readline().split()
        assert first[0] == "open", "the killed holder's lock is free"
        assert int(first[1]) >= acknowledged + 1
        for _ in range(3 + attempt * 11):
            acknowledged = int(child.stdout.readline())
        time.sleep(0.0007 * attempt)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")
        child.wait()
        child.stdout.close()
        acknowledged = max([acknowledged, *(int(line) for line in rest[:-1] if line)])
    with Journal.open(path, {"driver": "1"}) as journal:
        numbers = [record["n"] for record in journal.records]
    assert numbers == list(range(len(numbers)))
    assert acknowledged + 1 <= len(numbers) <= acknowledged + 2, (
        "at most the one in flight is not acknowledged"
    )


# A10: a full disk -------------------------------------------------------------------------------------------


def _fill(journal: Journal, record: dict[str, Any]) -> tuple[int, TuneError]:
    """Append until it fails: how many were acknowledged, and the error."""
    for number in range(10_000):
        try:
            journal.append({**record, "n": number})
        except TuneError as error:
            return number, error
    raise AssertionError("the disk was never full")


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip(
            "this user may not mount a small file system; the file size limit below is tested everywhere"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.process
def test_a_full_disk_stops_at_once_and_room_lets_the_journal_go_on(
    tmp_path: Path,
) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        (disk / "other").write_bytes(bytes(20_000))
        path = disk / "journal"
        journal = Journal.open(path, IDENTITY)
        count, error = _fill(journal, {"text": "x" * 500})
        assert count > 0
        assert re.search(r"No space left.*make room", str(error))
        with pytest.raises(TuneError, match="No space left"):
            journal.append({"after": 1})
        journal.close()
        (disk / "other").unlink()
        with Journal.open(path, IDENTITY) as again:
            assert [record["n"] for record in again.records] == list(range(count))
            again.append({"after": 2})
        assert read(path)[0][-1] == {"after": 2}


def test_a_write_that_is_cut_short_is_an_error_and_leaves_no_torn_line(path: Path) -> None:
    journal = Journal.open(path, IDENTITY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))  # Python ignores SIGXFSZ: write fails with EFBIG
    try:
        count, error = _fill(journal, {"text": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert count > 0
    assert "File too large" in str(error)
    assert path.read_bytes().endswith(b"\n")
    with pytest.raises(TuneError, match="File too large"):
        journal.append({"after": 1})
    journal.close()
    kept, damage = read(path)
    assert ([record["n"] for record in kept], damage) == (list(range(count)), None)


def test_a_failed_sync_is_not_acknowledged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path, IDENTITY)
    journal.append({"n": 0})

    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(TuneError, match="Input/output error"):
        journal.append({"n": 1})
    monkeypatch.undo()
    with pytest.raises(TuneError, match="Input/output error"):
        journal.append({"n": 2})
    journal.close()
    assert read(path)[0] == [{"n": 0}]


def test_what_is_added_is_in_the_file_at_once_and_kept_with_the_next_sync(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with Journal.open(path, IDENTITY) as journal:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.stat().st_size))
        for number in range(3):
            journal.add({"n": number})
            assert content(path).records[-1] == {"n": number}, "a kill loses nothing"
        assert synced == []
        journal.append({"n": 3})
        assert synced == [path.stat().st_size]
        journal.add({"n": 4})
    assert synced[1:] == [path.stat().st_size], "closing keeps the rest"


def test_what_was_added_before_a_failed_sync_stays_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(path, IDENTITY)
    journal.append({"n": 0})
    journal.add({"n": 1})

    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(TuneError, match="Input/output error"):
        journal.sync()
    with pytest.raises(TuneError, match="Input/output error"):
        journal.add({"n": 2})
    journal.close()
    assert read(path)[0] == [{"n": 0}, {"n": 1}]


def test_a_place_where_nothing_can_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=r"file/journal: cannot open.*name another folder with --journal"):
        Journal.open(tmp_path / "file" / "journal", IDENTITY)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        with pytest.raises(TuneError, match=rf"{name}: is not a plain file.*--journal"):
            Journal.open(tmp_path / name, IDENTITY)


# A12: two tuners --------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_second_opener_is_refused_with_the_holder_s_pid(path: Path) -> None:
    with Journal.open(path, IDENTITY) as journal:
        journal.append({"n": 0})
        with pytest.raises(TuneError, match=rf"another tuner, pid {os.getpid()}, holds"):
            Journal.open(path, IDENTITY)
        child = _child(path)
        assert child.communicate(timeout=30)[0] == ""
        assert child.returncode == 1
        journal.append({"n": 1})
    assert read(path)[0] == [{"n": 0}, {"n": 1}]


@pytest.mark.process
def test_another_process_that_holds_it_is_named(path: Path) -> None:
    child = _child(path)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(TuneError, match=rf"pid {child.pid}, holds"):
            Journal.open(path, IDENTITY)
    finally:
        child.kill()
        child.communicate()


def test_an_opening_that_fails_lets_go_of_the_lock(path: Path) -> None:
    write(path, records(1))
    with pytest.raises(JournalMismatchError):
        Journal.open(path, {"driver": "other"})
    assert read(path)[0] == records(1)


def test_fresh_sets_a_journal_aside_only_once_the_lock_is_held(path: Path) -> None:
    with Journal.open(path, IDENTITY) as journal:
        journal.append({"n": 0})
        with pytest.raises(TuneError, match="holds this journal"):
            Journal.open(path, {"driver": "other"}, fresh=True)
        journal.append({"n": 1})
    assert read(path)[0] == [{"n": 0}, {"n": 1}]
    with Journal.open(path, {"driver": "other"}, fresh=True) as journal:
        assert journal.records == []
    assert path.with_suffix(".old").exists()


def test_a_journal_that_cannot_be_renamed_is_one_line_that_says_what_to_do(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with Journal.open(path, IDENTITY) as journal:
        monkeypatch.setattr(Path, "replace", broken)
        told = journal.retire()
    assert told is not None
    assert "Read-only file system; remove it" in told


def test_a_lock_that_cannot_be_let_go_is_no_traceback(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal.open(path, IDENTITY)
    with monkeypatch.context() as patch:
        patch.setattr("filelock.FileLock.release", broken)
        journal.close()


# A14: changed conditions ------------------------------------------------------------------------------------


def test_a_journal_of_other_conditions_is_refused_with_what_differs(path: Path) -> None:
    before = write(path, records(2))
    other = {"driver": "590.1", "tileiras": "13.4.92", "gpu": "NVIDIA H200"}
    with pytest.raises(JournalMismatchError) as caught:
        Journal.open(path, other)
    message = str(caught.value)
    assert "driver was 580.159.04, is 590.1" in message
    assert "gpu was not set, is NVIDIA H200" in message
    assert "source was 3f0c9a51d2e4b678, is not set" in message
    assert "tileiras" not in message
    assert path.read_bytes() == before


def test_records_of_other_conditions_are_known_without_the_first_line(path: Path) -> None:
    lines = write(path, records(2)).splitlines(keepends=True)
    path.write_bytes(b"rubbish" + b"".join(lines[1:]))
    with pytest.raises(JournalMismatchError, match="first line"):
        Journal.open(path, {"driver": "590.1"})


def test_the_order_of_the_conditions_does_not_matter(path: Path) -> None:
    write(path, records(2))
    with Journal.open(path, dict(reversed(IDENTITY.items()))) as journal:
        assert journal.records == records(2)


@pytest.mark.parametrize("schema", [1, 2, 4])
def test_a_journal_of_another_release_is_refused_with_one_line(path: Path, schema: int) -> None:
    first = b'{"made_with":{"driver":"580.159.04"},"schema":%d}' % schema
    path.parent.mkdir()
    path.write_bytes(b"".join(_sealed(line, b"0123456789abcdef") for line in (first, b'{"kind":"result"}')))
    before = path.read_bytes()
    for look in (
        lambda: Journal.open(path, IDENTITY),
        lambda: content(path),
        lambda: check_resumable(path, IDENTITY),
    ):
        with pytest.raises(
            JournalMismatchError, match=rf"schema is {schema}.*reads 3; move the file away.*--fresh"
        ) as caught:
            look()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_ours_and_a_foreign_record_are_told_as_that(path: Path) -> None:
    whole = write(path, records(1))
    path.write_bytes(whole + _sealed(b'{"n":7}', b"0123456789abcdef"))
    with pytest.raises(JournalMismatchError, match="1 of its records are of another sweep"):
        check_resumable(path, IDENTITY)
    assert content(path).foreign == 1


def test_a_journal_is_read_while_it_is_written_and_left_as_it_is(path: Path) -> None:
    with Journal.open(path, IDENTITY) as journal:
        journal.append({"n": 0})
        path.write_bytes(path.read_bytes() + b"torn")
        found = content(path)
        assert (found.identity, list(found.records)) == (IDENTITY, [{"n": 0}])
        assert (found.damaged_places, found.damaged_bytes) == (1, 4)
    assert path.read_bytes().endswith(b"torn")
