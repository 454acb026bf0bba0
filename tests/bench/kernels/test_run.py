"""`aot-tune bench --kernels`: what is kept, what is printed, when it fails. The figures are made up."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from aot_tune.bench import records
from aot_tune.bench.__main__ import main as benches
from aot_tune.bench.kernels import run as kernels
from aot_tune.bench.kernels.standing import Shape
from aot_tune.nvidia.nvml import Gpu
from tests.support.bench_records import MADE
from tests.support.samples import SM90

IN_A_PROCESS = kernels._in_a_process


def record(default_us: float = 12.0) -> dict[str, Any]:
    shape = Shape(
        problem={"dtype": "bfloat16", "rows": 16384, "cols": 8192},
        config="occupancy=2",
        bytes=512 << 20,
        flops=0.0,
        roofline_us=9.0,
        us={"tuned": 10.0, "default": default_us, "torch.compile": 11.0, "copy": 9.5},
    )
    return {
        "device": "NVIDIA H200",
        "ceilings": {"copy": 4.2e12},
        "rivals": ["torch.compile"],
        "declared": 135,
        "seconds": 40.0,
        "shapes": [asdict(shape)],
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What ran, with its share of the time; every kernel answers as `record` does."""
    asked: list[tuple[str, float]] = []

    def answer(found: Any, options: Any, share_s: float) -> dict[str, Any]:
        asked.append((found.tunable.name, share_s))
        return record()

    monkeypatch.setattr(kernels, "_in_a_process", answer)
    monkeypatch.setattr(
        kernels, "visible_gpus", lambda: (Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0"),)
    )
    return asked


def test_a_kernels_figures_are_printed_and_kept_beside_those_of_earlier_runs(
    ran: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "bench.json"
    assert kernels.main(["--kernel", "rms_norm", "--out", str(out)]) == 0
    assert kernels.main(["--kernel", "rms_norm", "--kernel", "rope", "--out", str(out)]) == 0
    assert [name for name, _ in ran] == ["rms_norm", "rms_norm", "rope"]
    kept = orjson.loads(out.read_bytes())
    assert list(kept) == ["rms_norm", "rope"]
    assert kept["rope"]["shapes"] == record()["shapes"]
    told = capsys.readouterr().out
    assert "rms_norm: 1 of 135 declared shapes in 40 s; NVIDIA H200; a copy 4.20 TB/s" in told
    assert "held: at least 85 % of the bandwidth of a copy, from 64 MiB (geometric mean 0.950" in told
    assert "\n".join(kept["rope"]["standing"]) in told


def test_a_missed_demand_or_a_kernel_that_fails_is_exit_code_1(
    ran: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "bench.json")
    monkeypatch.setattr(kernels, "_in_a_process", lambda *_: record(default_us=9.0))
    assert kernels.main(["--kernel", "rms_norm", "--out", out]) == 1
    monkeypatch.setattr(kernels, "_in_a_process", lambda *_: {"failed": "exit code -11"})
    before = Path(out).read_bytes()
    assert kernels.main(["--kernel", "rms_norm", "--out", out]) == 1
    assert Path(out).read_bytes() == before


def test_without_rivals_what_is_asked_against_them_is_not_measured(
    ran: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    alone = {**record(), "rivals": []}
    del alone["shapes"][0]["us"]["torch.compile"]
    commands: list[list[str]] = []

    def finished(command: list[str], **_: Any) -> Any:
        commands.append(command)
        Path(command[command.index("--out") + 1]).write_bytes(orjson.dumps(alone))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(kernels, "_in_a_process", IN_A_PROCESS)
    monkeypatch.setattr(kernels.subprocess, "run", finished)
    out = str(tmp_path / "bench.json")
    assert kernels.main(["--kernel", "rms_norm", "--no-rivals", "--all", "--out", out]) == 0
    told = capsys.readouterr().out
    assert "not measured: at least as fast as torch.compile" in told
    assert "over torch.compile" not in told
    assert "--no-rivals" in commands[0]
    assert kernels.main(["--kernel", "rms_norm", "--out", out]) == 0
    assert "--no-rivals" not in commands[1]


def test_a_part_of_the_declared_problems_is_timed_alone(
    ran: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = str(tmp_path / "bench.json")
    chosen = ["--problem", "dtype=float16,tokens=64"]
    assert kernels.main(["--kernel", "softmax", "--kernel", "gate_up_swiglu", *chosen, "--out", out]) == 0
    assert [name for name, _ in ran] == ["gate_up_swiglu"]
    commands: list[list[str]] = []

    def finished(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(kernels, "_in_a_process", IN_A_PROCESS)
    monkeypatch.setattr(kernels.subprocess, "run", finished)
    assert kernels.main(["--kernel", "gate_up_swiglu", *chosen, "--out", out]) == 1
    assert commands[0][-2:] == chosen
    both = ["--kernel", "softmax", "--kernel", "gate_up_swiglu", "--problem", "cols=8192", *chosen]
    assert kernels.main([*both, "--out", out]) == 1
    assert sorted(command[-1] for command in commands[1:]) == ["cols=8192", chosen[1]]
    assert all(command.count("--problem") == 1 for command in commands[1:])
    capsys.readouterr()
    assert kernels.main(["--kernel", "gate_up_swiglu", "--problem", "M=64", "--out", out]) == 2
    assert "a problem of gate_up_swiglu has no M; it has dtype tokens N K" in capsys.readouterr().err
    assert kernels.main(["--verify", *chosen]) == 2
    assert "leave --problem out" in capsys.readouterr().err


def test_the_time_is_shared_by_the_kernels_that_are_left(
    ran: list[tuple[str, float]], tmp_path: Path
) -> None:
    out = str(tmp_path / "bench.json")
    kernels.main(["--kernel", "rms_norm", "--kernel", "rope", "--limit-s", "100", "--out", out])
    assert [round(share) for _, share in ran] == [50, 100]
    ran.clear()
    assert kernels.main(["--kernel", "rope", "--limit-s", "0", "--out", out]) == 1
    assert ran == []


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "visible_gpus", lambda: ())
    assert kernels.main(["--kernel", "rope"]) == 1
    assert "no GPU here" in capsys.readouterr().err


def test_a_recorded_kernel_has_its_provenance_beside_its_shapes(
    ran: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record()
    made["shapes"][0]["failed"] = {"SDPA": "OSError: /usr/lib/a is not there", "cuDNN": "Error: no window"}
    monkeypatch.setattr(kernels, "_in_a_process", lambda *_: made)
    monkeypatch.setattr(records, "made_with", lambda words: replace(MADE, command=" ".join(words)))
    out, results = str(tmp_path / "bench.json"), tmp_path / "results"
    words = ["--kernel", "rope", "--shapes", "4", "--record", "--out", out, "--results", str(results)]
    assert kernels.main(words) == 0
    found = records.read(results, "kernels")["NVIDIA H200"]["rope"]
    assert found.made_with.command.startswith("--kernels --kernel rope --shapes 4 --record")
    assert found.kernels == {"rope": records.present("sm90")["rope"]}
    assert "standing" not in found.figures
    [shape] = found.figures["shapes"]
    assert shape["us"] == made["shapes"][0]["us"]
    assert shape["failed"] == {"SDPA": "OSError", "cuDNN": "Error: no window"}


def test_a_kernel_that_fails_is_not_recorded_and_loses_no_other(
    ran: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(found: Any, options: Any, share_s: float) -> dict[str, Any]:
        return {"failed": "exit code -11"} if found.tunable.name == "rope" else record()

    monkeypatch.setattr(kernels, "_in_a_process", answer)
    monkeypatch.setattr(records, "made_with", lambda words: MADE)
    out, results = str(tmp_path / "bench.json"), tmp_path / "results"
    words = ["--kernel", "rms_norm", "--kernel", "rope", "--kernel", "softmax", "--record"]
    assert kernels.main([*words, "--out", out, "--results", str(results)]) == 1
    assert set(records.read(results, "kernels")["NVIDIA H200"]) == {"rms_norm", "softmax"}


@pytest.mark.parametrize(
    ("place", "text", "said"),
    [
        ("a", "{", "a is not a file of figures: "),
        ("a", "[]", "a is not a file of figures but a JSON list; move it away"),
        ("a/b.json", "kept", "cannot make the folder "),
        ("results/nvidia-h200/kernels.json", "{", "kernels.json is not a file of bench results"),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_kernel_is_timed(
    place: str, text: str, said: str,
    ran: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(records, "made_with", lambda words: MADE)
    results = tmp_path / "results"
    file = results / "nvidia-h200" / "kernels.json" if place.startswith("results") else tmp_path / "a"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    out = tmp_path / ("b.json" if place.startswith("results") else place)
    words = ["--kernel", "rope", "--record", "--out", str(out), "--results", str(results)]
    assert kernels.main(words) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert ran == []
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shapes", "13"], "at most 12 shapes"),
        (["--all"], "at most 12 shapes"),
        (["--no-rivals"], "leave --no-rivals out"),
        (["--problem", "tokens=64"], "leave --problem out"),
        (["--verify"], "leave --verify out"),
        (["--module", "aot_tune.kernels"], "leave --module out"),
    ],
)
def test_part_of_a_result_is_not_recorded(
    ran: list[tuple[str, float]], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.main(["--kernel", "rope", "--record", *words]) == 2
    assert said in capsys.readouterr().err
    assert ran == []


@pytest.mark.parametrize(("words", "shapes"), [([], "24"), (["--record"], "12")])
def test_a_record_has_fewer_shapes_by_default(
    words: list[str],
    shapes: str,
    ran: list[tuple[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def finished(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(kernels, "_in_a_process", IN_A_PROCESS)
    monkeypatch.setattr(kernels.subprocess, "run", finished)
    monkeypatch.setattr(records, "made_with", lambda words: MADE)
    kernels.main(["--kernel", "rope", *words, "--out", str(tmp_path / "a"), "--results", str(tmp_path)])
    assert commands[0][commands[0].index("--shapes") + 1] == shapes


def test_the_benches_command_leads_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert benches(["--kernels", "--kernel", "softmix"]) == 2
    assert "no kernel is called 'softmix'" in capsys.readouterr().err
