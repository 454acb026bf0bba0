"""A library's search on a real GPU: configs that would end the process are passed over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune import environment
from aot_tune.replay.document import parse
from aot_tune.replay.record.recorder import IN_PARTS
from tests.support import flashinfer_sites, library_sites
from tests.support.broken_kernels import FAULTS, HANGS, NOTHING, RIGHT
from tests.support.tilegym_sites import FOLDER, MISSING

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]


def main() -> None:
    """The program that is recorded: it searches over kernels that are broken in several ways."""
    import torch
    from cuda.tile.tune import exhaustive_search

    from tests.support.broken_kernels import TILE, add_one_kernel

    x = torch.randn(1 << 16, device="cuda")
    out = torch.zeros_like(x)
    space = [SimpleNamespace(mode=mode) for mode in (RIGHT, FAULTS, HANGS, NOTHING)]

    def args(config: Any) -> tuple[Any, ...]:
        return x, out, config.mode

    grid = (x.numel() // TILE, 1, 1)
    stream = torch.cuda.current_stream()
    result = exhaustive_search(space, stream, lambda config: grid, add_one_kernel, args, quiet=True)
    failed = {config.mode: message for config, _, message in result.failures}
    print(json.dumps({"best": result.best.config.mode, "failed": failed, "untouched": not out.any().item()}))


def with_cupy() -> None:
    """The program of a library whose users hold CuPy's arrays and streams."""
    from tests.support import tuned_once

    cupy: Any = import_module("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, out = cupy.random.random(1 << 16, dtype=cupy.float32), cupy.zeros(1 << 16, dtype=cupy.float32)
        best = tuned_once.launch(x, out, stream=stream)
        right = bool((out == x * 2).all())
    print(json.dumps({"best": vars(best), "right": right}))


def split_k() -> None:
    """TileGym's mHC product: each config of its search splits K into another number of parts."""
    import torch

    sys.path.append(str(FOLDER))
    mhc: Any = import_module("tilegym.ops.cutile.experimental.mhc")
    torch.manual_seed(0)
    x, w = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((256, 4096), (4096, 24)))
    y, r = mhc.mhc_gemm_rms_scale(x, w, 4, 0.5, 0.5, 0.5, torch.zeros(24, dtype=x.dtype, device="cuda"))
    print(json.dumps({"y": y.double().tolist(), "r": r.double().tolist()}))


def split_decode() -> None:
    """FlashInfer's decode, which asks for the compiler at import, and its reduction without a search."""
    import torch

    decode = flashinfer("attention.kernels.cutile.fmha_decode_bsr_cutile")
    batch, pages = int(os.environ.get("BATCH", "4")), 64
    q, k, v = randoms((batch, 16, 128), (batch * pages, 64, 4, 128), (batch * pages, 64, 4, 128))
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").reshape(batch, pages)
    lengths = torch.full((batch,), 64 * pages - 5, dtype=torch.int32, device="cuda")
    out = decode.fmha_decode_bsr_cutile(q, k, v, lengths, table, 0.1, 1.0)
    print(json.dumps({"out": out.double().tolist()}))


def mixture() -> None:
    """FlashInfer's mixture of experts, which searches nothing."""
    import torch

    moe, (tokens, hidden, inner, experts, top) = flashinfer("fused_moe.cutile.moe"), (64, 256, 128, 8, 2)
    config = moe.GemmConfig(tile_n=64, tile_k=64, occupancy=1)
    workspace = moe.allocate_workspace(
        num_tokens=tokens, hidden_size=hidden, intermediate_size=inner, num_experts=experts, top_k=top,
        is_gated=True, block_sizes=[16], device=torch.device("cuda"),
    )  # fmt: skip
    x, w1, w2, out = randoms(
        (tokens, hidden), (experts, hidden, 2 * inner), (experts, inner, hidden), (tokens, hidden)
    )
    weights, ids = torch.rand(tokens, experts, device="cuda").topk(top)
    activation = import_module("flashinfer.fused_moe.api").SwiGLU()
    moe.run_moe(
        x, ids.int(), weights, w1, w2, out, workspace, activation=activation, block_size=16,
        gemm1_config=config, gemm2_config=config,
    )  # fmt: skip
    print(json.dumps({"out": out.double().tolist()}))


def randoms(*shapes: tuple[int, ...]) -> list[Any]:
    import torch

    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def flashinfer(module: str) -> Any:
    """A module of FlashInfer; with NO_COMPILER=1 in a process that finds no compiler."""
    if os.environ.get("NO_COMPILER"):
        from tests.support.played_cuda import without_compiler

        without_compiler()
    sys.path.append(str(flashinfer_sites.FOLDER))
    return import_module(f"flashinfer.{module}")


