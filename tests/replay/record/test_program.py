"""Programs recorded by ``aot-tune record`` and replayed: real processes, real tables, the stand-in driver."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aot_tune.replay.document import parse
from aot_tune.replay.record import program
from aot_tune.replay.record.recorder import Recorder, Site
from tests.support import tuned_once
from tests.support.make import planned_commands
from tests.support.tuned_programs import ONCE, ROOT, aot_tune, kept, run

PACKAGE = ROOT / "tests" / "support" / "three_kernels" / "mylib"

_LINES = Path(tuned_once.__file__).read_text().splitlines()
SEARCH = f"tuned_once.py:{_LINES.index('    return exhaustive_search(') + 1}"
"""Place of the search, as reports name it."""

pytestmark = pytest.mark.process


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_exit_code_is_the_program_s_where_the_parent_ignores_how_children_end(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that is started now ignores it too
    program = "import signal, sys; print(signal.getsignal(signal.SIGCHLD).name); sys.exit(7)"
    command = [sys.executable, "-m", "aot_tune", "record", "--out", "tables", sys.executable, "-c", program]
    try:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=kept(tmp_path), stdout=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (process.communicate(timeout=300)[0], process.returncode) == ("SIG_DFL\n", 7)


def test_a_program_is_recorded_and_then_run_without_a_search(tmp_path: Path) -> None:
    program = ["--", sys.executable, "-c", ONCE]
    done = aot_tune(tmp_path, "record", "--out", "tables", *program, "1024", "5000")
    first = answer(done)
    (path,) = (tmp_path / "tables" / "sm90").iterdir()
    entries = parse(path.read_bytes()).entries
    assert [entry.problem.arguments[2].value for entry in entries] == [1024, 5000]
    row, *rest = done.stderr.splitlines()[1:]
    assert row.split()[:3] == [SEARCH, "tests.support.tuned_once.scale_kernel", "2"]
    assert rest == ["1 table written:", f"  {path}"]
    again = answer(aot_tune(tmp_path, "run", "--tables", "tables", *program, "1024", "5000"))
    assert again == {"launches": first["launches"], "searched": []}
    grids = [one["grid"] for one in again["launches"]]
    assert grids == [list(entry.grid) for entry in entries]
    near_and_far = answer(aot_tune(tmp_path, "run", "--tables", "tables", *program, "1500", "100"))
    assert near_and_far["searched"] == [9]


@pytest.mark.slow
def test_a_package_gets_tables_and_cubins_by_changing_one_import(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "mylib")
    program = ("-m", "tests.support.children.three_kernels")
    path = tmp_path / "mylib" / "kernels.py"
    text = path.read_text()
    assert text.count("import exhaustive_search\n") == 1
    path.write_text(text.replace("from cuda.tile.tune import", "from aot_tune import"))
    before = answer(run(tmp_path, *program))
    assert before["searched"] == [2, 3, 4]  # nothing is recorded yet

    recorded = aot_tune(tmp_path, "record", "--package", "mylib", "--", sys.executable, *program)
    assert answer(recorded)["launches"] == before["launches"]
    tables = sorted(one.name for one in (tmp_path / "mylib" / "tuned_configs" / "sm90").iterdir())
    kernels = ("add_kernel", "row_sum_kernel", "scale_kernel")
    assert tables == [f"mylib.kernels.{name}.json" for name in kernels]
    assert answer(run(tmp_path, *program)) == {**before, "searched": []}

    done = aot_tune(tmp_path, "compile", "--arch", "sm90", "--module", "mylib.kernels")
    assert done.returncode == 0, done.stderr
    loaded = answer(run(tmp_path, *program, "--compile-nothing"))
    assert (loaded["searched"], loaded["warnings"]) == ([], [])
    # A cubin's symbol is the function's name: nothing that is compiled at a launch has it.
    assert [one["symbol"] for one in loaded["launches"]] == ["scale_kernel", "add_kernel", "row_sum_kernel"]
    for one, other in zip(loaded["launches"], before["launches"], strict=True):
        assert (one["grid"], one["hints"]) == (other["grid"], other["hints"])


def test_every_launch_of_a_library_runs_from_cubins_where_no_compiler_is(tmp_path: Path) -> None:
    program = ("-m", "tests.support.children.split_sums")
    done = aot_tune(tmp_path, "record", "--out", "tables", "--", sys.executable, *program)
    recorded = answer(done)
    searched, launched = sorted((tmp_path / "tables" / "sm90").iterdir())
    assert [len(parse(path.read_bytes()).entries) for path in (searched, launched)] == [1, 0]
    assert [dict(one.hints) for one in parse(launched.read_bytes()).launched] == [
        {"occupancy": 2, "opt_level": 3}
    ]
    assert done.stderr.splitlines()[-3:] == ["2 tables written:", f"  {searched}", f"  {launched}"]

    made = ("compile", "--arch", "sm90", "--module", "tests.support.split_sums")
    done = aot_tune(tmp_path, *made, AOT_TUNE_TABLES=str(tmp_path / "tables"))
    assert done.returncode == 0, done.stderr
    served = ("run", "--tables", "tables", "--", sys.executable, *program)
    replayed = answer(aot_tune(tmp_path, *served, "--without-compiler", "float16"))
    assert (replayed["searched"], replayed["warnings"]) == ([], [])
    assert [one["symbol"] for one in replayed["launches"]] == ["partial_kernel", "reduce_kernel"]
    for one, other in zip(replayed["launches"], recorded["launches"], strict=True):
        assert (one["grid"], one["hints"]) == (other["grid"], other["hints"])
    (error,) = replayed["errors"]
    assert error.startswith("CompilerMissingError: no cubin was shipped for reduce_kernel_K")
    assert "aot-tune record" in error
    compiled = answer(aot_tune(tmp_path, *served, "float16"))
    (warning,) = compiled["warnings"]
    assert warning.startswith("no cubin of tests.support.split_sums.reduce_kernel for reduce_kernel_K")


def test_make_fetches_the_library_that_is_recorded_before_it_tests() -> None:
    for target in ("test", "test-slow"):
        text = "\n".join(planned_commands(target))
        assert 0 < text.index("--no-deps") < text.index("tilegym==1.5.1") < text.index("-m pytest")


SEEN = """
import json, os, sys
json.dump([sorted(sys.modules), sorted(os.environ)], open(sys.argv[1], "w"))
os.environ["OMP_NUM_THREADS"] = "1"
if sys.argv[1] == "record":
    import torch
    assert torch.get_num_threads() == 1
