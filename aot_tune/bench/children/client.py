"""Time the requests of a real client in a fresh process, for `serving`: prints one line of JSON.

The client is a transformers Llama with four layers of the 8B's sizes and random weights. As ``aot_tune`` its
RMS norms, linear layers, MLPs and attention run the shipped kernels; as ``torch`` it runs as it comes.
"""

from __future__ import annotations

import time

_STARTED = time.time_ns(), time.process_time_ns()

import json  # noqa: E402 - imports are timed
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable  # noqa: E402
from importlib import import_module  # noqa: E402
from typing import Any  # noqa: E402

SPAWNED = "BENCH_SPAWNED_NS"
"""Variable with the time at which the parent started this process, nanoseconds since the epoch."""

KERNELS = ("attention", "gate_up_swiglu", "linear", "rms_norm")
"""Kernels that the client launches."""

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 4, "vocab_size": 128256,
}  # fmt: skip

_LENGTHS = {"first": 300, "next": 256}
"""Tokens of the first request, and of the next, of another length."""

_STEADY = 20
"""Later requests of each length."""

_APART = 0.05
"""Largest difference between the logits of both ways over the largest logit: bfloat16, four layers."""

Ms = tuple[float, float]
"""Milliseconds of the wall's clock and of the process's CPU."""


def milliseconds(call: Callable[[], object]) -> Ms:
    """Return the time of a call."""
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    call()
    return (time.perf_counter_ns() - wall) / 1e6, (time.process_time_ns() - cpu) / 1e6


class Profile:
    """Milliseconds of parts of a process, each without the parts that ran inside it."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def measure(self, part: str, holder: Any, name: str) -> None:
        """Count the time of a function of a module or class to a part."""
        function = getattr(holder, name)
        self.ms[part] += 0.0

        def timed(*args: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter_ns()
            try:
                return function(*args, **named)
            finally:
                whole = (time.perf_counter_ns() - started) / 1e6
                self.ms[part] += whole - self._inside.pop()
                self._inside[-1] += whole

        setattr(holder, name, timed)

    def measure_serving(self) -> None:
        """Count the parts of first launches, which ``serve/INSIDE.md`` lists, and of imports that follow."""
        from aot_tune.serve import kernels, loader
        from aot_tune.serve.launch import dispatch
        from aot_tune.serve.search.live import LiveSearch

        self.measure("tables", loader, "load")
        self.measure("hinted kernels", kernels.HintedKernels, "of")
        for name in ("check_arguments", "follow_problem", "check_problem", "follow_args"):
            self.measure("arguments", dispatch, name)
        self.measure("look-ups", dispatch, "resolve")
        self.measure("searches", LiveSearch, "winner")
        self._measure_cubins()
        self.measure("cuTile and driver", dispatch.Dispatcher, "_fire")
        self.measure("memo", dispatch.Dispatcher, "_remember")

    def measure_replay(self) -> None:
        """Count what is ours of a library's first call that is replayed."""
        from aot_tune.replay.answer import cubins, records, searches

        self.measure("answers", searches, "answer")
        self.measure("tables", records, "read_recorded")
        self.measure("hashes of code", records, "hash_now")
        self.measure("hashes of code", cubins, "recorded_code")
        self._measure_cubins()

    def _measure_cubins(self) -> None:
        """Count what is ours of loading a cubin."""
        from aot_tune.cubins.archive import Section
        from aot_tune.serve import kernels

        for name in ("sections", "find"):
            self.measure("archives", kernels.Cubins, name)
        self.measure("decompression", Section, "cubin")
        self.measure("the driver's consent", kernels, "_refusal")

    def taken(self) -> dict[str, float]:
        """Return the milliseconds of each part since the last call."""
        ms = {part: round(ms, 3) for part, ms in self.ms.items()}
        self.ms.update(dict.fromkeys(self.ms, 0.0))
        return ms


