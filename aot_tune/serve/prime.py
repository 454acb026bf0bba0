"""Load kernels onto a GPU before serving or graph capture, so that no launch has to load one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from aot_tune.cubins.archive import CubinKey
from aot_tune.cubins.size_classes import posed, representatives, smaller_of_class
from aot_tune.declare.declaration import Declaration, expanded
from aot_tune.errors import LaunchError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.serve.launch.checks import unfit
from aot_tune.serve.launch.dispatch import Dispatcher, Machine, dispatcher_of
from aot_tune.serve.rank import is_replaying, priming, set_primed
from aot_tune.serve.runtime import Runtime, runtime
from aot_tune.serve.workspace import for_all_posed
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of priming a kernel."""

    kernel: str
    """Name of the declaration."""

    done: int
    """Number of signatures loaded so far."""

    total: int
    """Number of signatures to load."""


@dataclass(frozen=True, kw_only=True)
class Primed:
    """Result of `prime`."""

    loaded: int
    """Number of signatures loaded, each counted once per set of hints of its launches."""

    compiled: int
    """Number of loaded signatures that had no cubin and were compiled."""

    plans: int
    """Number of problems whose first launch is now as fast as later ones."""

    seconds: float
    """Duration of priming, in seconds."""


def prime(
    *tunables: Declaration,
    problems: Mapping[str, Iterable[Mapping[str, object]]] | None = None,
    device: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Primed:
    """Load kernels onto a GPU, so that later launches of these shapes compile, load and read nothing.

    One small problem of each signature is launched on the current stream and waited for. Where `problems`
    does not name a kernel, every declared bucket of it is primed: each size in the bucket, with each config
    of the table. Afterwards the process makes no live search: a miss takes the nearest entry at any distance.

    Call it in the process that will serve, after a fork and after torch.distributed is initialised, and
    before the first capture. The current stream gets the workspace that the largest of these problems needs,
    and a stream that captures gets an equal one. The kernels loaded are those for the tensors that the
    declaration's `make_args` makes; for other strides or alignment, such as those of a transposed weight,
    launch once with them.

    A server whose kernels are all recorded names no declaration: nothing is loaded, and nothing is searched
    afterwards.

    Args:
        *tunables: The declarations; none is needed where recorded searches are replayed.
        problems: By kernel name, exactly the problems to prime, stated as in `typical`: a list, tuple or
            range as a value means each of its members.
        device: The GPU, as torch names it or its index; None for the current one. Call `prime` once per GPU.
        progress: Called after each signature that was loaded.

    Returns:
        The numbers of loaded signatures and plans, and the time.

    Raises:
        UsageError: There is no declaration and nothing is replayed, or `problems` names another kernel or an
            impossible problem.
        LaunchError: There is no GPU, or a capture is under way.
    """
    started = time.monotonic()
    here = runtime()
    number = _checked(tunables, problems or {}, device, here)
    set_primed(True)
    parts = [_Part(tunable, number, here) for tunable in tunables]
    loaded = compiled = plans = 0
    import torch

    with priming(), here.relaxed_capture(), here.entered(number):  # another thread may be capturing
        with for_all_posed(torch.device("cuda", number)):
            for part in parts:
                named = (problems or {}).get(part.tunable.name)
                plans += part.plan(
                    part.tunable.typical_problems if named is None else _named(part.tunable, named)
                )
                if named is None:
                    part.plan_buckets()
                compiled += part.compiles()
                for done in part.load():
                    loaded += 1
                    if progress is not None:
                        progress(Progress(kernel=part.tunable.name, done=done, total=len(part.wanted)))
        here.synchronize(number)
    return Primed(loaded=loaded, compiled=compiled, plans=plans, seconds=time.monotonic() - started)


class _Part:
    """Priming of a kernel."""

    def __init__(self, tunable: Declaration, number: int, here: Runtime) -> None:
        self.tunable = tunable
        self._number = number
        self._here = here
        self._dispatcher: Dispatcher = dispatcher_of(tunable)
        self._machine: Machine = self._dispatcher.machine(number, here)
        self.wanted: dict[CubinKey, tuple[Config, Problem, int]] = {}
        """Launches by the hints and signature that they load: config, smallest problem, seed of arguments."""

    def plan(self, problems: Sequence[Problem]) -> int:
        """Make the plans of problems and note the kernels to launch; return the number of plans."""
        for problem in problems:
            args_by_seed = posed(partial(_arguments, self.tunable, problem, "meta"))
            plan = self._dispatcher.prepare(self._number, args_by_seed[0], self._here)
            self._want(plan.choice.config, problem, args_by_seed)
        return len(problems)

    def plan_buckets(self) -> None:
        """Note the kernels of every size in the declared buckets, for the portfolio and the default."""
        arch = self._machine.device.arch
        tabled = [c for table in self._machine.index.tables.values() for c in table.portfolio]
        for bucket in self.tunable.buckets:
            for problem in representatives(self.tunable, bucket):
                args_by_seed = posed(partial(_arguments, self.tunable, problem, "meta"))
                default = self.tunable.default_config(arch, problem)
                chosen = self._dispatcher.prepare(self._number, args_by_seed[0], self._here).choice.config
                runs = (config for config in (*tabled, default) if self._runs(config, problem))
                for config in dict.fromkeys((chosen, *runs)):
                    self._want(config, problem, args_by_seed)

    def _want(self, config: Config, problem: Problem, args_by_seed: Mapping[int, Sequence[Any]]) -> None:
        for seed, args in args_by_seed.items():
            key = (tuple(config.hints.items()), self._signature(config, args))
            known = self.wanted.get(key)
            if known is None or self._size(problem) < self._size(known[1]):
                self.wanted[key] = config, problem, seed

    def compiles(self) -> int:
        """Return the number of wanted signatures that cuTile will have to compile."""
        arch, cubins = self._machine.device.arch, self._dispatcher.kernels.cubins
        return sum(not cubins.has(hints, signature, arch) for hints, signature in self.wanted)

    def load(self) -> Iterator[int]:
        """Launch a small problem of each wanted signature; yield the number done."""
        from cuda.tile import launch

        for done, ((_, signature), (config, problem, seed)) in enumerate(self.wanted.items(), 1):
            small = self._smallest(config, signature, problem, seed)
            args = _arguments(self.tunable, small, f"cuda:{self._number}", seed)
            kernel = self._dispatcher.kernels.of(config)
            grid = self._dispatcher.grid(self._machine.device, config, small)
            launch(self._here.raw_stream(self._number), grid, kernel, self._kernel_args(config, args))
            yield done

    def _smallest(self, config: Config, signature: str, problem: Problem, seed: int) -> Problem:
        """Return a problem with every size as small as the signature and `legal` allow."""
        for name in self.tunable.axes:
            for size in smaller_of_class(problem.size(name)):
                smaller = problem.replaced(**{name: size})
                if self._fits(config, signature, smaller, seed):
                    problem = smaller
                    break
        return problem

    def _fits(self, config: Config, signature: str, problem: Problem, seed: int) -> bool:
        try:
            if not self._runs(config, problem):
                return False
            return self._signature(config, _arguments(self.tunable, problem, "meta", seed)) == signature
        except Exception:  # the declaration cannot make this problem: one size may have to divide another
            return False

    def _runs(self, config: Config, problem: Problem) -> bool:
        """Whether a config may run a problem on this particular GPU."""
        if self._machine.legality.refusal(config, problem) is not None:
            return False
        return unfit(self.tunable, config, self._machine.device, problem) is None

    def _signature(self, config: Config, args: Sequence[Any]) -> str:
        return cutile.signature_of(self.tunable.kernel_of(config), self._kernel_args(config, args))

    def _kernel_args(self, config: Config, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.tunable.args_fn_on(self._machine.device)(config, *args))

    def _size(self, problem: Problem) -> int:
        return prod(problem.size(name) for name in self.tunable.axes)


def _checked(
    tunables: Sequence[Declaration], problems: Mapping[str, object], device: Any, here: Runtime
) -> int:
    """Refuse declarations, problems or a GPU that cannot be primed; return the GPU's index."""
    for tunable in tunables:
        if not isinstance(tunable, Declaration):
            raise UsageError(
                f"prime takes declarations, not {tunable!r:.80}; pass the Tunable that launches it"
            )
    names = [tunable.name for tunable in tunables]
    for name in problems:
        if name not in names:
            raise UsageError(
                f"problems names the kernel {name!r}; the declarations given are {' '.join(names) or 'none'}"
            )
    if not tunables and not is_replaying():
        raise UsageError(
            "prime was given no declaration; pass one such as aot_tune.kernels.matmul_tunable, or call "
            "aot_tune.install() before where all kernels are recorded"
        )
    number, count = _index(device, here), here.device_count()
    if not 0 <= number < count:
        raise LaunchError(f"there is no GPU {number} to prime; this process may use {count}")
    if here.capturing():
        raise LaunchError("prime was called during graph capture; call it before the capture begins")
    return number


def _index(device: Any, here: Runtime) -> int:
    if isinstance(device, int):
        return device
    import torch

    named = torch.device("cuda" if device is None else device)
    if named.type != "cuda":
        raise UsageError(f"device={device!r} is not a GPU; pass one such as 'cuda:0'")
    if named.index is not None:
        return named.index
    return here.current_device() if here.device_count() else 0


def _named(tunable: Declaration, wanted: Iterable[Mapping[str, object]]) -> tuple[Problem, ...]:
    """Return the problems that a user states, checked against the kernel's pattern."""
    pattern = tunable.typical_problems[0]
    listed = [
        {name: tuple(value) if isinstance(value, range) else value for name, value in stated.items()}
        for stated in wanted
    ]
    problems = tuple(dict.fromkeys(expanded(listed)))
    for problem in problems:
        if problem.keys() != pattern.keys() or any(type(problem[n]) is not type(pattern[n]) for n in pattern):
            raise UsageError(
                f"problems: {tunable.name} has no problem {problem}; state it like the declared {pattern}"
            )
        if not all(problem.size(name) > 0 for name in tunable.axes):
            raise UsageError(
                f"problems: {tunable.name} {problem}: a size of 0 is never launched; leave it out"
            )
    return tuple(Problem({name: problem[name] for name in pattern}) for problem in problems)


def _arguments(tunable: Declaration, problem: Problem, device: str, seed: int) -> tuple[Any, ...]:
    return tuple(tunable.make_args(problem, device, seed))
