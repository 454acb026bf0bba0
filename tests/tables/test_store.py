"""aot_tune.tables.store: where tables lie, reading without blocking, writing whole (A15, B1, B2, B4, B14)."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from aot_tune.errors import DeclarationError, NewerSchemaError, StoreError, TableError
from aot_tune.tables import files, store
from aot_tune.tables.strict_json import MOST_BYTES
from aot_tune.tables.writer import dump
from aot_tune.values.arch import Arch
from tests.support.tables import TABLE

DATA = dump(TABLE)


def _child(script: str, *args: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a script in a Python of its own; it may not take long."""
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, **options)


# Where ------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package `somelib` in a folder of its own."""
    folder = tmp_path / "checkout" / "somelib"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('looking up must not import')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def _declared(package: str, tables: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(package=package, tables=tables)


def test_tables_lie_in_the_top_level_package(package):
    assert store.package_folder(_declared("somelib.kernels.deep")) == package / "tuned_configs"


def test_a_folder_that_the_declaration_names_is_taken_as_it_is():
    assert store.package_folder(_declared("no_such_package", Path("some/where"))) == Path("some/where")


def test_in_a_checkout_the_folder_beside_the_package_is_taken_where_it_exists(package):
    beside = package.parent / "tuned_configs"
    beside.mkdir()
    assert store.package_folder(_declared("somelib")) == package / "tuned_configs"
    (package.parent / "pyproject.toml").touch()
    assert store.package_folder(_declared("somelib")) == beside
    (package / "tuned_configs").mkdir()
    assert store.package_folder(_declared("somelib")) == package / "tuned_configs"


def test_the_first_table_of_another_package_goes_into_it_even_in_a_checkout(package):
    (package.parent / "pyproject.toml").touch()
    assert store.package_folder(_declared("somelib")) == package / "tuned_configs"


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """Three distributions of the namespace package `acme_ns`, each installed in a folder of its own."""
    for name in ("site/acme_ns/alpha/alpha.py", "src/acme_ns/beta/beta.py", "ext/acme_ns/gamma/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("raise AssertionError('looking up must not import')")
        monkeypatch.syspath_prepend(str(tmp_path / name.partition("/")[0]))
    return tmp_path


@pytest.mark.parametrize(
    ("package", "folder"),
    {
        "acme_ns.alpha": "site/acme_ns/alpha",
        "acme_ns.beta": "src/acme_ns/beta",
        "acme_ns.beta.beta": "src/acme_ns/beta",
        "acme_ns.gamma": "ext/acme_ns/gamma",
        "acme_ns.gamma.kernels.deep": "ext/acme_ns/gamma",
    }.items(),
)
def test_distributions_of_a_namespace_package_share_no_folder(package, folder, namespace):
    assert store.package_folder(_declared(package)) == namespace / folder / "tuned_configs"
    former = [str(path.relative_to(namespace)) for path in store.former_folders(package)]
    assert sorted(former) == [f"{name}/acme_ns/tuned_configs" for name in ("ext", "site", "src")]


def test_a_package_that_lies_in_several_folders_has_none_for_its_tables(namespace):
    with pytest.raises(StoreError, match=r"'acme_ns' has no __init__.py and lies in .* put its modules into"):
        store.package_folder(_declared("acme_ns"))


def test_a_folder_that_the_path_leads_to_twice_is_one(namespace, monkeypatch):
    (namespace / "link").symlink_to(namespace / "src")
    monkeypatch.syspath_prepend(str(namespace / "link"))
    home = store.package_folder(_declared("acme_ns.beta"))
    assert home == namespace / "link" / "acme_ns" / "beta" / "tuned_configs"
    assert len(store.former_folders("acme_ns.beta")) == 3


def test_a_regular_package_has_no_former_folder(package):
    assert store.former_folders("somelib.kernels") == []


@pytest.mark.parametrize("name", ["no_such_package", "", "sys"])
def test_a_package_without_a_folder_is_an_error_that_says_what_to_declare(name):
    with pytest.raises(StoreError, match=r"package=__package__ .* tables=Path"):
        store.package_folder(_declared(name))


def test_a_table_lies_at_its_arch_and_kernel():
    assert store.table_path(Path("t"), Arch(9, 0), "rms_norm") == Path("t/sm90/rms_norm.json")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "x\0", "x" * 300, ""])