def replace_layers(model: Any) -> None:
    """Let a Llama's RMS norms, MLPs, linear layers and attention run the shipped kernels."""
    import torch

    from aot_tune.kernels import attention, gate_up_swiglu, linear, rms_norm

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scaling), None

    def norm(module: Any) -> Callable[[Any], Any]:
        return lambda x: rms_norm(x, module.weight, module.variance_epsilon)

    def mlp(module: Any) -> Callable[[Any], Any]:
        gate_up = torch.cat([module.gate_proj.weight, module.up_proj.weight])
        down = module.down_proj.weight
        return lambda x: linear(gate_up_swiglu(x.flatten(0, -2), gate_up), down).view(x.shape)

    def product(module: Any) -> Callable[[Any], Any]:
        return lambda x: linear(x, module.weight, module.bias)

    makers = {"LlamaRMSNorm": norm, "LlamaMLP": mlp, "Linear": product}
    for module in model.modules():
        if maker := makers.get(type(module).__name__):
            module.forward = maker(module)
    import_module("transformers").AttentionInterface.register("aot_tune", attend)
    model.config._attn_implementation = "aot_tune"


def restore_layers(model: Any) -> None:
    """Undo `replace_layers`."""
    for module in model.modules():
        vars(module).pop("forward", None)
    model.config._attn_implementation = "sdpa"


def measured(way: str, device: str = "cuda", sizes: dict[str, int] = LLAMA) -> dict[str, Any]:
    """Return milliseconds of imports, of two requests of other lengths, of later ones, and the parts.

    Args:
        way: ``aot_tune`` or ``torch``.
        device: The model's device.
        sizes: The model's sizes.
    """
    figures: dict[str, Any] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        figures[f"{name}_ms"], figures[f"{name}_cpu_ms"] = milliseconds(call)

    def import_torch() -> None:
        import_module("transformers.models.llama.modeling_llama")

    def import_kernels() -> None:
        kernels = import_module("aot_tune.kernels")
        for name in KERNELS:
            getattr(kernels, name)

    ours, profile = way == "aot_tune", Profile()
    timed("torch_import", import_torch)
    if ours:
        timed("cutile_import", lambda: import_module("cuda.tile"))
        timed("serve_import", profile.measure_serving)
        timed("import", import_kernels)
        figures |= {f"import: {part}_ms": ms for part, ms in profile.taken().items()}

    import torch

    transformers = import_module("transformers")
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.LlamaConfig(**sizes, use_cache=False)
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()

    def logits(tokens: int) -> Any:
        answer = model(torch.arange(tokens, device=device)[None] % sizes["vocab_size"]).logits
        if answer.is_cuda:
            torch.cuda.synchronize()
        return answer

    with torch.inference_mode():
        if ours:
            replace_layers(model)
        for name, tokens in _LENGTHS.items():
            timed(name, lambda tokens=tokens: logits(tokens))  # type: ignore[misc]
            if name == "first":
                figures |= {f"first: {part}_ms": ms for part, ms in profile.ms.items()}
        for tokens in _LENGTHS.values():
            taken = [milliseconds(lambda tokens=tokens: logits(tokens)) for _ in range(_STEADY)]  # type: ignore[misc]
            figures[f"steady, {tokens} tokens_ms"] = statistics.median(wall for wall, _ in taken)
        if ours:
            answer = logits(tokens)
            restore_layers(model)
            plain = logits(tokens)
            figures["right"] = bool((answer - plain).abs().max() < _APART * plain.abs().max())
    return figures


if __name__ == "__main__":
    spawned_at = int(os.environ.get(SPAWNED, _STARTED[0]))
    start = {"start_ms": (_STARTED[0] - spawned_at) / 1e6, "start_cpu_ms": _STARTED[1] / 1e6}
    shown = {
        name: value if type(value) is bool else round(value, 2)
        for name, value in measured(sys.argv[1]).items()
    }
    print(json.dumps(start | shown))
