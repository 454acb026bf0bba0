"""From a command line's words to archs, GPUs, kernels and problems; errors name what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot_tune.declare import selection
from aot_tune.errors import ArchError, TuneError, UsageError
from aot_tune.kernels import rms_norm_tunable
from aot_tune.nvidia.nvml import Gpu
from aot_tune.values.arch import Arch
from tests.support.samples import SM90, scale, scale_in

SM100 = Arch.parse("sm100")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """What this machine's NVML answers; empty unless the test fills it."""
    answer: list[Gpu] = []
    monkeypatch.setattr(selection, "visible_gpus", lambda: tuple(answer))
    return answer


def test_the_arch_is_the_one_named_else_this_machines_else_sm100(gpus: list[Gpu]) -> None:
    assert selection.chosen_arch("sm_90a") == SM90
    assert selection.chosen_arch(None) == SM100
    assert "for sm100; --arch names another" in "".join(selection.arch_remarks(None))
    assert not [*selection.arch_remarks("sm90")]
    gpus += [
        Gpu(index=0, name="old", arch=None, uuid="a"),
        Gpu(index=1, name="NVIDIA H200", arch=SM90, uuid="b"),
    ]
    assert selection.chosen_arch(None) == SM90
    assert not [*selection.arch_remarks(None)]
    with pytest.raises(ArchError, match="sm90 sm100"):
        selection.chosen_arch("hopper")


def test_the_gpus_are_those_named_else_all_of_the_arch_else_none(gpus: list[Gpu]) -> None:
    assert selection.chosen_gpus(SM90, None) == ()
    with pytest.raises(TuneError, match=r"--require measured: .* this process may use no GPU; run"):
        selection.chosen_gpus(SM100, None, require_measured=True)
    with pytest.raises(UsageError, match="--gpus all: none is an sm90 GPU; this process may use none"):
        selection.chosen_gpus(SM90, "all")
    gpus += [
        Gpu(index=0, name="NVIDIA B200", arch=SM100, uuid="a"),
        Gpu(index=1, name="NVIDIA H200", arch=SM90, uuid="b"),
        Gpu(index=2, name="NVIDIA H200", arch=SM90, uuid="c"),
    ]
    with pytest.raises(TuneError, match="may use no sm120 GPU \\(0: NVIDIA B200 sm100"):
        selection.chosen_gpus(Arch.parse("sm120"), None, require_measured=True)
    assert selection.chosen_gpus(SM90, None, require_measured=True) == (gpus[1], gpus[2])
    assert selection.chosen_gpus(SM90, "all", require_measured=True) == (gpus[1], gpus[2])
    assert selection.chosen_gpus(SM90, "2, 1", require_measured=True) == (gpus[1], gpus[2])
    assert selection.chosen_gpus(SM90, "1") == (gpus[1],)
    for index in (0, 3):
        with pytest.raises(UsageError, match=f"--gpus {index} is not an sm90 GPU.*1: NVIDIA H200 sm90"):
            selection.chosen_gpus(SM90, f"1,{index}")
    with pytest.raises(UsageError, match="write places separated by commas"):
        selection.chosen_gpus(SM90, "1;2")


def test_gpus_of_two_models_are_refused_together_with_the_options(gpus: list[Gpu]) -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
    gpus += [Gpu(index=i, name=name, arch=SM90, uuid=str(i)) for i, name in enumerate(names)]
    with pytest.raises(UsageError, match="--gpus 0,2 for NVIDIA H200 or --gpus 1 for NVIDIA H100 80GB HBM3"):
        selection.chosen_gpus(SM90, None)
    assert selection.chosen_gpus(SM90, "0,2") == (gpus[0], gpus[2])


def test_an_unknown_kernel_is_refused_with_those_there_are(tmp_path: Path) -> None:
    found = scale_in(tmp_path)
    assert selection.chosen_kernels(found, ["scale", "scale"]) == (found["scale"],)
    assert selection.chosen_kernels(found, []) == (found["scale"],)
    with pytest.raises(UsageError, match="no kernel is called 'scala'; there is scale"):
        selection.chosen_kernels(found, ["scala"])
    with pytest.raises(UsageError, match="--module"):
        selection.chosen_kernels({}, [])