def test_b14_no_name_leaves_the_folder(name):
    with pytest.raises(DeclarationError):
        store.table_path(Path("t"), Arch(9, 0), name)


def test_all_tables_are_listed_in_order_without_hidden_names(tmp_path):
    for name in (
        "sm90/b.json",
        "sm90/a.json",
        "sm100/c.json",
        "sm90/.a.json.1-2.tmp",
        "sm90/notes.txt",
        ".git/x.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "loose.json").touch()
    names = [str(path.relative_to(tmp_path)) for path in store.listed(tmp_path)]
    assert names == ["sm100/c.json", "sm90/a.json", "sm90/b.json"]
    assert store.listed(tmp_path / "missing") == []


def test_b4_looking_up_makes_no_folder(tmp_path):
    store.listed(tmp_path / "a")
    with pytest.raises(StoreError):
        store.read_table(tmp_path / "a" / "sm90" / "x.json")
    files.check_writable(tmp_path / "a" / "sm90")
    assert list(tmp_path.iterdir()) == []


# Reading ----------------------------------------------------------------------------------------------------


def _in_time(function, *args):
    """The error a call raises; a call that blocks fails the test and does not hang it."""
    errors: list[BaseException | None] = []

    def call():
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert errors, "it blocks"
    return errors[0]


def test_a_table_is_read(tmp_path):
    path = tmp_path / "matmul.json"
    path.write_bytes(DATA)
    assert store.read_table(path) == TABLE


def test_a_table_behind_a_link_is_read(tmp_path):
    (tmp_path / "real.json").write_bytes(DATA)
    (tmp_path / "link.json").symlink_to("real.json")
    assert store.read_table(tmp_path / "link.json") == TABLE


ODD = {
    "missing": (lambda path: None, StoreError, "No such file"),
    "fifo": (os.mkfifo, StoreError, "a FIFO, not a file"),
    "directory": (Path.mkdir, StoreError, "a directory, not a file"),
    "dangling": (lambda path: path.symlink_to("nowhere"), StoreError, "No such file"),
    "circle": (lambda path: path.symlink_to(path), StoreError, "symbolic links"),
    "socket": (lambda path: socket.socket(socket.AF_UNIX).bind(path.name), StoreError, "No such device"),
    "empty": (Path.touch, TableError, "the file is empty"),
    "nuls": (lambda path: path.write_bytes(bytes(5000)), TableError, "not JSON"),
    "truncated": (lambda path: path.write_bytes(DATA[:700]), TableError, "not JSON"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the socket's file stays when the socket is gone
def test_b1_no_odd_file_blocks_or_crashes_and_the_error_names_its_path(tmp_path, monkeypatch, name):
    make, kind, told = ODD[name]
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = tmp_path / f"{name}.json"
    make(path)
    error = _in_time(store.read_table, path)
    assert type(error) is kind
    assert str(path) in str(error)
    assert told in str(error)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_b1_an_endless_device_is_not_read(device):
    error = _in_time(store.read_table, Path(device))
    assert isinstance(error, StoreError)
    assert "a device, not a file" in str(error)


def test_b1_a_path_with_a_nul_is_an_error():
    assert isinstance(_in_time(store.read_table, Path("a\0b")), StoreError)


def test_b2_a_gigabyte_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "matmul.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    started = time.process_time()
    with pytest.raises(TableError, match=f"1073741824 bytes; a document has at most {MOST_BYTES}"):
        store.read_table(path)
    assert time.process_time() - started < 0.2  # CPU time; to read a gigabyte takes more


def test_the_error_keeps_its_kind_and_place_and_starts_with_the_path(tmp_path):
    path = tmp_path / "matmul.json"
    path.write_bytes(DATA.replace(b'"schema": 2', b'"schema": 9'))
    with pytest.raises(NewerSchemaError) as newer:
        store.read_table(path)
    assert str(newer.value).startswith(f"{path}: ")
    path.write_bytes(DATA.replace(b'"sm_count": 132', b'"sm_count": true'))
    with pytest.raises(TableError) as caught:
        store.read_table(path)
    assert caught.value.path == "built_with.sm_count"


def test_no_descriptor_is_left_open(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "cut.json").write_bytes(DATA[:700])
    before = len(os.listdir("/proc/self/fd"))
    for name in ("fifo.json", "cut.json", "missing.json", "."):
        with pytest.raises((StoreError, TableError)):
            store.read_table(tmp_path / name)
    files.write_atomic(tmp_path / "new.json", DATA)
    assert len(os.listdir("/proc/self/fd")) == before


# Writing ----------------------------------------------------------------------------------------------------


def test_a_table_is_written_with_its_folders(tmp_path):
    path = tmp_path / "tuned_configs" / "sm90" / "matmul.json"
    files.write_atomic(path, DATA)
    assert path.read_bytes() == DATA
    assert os.listdir(path.parent) == ["matmul.json"]


def test_a_new_file_has_the_mode_that_the_process_gives_and_an_old_one_keeps_its_own(tmp_path):
    path = tmp_path / "matmul.json"
    before = os.umask(0o027)
    try:
        files.write_atomic(path, DATA)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o664)
        files.write_atomic(path, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert path.read_bytes() == b"new"


KILLER = """
import os, signal, sys
from pathlib import Path
from aot_tune.tables import files, store

folder, old, new = Path(sys.argv[1]), b"old" * 100_000, b"new" * 200_000
steps = 0
while True:
    path = folder / f"{steps}" / "matmul.json"
    path.parent.mkdir()
    path.write_bytes(old)
    child = os.fork()
    if child == 0:
        seen = 0
        def trace(frame, event, argument):
            global seen
            if frame.f_code.co_filename != files.__file__:
                return None
            if seen == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return trace
        sys.settrace(trace)
        files.write_atomic(path, new)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert path.read_bytes() in (old, new), steps
    others = [name for name in os.listdir(path.parent) if name != path.name]
    assert all(name.startswith(".") for name in others), others
    assert store.listed(folder / "x") == []
    print(steps, "old" if path.read_bytes() == old else "new", len(others))
    if os.WIFEXITED(status):
        break
    steps += 1
"""


@pytest.mark.process
def test_a15_a_kill_at_any_step_leaves_the_old_or_the_new_file_whole(tmp_path):
    """The child is killed before its n-th line in the module, for every n until it comes through."""
    lines = [line.split() for line in _child(KILLER, tmp_path).stdout.splitlines()]
    outcomes = [outcome for _, outcome, _ in lines]
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes, reverse=True), "once new, it stays new"
    assert set(outcomes) == {"old", "new"}
    assert any(int(left) for _, _, left in lines), (
        "some kill met a temporary file, or this test tests nothing"
    )


PROBE_KILLER = """
import os, signal, sys, tempfile
from pathlib import Path
from aot_tune.tables import files

folder, steps, status = Path(sys.argv[1]), 0, 1
while not os.WIFEXITED(status):
    child = os.fork()
    if child == 0:
        seen = 0
        def trace(frame, event, argument):
            global seen
            if frame.f_code.co_filename not in (files.__file__, tempfile.__file__):
                return None
            if seen == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return trace
        sys.settrace(trace)
        files.check_writable(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.listdir(folder) == [], (steps, os.listdir(folder))
    steps += 1
print(steps)
"""


@pytest.mark.process
def test_a_kill_while_a_folder_is_tried_leaves_nothing_in_it(tmp_path):
    assert int(_child(PROBE_KILLER, tmp_path).stdout) > 5


def test_what_a_killed_writer_left_behind_is_removed_by_the_next_after_an_hour(tmp_path):
    old, fresh, other = (
        tmp_path / name for name in (".m.json.1-1.tmp", ".m.json.2-2.tmp", ".x.json.1-1.tmp")
    )
    for path in (old, fresh, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    files.write_atomic(tmp_path / "m.json", DATA)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_writers_at_once_leave_one_of_their_files_whole(tmp_path):
    path = tmp_path / "matmul.json"
    contents = [bytes([65 + i]) * 300_000 for i in range(8)]
    seen: set[bytes] = set()

    def write(data):
        for _ in range(5):
            files.write_atomic(path, data)
            seen.add(path.read_bytes())

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen <= set(contents)
    assert os.listdir(tmp_path) == ["matmul.json"]


@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "symlink", "dangling"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, make):
    path, target = tmp_path / "matmul.json", tmp_path / "elsewhere"
    target.write_bytes(b"target")
    {
        "mkdir": path.mkdir,
        "mkfifo": lambda: os.mkfifo(path),
        "symlink": lambda: path.symlink_to(target),
        "dangling": lambda: path.symlink_to("nowhere"),
    }[make]()
    error = _in_time(files.write_atomic, path, DATA)
    assert isinstance(error, StoreError)
    assert str(path) in str(error)
    assert "remove it" in str(error)
    assert target.read_bytes() == b"target"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "matmul.json"]


def test_a_linked_folder_is_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    files.write_atomic(tmp_path / "link" / "matmul.json", DATA)
    assert (tmp_path / "real" / "matmul.json").read_bytes() == DATA


@pytest.mark.process
def test_a10_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    """A limit on the size of a file stands in for the disk's."""
    path = tmp_path / "matmul.json"
    path.write_bytes(b"old")
    script = """
import resource, sys
from pathlib import Path
from aot_tune.tables import files, store
from aot_tune.errors import StoreError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.write_atomic(Path(sys.argv[1]), bytes(100_000))
except StoreError as error:
    print(error)
"""
    told = _child(script, path).stdout
    assert told.startswith(f"cannot write {path}: File too large; ")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["matmul.json"]


READ_ONLY = """
import os, sys
from pathlib import Path
from aot_tune.tables import files, store
from aot_tune.errors import StoreError
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
folder = Path(sys.argv[1])
for call in (
    lambda: files.check_writable(folder), lambda: files.check_writable(folder / "sm90"),
    lambda: files.write_atomic(folder / "matmul.json", b"new"),
    lambda: files.write_atomic(folder / "sm90" / "matmul.json", b"new"),
    lambda: files.write_atomic(folder / "open" / "locked.json", b"new"),
):
    try:
        call()
        print("written")
    except StoreError as error:
        print(error)
assert files.read_bytes(folder / "matmul.json") == b"old"
assert [path.name for path in store.listed(folder)] == ["locked.json"]
"""


@pytest.mark.process
def test_a_read_only_folder_or_file_is_refused_and_stays_as_it_was():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        (folder / "matmul.json").write_bytes(b"old")
        (folder / "open").mkdir()
        (folder / "open" / "locked.json").write_bytes(b"old")
        (folder / "open").chmod(0o777)
        (folder / "open" / "locked.json").chmod(0o444)
        folder.chmod(0o555)
        try:
            lines = _child(
                READ_ONLY, folder, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
            ).stdout.splitlines()
        finally:
            folder.chmod(0o755)
        assert [line.startswith("cannot write") for line in lines] == [True] * 5, lines
        assert all("another folder" in line and name in line for line in lines)
        assert sorted(os.listdir(folder)) == ["matmul.json", "open"]
        assert (folder / "open" / "locked.json").read_bytes() == b"old"


def test_a_folder_that_is_a_file_is_not_writable(tmp_path):
    (tmp_path / "sm90").touch()
    for folder in (tmp_path / "sm90", tmp_path / "sm90" / "deeper"):
        with pytest.raises(StoreError, match="cannot write in"):
            files.check_writable(folder)
    with pytest.raises(StoreError, match="cannot write"):
        files.write_atomic(tmp_path / "sm90" / "matmul.json", DATA)


def test_a_writable_folder_passes_and_nothing_is_left_in_it(tmp_path):
    files.check_writable(tmp_path)
    files.check_writable(tmp_path / "not" / "yet")
    assert os.listdir(tmp_path) == []
