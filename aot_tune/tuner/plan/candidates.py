"""Plan a sweep's candidates and compilations on one arch. Compiles and runs nothing."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aot_tune.declare.declaration import Work
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.declare.kernel_source.block_counts import BlockCounts, NotCountedError, count_blocks
from aot_tune.declare.mistakes import is_grid
from aot_tune.errors import AotTuneError, CutileError, DeclarationError, LaunchError, TuneError
from aot_tune.nvidia import cutile
from aot_tune.tables.table import Table
from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.outcome import Failure
from aot_tune.tuner.plan.model import Launched
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.parts import flat
from aot_tune.values.problem import Problem
from aot_tune.values.text import described

NO_COMPILER = (
    "no cuTile compiler (tileiras) is installed here; install the tuner's parts: pip install 'aot-tune[tune]'"
)
"""The message where nothing can be compiled."""

_SEED = 0
"""The seed of `make_args` on device "meta", where nothing is drawn."""


@dataclass(frozen=True, kw_only=True)
class ProblemPlan:
    """One problem and the configs that may run it."""

    problem: Problem
    """The problem."""

    default: Config
    """The problem's default; the first candidate."""

    incumbent: Config | None
    """The config of the present table's entry, where it may still run; the second candidate."""

    candidates: tuple[Config, ...]
    """All configs that pass `legal` and the device's limits, each once."""

    refused: tuple[Failure, ...]
    """The other configs of the search space: a rule refuses them (``legal``), or ``grid_fn`` fails for them
    (``launch``)."""

    jobs: Mapping[Config, CompileJob]
    """The compilation of each candidate; many candidates share a compilation."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """All problems of one kernel on one arch."""

    kernel: DeviceKernel
    """The kernel on its arch and device."""

    problems: tuple[ProblemPlan, ...]
    """One plan for each problem, in the order of the request."""

    @property
    def jobs(self) -> tuple[CompileJob, ...]:
        """Every compilation once, the first problem's compilations first."""
        jobs = {job.key: job for problem in self.problems for job in problem.jobs.values()}
        return tuple(jobs.values())


