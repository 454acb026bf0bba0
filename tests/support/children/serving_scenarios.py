"""A child process that serves on a GPU: it runs one scenario of the GPU tests of `serve` and prints JSON.

``python -m tests.support.children.serving_scenarios SCENARIO [ARGUMENTS]`` prints one line. The scenarios
have processes of their own because tests of the tuner need a pytest process without a CUDA context, and
because many of them are about what a fresh process does.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import aot_tune
from aot_tune.bench.children import serving
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels import matmul_tunable, rms_norm, rms_norm_tunable, rope_tunable
from aot_tune.nvidia import cutile
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.support.broken_kernels import add_one
from tests.support.samples import scale

HIT = {"dtype": "bfloat16", "M": 64, "N": 6144, "K": 4096}
NEAR = {"dtype": "bfloat16", "M": 64, "N": 6000, "K": 4000}
MISSES = [{"dtype": "bfloat16", "M": m, "N": n, "K": k} for m, n, k in serving.MISSES]


class _NoCompiler(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "cuda.tile._compile":
            raise SystemExit("the compiler was imported")


def without_compiler() -> None:
    """cuTile's compiling half cannot be imported, and no compiler is found."""
    assert "cuda.tile._compile" not in sys.modules
    sys.meta_path.insert(0, _NoCompiler())
    os.environ["PATH"] = "/nonexistent"
    cutile.may_have_compiler = lambda: False  # type: ignore[assignment]


def here() -> Arch:
    return Arch(*torch.cuda.get_device_capability())


def made(tunable: Tunable, values: dict[str, Any], device: int = 0) -> tuple[Any, ...]:
    return tunable.make_args(Problem(values), f"cuda:{device}", 1)


def right(tunable: Tunable, args: tuple[Any, ...]) -> bool:
    """Whether the output is what the reference says. For kernels that do not change their inputs."""
    wanted, output = tunable.reference(*args), tunable.output_names[0]
    if not isinstance(wanted, Close):
        wanted = wanted[output]
    out = args[tunable.parameters.index(output)].double()
    return bool(((out - wanted.value).abs() <= wanted.atol + wanted.rtol * wanted.value.abs()).all())


def source_of(tunable: Tunable, values: dict[str, Any]) -> str:
    """The ladder's step that the process's plan for a problem came from."""
    plans = dispatcher_of(tunable)._plans
    return next(p.choice.source for key, p in plans.items() if key[1] == Problem(values))


@contextmanager
def searches() -> Iterator[list[int]]:
    """How many configs each live search was given."""
    from cuda.tile import tune

    real, seen = tune.exhaustive_search, []

    def note(configs: Any, *args: Any, **options: Any) -> Any:
        seen.append(len(configs))
        return real(configs, *args, **options)

    tune.exhaustive_search = note
    try:
        yield seen
    finally:
        tune.exhaustive_search = real


# Graph capture ----------------------------------------------------------------------------------------------


def capture() -> dict[str, Any]:
    """Hit, nearest and miss in one graph, and one launch that is refused."""
    without_compiler()
    aot_tune.prime(matmul_tunable)
    problems = [HIT, NEAR, MISSES[0]]
    calls = [made(matmul_tunable, values) for values in problems]
    x = torch.ones(3, 511, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    refused = ""
    with searches() as searched, torch.cuda.graph(graph):
        for args in calls[:2]:
            matmul_tunable.launch(*args)
        try:
            rms_norm_tunable.launch(x, x[0], torch.empty_like(x), 1e-6)
        except LaunchError as error:
            refused = str(error)
        matmul_tunable.launch(*calls[2])
    replays = []
    for _ in range(2):
        for args in calls:
            args[2].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replays.append([right(matmul_tunable, args) for args in calls])
    return {
        "sources": [source_of(matmul_tunable, values) for values in problems],
        "replays": replays,
        "searched": searched,
        "refused": refused,
    }


def capture_elsewhere() -> dict[str, Any]:
    """A miss while another thread captures, and one after it."""
    arch, problem = here(), Problem(MISSES[0])
    args, later = made(matmul_tunable, MISSES[0]), made(matmul_tunable, MISSES[1])
    portfolio = next(iter(dispatcher_of(matmul_tunable).load(arch).tables.values())).portfolio
    for config in (*portfolio, matmul_tunable.default_config(arch, problem)):
        if matmul_tunable.refusal(config, arch, problem) is None:
            matmul_tunable.launch(*args, config=config)  # loaded: loading is no thing to do during a capture
    torch.cuda.synchronize()
    value = torch.zeros(16, device="cuda")
    graph, began, go = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    failures: list[str] = []

    def other() -> None:
        try:
            with torch.cuda.graph(graph):
                value.add_(1)
                began.set()
                go.wait(60)
                value.add_(1)
        except Exception as error:
            failures.append(repr(error))
            began.set()

    thread = threading.Thread(target=other)
    thread.start()
    began.wait(60)
    with searches() as searched:
        matmul_tunable.launch(*args)
        during = list(searched)
        go.set()
        thread.join()
        if not failures:
            graph.replay()
        torch.cuda.synchronize()
        matmul_tunable.launch(*later)
    torch.cuda.synchronize()
    return {
        "during": during,
        "after": searched,
        "failures": failures,
        "value": value.tolist()[0],
        "right": [right(matmul_tunable, args), right(matmul_tunable, later)],
    }


# First launches ---------------------------------------------------------------------------------------------


def first_launches() -> dict[str, Any]:
    """Milliseconds of the first launch of each kernel, waited for, with no compiler."""
    without_compiler()
    calls = [
        (tunable, tunable.make_args(tunable.typical_problems[3], "cuda:0", 1))
        for tunable in (rms_norm_tunable, matmul_tunable, rope_tunable)
    ]
    other = rms_norm_tunable.make_args(Problem({"dtype": "bfloat16", "rows": 63, "cols": 4096}), "cuda:0", 1)
    calls.append((rms_norm_tunable, other))  # another signature of a kernel that was launched before
    torch.cuda.synchronize()
    spent = []
    for tunable, args in calls:
        started = time.perf_counter()
        tunable.launch(*args)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - started) * 1e3)
    return {"ms": spent, "right": [right(*calls[0]), right(*calls[1]), right(*calls[3])]}


