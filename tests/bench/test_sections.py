"""Running sections: each part is printed, kept and recorded as soon as it is there. Stand-ins measure."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from aot_tune.bench import __main__ as bench
from aot_tune.bench import records
from aot_tune.bench.sections.part import Part, Request
from aot_tune.nvidia.nvml import Gpu
from tests.support.bench_records import MADE
from tests.support.samples import SM90

POPEN = subprocess.Popen

CHILD = """
import sys, time
from types import SimpleNamespace
from aot_tune.bench import __main__ as bench
from aot_tune.bench.sections.part import Part

def run(request):
    yield Part(name="rope", kernels=("rope",), figures={"sizes": request.sizes})
    yield Part(name="softmax", kernels=("softmax",), figures={"failed": "out of memory"})
    yield Part(name="rms_norm", kernels=("rms_norm",), figures={"sizes": request.sizes})
    if request.repeats == 1:
        raise SystemExit(7)

bench.importlib = SimpleNamespace(import_module=lambda name: SimpleNamespace(run=run))
sys.exit(bench.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is named and never used, and children that run the section above."""

    def popen(command: list[str]) -> object:
        assert command[:3] == [sys.executable, "-m", "aot_tune.bench"]
        return POPEN([sys.executable, "-c", CHILD, *command[3:]])

    monkeypatch.setattr(bench.subprocess, "Popen", popen)
    gpu = Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0")
    monkeypatch.setattr(bench, "visible_gpus", lambda: (gpu,))
    monkeypatch.setattr(records, "made_with", lambda words: MADE)


def run(folder: Path, *words: str) -> int:
    return bench.main([*words, "--out", str(folder / "bench.json"), "--results", str(folder / "results")])


@pytest.mark.process
def test_parts_are_recorded_by_the_device_but_for_those_that_failed(tmp_path: Path) -> None:
    assert run(tmp_path, "regret", "--sizes", "8", "--record") == 1
    found = records.read(tmp_path / "results", "regret")["NVIDIA H200"]
    assert {name: one.figures for name, one in found.items()} == {
        "rope": {"sizes": 8}, "rms_norm": {"sizes": 8},
    }  # fmt: skip
    assert found["rope"].kernels == {"rope": records.present("sm90")["rope"]}
    kept = orjson.loads((tmp_path / "bench.json").read_bytes())
    assert kept["regret"]["softmax"] == {"failed": "out of memory"}


@pytest.mark.process
def test_without_record_no_results_are_written(tmp_path: Path) -> None:
    run(tmp_path, "regret")
    assert not (tmp_path / "results").exists()
    assert orjson.loads((tmp_path / "bench.json").read_bytes())["regret"]["rope"] == {
        "sizes": Request().sizes
    }


@pytest.mark.process
def test_a_section_that_dies_keeps_the_parts_before(tmp_path: Path) -> None:
    assert run(tmp_path, "launch", "serving", "--repeats", "1", "--record") == 1
    for section in ("launch", "serving"):
        assert set(records.read(tmp_path / "results", section)["NVIDIA H200"]) == {"rope", "rms_norm"}
    kept = orjson.loads((tmp_path / "bench.json").read_bytes())
    assert kept["launch"]["failed"] == "exit code 7"


def test_a_part_is_yielded_before_its_section_ends(tmp_path: Path) -> None:
    """A run that is cut off has recorded what it measured."""

    class Running:
        def poll(self) -> None:
            return None

    (tmp_path / "0.json").write_bytes(
        orjson.dumps({"name": "rope", "figures": {"us": 1}, "kernels": ["rope"]})
    )
    first = next(bench._parts(tmp_path, Running()))  # type: ignore[arg-type]
    assert first == Part(name="rope", figures={"us": 1}, kernels=["rope"])  # type: ignore[arg-type]


def test_declared_needs_modules_and_runs_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(bench, "_section", lambda name, *_: ran.append(name) or {})
    assert run(tmp_path, "declared") == 2
    assert "name each, --module mylib.kernels" in capsys.readouterr().err
    run(tmp_path)
    assert ran == [name for name in bench.SECTIONS if name not in ("declared", "scaling")]
    ran.clear()
    run(tmp_path, "declared", "--module", "mylib.kernels")
    assert ran == ["declared"]


def test_an_unknown_section_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "lunch") == 2
    assert "no section is called lunch; there is lookups launch" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sizes", "--problems", "--look-ups", "--repeats"])
@pytest.mark.parametrize("count", ["0", "-1", "1.5"])
def test_a_count_of_less_than_one_is_refused(
    option: str, count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "lookups", f"{option}={count}") == 2
    assert f"Invalid value for '{option}': " in capsys.readouterr().err


def test_kernels_and_modules_are_refused_where_no_section_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_section", lambda *_: {})
    for words, said in {
        (
            "lookups",
            "--kernel",
            "rope",
        ): "no --kernel for lookups: it is for scaling inside regret replay declared; leave it",
        (
            "inside",
            "launch",
            "--module",
            "a",
        ): "no --module for launch inside: it is for declared; leave it out",
    }.items():
        assert run(tmp_path, *words) == 2
        assert said in capsys.readouterr().err
    assert run(tmp_path, "lookups", "inside", "--kernel", "rope") == 0


# Places that cannot be written --------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sections that ran; none is measured."""
    names: list[str] = []
    monkeypatch.setattr(bench, "_section", lambda name, *_: names.append(name) or {})
    return names


def test_an_out_that_cannot_be_written_is_refused_before_a_section(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    for out, said in {
        "file/bench.json": "cannot make the folder",
        "file/a/bench.json": "cannot make the folder",
        "folder": "it is a directory; name a file in it",
    }.items():
        assert bench.main(["lookups", "--out", str(tmp_path / out)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("aot-tune bench: cannot ")
        assert said in line
    assert ran == []
    assert (tmp_path / "file").read_text() == "kept"


def test_results_that_cannot_be_written_are_refused_before_a_section(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").write_text("kept")
    assert run(tmp_path, "lookups", "--record") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot make the folder" in line
    assert ran == []
    assert run(tmp_path, "lookups") == 0, "without --record they are not written"


@pytest.mark.parametrize("text", ["{", "[]", '{"launch": {"figures": {}}}'])
def test_a_damaged_record_is_named_and_kept_before_a_section_runs(
    text: str, tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "nvidia-h200" / "launch.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert run(tmp_path, "lookups", "launch", "--record") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"{path} is not a file of bench results" in line
    assert ran == []
    assert path.read_text() == text


@pytest.mark.process
def test_a_record_that_is_damaged_meanwhile_costs_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "nvidia-h200" / "launch.json"
    section = bench._section

    def damaging(*args: Any) -> Any:
        if args[0] == "launch":
            path.write_text("{")
        return section(*args)

    monkeypatch.setattr(bench, "_section", damaging)
    assert run(tmp_path, "launch", "serving", "--record") == 1
    kept = orjson.loads((tmp_path / "bench.json").read_bytes())
    assert kept["launch"]["rope"] == {"sizes": Request().sizes}
    assert f"rms_norm is not recorded: {path} is not a file of bench results" in kept["launch"]["failed"]
    assert set(records.read(tmp_path / "results", "serving")["NVIDIA H200"]) == {"rope", "rms_norm"}
    assert path.read_text() == "{"


def test_an_out_that_is_gone_meanwhile_stops_no_later_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: list[str] = []

    def removing(name: str, *_: object) -> dict[str, Any]:
        names.append(name)
        (tmp_path / "new").rmdir()
        (tmp_path / "new").touch()
        monkeypatch.setattr(bench, "_section", lambda name, *_: names.append(name) or {})
        return {}

    monkeypatch.setattr(bench, "_section", removing)
    assert bench.main(["lookups", "launch", "--out", str(tmp_path / "new" / "bench.json")]) == 1
    assert names == ["lookups", "launch"]
    told = capsys.readouterr()
    assert "cannot write" in told.err
    assert "written to" not in told.out


@pytest.mark.process
@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_a_child_is_ended_where_its_parent_stops(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []

    def sleeping(command: list[str]) -> object:
        children.append(POPEN(["sleep", "60"]))
        return children[-1]

    def stopped(*_: object) -> Any:
        raise raised

    monkeypatch.setattr(bench.subprocess, "Popen", sleeping)
    monkeypatch.setattr(bench, "_parts", stopped)
    monkeypatch.setattr(bench, "_GRACE_S", 0.2)
    if raised is KeyboardInterrupt:
        assert run(tmp_path, "launch") == 130  # as shells report Ctrl-C
    else:
        with pytest.raises(raised):
            run(tmp_path, "launch")
    # After Ctrl-C the terminal tells a child. One started where SIGINT is ignored has to be killed too.
    told = set() if raised is KeyboardInterrupt else {-signal.SIGINT}
    assert children[0].returncode in {*told, -signal.SIGKILL}