class DeviceKernel:
    """A declaration on one arch and device. Caches expensive results.

    Args:
        kernel: The declaration and its module.
        arch: The target.
        device: The GPU whose limits and counts apply; the arch's reference device when None.

    Raises:
        TuneError: There is no compiler here.
    """

    def __init__(self, kernel: FoundKernel, arch: Arch, device: Device | None = None) -> None:
        self.declared, self.tunable, self.arch = kernel, kernel.tunable, arch
        self.device = device or Device.reference(arch)
        compiler = cutile.compiler_version()
        if compiler is None:
            raise TuneError(NO_COMPILER)
        self._versions = (source_hash(self.tunable), cutile.version(), compiler)
        self._args: dict[tuple[Problem, int], tuple[Any, ...]] = {}
        self._counted: dict[tuple[Problem, Config], BlockCounts | NotCountedError] = {}
        self._defaults: dict[Problem, Config] = {}
        self._signatures: dict[Hashable, str] = {}

    def job(self, problem: Problem, config: Config) -> CompileJob:
        """Return the compilation of a config on a problem."""
        args = self.kernel_args(problem, config)
        described = (config.kernel, *(_described(arg) for arg in args))
        if described not in self._signatures:  # 0.7 ms each, and hints alone do not change it
            try:
                self._signatures[described] = cutile.signature_of(self.tunable.kernel_of(config), args)
            except CutileError as error:
                raise DeclarationError(
                    f"{self.tunable.name}: args_fn for {config} on {problem}: {error}"
                ) from error
        signature = self._signatures[described]
        parts = [*self._versions, str(self.arch), signature, sorted(config.hints.items())]
        return CompileJob(
            key=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
            module=self.declared.module,
            name=self.tunable.name,
            kernel=config.kernel,
            signature=signature,
            hints=dict(config.hints),
            arch=self.arch,
        )

    def launch_key(self, problem: Problem, config: Config) -> Hashable:
        """Return a launch without its machine code: the grid and the arguments except constants."""
        constants = set(self.tunable.constants_of(config.kernel))
        names = [name for name, _ in cutile.parameters(self.tunable.kernel_of(config))]
        passed = zip(names, self.kernel_args(problem, config), strict=True)
        return (
            self.grid(problem, config),
            tuple(_described(value) for name, value in passed if name not in constants),
        )

    def launched(self, problem: Problem, config: Config) -> Launched:
        """Return the model's facts of a launch; without `work` only the memory that it moves."""
        tunable = self.tunable
        named = zip(tunable.parameters, self.launch_args(problem), strict=False)
        # Tensors through which blocks communicate (`reset`) stay in the L2 cache and are far smaller than it.
        moved = flat([arg for name, arg in named if name not in tunable.reset])
        tensors = {id(arg): arg for arg in moved if hasattr(arg, "element_size")}
        memory_bytes = float(sum(map(_bytes, tensors.values())))
        if tunable.work is None:
            return Launched(work=Work(), tiles=1, blocks=1, ctas=1, memory_bytes=memory_bytes)
        blocks = math.prod(self.grid(problem, config))
        return Launched(
            work=self._called("work", problem, config),
            tiles=self._called("tiles", problem, config) if tunable.tiles is not None else blocks,
            blocks=blocks,
            ctas=config.hints.get("num_ctas", 1),
            memory_bytes=memory_bytes,
        )

    def derived(self, problem: Problem, config: Config) -> Launched:
        """Return the facts of a kernel without `work`, derived from the sizes of its arguments.

        Each block is assumed to load and to store an equal share of the kernel's inputs and outputs. That is
        wrong for a product, whose blocks read the same operands: see `counted`.
        """
        tunable, launched = self.tunable, self.launched(problem, config)
        named = dict(zip(tunable.parameters, self.launch_args(problem), strict=False))
        written = [named[name] for name in (*tunable.output_names, *tunable.inplace)]
        store_bytes = float(sum(_bytes(arg) for arg in flat(written)))
        produced = sum(_bytes(arg) for arg in flat([named[name] for name in tunable.output_names]))
        blocks = math.prod(self.grid(problem, config))
        tiles = self._called("tiles", problem, config) if tunable.tiles is not None else blocks
        return Launched(
            work=Work(
                load_bytes=max(launched.memory_bytes - produced, 0.0) / tiles, store_bytes=store_bytes / tiles
            ),
            tiles=tiles,
            blocks=blocks,
            ctas=config.hints.get("num_ctas", 1),
            memory_bytes=launched.memory_bytes,
        )

    def counted(self, problem: Problem, config: Config) -> Launched:
        """Return the facts of a kernel without `work`, by following the code of a few blocks.

        Raises:
            NotCountedError: The code needs values that are known only at a launch.
        """
        if (problem, config) not in self._counted:
            kernel, args = self.tunable.kernel_of(config), self.kernel_args(problem, config)
            try:
                self._counted[problem, config] = count_blocks(kernel, args, self.grid(problem, config))
            except NotCountedError as error:
                self._counted[problem, config] = error
        counts = self._counted[problem, config]
        if isinstance(counts, NotCountedError):
            raise counts
        launched, blocks = self.launched(problem, config), math.prod(self.grid(problem, config))
        tiles = self._called("tiles", problem, config) if self.tunable.tiles is not None else blocks
        per_tile = blocks / tiles
        steps = max(1, round(counts.steps * per_tile))
        return Launched(
            work=Work(
                steps=steps,
                flops=counts.flops * per_tile / steps,
                load_bytes=counts.load_bytes * per_tile / steps,
                store_bytes=counts.store_bytes * per_tile,
            ),
            tiles=tiles,
            blocks=blocks,
            ctas=config.hints.get("num_ctas", 1),
            memory_bytes=launched.memory_bytes,
        )

    def grid(self, problem: Problem, config: Config) -> tuple[int, ...]:
        """Return the grid of a launch on this device."""
        return self.tunable.grid(config, self.device, problem)

    def default(self, problem: Problem) -> Config:
        """Return the declared default, computed once so that all steps use the same config."""
        if problem not in self._defaults:
            with self._named("default", problem):
                self._defaults[problem] = self.tunable.default_config(self.arch, problem)
        return self._defaults[problem]

    def space(self, problem: Problem) -> tuple[Config, ...]:
        """Return the search space."""
        with self._named("search_space", problem):
            return self.tunable.space(self.arch, problem)

    @contextmanager
    def _named(self, name: str, problem: Problem) -> Iterator[None]:
        """Turn an error of the author's function into a DeclarationError: it may raise at some sizes only."""
        try:
            yield
        except AotTuneError:
            raise
        except Exception as error:
            raised = described(error, getattr(self.tunable, name))
            message = f"{self.tunable.name}: {name} for {problem} on {self.arch} raised {raised}"
            raise DeclarationError(message) from error

    def failure(self, problem: Problem, config: Config) -> Failure | None:
        """Return why a config may not run a problem on this device: a rule refuses it, or its grid fails."""
        with self._named("legal", problem):
            reason = self.tunable.refusal(config, self.arch, problem)
        reason = reason or self.device.refusal(config.hints.get("occupancy", 1))
        if reason is not None:
            return Failure(config=config, stage="legal", message=reason)
        try:
            grid = self.grid(problem, config)
        except LaunchError as error:  # this GPU is smaller than other GPUs of the arch
            return Failure(config=config, stage="legal", message=str(error))
        except Exception as error:  # the author's code; it succeeded for the default
            raised = described(error, self.tunable.grid_fn)
            return Failure(config=config, stage="launch", message=f"grid_fn raised {raised}")
        if not is_grid(grid):
            message = f"grid_fn returned {grid!r:.200}; return one to three block counts, each 1 or more"
            return Failure(config=config, stage="launch", message=message)
        return None

    def kernel_args(self, problem: Problem, config: Config, seed: int = _SEED) -> tuple[Any, ...]:
        """Return the kernel's arguments as tensors without storage.

        Raises:
            DeclarationError: `args_fn` raises.
        """
        try:
            return tuple(self.tunable.args_fn_on(self.device)(config, *self.launch_args(problem, seed)))
        except AotTuneError:
            raise
        except Exception as error:  # the author's code: any error of it means a wrong declaration
            raise DeclarationError(
                f"{self.tunable.name}: args_fn for {config} on {problem} raised "
                f"{described(error, self.tunable.args_fn)}"
            ) from error

    def _called(self, name: str, problem: Problem, config: Config) -> Any:
        """Call `work` or `tiles` and check the result; so far only the default's was checked."""
        function = getattr(self.tunable, name)
        where = f"{self.tunable.name}: {name} for {config} on {problem}"
        try:
            result = function(config, problem)
        except Exception as error:
            raise DeclarationError(f"{where} raised {described(error, function)}") from error
        expected = Work if name == "work" else int
        if not isinstance(result, expected):
            raise DeclarationError(
                f"{where} returned {result!r:.200}; return {expected.__name__} for all configs"
            )
        return result

    def launch_args(self, problem: Problem, seed: int = _SEED) -> tuple[Any, ...]:
        """Return the launch arguments that `make_args` returns on device "meta".

        Raises:
            DeclarationError: `make_args` raises.
        """
        if (problem, seed) not in self._args:
            try:
                self._args[problem, seed] = tuple(self.tunable.make_args(problem, "meta", seed))
            except Exception as error:
                raise DeclarationError(
                    f"{self.tunable.name}: make_args({problem}, 'meta', {seed}) raised "
                    f"{type(error).__name__}: {error}; it must take device 'meta', as aot_tune.inputs does"
                ) from error
        return self._args[problem, seed]


