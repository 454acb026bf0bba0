"""Every shipped kernel has one config for every batch, from its committed table; and a row's bits do not
depend on the batch: in the emulator, and by the arithmetic that the compiler makes."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
import torch

from aot_tune.choose.batch import every_batch, without_batch
from aot_tune.choose.choice import Options
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import machine_code
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tables import store
from aot_tune.tunable import Tunable
from aot_tune.tuner.archives.build import table_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.kernels.cases import CASES
from tests.support import emulator
from tests.support.batches import batch_size, parts
from tests.support.kernel_case import problem
from tests.support.samples import SM90
from tests.support.shipped import FOUND, SHIPPED

CPU = torch.device("cpu")


def chosen(tunable: Tunable, one: Problem) -> Config:
    return dispatcher_of(tunable).every_batch(SM90).choice(one, Options(on_miss="nearest")).config


@pytest.mark.parametrize("tunable", SHIPPED, ids=lambda tunable: tunable.name)
def test_the_committed_tables_give_one_config_for_every_batch(tunable: Tunable) -> None:
    table = table_of(store.package_folder(tunable), SM90, tunable)
    assert table is not None
    assert tunable.batch_axes
    configs: dict[Problem, Config] = {}
    every = dispatcher_of(tunable).every_batch(SM90)
    for bucket in tunable.buckets:
        choice = every.choice(bucket, Options(on_miss="error"))
        assert choice.source == "invariant"
        other = without_batch(tunable, bucket)
        assert configs.setdefault(other, choice.config) == choice.config
        inside = bucket.replaced(**{name: max(bucket.size(name) - 3, 1) for name in tunable.batch_axes})
        assert every.choice(inside, Options(on_miss="error")).config == choice.config
    for bucket in tunable.buckets:
        config = configs[without_batch(tunable, bucket)]
        for one in every_batch(tunable, bucket):
            assert tunable.refusal(config, SM90, one) is None
        assert config.constants.get("splits", 1) == 1, "keys or K are split by how many rows there are"
        assert not config.constants.get("balanced", False)
        assert config in table.portfolio or config in {
            tunable.default_config(SM90, one) for one in every_batch(tunable, bucket)
        }


def test_every_shipped_kernel_has_a_case_with_problems_for_the_gpu() -> None:
    assert CASES.keys() == {tunable.name for tunable in SHIPPED}
    assert [kernel for kernel, case in CASES.items() if not case.large] == []


def run(kernel: str, args: tuple[object, ...], config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        emulator.run(FOUND[kernel].tunable, args, config, patch, amended=1 << 40)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("kernel", "one"),
    [
        ("linear", problem(dtype="float32", activation="none", M=70, N=40, K=300)),
        ("grouped_matmul", problem(dtype="bfloat16", tokens=70, experts=4, N=40, K=130)),
        ("rms_norm", problem(dtype="float32", rows=21, cols=100)),
        ("layer_norm", problem(dtype="float32", bias=True, rows=21, cols=768)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_in_the_emulator_a_rows_bits_do_not_depend_on_the_batch(
    kernel: str, one: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunable, batch = FOUND[kernel].tunable, CASES[kernel].batch
    args = tunable.make_args(one, CPU, 0)
    size, config = batch_size(tunable, args), chosen(tunable, one)
    whole = batch.of(args, 0, size)
    run(kernel, whole, config, monkeypatch)
    for first, last in parts(size):
        part = batch.of(args, first, last)
        assert chosen(tunable, tunable.problem_of(*part)) == config
        run(kernel, part, config, monkeypatch)
        for ours, theirs in zip(
            batch.results(part, 0, last - first), batch.results(whole, first, last), strict=True
        ):
            assert torch.equal(ours, theirs), f"rows {first} to {last}"


@pytest.mark.emulated
def test_in_the_emulator_the_defaults_of_two_batches_give_a_row_other_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the test above would see it where the batch chose the config."""
    tunable, batch = FOUND["linear"].tunable, CASES["linear"].batch
    args = tunable.make_args(problem(dtype="float32", activation="none", M=70, N=40, K=300), CPU, 0)
    bits = []
    for last in (70, 16):
        part = batch.of(args, 0, last)
        run("linear", part, tunable.default_config(SM90, tunable.problem_of(*part)), monkeypatch)
        bits += [one[:16] for one in batch.results(part, 0, last)]
    assert not torch.equal(*bits)


_SUMS = {0x021: "FADD", 0x023: "FFMA", 0x189: "SHFL", 0x188: "STS", 0x184: "LDS", 0x1F0: "HGMMA"}
"""Operations of sm90 by their code: those of sums, exchanges between threads, and matrix products. Products
of two numbers and reciprocals are left out, since divisions of block numbers have them too."""


def sums_of(tunable: Tunable, one: Problem) -> Counter[str]:
    """How many such operations the machine code of a problem's batch-invariant launch has."""
    config = chosen(tunable, one)
    args = tunable.args_fn(config, *tunable.make_args(one, torch.device("meta"), 0))
    signature = cutile.signature_of(tunable.kernel, args)
    code = machine_code(cutile.compile_cubin(tunable.kernel, config.hints, signature, SM90, timeout_s=120))
    words = (struct.unpack_from("<Q", code, at)[0] for at in range(0, len(code) - 15, 16))
    return Counter(_SUMS[word & 0x1FF] for word in words if word & 0x1FF in _SUMS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kernel", "one", "axis", "sizes"),
    [
        ("rms_norm", problem(dtype="bfloat16", rows=1, cols=128), "rows", (17, 64)),
        ("layer_norm", problem(dtype="bfloat16", bias=True, rows=1, cols=768), "rows", (3, 64)),
        ("softmax", problem(dtype="float32", rows=1, cols=128), "rows", (17, 64)),
        ("matmul", problem(dtype="bfloat16", M=1, N=6144, K=4096), "M", (1, 17, 4096)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_compilers_sums_do_not_depend_on_the_batch(
    kernel: str, one: Problem, axis: str, sizes: tuple[int, ...]
) -> None:
    """Whether bounds are checked depends on the rows; the order in which threads add must not."""
    tunable = FOUND[kernel].tunable
    found = [sums_of(tunable, one.replaced(**{axis: size})) for size in sizes]
    assert found[0]
    assert all(other == found[0] for other in found)
