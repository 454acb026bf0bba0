"""The comparison of two compilers without a GPU: what is compiled and refused, and the figures of a row."""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_tune.bench.gpu import shipped
from aot_tune.bench.states import compilers
from aot_tune.bench.states.compilers import main
from aot_tune.bench.states.configs import worth_timing
from aot_tune.nvidia import cutile
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.other_compilers import other

SM90 = Arch.parse("sm90")


@pytest.fixture
def kernel() -> DeviceKernel:
    return DeviceKernel(shipped()["rms_norm"], SM90)


def test_the_choice_comes_first_then_the_default_then_the_portfolio(kernel: DeviceKernel) -> None:
    problem = kernel.tunable.typical_problems[0]
    first, *others = worth_timing(kernel, problem)
    assert first == dispatcher_of(kernel.tunable).choice(SM90, problem, device=kernel.device).config
    assert kernel.tunable.default_config(SM90, problem) in (first, *others[:1])
    assert len(others) == len(set(others))
    assert set(others) <= set(kernel.tunable.candidates(SM90, problem))


@pytest.mark.process
def test_what_a_compiler_has_made_is_kept_by_its_version_and_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rms_norm", "--problems", "1", "--most", "2", "--folder", str(tmp_path)]
    assert main(words) == 0
    [folder] = tmp_path.iterdir()
    assert folder.name == cutile.compiler_version()
    made = {path: path.stat().st_mtime_ns for path in folder.glob("*.cubin")}
    assert len(made) in (1, 2)
    said = capsys.readouterr().out
    assert f"{len(made)} cubins in {folder} (" in said
    assert said.endswith("s of compiling), 0 of which spill\n")
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made
    lost, _ = made.popitem()
    lost.unlink()
    assert main(words) == 0
    assert lost.is_file()
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.process
def test_what_does_not_compile_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rms_norm", "--problems", "1", "--most", "1", "--folder", str(tmp_path)]
    with monkeypatch.context() as refusing:
        refusing.setattr(compilers, "CompilePool", partial(CompilePool, target=other("RefusesInOneBreath")))
        assert main(words) == 0
    said = capsys.readouterr().out
    assert "0 cubins in " in said
    assert "\n  not compiled: not with me\n" in said
    assert main(words) == 0
    assert ": 1 cubins in " in capsys.readouterr().out


def test_a_cubin_is_named_by_all_but_its_compiler(
    kernel: DeviceKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(kernel: DeviceKernel) -> set[str]:
        return {case.job.key for case in compilers._cases(kernel, problems=3, most=3)}

    own = keys(kernel)
    assert not own & keys(DeviceKernel(kernel.found, Arch.parse("sm100")))
    monkeypatch.setattr(cutile, "compiler_version", lambda: "13.10.1")
    assert own == keys(DeviceKernel(kernel.found, SM90))
    monkeypatch.setattr(compilers, "source_hash", lambda tunable: "0" * 16)
    assert not own & keys(kernel)


def test_more_problems_than_are_declared_are_all_of_them(kernel: DeviceKernel) -> None:
    declared = kernel.tunable.typical_problems
    assert len(compilers._cases(kernel, problems=10**5, most=1)) == len(declared)
    some = compilers._cases(kernel, problems=len(declared) - 1, most=1)
    assert len({case.problem for case in some}) == len(declared) - 1


def test_bad_words_are_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["rms_norm", "--time", "13.4.92", "13.5.37", *folder]) == 1
    assert "no GPU here; run it on a GPU host" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["rms_norm", "--time", "13.4.92", "13.5.37", *folder]) == 1
    assert f"{tmp_path / '13.4.92'} is not there; compile in an environment" in capsys.readouterr().err
    assert main(["rms_nrm", *folder]) == 1
    assert "rms_nrm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rms_norm", "--problems", "0", *folder])
    assert "0 is too few; give 1 or more" in capsys.readouterr().err


class PlayedGpu:
    """A card whose launches write ones, and in the second compiler's name twos where it is told to."""

    arch, device, torch_device = SM90, Device.reference(SM90), torch.device("cpu")
    differs = False

    def launcher(self, kernel: DeviceKernel, problem: Problem, config: Config, cubin: Path, args: Any) -> Any:
        named = dict(zip(kernel.tunable.parameters, args, strict=True))
        value = 2 if self.differs and cubin.parent.name == "13.10.1" else 1
        return lambda: [named[name].fill_(value) for name in kernel.tunable.mutated]


class PlayedClock:
    """The first compiler's code takes 10 us, the second one's 12."""

    def samples(
        self, runs: dict[str, Any], renewed: Any, states: tuple[str, ...], count: int
    ) -> dict[str, dict[str, list[float]]]:
        return {
            name: {state: [us] * count for state in states}
            for name, us in zip(runs, (10.0, 12.0), strict=True)
        }


@pytest.mark.process
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_what_two_compilers_have_made_is_timed_side_by_side_and_compared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a kernel in place. What only one of them has made is left out."""
    words = [name, "--problems", "1", "--most", "3", "--folder", str(tmp_path)]
    assert main(words) == 0
    [first] = tmp_path.iterdir()
    shutil.copytree(first, tmp_path / "13.10.1")
    missing = sorted((tmp_path / "13.10.1").glob("*.cubin"))[0]
    missing.unlink()
    gpu = PlayedGpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(compilers, "this_gpu", lambda: contextlib.nullcontext(gpu))
    monkeypatch.setattr(compilers, "StateClock", PlayedClock)
    for gpu.differs, differing in ((False, "0"), (True, "2")):
        capsys.readouterr()
        assert main([*words, "--time", first.name, "13.10.1"]) == 0
        said, head, row = capsys.readouterr().out.splitlines()
        assert said.startswith(f"13.10.1 over {first.name} on NVIDIA H200, ")
        assert head.split()[:2] == ["configs", "left"]
        assert row.split() == [name, "2", "1", "2", differing, *["1.200"] * 5, "1.20", "1.20", "1.200"]


def test_a_row_has_means_by_state_the_extremes_and_the_fastest_of_each(kernel: DeviceKernel) -> None:
    [small, large] = compilers._cases(kernel, problems=2, most=1)

    def compared(case: compilers._Case, old: float, new: float, *, same: bool) -> compilers._Compared:
        us = dict.fromkeys(compilers._STATES, old), dict.fromkeys(compilers._STATES, new)
        return compilers._Compared(case=case, us=us, same_code=same, same_bits=not same)

    rows = [compared(small, 10, 20, same=True), compared(small, 40, 5, same=False)]
    rows += [compared(large, 8, 8, same=False)]
    row = compilers._row("rms_norm", rows, left_out=7)
    name, configs, left_out, same_code, other_bits, *means, worst, best, fastest = row
    assert (name, configs, left_out, same_code, other_bits) == ("rms_norm", "3", "7", "1", "1")
    assert means == ["0.630"] * 5  # the third root of 2 times 1/8 times 1
    assert (worst, best) == ("2.00", "0.12")
    assert fastest == "0.707"  # 5 over 10, and 8 over 8
