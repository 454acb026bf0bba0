"""The real backend: one kernel on one GPU, through torch and cuda.tile.

Only a measuring worker imports this module.

Times come from `cuda.tile.tune.exhaustive_search` on one config at a time, so that a fault belongs to that
config. It launches three warm-ups (after at least `WARM_LAUNCHES` earlier launches, those of the verification
included) and takes five samples or more, `MOST_SAMPLES` at most, until their 95 % interval is within 1 % or
0.5 us. It returns a plain mean; `aot_tune.tuner.measure.rounds` handles outliers. Before each sample the L2
cache is filled by `aot_tune.tuner.measure.worker.clock`, which is also the clock of configs that are timed in
turn (`aot_tune.tuner.measure.worker.runner`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.tile import launch as ct_launch

from aot_tune.declare.discovery import load
from aot_tune.errors import TuneError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import has_symbol
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables.states import State
from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.measure.worker.clock import EventRound
from aot_tune.tuner.measure.worker.gpu_state import GpuMonitor, GpuState
from aot_tune.tuner.measure.worker.verify import Case
from aot_tune.tuner.outcome import Measurement, Stage
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

MOST_SAMPLES = 25
"""Most samples of one search. Under its power cap a GPU never settles within 1 %: without a limit one config
of a large matmul took 1655 samples and heated the GPU, so that the next config was timed 20 % too slow
(H200). Finals take several rounds instead."""

WARM_LAUNCHES = 2
"""Least launches of a config on a problem before its first search; with the search's own three, five
warm-ups."""

_BUSY_SIDE = 4096
"""Rows and columns of the square matrices whose products keep the GPU busy, 0.2 ms each on an H200."""


class GpuBackend:
    """A `Backend` on a GPU.

    Args:
        module: Module that declares the kernel.
        name: The kernel's declared name.
        gpu_index: As torch counts: ``cuda:<index>``.
    """

    def __init__(self, *, module: str, name: str, gpu_index: int) -> None:
        self._torch_device = torch.device("cuda", gpu_index)
        cutile.limit_samples(MOST_SAMPLES)
        gpus = visible_gpus() or ()
        self._monitor = GpuMonitor(gpus[gpu_index].uuid if gpu_index < len(gpus) else "")
        before = self._monitor.processes()
        torch.cuda.set_device(self._torch_device)
        torch.zeros(1, device=self._torch_device)  # creates the context
        torch.cuda.synchronize()
        # In a container NVML reports ids of another namespace: the id that appeared with our context is ours.
        after = self._monitor.processes()
        self._ours = frozenset() if before is None or after is None else after - before
        # The integer, because cuTile would read it from torch's object at each launch.
        self._stream = torch.cuda.current_stream(self._torch_device).cuda_stream
        self._device = Device.of(torch.cuda.get_device_properties(self._torch_device))
        self._round = EventRound()  # now, so that no config is blamed when memory is too small for its buffer
        self._factors = torch.randn((2, _BUSY_SIDE, _BUSY_SIDE), device=self._torch_device).bfloat16()
        self._product = torch.empty_like(self._factors[0])
        # Never emptied: cuTile unloads the module of a collected kernel, which a launch under way may still
        # need.
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._launches: Counter[Config] = Counter()
        self.turn_to(module=module, name=name, gpu_index=gpu_index)

    def turn_to(self, *, module: str, name: str, gpu_index: int) -> None:
        """Measure another kernel from here on; the GPU stays the same."""
        self._problem: Problem | None = None
        self._cases: list[Case] = []
        self._results: list[dict[str, torch.Tensor]] = []
        self._written: list[Case] = []
        """The cases of the last `time` or `sample`."""
        self._tunable = load(module, name)
        self._launcher = cutile.launcher(
            programmatic_dependent_launch=self._tunable.programmatic_dependent_launch, arch=self._device.arch
        )

    def device(self) -> Device:
        """Return the GPU as grids are computed for it."""
        return self._device

    def state(self) -> GpuState:
        """Return the present clocks, and the reasons why they are not higher."""
        return self._monitor.read()

    def disturbance(self) -> str | None:
        """Return what spoils samples now: throttling or another process on the GPU; None without either."""
        held_back = self._monitor.throttled()
        if held_back:
            return f"throttled: {held_back}"
        others = (self._monitor.processes() or frozenset()) - self._ours
        return f"another process on the GPU: {', '.join(map(str, sorted(others)))}" if others else None

    def canary(self) -> None:
        """Compute a known sum with torch, because a declared kernel might itself break the GPU."""
        numbers = torch.arange(1 << 20, device=self._torch_device, dtype=torch.float64)
        total = float((numbers * 2 + 1).sum())
        if total != float(1 << 40):  # the sum of the first n odd numbers is n squared
            raise TuneError(f"the GPU adds wrongly: {total:g} in place of {float(1 << 40):g}")

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        """Make this problem's arguments and references."""
        self._cases, self._results, self._problem = [], [], problem
        self._cases = [Case.make(self._tunable, problem, self._torch_device, seed) for seed in seeds]
        torch.cuda.synchronize()
        self._launches.clear()

    def verify(self, trial: Trial) -> str | None:
        """Launch once per seed on poisoned outputs and compare; return what is wrong, or None."""
        self._results = []
        for case in self._cases:
            self._launch_prepared(trial, case)
            wrong = case.check()
            if wrong:
                return wrong
        return None

    def again(self, trial: Trial, number: int) -> str | None:
        """Launch a verified config once more, on each seed in turn; return what is wrong, or None."""
        if not self._results:
            self._results = [case.results() for case in self._cases]
        place = number % len(self._cases)
        self._launch_prepared(trial, self._cases[place])
        return self._cases[place].repeated(self._results[place])

    def _launch_prepared(self, trial: Trial, case: Case) -> None:
        case.prepare()
        self._launch(trial, case)
        torch.cuda.synchronize()

    def prepare(self) -> None:
        """Poison the outputs before a `sample` whose output `check` compares."""
        for case in self._cases:
            case.prepare()

    def check(self) -> str | None:
        """Compare what the last `time` or `sample` wrote; return what is wrong, or None."""
        torch.cuda.synchronize()
        return next(filter(None, (case.check() for case in self._written)), None)

    def damage(self) -> str | None:
        """Return which expected value, saved copy or input changed; None when none did."""
        torch.cuda.synchronize()
        return next(filter(None, (case.damage() for case in self._cases)), None)

    def time(self, trial: Trial) -> Measurement:
        """Time a config on the first seed's arguments, renewed untimed before each launch."""
        case = self._cases[0]
        kernel = self._kernel(trial)
        self._results, self._written = [], [case]
        case.prepare()  # poisoned: a launch that writes nothing must not pass with an earlier launch's output
        while self._launches[trial.config] < WARM_LAUNCHES:
            case.renew()
            self._launch(trial, case)
        arguments = self._arguments(trial.config, case)

        def renewed(_: Config) -> tuple[Any, ...]:
            case.renew()  # on the stream of the launch, so that the launch comes after it
            self._round.flush()  # reads; cuTile's flush writes, and a kernel waits while that goes to memory
            return arguments

        result = cutile.search(
            [trial.config],
            self._stream,
            kernel=kernel,
            grid_of=self._grid,
            args_of=renewed,
            flush_l2=False,
        )
        return Measurement(
            config=trial.config,
            mean_us=result.best.mean_us,
            error_margin_us=result.best.error_margin_us,
            num_samples=result.best.num_samples,
        )

    def busy(self, seconds: float) -> None:
        """Let the GPU multiply large matrices for that many seconds; it is idle when this returns."""
        until = time.monotonic() + seconds
        while True:
            torch.mm(*self._factors, out=self._product)
            torch.cuda.synchronize()
            if time.monotonic() >= until:
                return

    def sample(self, trial: Trial, state: State) -> float:
        """Time one launch on the first seed's renewed arguments; return microseconds.

        In a tight row two launches go before it, the second of them on another seed's arguments, as a layer
        follows another: the L2 cache holds what they have left in it.
        """
        kernel, grid = self._kernel(trial), self._grid(trial.config)

        def launch(case: Case) -> Callable[[], None]:
            arguments = self._arguments(trial.config, case)
            return lambda: ct_launch(self._stream, grid, kernel, arguments)

        case = self._cases[0]
        self._written = [case]
        if state == "tight":
            row = (case, self._cases[-1], case)
            self._written.append(self._cases[-1])
            return self._round.tight([(member.renew, launch(member)) for member in row])
        case.renew()
        [us] = self._round([launch(case)], written=state == "written")
        return us

    def healthy(self) -> bool:
        """Return whether the GPU's context is alive; after a fault every call fails."""
        try:
            torch.cuda.synchronize()
        except Exception:  # torch and the driver raise several types; each means a dead context
            return False
        return True

    def stage(self, error: Exception) -> Stage:
        """Return the stage at which a config failed with this error."""
        from cuda.tile import TileError

        if not self.healthy():
            return "fault"
        text = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "out_of_memory" in text:
            return "memory"
        return "compile" if isinstance(error, TileError) else "launch"

    def _launch(self, trial: Trial, case: Case) -> None:
        arguments = self._arguments(trial.config, case)
        self._launcher(self._stream, self._grid(trial.config), self._kernel(trial), arguments)
        self._launches[trial.config] += 1

    def _grid(self, config: Config) -> tuple[int, ...]:
        assert self._problem is not None
        return self._tunable.grid(config, self._device, self._problem)

    def _arguments(self, config: Config, case: Case) -> tuple[Any, ...]:
        return tuple(self._tunable.args_fn_on(self._device)(config, *case.args))

    def _kernel(self, trial: Trial) -> Any:
        hints = trial.config.hints
        # One cubin has one set of constants. Without a cubin, cuTile's own cache distinguishes constants.
        key = (self._tunable.name, trial.config.kernel, tuple(hints.items()), trial.cubin)
        if key not in self._kernels:
            cubin = trial.cubin
            self._kernels[key] = cutile.with_hints(
                self._tunable.kernel_of(trial.config),
                hints,
                lambda symbol, arch: _cubin_of(cubin, symbol) if cubin else None,
            )
        return self._kernels[key]


def _cubin_of(path: Path, symbol: str) -> cutile.Cubin | None:
    """Return the cubin at `path`; None where it is missing or lacks this symbol: cuTile then compiles."""
    try:
        cubin = path.read_bytes()
    except OSError:
        return None
    # A cubin that was compiled for other alignments holds another name.
    return cutile.Cubin(cubin, symbol) if has_symbol(cubin, symbol) else None