def ran(folder: Path, program: str, *command: str, **variables: str) -> tuple[dict[str, Any], str]:
    """What a function of this module prints, and what a verb of aot-tune does that runs it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "aot_tune", *command, "--"),
            *(sys.executable, "-c", f"from tests.replay.record.test_on_gpu import {program}; {program}()"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_cupy_s_arrays_are_recorded_and_replayed(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    recorded, _ = ran(tmp_path, "with_cupy", "record", "--out", "tables")
    (path,) = (tmp_path / "tables").glob("sm90/*.json")
    (entry,) = parse(path.read_bytes()).entries
    assert entry.config == {"SimpleNamespace": recorded["best"]}
    replayed, _ = ran(tmp_path, "with_cupy", "run", "--tables", "tables", **{environment.ON_MISS: "error"})
    assert replayed == recorded
    assert recorded["right"]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=MISSING)
def test_a_workspace_of_split_k_configs_passes_none_of_them_over(tmp_path: Path) -> None:
    recorded, told = ran(tmp_path, "split_k", "record", "--out", "tables")
    of_kernel = [line for line in told.splitlines() if "_mhc_split_gemm_rms_kernel " in line]
    (row,) = (line.split() for line in of_kernel if " the first config " in line)
    assert row[-1] == "0"  # wrong
    assert f"R_acc, Y_acc {IN_PARTS}" in told
    assert "no search was for" not in told
    replayed, _ = ran(tmp_path, "split_k", "run", "--tables", "tables", **{environment.ON_MISS: "error"})
    assert replayed == recorded


@pytest.mark.skipif(not (flashinfer_sites.FOLDER / "flashinfer").is_dir(), reason=flashinfer_sites.MISSING)
@pytest.mark.parametrize("program", ["split_decode", "mixture"])
def test_flashinfer_runs_from_cubins_without_a_compiler(program: str, tmp_path: Path) -> None:
    recorded, _ = ran(tmp_path, program, "record", "--out", "tables")
    compile_flashinfer(tmp_path)
    variables = {environment.ON_MISS: "error", "NO_COMPILER": "1"}
    served, told = ran(tmp_path, program, "run", "--tables", "tables", **variables)
    assert served == recorded
    assert "Warning" not in told


def compile_flashinfer(folder: Path) -> None:
    """Make the cubins of the tables in a folder."""
    (arch,) = (path.name for path in (folder / "tables").iterdir())
    compiled = ("compile", "--arch", arch, "--module", "flashinfer")
    variables = {environment.TABLES: str(folder / "tables")}
    library_sites.aot_tune(folder, *compiled, ahead=flashinfer_sites.FOLDER, **variables)


@pytest.mark.skipif(not (flashinfer_sites.FOLDER / "flashinfer").is_dir(), reason=flashinfer_sites.MISSING)
def test_flashinfer_runs_at_a_size_between_the_recorded_without_a_compiler(tmp_path: Path) -> None:
    import torch

    ran(tmp_path, "split_decode", "record", "--out", "tables", BATCH="16")
    compile_flashinfer(tmp_path)
    run, variables = ("run", "--tables", "tables"), {environment.ON_MISS: "error", "BATCH": "15"}
    compiled, _ = ran(tmp_path, "split_decode", *run, **variables)
    served, told = ran(tmp_path, "split_decode", *run, NO_COMPILER="1", **variables)
    assert torch.allclose(torch.tensor(served["out"]), torch.tensor(compiled["out"]), atol=1e-2, rtol=2e-2)
    assert "the cubin that assumes nothing of strides and alignment runs instead" in told


def test_what_would_end_the_process_is_passed_over(tmp_path: Path) -> None:
    found, _ = ran(tmp_path, "main", "record", "--out", "tables")
    assert (found["best"], found["untouched"]) == (RIGHT, True)
    failed = {int(mode): message for mode, message in found["failed"].items()}
    assert sorted(failed) == [FAULTS, HANGS, NOTHING]
    assert failed[FAULTS].startswith("it ended the process that tried it first: ")
    assert failed[HANGS].startswith("it had not ended after ")
    assert "differs from the first config's" in failed[NOTHING]
    (path,) = (tmp_path / "tables").glob("sm90/*.json")
    assert len(parse(path.read_bytes()).entries) == 1
