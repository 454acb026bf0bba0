"""The operators on a real GPU: compiled whole, captured into CUDA graphs, with the results of eager calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.kernel_case import Call
from tests.support.operators import CALLS, Layer, copied, results, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.fixture(autouse=True)
def _nothing_traced_before() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def layer() -> Layer:
    return Layer("cuda").requires_grad_(False)


def assert_same(these: tuple[torch.Tensor, ...], those: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(these, those, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_is_one_graph_with_the_eager_results(layer: Layer, dynamic: bool) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for count in (8, 13) if dynamic else (8,):
        assert_same(compiled(*tokens(count, "cuda")), layer(*tokens(count, "cuda")))


def test_a_compiled_model_runs_from_cuda_graphs_of_its_own(layer: Layer) -> None:
    # Compiled first: what a kernel keeps from its first launch on must survive the graphs' memory pool.
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    x, *rest = tokens(16, "cuda")
    for step in range(5):  # warmed up, captured, replayed
        torch.compiler.cudagraph_mark_step_begin()
        found = tuple(one.clone() for one in compiled(x * (step + 1), *rest))
        assert_same(found, layer(x * (step + 1), *rest))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


IMPORTED_INSIDE = """
import torch, aot_tune.kernels
x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    from aot_tune.kernels import rms_norm
    y = x + 1
graph.replay()
assert y.sum().item() == 8
"""


@pytest.mark.process
def test_a_kernel_is_imported_inside_a_capture() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_INSIDE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_model_is_captured_into_a_cuda_graph(layer: Layer, way: str) -> None:
    model = layer if way == "eager" else torch.compile(layer, fullgraph=True)
    inputs = tokens(16, "cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = model(*inputs)
    for _ in range(3):
        inputs[0].mul_(1.5)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, layer(*inputs))


def on_gpu(call: Call) -> Call:
    def moved(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        gpu = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return gpu.copy_(value)

    kwargs = {name: moved(value) for name, value in call.kwargs.items()}
    return Call(call.name, call.overload, tuple(map(moved, call.args)), kwargs)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_operator_runs_as_a_node_of_a_graph(call: Call) -> None:
    if call.name == "matmul_fp8" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("fp8 is multiplied from sm90 on")
    eager, traced = on_gpu(call), on_gpu(copied(call))
    wanted = results(eager.operator(*eager.args, **eager.kwargs))
    compiled = torch.compile(call.operator, fullgraph=True, backend="aot_eager")
    found = results(compiled(*traced.args, **traced.kwargs))
    written = [arg for arg in (*eager.args, *eager.kwargs.values()) if isinstance(arg, torch.Tensor)]
    also = [arg for arg in (*traced.args, *traced.kwargs.values()) if isinstance(arg, torch.Tensor)]
    for one, other in zip((*found, *also), (*wanted, *written), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
