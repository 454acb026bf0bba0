"""Counters by CUPTI: structures as in the headers, passes by the real library, refusals by a stand-in."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.nvidia import cupti
from aot_tune.nvidia.cupti import METRICS, STRUCTS, CountersError, Cupti, size_of

HEADERS = Path("/usr/local/cuda-13.0/include")


def _known(metric: str) -> bool:
    return "gmma" not in metric


class Library:
    """CUPTI's functions on no device; `codes` are what functions answer instead of success."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.called, self.dropped, self.ranges = codes, list[str](), 0, 1
        self.starts = 0
        self.images: set[bool] = set()

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.called.append(name)
            answer = getattr(type(self), f"_{name}", None)
            return self.codes.get(name) or int((answer and answer(self, *args)) or 0)

        return function

    def _cuptiGetResultString(self, code: int, text: Any) -> None:
        text._obj.value = b"CUPTI_ERROR_OF_THE_TEST"

    def _cuptiDeviceGetChipName(self, made: Any) -> None:
        made._obj.pChipName = b"GH100"

    def _cuptiProfilerGetCounterAvailability(self, made: Any) -> None:
        made._obj.counterAvailabilityImageSize = 8

    def _cuptiProfilerHostInitialize(self, made: Any) -> None:
        self.images.add(bool(made._obj.pImage))

    def _cuptiProfilerHostConfigAddMetrics(self, made: Any) -> int:
        names = [made._obj.metricNames[place].decode() for place in range(made._obj.numMetrics)]
        return 0 if all(map(_known, names)) else 8

    def _cuptiProfilerHostGetConfigImageSize(self, made: Any) -> None:
        made._obj.configImageSize = 16

    def _cuptiProfilerHostGetNumOfPasses(self, made: Any) -> None:
        made._obj.numOfPasses = 3

    def _cuptiRangeProfilerGetCounterDataSize(self, made: Any) -> None:
        made._obj.counterDataSize = 32

    def _cuptiRangeProfilerStop(self, made: Any) -> None:
        self.starts += 1
        made._obj.isAllPassSubmitted = self.starts == 2

    def _cuptiRangeProfilerDecodeData(self, made: Any) -> None:
        made._obj.numOfRangeDropped = self.dropped

    def _cuptiRangeProfilerGetCounterDataInfo(self, made: Any) -> None:
        made._obj.numTotalRanges = self.ranges

    def _cuptiProfilerHostEvaluateToGpuValues(self, made: Any) -> None:
        for place in range(made._obj.numMetrics):
            made._obj.pMetricValues[place] = float(place) if place else float("nan")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with a current context."""

    def current(context: Any) -> int:
        context._obj.value = 7
        return 0

    monkeypatch.setattr(cupti.c, "CDLL", lambda *args, **more: SimpleNamespace(cuCtxGetCurrent=current))


def _of(library: Library) -> Cupti:
    made = Cupti.__new__(Cupti)
    made._library = library  # type: ignore[assignment]
    return made


def test_a_launch_is_prepared_and_run_until_all_passes_are_submitted(driver: None) -> None:
    done: list[str] = []
    library = Library()
    read = _of(library).counters(lambda: done.append("launch"), lambda: done.append("prepare"), 0)
    assert done == ["prepare", "launch"] * 2
    assert read.passes == 3
    assert set(read.values) == set(filter(_known, METRICS[1:]))  # the first is no number
    assert library.called.count("cuptiProfilerHostInitialize") == library.called.count(
        "cuptiProfilerHostDeinitialize"
    )
    assert "cuptiRangeProfilerDisable" in library.called
    assert library.images == {True}  # what the device lacks is left out
    without = Library(cuptiProfilerGetCounterAvailability=7)
    assert _of(without).counters(lambda: None, lambda: None, 0).values == read.values
    assert without.images == {False}


@pytest.mark.parametrize(
    "function", ["cuptiProfilerInitialize", "cuptiRangeProfilerEnable", "cuptiRangeProfilerStart"]
)
def test_a_refusal_names_the_function_and_what_would_allow_it(driver: None, function: str) -> None:
    with pytest.raises(CountersError, match=rf"{function}: error 35 CUPTI_ERROR_OF_THE_TEST \(needs root"):
        _of(Library(**{function: 35})).counters(lambda: None, lambda: None, 0)
    with pytest.raises(CountersError, match=rf"{function}: error 7 CUPTI_ERROR_OF_THE_TEST$"):
        _of(Library(**{function: 7})).counters(lambda: None, lambda: None, 0)


def test_ranges_that_are_dropped_or_missing_are_an_error(driver: None) -> None:
    for dropped, ranges in ((1, 1), (0, 0), (0, 2)):
        library = Library()
        library.dropped, library.ranges = dropped, ranges
        with pytest.raises(CountersError, match=f"kept {ranges} ranges of one launch and dropped {dropped}"):
            _of(library).counters(lambda: None, lambda: None, 0)
        assert "cuptiRangeProfilerDisable" in library.called


def test_an_error_of_the_launch_ends_the_profile(driver: None) -> None:
    library = Library()

    def launch() -> None:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        _of(library).counters(launch, lambda: None, 0)
    assert {"cuptiRangeProfilerDisable", "cuptiProfilerHostDeinitialize"} <= set(library.called)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cupti, "_places", lambda: iter(()))
    with pytest.raises(CountersError, match="pip install nvidia-cuda-cupti"):
        Cupti()
    broken = tmp_path / "libcupti.so.13"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(cupti, "_places", lambda: iter([str(broken)]))
    with pytest.raises(CountersError, match="cannot be loaded"):
        Cupti()


@pytest.mark.process
@pytest.mark.skipif(
    not (HEADERS / "cupti_range_profiler.h").exists() or shutil.which("g++") is None,
    reason="no headers of 13.0",
)
def test_the_structures_are_those_of_the_headers(tmp_path: Path) -> None:
    lines = "\n".join(f'printf("%zu %zu\\n", {name}_STRUCT_SIZE, sizeof({name}));' for name in STRUCTS)
    source = tmp_path / "sizes.cpp"
    source.write_text(
        "#include <stdio.h>\n#include <cuda.h>\n#include <cupti.h>\n#include <cupti_profiler_target.h>\n"
        "#include <cupti_profiler_host.h>\n#include <cupti_range_profiler.h>\n#include <cupti_target.h>\n"
        f"int main(void) {{ {lines} return 0; }}\n"
    )
    subprocess.run(["g++", f"-I{HEADERS}", "-o", tmp_path / "sizes", source], check=True)
    answer = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    theirs = dict(zip(STRUCTS, (tuple(map(int, line.split())) for line in answer.splitlines()), strict=True))
    ours = {name: (size_of(params), ctypes.sizeof(params)) for name, params in STRUCTS.items()}
    assert ours == theirs


@pytest.mark.process
def test_the_metrics_take_few_passes_on_the_gpus_of_data_centers() -> None:
    """Asked of the real library, of release 13.0: later ones want a driver."""
    places = [
        place for place in cupti._places() if Path(place).exists() and "13.0" in str(Path(place).resolve())
    ]
    if not places:
        pytest.skip("no libcupti of 13.0")
    library = Cupti()
    for chip, missing in ((b"GH100", 0), (b"GB100", 1), (b"GB202", 3)):
        _, _, passes, known = library.planned(chip)
        assert passes <= 6
        assert len(METRICS) - len(known) == missing