def given_config() -> dict[str, Any]:
    """Launches that name their config, each config twice; the second asks nothing."""
    args = rms_norm_tunable.make_args(Problem({"dtype": "bfloat16", "rows": 64, "cols": 4096}), "cuda:0", 1)
    rms_norm_tunable.launch(*args)
    names = rms_norm_tunable.launch.__globals__
    slow, asked, rights = names["slow"], [], []
    names["slow"] = lambda *given: asked.append(given[1]) or slow(*given)
    arch, problem = Arch(*torch.cuda.get_device_capability()), rms_norm_tunable.problem_of(*args)
    configs = rms_norm_tunable.candidates(arch, problem)[:6]
    for config in configs * 2:
        args[2].zero_()
        rms_norm_tunable.launch(*args, config=config)
        torch.cuda.synchronize()
        rights.append(right(rms_norm_tunable, args))
    return {"asked": len(asked), "configs": len(configs), "right": all(rights)}


def odd_strides() -> dict[str, Any]:
    """Without a compiler, arrays that no exact cubin fits."""
    without_compiler()
    wide = torch.randn(33, 4099, device="cuda", dtype=torch.bfloat16)
    args = (wide[:, 3:], torch.randn(4096, device="cuda").bfloat16(), torch.empty_like(wide)[:, 1:4097], 1e-6)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rms_norm_tunable.launch(*args)
    torch.cuda.synchronize()
    return {"right": right(rms_norm_tunable, args), "told": [str(one.message) for one in told]}


def live_search() -> dict[str, Any]:
    """Milliseconds of misses that are searched over prebuilt cubins."""
    without_compiler()
    matmul_tunable.launch(*made(matmul_tunable, HIT))
    calls = [made(matmul_tunable, values) for values in MISSES]
    torch.cuda.synchronize()
    spent = []
    with searches() as searched:
        for args in calls:
            started = time.perf_counter()
            matmul_tunable.launch(*args)
            torch.cuda.synchronize()
            spent.append((time.perf_counter() - started) * 1e3)
    return {
        "ms": spent,
        "configs": searched,
        "sources": [source_of(matmul_tunable, values) for values in MISSES],
        "right": [right(matmul_tunable, args) for args in calls],
    }


def untuned() -> dict[str, Any]:
    """A miss of a kernel without any table, searched by a child of this process."""
    values = {"dtype": "bfloat16", "M": 64, "N": 1024}
    args = made(scale, values)
    torch.cuda.synchronize()
    with searches() as searched:
        scale.launch(*args)
    torch.cuda.synchronize()
    return {"source": source_of(scale, values), "searched": searched, "right": right(scale, args)}


def broken() -> dict[str, Any]:
    """A miss whose candidates fault, hang and compute wrong results, and then another one of its bucket."""
    spent, calls = [], [made(add_one, {"n": n}) for n in (65536, 65280)]
    torch.cuda.synchronize()
    for args in calls:
        started = time.perf_counter()
        add_one.launch(*args)
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    config = next(iter(dispatcher_of(add_one)._plans.values())).choice.config
    return {
        "mode": config["mode"], "seconds": spent, "right": [right(add_one, args) for args in calls],
        "source": source_of(add_one, {"n": 65536}),
    }  # fmt: skip


