"""The command line: exit codes, what goes to stdout and what to stderr, and how each mistake is answered."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import typer
from typer.testing import CliRunner, Result

from aot_tune.cli import command
from aot_tune.cli.app import app
from aot_tune.declare import discovery, selection
from aot_tune.errors import TuneError
from aot_tune.nvidia.nvml import Gpu
from aot_tune.replay.answer import program as replayed
from aot_tune.replay.record import program as recorded
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import Finished, PlainProgress, Progress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest, SweptKernel
from aot_tune.values.arch import Arch
from tests.support.make import made, planned_commands
from tests.support.samples import SM90, scale_in, scale_table, with_entry, write
from tests.support.third_party import installed

REPORT = SweptKernel(
    kernel="scale",
    evidence="measured",
    problems=3,
    speedup=1.5,
    failures=0,
    compile_s=1.0,
    measure_s=2.0,
    verify_s=3.0,
    path=Path("tuned_configs/sm90/scale.json"),
)

EMPTY = Path(__file__).parents[1] / "kernels"
"""A folder without tables."""

Sweep = Callable[[SweepRequest, Progress], SweepReport]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample kernel is all that is declared; its tables lie here. This machine has no GPU."""
    declared = discovery.Survey(found=scale_in(tmp_path), broken=())
    monkeypatch.setattr(discovery, "survey", lambda modules=(): declared)
    monkeypatch.setattr(selection, "visible_gpus", lambda: None)
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    return tmp_path


@pytest.fixture
def requests(tables: Path, monkeypatch: pytest.MonkeyPatch) -> list[SweepRequest]:
    """What a sweep in the real one's place was asked for; it publishes one table."""
    asked: list[SweepRequest] = []

    def run(request: SweepRequest, progress: Progress) -> SweepReport:
        asked.append(request)
        progress.show(Finished(rows=[REPORT]))
        return SweepReport(arch=request.arch, device_name="NVIDIA H200", rows=(REPORT,), seconds=6.0)

    monkeypatch.setattr(sweep, "run", run)
    return asked


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="a")
    monkeypatch.setattr(selection, "visible_gpus", lambda: (gpu,))


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tune", "--arch", "hopper"], "sm90"),
        (["tune", "scala"], "there is scale"),
        (["tune", "--problem", "K=3"], "it has dtype M N"),
        (["tune", "--problem", "M"], "name=value"),
        (["tune", "--require", "guessed"], "write measured"),
        (["tune", "--gpus", "0"], "--gpus 0 is not an sm100 GPU"),
        (
            ["tune", "--time-budget", "1s"],
            "without an sm100 GPU times are predicted; leave",
        ),
        (["tune", "--gpus", "all"], "none is an sm100 GPU; this process may use none"),
        (["show", "--arch", "sm12345"], "sm90"),
        (["doctor", "--problem", "M=3"], "needs a kernel: aot-tune doctor KERNEL --problem"),
        (["doctor", "--coverage", "--problems", "m"], "aot-tune doctor KERNEL --coverage --problems FILE"),
        (["doctor", "scala"], "there is scale"),
        (["check", "/nonexistent"], "does not exist"),
        (["diff", "/nonexistent", "/nonexistent"], "does not exist"),
        (["diff", "x" * 5000, "x" * 5000], "File name too long; give two tables"),
        (["report", "a", "b", "c"], "give at most two folders of tables"),
        (["diff", "--markdown", "--json", str(EMPTY), str(EMPTY)], "two forms of the output; give one"),
        (["journal", "scala"], "no journal of scala is in build/journal; name the folder"),
        (["journal", "/nonexistent"], "no journal is at /nonexistent; give a journal's path"),
        (["journal", "x/" * 3000], "File name too long; give a journal's path"),
        (["journal", "--json", "--seconds"], "choose one"),
        (["diff", "--exit-code", str(EMPTY), str(EMPTY)], "no tables in"),
        (["check", str(EMPTY)], "no tables in"),
    ],
)
def test_what_does_not_exist_is_one_line_that_says_what_does_and_exit_code_2(
    words: list[str], told: str, requests: list[SweepRequest]
) -> None:
    result = _run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("aot-tune: ")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr
    assert requests == []