def test_an_unknown_kernel_is_refused_with_the_nearest_and_the_way_to_name_another_module(
    tmp_path: Path,
) -> None:
    many = dict.fromkeys(
        [*(f"kernel_{place}" for place in range(20)), "rms_norm"], scale_in(tmp_path)["scale"]
    )
    with pytest.raises(UsageError) as told:
        selection.chosen_kernels(many, ["rmsnorm"])
    assert str(told.value).endswith(
        " …; the nearest is rms_norm; where a module of yours declares it, name the module: "
        "--module mylib.kernels"
    )
    with pytest.raises(
        UsageError, match=r"there is scale; where a module of yours .* --module mylib.kernels"
    ):
        selection.chosen_kernels(scale_in(tmp_path), ["matrix"])


def test_a_problem_is_read_with_sizes_flags_and_classes() -> None:
    assert selection.parse_problem("M=300, causal=true,dtype=bfloat16") == {
        "M": 300,
        "causal": True,
        "dtype": "bfloat16",
    }
    printed = {"interleaved": True, "windowed": False}
    for separator in (",", " ", ", "):
        text = separator.join(f"{name}={value}" for name, value in printed.items())
        assert selection.parse_problem(text) == printed
    assert selection.parse_problem(" M = 3  N=4") == {"M": 3, "N": 4}


@pytest.mark.parametrize("text", ["", "M", "M=", "=3", "M=1,,N=2", "M=1,M=2", "M=1 M=2"])
def test_a_malformed_problem_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--problem"):
        selection.parse_problem(text)


def test_all_values_name_any_problem_declared_or_not() -> None:
    (problem,) = selection.chosen_problems(scale, {"M": 300, "N": 7, "dtype": "float16"})
    assert dict(problem) == {"dtype": "float16", "M": 300, "N": 7}
    assert list(problem) == ["dtype", "M", "N"]


def test_some_values_mean_the_declared_problems_that_agree_a_bucketed_size_by_its_bucket() -> None:
    assert [problem["M"] for problem in selection.chosen_problems(scale, {"N": 1024})] == [1, 64, 256]
    (asked,) = selection.chosen_problems(scale, {"M": 200})
    assert dict(asked) == {"dtype": "bfloat16", "M": 200, "N": 1024}


def test_a_problem_without_its_dtype_is_of_the_sizes_that_were_asked() -> None:
    problems = selection.chosen_problems(rms_norm_tunable, {"rows": 3, "cols": 4096})
    assert {(problem["rows"], problem["cols"]) for problem in problems} == {(3, 4096)}
    assert len({problem["dtype"] for problem in problems}) == len(problems)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"K": 1}, "has no K; it has dtype M N"),
        ({"M": "many"}, "M=many is of another type than M=1"),
        ({"M": True}, "M=True is of another type than M=1"),
        ({"M": 0}, "M=0 is never launched"),
        ({"N": 2048}, "declared are N=1024; add dtype M"),
        ({"M": 1, "N": 1, "dtype": "bfloat17"}, r"cannot make arguments for dtype=bfloat17 .*: \w+Error: "),
    ],
)
def test_a_problem_that_cannot_be_meant_is_refused_with_what_can(
    wanted: dict[str, object], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        selection.chosen_problems(scale, wanted)  # type: ignore[arg-type]


def test_a_problem_is_given_to_the_kernels_it_fits_and_refused_where_it_fits_none(tmp_path: Path) -> None:
    kernels = tuple(scale_in(tmp_path).values())
    chosen = selection.problems_by_kernel(kernels, ["M=1", "M=64", "M=60"])
    assert [problem["M"] for problem in chosen["scale"]] == [1, 64, 60]
    with pytest.raises(UsageError, match="has no K"):
        selection.problems_by_kernel(kernels, ["K=3"])