raise SystemExit(3)
"""


def test_a_program_sees_the_modules_and_variables_as_ever_and_its_exit_code_is_passed_on(
    tmp_path: Path,
) -> None:
    program = ["--", sys.executable, "-c", SEEN]
    done = aot_tune(tmp_path, "record", *program, "record")
    assert (done.returncode, done.stderr) == (
        3,
        "nothing was recorded: no kernel of cuTile was searched or launched\n",
    )
    done = aot_tune(tmp_path, "run", "--tables", "tabels", *program, "run")
    assert (done.returncode, done.stderr) == (
        3,
        "aot-tune: the folder of recorded tables tabels does not exist yet\n",
    )
    modules, variables = json.loads((tmp_path / "record").read_text())
    assert [modules, variables] == json.loads((tmp_path / "run").read_text())
    assert not {"torch", "numpy", "cuda", "aot_tune.replay.record"} & {*modules}
    killed = aot_tune(tmp_path, "run", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == -9
    killed = aot_tune(tmp_path, "record", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 137


STOPPED = """
import signal, sys, time

def stop(number, frame):
    time.sleep(0.5)
    print("served all", flush=True)
    sys.exit(5)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda number, frame: print("reloaded", flush=True))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("verb", ["record", "run"])
def test_a_program_that_is_asked_to_end_ends_in_its_own_way(verb: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aot_tune", verb, "--", sys.executable, "-c", STOPPED]
    (tmp_path / "temporary").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "reloaded\n"
        process.terminate()
        assert process.stdout.read() == "served all\n"
    assert process.returncode == 5
    assert list((tmp_path / "temporary").iterdir()) == []


FORKED = """
        if rows == 5000 and (child := os.fork()):
            os.waitpid(child, 0)
            break
"""


def test_what_a_program_recorded_before_it_was_killed_is_told_once(tmp_path: Path) -> None:
    loop = "    for rows in map(int, sys.argv[1:]):\n"
    forked = f"import os\n{ONCE}\nos.kill(os.getpid(), 9)".replace(loop, f"{loop}{FORKED}")
    done = aot_tune(tmp_path, "record", "--out", "tables", "--", sys.executable, "-c", forked, "1024", "5000")
    assert done.returncode == 137
    (row,) = (line.split() for line in done.stderr.splitlines() if line.startswith(f"{SEARCH} "))
    assert row[:3] == [SEARCH, "tests.support.tuned_once.scale_kernel", "2"]
    assert "1 table written:" in done.stderr


def test_a_report_is_written_while_another_thread_adds_remarks(tmp_path: Path) -> None:
    recorder, ended = Recorder(), threading.Event()
    site = recorder.sites["a"] = Site(place="lib.py:1", kernel="lib.kernel")

    def remark() -> None:
        for number in itertools.count():
            site.remarks[str(number % 20_000)] = None
            if number % 20_000 == 0:
                site.remarks.clear()
            if ended.is_set():
                return

    thread = threading.Thread(target=remark)
    thread.start()
    try:
        for _ in range(20):
            program._report(recorder, tmp_path)
    finally:
        ended.set()
        thread.join()
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text())["sites"][0]["kernel"] == "lib.kernel"


INTERRUPTED = """
    import os, signal, time
    from aot_tune.nvidia import cutile
    own, timed = cutile.search, []
    def interrupted(*args, **kwargs):
        timed.append(args)
        if len(timed) == 4:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(60)
        return own(*args, **kwargs)
    cutile.search = interrupted
"""