# Processes and threads --------------------------------------------------------------------------------------


def forked() -> dict[str, Any]:
    """Children forked before CUDA is touched launch; then the parent does."""

    def works() -> bool:
        args = made(rms_norm_tunable, {"dtype": "bfloat16", "rows": 64, "cols": 4096})
        rms_norm_tunable.launch(*args)
        torch.cuda.synchronize()
        return right(rms_norm_tunable, args)

    assert not torch.cuda.is_initialized()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if works() else 2
            finally:
                os._exit(code)
        children.append(child)
    return {"children": [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children], "parent": works()}


def threads() -> dict[str, Any]:
    """Many threads launch and resolve at once, one of them started later."""
    failures: list[str] = []
    wrong: list[int] = []

    def work(seed: int) -> None:
        try:
            pick = random.Random(seed)
            for _ in range(20):
                rows = pick.randrange(1, 600)
                args = made(rms_norm_tunable, {"dtype": "bfloat16", "rows": rows, "cols": 4096})
                rms_norm_tunable.launch(*args)
                torch.cuda.current_stream().synchronize()
                if not right(rms_norm_tunable, args):
                    wrong.append(rows)
        except BaseException as error:
            failures.append(repr(error))

    started = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in started:
        thread.start()
    time.sleep(0.05)
    started.append(threading.Thread(target=work, args=(99,)))
    started[-1].start()
    for thread in started:
        thread.join()
    return {"failures": failures, "wrong": wrong}


# Two GPUs ---------------------------------------------------------------------------------------------------


def two_gpus() -> dict[str, Any]:
    """Each GPU's tensors on its default stream while the other one is current; also from a fresh thread."""
    results: list[bool] = []
    failures: list[str] = []

    def launch_on(device: int, current: int) -> None:
        try:
            values = {"dtype": "bfloat16", "rows": 64 + device, "cols": 4096}
            args = made(rms_norm_tunable, values, device)
            torch.cuda.synchronize(device)
            torch.cuda.set_device(current)
            for _ in range(2):  # the slow path, and the memo
                args[2].fill_(float("nan"))
                torch.cuda.synchronize(device)
                rms_norm_tunable.launch(*args)
                torch.cuda.synchronize(device)
                results.append(right(rms_norm_tunable, args) and torch.cuda.current_device() == current)
        except BaseException as error:
            failures.append(repr(error))

    for device, current in ((1, 0), (0, 1), (1, 0)):
        launch_on(device, current)
    fresh = threading.Thread(target=launch_on, args=(1, 0))
    fresh.start()
    fresh.join()
    primed = aot_tune.prime(rms_norm_tunable, device="cuda:1").loaded
    return {"right": results, "failures": failures, "primed": primed}


def rank(number: str, ranks: str, rendezvous: str) -> dict[str, Any]:
    """One of several ranks with NCCL: what it chooses for random problems, gathered from all."""
    torch.cuda.set_device(int(number))
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=int(number), world_size=int(ranks)
    )
    pick = random.Random(5)
    chosen: list[str] = []
    with searches() as searched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            values = {"dtype": "bfloat16", "M": pick.randrange(1, 3000), "N": pick.choice([512, 4096, 6144]),
                      "K": pick.choice([256, 1024, 4096])}  # fmt: skip
            args = made(matmul_tunable, values, int(number))
            matmul_tunable.launch(*args)
            plans = dispatcher_of(matmul_tunable)._plans
            chosen.append(next(str(p.choice.config) for k, p in plans.items() if k[1] == Problem(values)))
    gathered: list[Any] = [None] * int(ranks)
    torch.distributed.all_gather_object(gathered, chosen)
    torch.distributed.destroy_process_group()
    equal = all(theirs == chosen for theirs in gathered)
    return {"equal": equal, "different": len(set(chosen)), "searched": searched}


def host_function() -> dict[str, Any]:
    """The host function, which users call."""
    x, weight = torch.randn(3, 5, 4096, device="cuda").half(), torch.randn(4096, device="cuda").half()
    out = rms_norm(x, weight)
    wanted = torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-6)
    return {"off": float((out.float() - wanted).abs().max())}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    one.__name__: one
    for one in (capture, capture_elsewhere, first_launches, given_config, odd_strides, live_search, untuned,
                broken, forked, threads, two_gpus, rank, host_function)
}  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:])))