def plan(
    kernel: FoundKernel,
    arch: Arch,
    problems: Sequence[Problem],
    *,
    incumbent: Table | None = None,
    device: Device | None = None,
) -> SweepPlan:
    """Plan the candidates of each problem and their compilations.

    Args:
        kernel: The kernel and its module.
        arch: The target.
        problems: The problems, as a rule at their buckets' edges.
        incumbent: The present table, whose entries' configs are candidates too.
        device: The GPU to tune for; the arch's reference device when None.

    Raises:
        TuneError: There is no compiler here, or no config of a problem may run.
        DeclarationError: A function of the declaration raises; the message names it.
    """
    here = DeviceKernel(kernel, arch, device)
    return SweepPlan(kernel=here, problems=tuple(_planned(here, problem, incumbent) for problem in problems))


def plan_only(kernel: DeviceKernel, problem: Problem, configs: Sequence[Config]) -> ProblemPlan:
    """Plan one problem with its default and those of some configs that may run."""
    default, space = kernel.default(problem), set(kernel.space(problem))
    wanted = dict.fromkeys([default, *(config for config in configs if config in space)])
    admitted = tuple(config for config in wanted if kernel.failure(problem, config) is None)
    return ProblemPlan(
        problem=problem,
        default=default,
        incumbent=None,
        candidates=admitted,
        refused=(),
        jobs={config: kernel.job(problem, config) for config in admitted},
    )


def _planned(kernel: DeviceKernel, problem: Problem, table: Table | None) -> ProblemPlan:
    tunable, arch = kernel.tunable, kernel.arch
    default = kernel.default(problem)
    space = kernel.space(problem)
    entry = table.entry(tunable.bucket_of(problem)) if table is not None else None
    kept = [entry.config] if entry is not None and entry.config in space else []
    refused: dict[Config, Failure] = {}
    admitted: list[Config] = []
    for config in dict.fromkeys([default, *kept, *space]):
        failure = kernel.failure(problem, config)
        if failure is None:
            admitted.append(config)
        else:
            refused[config] = failure
    too_small = default in refused and refused[default].stage == "legal"
    if too_small and admitted and tunable.refusal(default, arch, problem) is None:
        default = admitted[0]  # as a launch on this GPU would take
    if default in refused:
        raise DeclarationError(
            f"{tunable.name}: the default {default} may not run {problem} on {arch}: "
            f"{refused[default].message}; declare another default there"
        )
    return ProblemPlan(
        problem=problem,
        default=default,
        incumbent=kept[0] if kept and kept[0] not in refused else None,
        candidates=tuple(admitted),
        refused=tuple(refused.values()),
        jobs={config: kernel.job(problem, config) for config in admitted},
    )


def _bytes(value: Any) -> int:
    return int(value.numel() * value.element_size()) if hasattr(value, "element_size") else 0


def _described(value: Any) -> Hashable:
    """Return a runtime argument's properties that a launch reads, as one value."""
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if hasattr(value, "stride") and hasattr(value, "dtype"):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return (type(value).__name__, repr(value))