def test_a_search_that_is_interrupted_excludes_no_config_and_is_told(tmp_path: Path) -> None:
    line = "    from tests.support import tuned_once\n"
    stopped = ONCE.replace(line, line + INTERRUPTED)
    done = aot_tune(tmp_path, "record", "--out", "tables", "--", sys.executable, "-c", stopped, "1024")
    assert done.returncode == 128 + signal.SIGTERM
    first, _, row, remark, *_ = done.stderr.splitlines()
    assert first == "interrupted by SIGTERM: no config is passed over for it"
    assert row.split()[1:] == ["tests.support.tuned_once.scale_kernel", "0", "-", "0", "0"]
    assert remark.partition(": ")[2].startswith("a search had not ended: its outcomes are kept")
    done = aot_tune(tmp_path, "record", "--out", "tables", "--", sys.executable, "-c", ONCE, "1024")
    row, *rest = done.stderr.splitlines()[1:]
    assert row.split()[2] == "1"
    assert row.split()[-2:] == ["0", "0"]
    assert rest[0] == "1 table written:"


AGENT = "os.getppid()"
RECORDER = f'int(open(f"/proc/{{{AGENT}}}/stat").read().rpartition(")")[2].split()[1])'


@pytest.mark.slow
@pytest.mark.parametrize("asked", [AGENT, RECORDER], ids=["torchrun", "aot-tune"])
def test_ranks_that_torchrun_ends_exclude_no_config(asked: str, tmp_path: Path) -> None:
    line = "    from tests.support import tuned_once\n"
    begun = 'import os, torch.distributed\ntorch.distributed.init_process_group("gloo")\n'
    ranked = begun + ONCE.replace("empty(rows,", 'empty(rows * (1 + int(os.environ["RANK"])),')
    ranked = ranked.replace("print(", "0 and print(")  # of two processes
    (tmp_path / "whole.py").write_text(ranked)
    (tmp_path / "stopped.py").write_text(ranked.replace(line, line + INTERRUPTED.replace(AGENT, asked)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["record", "--out", "tables", "--", *torchrun]
    one_of_each = {"AOT_TUNE_RANKED": "1"}
    done = aot_tune(tmp_path, *command, "stopped.py", "1024", **one_of_each)
    assert done.returncode == 1
    interrupted = "interrupted by SIGTERM: no config is passed over for it" in done.stderr.splitlines()
    assert interrupted == (asked == RECORDER)
    assert ": a search had not ended: its outcomes are kept" in done.stderr
    done = aot_tune(tmp_path, *command, "whole.py", "1024", **one_of_each)
    (row,) = (line.split() for line in done.stderr.splitlines() if line.startswith(f"{SEARCH} "))
    assert (row[2], row[-2:]) == ("2", ["0", "0"])


@pytest.mark.parametrize("verb", ["record", "run"])
def test_without_a_program_it_is_told_what_to_do(verb: str, tmp_path: Path) -> None:
    done = aot_tune(tmp_path, verb)
    assert done.returncode == 2
    assert "name the program after --, such as: -- python serve.py" in done.stderr
    done = aot_tune(tmp_path, verb, "--", "no-such-program")
    assert done.returncode == 2
    assert "there is no program 'no-such-program' on PATH" in done.stderr


@pytest.mark.parametrize(
    ("verb", "variable", "value", "said"),
    [
        ("run", "AOT_TUNE_ON_MISS", "eror", "'eror': write one of search, nearest, default, error, or unset"),
        ("record", "AOT_TUNE_ON_MISS", "eror", "'eror': write one of search, nearest, default, error"),
        ("record", "AOT_TUNE_RANKED", "abc", "AOT_TUNE_RANKED='abc'"),
        ("record", "DISABLE_AUTOTUNE", "1", "DISABLE_AUTOTUNE or AOT_TUNE_DISABLE_AUTOTUNE is set"),
    ],
)
def test_a_wrong_variable_is_refused_before_the_program_starts(
    verb: str, variable: str, value: str, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "aot_tune", verb, "--", sys.executable, "-c", "print('started')"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), variable: value}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--out", "file"], 1, "file"),
        (["--journal", "file"], 1, "file"),
        (["--package", "mylib.ops"], 2, "--package takes a top-level package: --package mylib"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_program_starts(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = aot_tune(tmp_path, "record", *words, "--", sys.executable, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_python_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    done = aot_tune(tmp_path, "record", "--", sys.executable, "-I", "-c", "print('started')")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert done.stderr.startswith("nothing was recorded: the program started no Python that heeds PYTHONPATH")


@pytest.mark.slow
def test_journals_lie_where_they_are_named_wherever_the_program_goes(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = f"import os\nos.chdir('elsewhere')\n{ONCE}"
    done = aot_tune(
        tmp_path, "record", "--out", "tables", "--journal", "kept", "--", sys.executable, "-c", moved, "1024"
    )
    assert answer(done)["searched"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (journal,) = (tmp_path / "kept" / "sm90").glob("*.jsonl")
    assert journal.stat().st_size
    assert not (tmp_path / "build").exists()