@pytest.mark.parametrize(
    "words", [["tune", "--limit", "0"], ["tune", "--nonsense"], ["sing"], ["diff", "one"]]
)
def test_an_option_or_verb_that_is_unknown_is_exit_code_2(words: list[str]) -> None:
    result = _run(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_a_failure_is_one_message_without_a_traceback_unless_asked(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: SweepRequest, progress: Progress) -> SweepReport:
        raise TuneError("the disk is full; free space and run the same command again")

    monkeypatch.setattr(sweep, "run", run)
    result = _run("tune")
    assert result.exit_code == 1
    assert result.stderr.endswith("aot-tune: the disk is full; free space and run the same command again\n")
    assert "Traceback" not in result.stderr
    assert "Traceback" in _run("tune", "-v").stderr


@pytest.mark.process
def test_without_typer_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from aot_tune.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "aot-tune needs typer: pip install 'aot-tune[tune]'\n"


# tune ---------------------------------------------------------------------------------------------


def test_tune_prints_tables_to_stdout_and_progress_to_stderr(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _h200(monkeypatch)
    result = _run("tune")
    assert result.exit_code == 0
    assert result.stdout == "tuned_configs/sm90/scale.json\n"
    assert "speed-up" in result.stderr
    (request,) = requests
    assert (request.arch, request.gpus, request.predicts) == (SM90, (0,), False)


def test_every_option_of_tune_reaches_the_sweep(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _h200(monkeypatch)
    words = (
        "tune scale --arch 90 --module tests.support.samples --problem M=300,N=8,dtype=bfloat16 "
        "--limit 2 --allow-worse --exhaustive --require measured --out O --jobs 3 --gpus 0 --journal J "
        "--cubins C --fresh"
    )
    assert _run(*words.split()).exit_code == 0
    (request,) = requests
    assert [dict(problem) for problem in request.problems["scale"]] == [
        {"dtype": "bfloat16", "M": 300, "N": 8}
    ]
    assert (request.arch, request.modules, request.limit, request.jobs, request.gpus) == (
        SM90, ("tests.support.samples",), 2, 3, (0,),
    )  # fmt: skip
    assert (request.out, request.journal, request.cubins) == (Path("O"), Path("J"), Path("C"))
    assert request.exhaustive
    assert request.require_measured
    assert request.fresh
    assert request.allow_worse


@pytest.mark.parametrize(
    ("text", "seconds"), [("20m", 1200.0), ("90s", 90.0), ("1h30m", 5400.0), ("1h0m5s", 3605.0)]
)
def test_a_time_budget_is_hours_minutes_and_seconds(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    _h200(monkeypatch)
    assert _run("tune", "--time-budget", text).exit_code == 0
    assert requests[0].time_budget_s == seconds
    assert f"--time-budget {seconds:g}s" in requests[0].command()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--time-budget", "20"], "write hours, minutes and seconds, as 20m"),
        (["--time-budget", "0m"], "write hours, minutes and seconds"),
        (["--ray", "--gpus", "all"], "--ray and --gpus: choose one"),
        (["--ray", "--arch", "sm90"], "pip install 'aot-tune[ray]'"),
    ],
)
def test_options_of_tune_that_do_not_go_together_are_refused(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    _h200(monkeypatch)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = _run("tune", *words)
    assert (result.exit_code, requests) == (2, [])
    assert told in result.stderr


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray", "--arch", "sm90", "scale"], ""),
        (["--arch", "sm90", "--ray", "scale"], ""),
        (["--arch", "sm90", "scale", "--ray"], ""),
        (["--ray", "head:6379", "--arch", "sm90", "scale"], "head:6379"),
        (["--ray=auto", "--arch", "sm90"], "auto"),
    ],
)
def test_an_address_behind_ray_may_be_left_out_and_the_command_repeats_it(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch, words: list[str], address: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert _run("tune", *words).exit_code == 0
    (request,) = requests
    assert (request.ray, request.gpus, request.predicts, request.first_look) == (address, (), False, False)
    again = shlex.split(request.command())[1:]
    assert _run(*again).exit_code == 0
    assert requests[1].ray == address


def test_without_a_gpu_tune_says_first_that_it_predicts_from_what_and_where_it_writes(
    requests: list[SweepRequest],
) -> None:
    result = _run("tune", "--arch", "sm100")
    first, second, third = result.stderr.splitlines()[:3]
    assert first.startswith("no sm100 GPU here: this predicts")
    assert "NVIDIA B200" in second
    assert third.startswith("Writes build/tuned_configs/sm100/, ")
    assert requests[0].predicts


def test_without_a_gpu_and_a_choice_tune_takes_a_first_look_and_says_what_is_left_out(
    requests: list[SweepRequest],
) -> None:
    lines = _run("tune", "--arch", "sm100").stderr.splitlines()
    assert requests[0].first_look
    assert lines[3:7] == [
        "This is a first look at 1 kernel: it predicts 3 of 3 buckets with at most 4 candidates each, "
        "evenly spread,",
        "and leaves out 0 buckets and all further candidates.",
        "To predict everything: aot-tune tune --arch sm100 --full",
        "or, in a checkout: make tune ARGS='--arch sm100 --full'",
    ]


@pytest.mark.parametrize(
    "chosen",
    [
        ["--full"],
        ["scale"],
        ["--module", "tests.support.samples"],
        ["--problem", "M=300,N=8,dtype=bfloat16"],
        ["--limit", "2"],
        ["--exhaustive"],
    ],
)
def test_what_is_asked_for_is_predicted_as_asked(chosen: list[str], requests: list[SweepRequest]) -> None:
    said = _run("tune", *chosen).stderr
    assert requests[0].predicts
    assert not requests[0].first_look
    assert "first look" not in said


def test_a_gpu_measures_all_that_is_declared(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _h200(monkeypatch)
    said = _run("tune").stderr
    _run("tune", "--full")
    assert [(request.predicts, request.first_look) for request in requests] == [(False, False)] * 2
    assert "first look" not in said


def test_a_required_measurement_without_a_gpu_is_exit_code_1(requests: list[SweepRequest]) -> None:
    result = _run("tune", "--require", "measured")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "aot-tune: --require measured: this measures, and this process may use no GPU;"
    )
    assert requests == []


def test_a_problem_without_times_is_exit_code_1(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(request: SweepRequest, progress: Progress) -> SweepReport:
        row = replace(REPORT, left_out=("M=64: make_args was killed",))
        return SweepReport(arch=request.arch, device_name="NVIDIA H200", rows=(row,), seconds=1.0)

    monkeypatch.setattr(sweep, "run", run)
    result = _run("tune")
    assert (result.exit_code, result.stdout) == (1, "tuned_configs/sm90/scale.json\n")


def test_a_table_that_is_not_published_is_exit_code_1(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(request: SweepRequest, progress: Progress) -> SweepReport:
        row = SweptKernel(**{**vars(REPORT), "path": None, "refusals": ("fewer entries",)})
        return SweepReport(arch=request.arch, device_name="NVIDIA H200", rows=(row,), seconds=1.0)

    monkeypatch.setattr(sweep, "run", run)
    result = _run("tune")
    assert (result.exit_code, result.stdout) == (1, "")
    data = json.loads(_run("tune", "--json").stdout)
    assert data["rows"][0]["refusals"] == ["fewer entries"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_stops_a_sweep_and_says_how_to_go_on(
    number: signal.Signals, code: int, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: SweepRequest, progress: Progress) -> SweepReport:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal should have stopped this")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sweep, "run", run)
    outside = {  # a shell's background job ignores the first, and one under nohup the second
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    try:
        result = _run("tune", "--fresh", "--limit", "2")
    finally:
        for one, handler in outside.items():
            signal.signal(one, handler)
    assert result.exit_code == code
    last = result.stderr.splitlines()[-1]
    assert last == "stopped; what was compiled is kept. To go on: aot-tune tune scale --arch sm100 --limit 2"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_changes_nothing_of_what_is_said(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: SweepRequest, progress: Progress) -> SweepReport:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal should have stopped this")

    more = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

    def close(self: PlainProgress) -> None:
        while more:
            os.kill(os.getpid(), more.pop())

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(PlainProgress, "close", close)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = _run("tune")
    finally:
        signal.signal(signal.SIGINT, outside)
    assert result.exit_code == 143
    assert "To go on: aot-tune tune --arch" in result.stderr.splitlines()[-1]


def test_a_closed_terminal_that_nohup_hides_stops_nothing(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command.signals_stop():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# The verbs that read ------------------------------------------------------------------------------


def test_check_of_faultless_tables_is_silent_on_stdout(tables: Path) -> None:
    write(tables, scale_table())
    result = _run("check")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no problems found\n")
    assert json.loads(_run("check", "--json").stdout) == []


def test_check_prints_one_line_a_finding_and_ends_with_1(tables: Path) -> None:
    path = write(tables, with_entry(scale_table(), 1, evidence="predicted"))
    result = _run("check", tables)
    assert result.exit_code == 1
    assert result.stderr == "1 problem found\n"
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{path}: dtype=bfloat16 M=64 N=1024: a prediction in a package's own tables: ")
    (finding,) = json.loads(_run("check", tables, "--json").stdout)
    assert finding["entry"] == "dtype=bfloat16 M=64 N=1024"


def test_check_counts_an_installed_package_whose_kernels_cannot_be_checked(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tables, scale_table())
    broken = discovery.Broken(point="entry point lib = lib.k of lib 1.0", what="no module", fix="repair lib")
    declared = discovery.Survey(found=scale_in(tables), broken=(broken,))
    monkeypatch.setattr(discovery, "survey", lambda modules=(): declared)
    result = _run("check")
    assert (result.exit_code, result.stderr) == (1, "1 problem found\n")
    assert result.stdout == "entry point lib = lib.k of lib 1.0: no module: repair lib\n"


def test_diff_ends_with_0_unless_an_exit_code_is_asked_for(tables: Path) -> None:
    old = write(tables / "old", scale_table())
    new = write(tables / "new", with_entry(scale_table(), 1, mean_us=5.0))
    assert _run("diff", old, new).exit_code == 0
    assert "1.50x -> 3.00x" in _run("diff", old, new).stdout
    assert "| `1.50x -> 3.00x` |" in _run("diff", "--markdown", old, new).stdout
    assert _run("diff", "--exit-code", old, new).exit_code == 1
    assert _run("diff", "--exit-code", old, old).exit_code == 0
    (change,) = json.loads(_run("diff", "--json", old, new).stdout)[0]["changes"]
    assert (change["kind"], change["before"]["mean_us"], change["after"]["mean_us"]) == ("figures", 10.0, 5.0)


def test_a_damaged_table_fails_diff_and_show_with_its_path(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOT_TUNE_TABLES", str(tables))
    path = write(tables, scale_table())
    path.write_bytes(path.read_bytes()[:200])
    for words in (["diff", path, path], ["show", "scale"]):
        result = _run(*words)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"aot-tune: {path}: ")


def test_one_damaged_table_does_not_keep_show_from_the_others(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOT_TUNE_TABLES", str(tables))
    good = write(tables, scale_table())
    bad = write(tables, scale_table(Arch(10, 0)))
    bad.write_bytes(bad.read_bytes()[:200])
    for words in (["show"], ["show", "--json"]):
        result = _run(*words)
        assert result.exit_code == 1
        assert str(good) in result.stdout
        assert result.stderr.startswith(f"aot-tune: {bad}: ")


def test_show_lists_tables_and_shows_one(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOT_TUNE_TABLES", str(tables))
    path = write(tables, scale_table())
    assert str(path) in _run("show").stdout
    assert "portfolio of 2 configs" in _run("show", "scale", "--arch", "sm90").stdout
    (document,) = json.loads(_run("show", "scale", "--json").stdout)
    assert document["kernel"] == "scale"


def test_doctor_tells_of_the_process_and_of_a_problem(tables: Path) -> None:
    write(tables, scale_table())
    whole = _run("doctor", "--arch", "sm90")
    assert whole.exit_code == 0
    assert "DISABLE_AUTOTUNE" in whole.stdout
    (answer,) = json.loads(_run("doctor", "scale", "--arch", "sm90", "--problem", "M=60", "--json").stdout)
    assert answer["source"] == "own"
    assert answer["bucket"] == {"dtype": "bfloat16", "M": 64, "N": 1024}


@pytest.mark.parametrize("words", [[], ["--json"], ["--problem", "M=60"]])
def test_doctor_of_a_wrong_declaration_tells_it_and_fails(
    tables: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (found,) = scale_in(tables).values()
    wrong = replace(found.tunable, args_fn=lambda config, source, target: (source, target))
    declared = discovery.Survey(found={"scale": replace(found, tunable=wrong)}, broken=())
    monkeypatch.setattr(discovery, "survey", lambda modules=(): declared)
    told = _run("doctor", "scale", "--arch", "sm90", *words)
    assert told.exit_code == 1
    assert "args_fn returned 2 values; return a tuple of what the kernel takes" in told.stdout


@pytest.mark.parametrize("words", [[], ["--problem", "M=60"]])
def test_doctor_of_functions_that_raise_tells_their_mistake(
    tables: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (found,) = scale_in(tables).values()
    spaces = {Arch(10, 0): found.tunable.space(SM90, found.tunable.typical_problems[0])}
    one_arch = replace(found.tunable, search_space=lambda arch, problem: spaces[arch], default=None)
    declared = discovery.Survey(found={"scale": replace(found, tunable=one_arch)}, broken=())
    monkeypatch.setattr(discovery, "survey", lambda modules=(): declared)
    told = _run("doctor", "scale", "--arch", "sm90", *words)
    assert told.exit_code == 1
    assert "scale: search_space(sm90, dtype=bfloat16 M=1 N=1024) raised KeyError" in told.stderr


# Real processes -----------------------------------------------------------------------------------


def _process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, "-m", "aot_tune", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.process
def test_check_runs_as_a_module_with_no_gpu_and_no_driver() -> None:
    done = _process("check", "--module", "tests.support.samples")
    assert done.returncode == 1
    assert "holds no tables for scale" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_doctor_runs_as_a_module_with_no_gpu_and_no_driver(tmp_path: Path) -> None:
    done = _process(
        "doctor", "--module", "tests.support.samples", "--json", AOT_TUNE_CACHE_DIR=str(tmp_path / "none")
    )
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(done.stdout)
    assert diagnosis["arch"] == str(Arch(10, 0))
    assert diagnosis["cache"]["folder"] == str(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.process
def test_another_package_s_broken_entry_point_is_one_warning_on_stderr(tmp_path: Path) -> None:
    installed(tmp_path, None)
    kernel = ["doctor", "rms_norm", "--arch", "sm90"]
    for words, out in (
        (kernel, "rows=64"),
        (["doctor"], "  rms_norm "),
        (["show", "rms_norm"], "rms_norm on"),
    ):
        done = _process(*words, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert out in done.stdout
        (told,) = [line for line in (done.stdout + done.stderr).splitlines() if "thirdlib" in line]
        where = "remark: " if words == ["doctor"] else "aot-tune: warning: "
        assert told.startswith(f"{where}entry point third = thirdlib.kernels of Third-Lib 1.0 is left out: ")
    done = _process("doctor", "third", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "no kernel is called 'third'" in done.stderr
    assert "of Third-Lib 1.0 is left out" in done.stderr


@pytest.mark.process
def test_doctor_of_a_module_that_is_not_there_fails_as_the_other_verbs_do() -> None:
    done = _process("doctor", "--module", "nolib")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("aot-tune: there is no module 'nolib'")


@pytest.mark.process
def test_the_command_line_itself_imports_neither_torch_nor_cuda_tile() -> None:
    script = "import sys, aot_tune.cli.app; print([n for n in ('torch', 'cuda.tile') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_commands_name_the_module_where_a_factory_made_the_kernel(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(scale_in(tables)["scale"], module="mylib.kernels")
    monkeypatch.setattr(
        discovery, "survey", lambda modules=(): discovery.Survey(found={"scale": made}, broken=())
    )
    verbs = (["doctor", "scale", "--arch", "sm90"], ["check"])
    untuned = [_run(*verb).stdout for verb in verbs]
    untuned.append(
        _run("doctor", "scale", "--arch", "sm90", "--problem", "dtype=bfloat16,M=64,N=1024").stdout
    )
    whole = scale_table()
    write(tables, replace(whole, source_hash="0" * 16, entries=whole.entries[1:]))
    for told in (*untuned, *(_run(*verb).stdout for verb in verbs)):
        assert "--module mylib.kernels" in told
        assert "--module tests." not in told


# Programs -----------------------------------------------------------------------------------------

PROGRAM = ["python", "-c", "print(1)", "--flag", "--out", "theirs", "--", "-v"]


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_all_from_the_program_s_name_on_is_the_program_s(
    separator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[list[str], object]] = []

    def record(command: list[str], *, out: Path | None, **others: object) -> NoReturn:
        commands.append((command, out))
        raise SystemExit(3)

    def become(command: list[str], *, tables: list[str]) -> None:
        commands.append((command, tables))

    monkeypatch.setattr(recorded, "record", record)
    monkeypatch.setattr(replayed, "become", become)
    assert _run("record", "--out", "ours", *separator, *PROGRAM).exit_code == 3
    assert _run("run", *separator, *PROGRAM).exit_code == 0
    assert commands == [(PROGRAM, Path("ours")), (PROGRAM, [])]


@pytest.mark.parametrize("verb", ["record", "run"])
def test_an_unknown_option_before_a_program_is_refused(verb: str) -> None:
    result = _run(verb, "--nonsense", "python")
    assert result.exit_code == 2
    assert "No such option: --nonsense" in result.stderr


# Help and make -----------------------------------------------------------------------------------


def test_each_verbs_first_sentence_is_short_and_whole_in_the_list_of_verbs() -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    listed = _run("--help").stdout
    for name, verb in verbs.items():
        first = re.split(r"(?<=\.)\s", verb.help)[0]
        assert len(first) <= 60, name
        assert re.search(rf"^  {name} +{re.escape(first)}$", listed, re.M), name


def test_the_help_of_tune_is_three_panels_with_every_option() -> None:
    text = _run("tune", "--help").stdout
    assert re.findall(r"^(\w+):$", text, re.M) == ["What", "Where", "How"]
    tune = typer.main.get_command(app).commands["tune"]  # type: ignore[attr-defined]
    options = {option for param in tune.params for option in param.opts if option.startswith("--")}
    assert options <= set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M))


@pytest.mark.process
def test_make_tune_gives_the_command_line_its_words(
    requests: list[SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _h200(monkeypatch)
    (planned,) = planned_commands(
        "tune", "ARCH=sm90", "KERNEL=scale scale", "PROBLEM=M=300,N=8,dtype=bfloat16", "LIMIT=2",
        "REQUIRE=measured", "ARGS=--fresh",
    )  # fmt: skip
    done = _run(*shlex.split(planned.partition(" -m aot_tune ")[2]))
    assert done.exit_code == 0, done.stderr
    (request,) = requests
    assert [found.tunable.name for found in request.kernels] == ["scale"]
    assert (request.arch, request.limit, request.require_measured, request.fresh) == (SM90, 2, True, True)
    assert list(map(str, request.problems["scale"])) == ["dtype=bfloat16 M=300 N=8"]


@pytest.mark.process
def test_make_tune_and_make_cubins_run_one_kernel(tmp_path: Path) -> None:
    module, kernel = "--module tests.support.samples", "KERNEL=scale"
    folders = f"--out {tmp_path / 'out'} --cubins {tmp_path / 'kept'}"
    tuned = made(
        "tune", "ARCH=sm90", kernel, "LIMIT=1", f"ARGS={module} {folders} --jobs 1", CUDA_VISIBLE_DEVICES=""
    )
    assert tuned.returncode == 0, tuned.stderr
    assert (tmp_path / "out" / "sm90" / "scale.json").exists()
    compiled = made("cubins", "ARCH=sm90 sm100", kernel, f"ARGS={module} {folders} --jobs 1")
    assert compiled.returncode == 0, compiled.stderr
    assert {path.parent.name for path in tmp_path.glob("out/*/cubins.aot")} == {"sm90", "sm100"}


# The bench ------------------------------------------------------------------------------------------------


def test_where_the_bench_is_missing_its_verb_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("aot_tune.bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("aot_tune.__path__", [])
    done = _run("bench", "--report")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "runs in a checkout" in done.stderr
    assert "make bench" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("words", "code"), [(["lunch"], 2), (["--report", "--results", "nowhere"], 2)])
def test_the_verb_exits_as_the_bench_does(words: list[str], code: int) -> None:
    assert _run("bench", *words).exit_code == code
