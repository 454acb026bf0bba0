"""The serving bench without a GPU: how it sums up several processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aot_tune.bench import records, report
from aot_tune.bench.children import client
from aot_tune.bench.records import Record
from aot_tune.bench.sections import serving
from aot_tune.bench.sections.part import Request
from tests.support.bench_records import MADE
from tests.support.samples import SM90

TOLD = [
    {"ms": ms, "source": source} for ms, source in ((5.0, "own"), (8.0, "own"), (4.0, "own"), (9.0, "far"))
]


def several(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    bench = serving._Bench.__new__(serving._Bench)
    answers = iter([{"ms": 99.0, "source": "not counted"}, *told])
    bench._repeats = len(told)
    monkeypatch.setattr(bench, "_child", lambda scenario, **_: next(answers))
    return bench._several("first_launches")


def test_of_several_processes_the_median_and_the_least_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert several(TOLD[:3], monkeypatch) == {
        "ms": 5.0, "ms, the least": 4.0, "source": "own", "processes": 3,
    }  # fmt: skip
    assert several(TOLD, monkeypatch) == {
        "ms": 8.0, "ms, the least": 4.0, "source": "far", "processes": 4,
    }  # fmt: skip


def test_a_process_that_failed_is_reported_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert several([*TOLD, {"failed": "no GPU"}, *TOLD], monkeypatch) == {"failed": "no GPU"}


@pytest.mark.process
def test_a_process_that_fails_reports_its_last_line(tmp_path: Path) -> None:
    bench = serving._Bench.__new__(serving._Bench)
    bench._folder, bench._archives, bench._caches = tmp_path, tmp_path / "archives", 0
    assert "failed" in bench._child("no_such_scenario")


MS = {"rms_norm_ms": 5.0, "matmul_ms": 1.5}

IMPORTS = {
    "aot_tune_ms": 3.2, "aot_tune_cpu_ms": 3.1, "rms_norm_ms": 50.6, "rms_norm_cpu_ms": 50.5,
    "kernels_ms": 150.4, "kernels_cpu_ms": 150.2, "no CUDA context": True,
}  # fmt: skip

UNITS = ("_ms", "_cpu_ms")
TORCH: dict[str, Any] = {
    **{f"{name}{unit}": 7.5 for name in ("start", "torch_import", "first", "next") for unit in UNITS},
    "steady, 300 tokens_ms": 3.65,
}

FIGURES: dict[str, dict[str, Any]] = {
    "tune_first": {**MS, "rms_norm_configs": 8},
    "bare_first": MS,
    "first_launches": {
        **MS, "rope_ms": 1.2,
        "rms_norm: look-ups_ms": 0.9, "rms_norm: searches_ms": 0.0, "matmul: memo_ms": 0.25,
    },
    "rms_norm": {"rms_norm_ms": 4503.0, "again_ms": 0.1, "right": True},
    "launches": {"bare_us": 5.0, "launch_us": 6.0, "above_us": 1.0, "grad off: above_us": 0.75},
    "misses": {"64 x 512 x 256 ms": 37.0, "64 x 512 x 256": "searched"},
    "loading": {
        "tables": 16, "sections": 3, "tables_ms": 87.0, "tables_mb": 5.0,
        "archive_ms": 10.0, "archive_mb": 1.5,
    },
    "torch": TORCH,
    "aot_tune": TORCH | {
        **{f"{name}{unit}": 7.5 for name in ("cutile_import", "serve_import", "import") for unit in UNITS},
        "import: tables_ms": 2.5, "first: look-ups_ms": 1.5, "first: cubins_ms": 2.25, "right": True,
    },
    "after_prime": {
        "prime_seconds": 4.5, "signatures loaded": 349, "plans": 302,
        **{kernel: {"waited for: first / later": 1.25} for kernel in serving.KERNELS},
    },
}  # fmt: skip


def test_every_scenario_is_a_row_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[str]] = []

    def compile_(command: list[str], **_: Any) -> None:
        compiled.append(command)
        archive = Path(command[command.index("--out") + 1], "sm90", "cubins.aot")
        archive.parent.mkdir(parents=True)
        archive.write_bytes(bytes(2 << 20))

    ran: list[str] = []

    def child(self: Any, scenario: str, **_: Any) -> dict[str, Any]:
        ran.append(scenario)
        return FIGURES[scenario]

    monkeypatch.setattr(serving, "chosen_arch", lambda name: SM90)
    monkeypatch.setattr(serving.subprocess, "run", compile_)
    monkeypatch.setattr(serving._Bench, "_child", child)
    monkeypatch.setattr(serving, "_imports", lambda repeats: IMPORTS)
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: object())
    parts = list(serving.run(Request(repeats=2)))
    wanted = {*serving.KERNELS, *client.KERNELS}
    assert sorted(word for word in compiled[0] if word in wanted) == sorted(wanted)
    assert ran.count("first_launches") == ran.count("misses") == 3, "two, and one that is not counted"
    assert ran.count("after_prime") == 2
    now = records.present("sm90")
    for part in parts:
        stamps = {kernel: now[kernel] for kernel in part.kernels}
        record = Record(made_with=MADE, kernels=stamps, figures=part.figures)
        records.add(tmp_path, "serving", part.name, record)
    text = report.block("serving", tmp_path)
    for part in parts:
        assert f"| {part.name.removeprefix('first launch: ')}" in text, part.name
    assert "| aot_tune with cubins, no compiler | 5.0 ms | 1.5 ms | 1.2 ms | 2 |" in text
    assert "| Triton, compile cache warm | 4503 ms | | | 1 |" in text
    assert "| launch, with cubins, grad off | 0.75 us above a bare `ct.launch` of 5.00 us |" in text
    assert "| a miss, searched live over cubins | 37.0 ms |" in text
    assert (
        "| imports | `aot_tune` 3 ms, the kernels 150 ms beyond torch and cuTile; no CUDA context |" in text
    )
    assert "| archive | 2.0 MiB for 6 kernels |" in text
    assert "| client: aot_tune: first request, another length next | 7.5 ms (7.5 of CPU), 7.5 ms" in text
    assert "| client: aot_tune: of the first request | look-ups 1.5, cubins 2.2, all else 3.8 ms |" in text
    assert "| client: torch as it comes: steady | 300 tokens 3.65 ms |" in text
    assert "highest 1.25" in text
    parts = report.block("first-launch", tmp_path)
    ms = re.findall(r"^\| ([^|:]+)(?:: [^|]+)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", parts, re.M)
    told = {part: kernels for part, *kernels in ms}
    assert told["look-ups"] == ["0.90", "0.00", "0.00"]
    assert told["memo"] == ["0.00", "0.25", "0.00"]
    assert told["all else"] == ["4.10", "1.25", "1.20"]
    assert told["all"] == ["5.00", "1.50", "1.20"]


def test_the_parts_of_a_profile_do_not_hold_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(client.time, "perf_counter_ns", lambda: now[0])

    class Steps:
        def outer(self) -> None:
            now[0] += 1_000_000
            self.inner()
            self.inner()

        def inner(self) -> None:
            now[0] += 2_000_000

    profile = client.Profile()
    for name in ("outer", "inner"):
        profile.measure(name, Steps, name)
    assert profile.ms == {"outer": 0.0, "inner": 0.0}
    Steps().outer()
    Steps().inner()
    assert profile.ms == {"outer": 1.0, "inner": 6.0}


class Runs:
    """Records the environments of processes, which all print the same times."""

    returncode, stdout, stderr = 0, "0.0135 0.0125", ""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.environments: list[dict[str, str]] = []
        monkeypatch.setattr(serving.subprocess, "run", self.run)

    def run(self, command: list[str], *, env: dict[str, str], **_: Any) -> Runs:
        self.environments.append(env)
        return self


def test_fresh_processes_cache_what_python_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an import would take as long as the compilation of its files."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    runs = Runs(monkeypatch)
    serving._imports(2)
    bench = serving._Bench.__new__(serving._Bench)
    bench._folder, bench._archives, bench._caches = tmp_path, tmp_path, 0
    runs.stdout = "{}"
    bench._child("loading")
    assert [env for env in runs.environments if "PYTHONDONTWRITEBYTECODE" in env] == []
    assert all("PATH" in env for env in runs.environments)


def test_the_time_of_an_import_is_the_least_of_those_that_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = ["0.9 0.9", "0.0135 0.0125", "0.0145 0.0115"] * len(serving._IMPORTS)
    answers = iter(times)
    monkeypatch.setattr(serving, "_printed", lambda code: next(answers))
    Runs(monkeypatch)
    figures = serving._imports(2)
    names = ("aot_tune", "rms_norm", "kernels")
    told = {f"{name}{unit}": ms for name in names for unit, ms in (("_ms", 13.5), ("_cpu_ms", 11.5))}
    assert figures == {**told, "no CUDA context": True}


@pytest.mark.process
def test_it_is_seen_whether_imports_create_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_printed", lambda code: "0 0")
    monkeypatch.setattr(serving, "_NO_CONTEXT", "assert True")
    assert serving._imports(1)["no CUDA context"] is True
    monkeypatch.setattr(serving, "_NO_CONTEXT", "assert False")
    assert serving._imports(1)["no CUDA context"] is False
