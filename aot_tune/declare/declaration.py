"""A kernel's declaration: all that a build and a launch need to know of it. Checks and launches nothing.

Authors construct an `aot_tune.tunable.Tunable`, a declaration that checks itself and can be launched. All
other code uses the class of this module. ``aot_tune/declare/README.md`` shows how to write one.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot_tune.errors import DeclarationError, LaunchError
from aot_tune.nvidia import cutile
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axis, bucket_of
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem

if TYPE_CHECKING:
    import torch

    from aot_tune.declare.kernel_source.outputs import Written


NAME = "[a-z][a-z0-9_]{0,63}"
"""The pattern of a kernel's name, which is also the name of its table's file."""

_NAME = re.compile(NAME)


@dataclass(frozen=True, kw_only=True)
class Close:
    """The value that an output must equal, and how closely: ``|output - value| <= atol + rtol * |value|``."""

    value: torch.Tensor
    """The right result, of any float dtype, more precise than the kernel's, and of the output's shape."""

    rtol: float
    """Relative tolerance."""

    atol: float
    """Absolute tolerance, in the output's unit."""

    def __post_init__(self) -> None:
        for name, bound in (("rtol", self.rtol), ("atol", self.atol)):
            # A bound may be computed from values that are not finite; `reference.closes_of` refuses it then.
            if not isinstance(bound, int | float) or isinstance(bound, bool) or bound < 0:
                raise DeclarationError(f"Close has {name}={bound!r:.80}; write a finite number of 0 or more")


def is_amount(value: object) -> bool:
    """Whether a value is a finite number of 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cost of one tile (block of work), for the performance model and for launches on another card."""

    steps: int = 1
    """Iterations of the inner loop."""

    flops: float = 0.0
    """Matrix-unit operations of one step, where a multiply-add counts two; 0 without matrix products."""

    load_bytes: float = 0.0
    """Bytes loaded in one step."""

    store_bytes: float = 0.0
    """Bytes that the tile writes at its end."""

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise DeclarationError(f"Work has steps={self.steps!r:.80}; write an int of 1 or more")
        for name in ("flops", "load_bytes", "store_bytes"):
            if not is_amount(getattr(self, name)):
                raise DeclarationError(
                    f"Work has {name}={getattr(self, name)!r:.80}; write a finite number of 0 or more"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """A cuTile kernel with its search space, its rules and the shapes it meets in practice.

    `problem`, `args_fn` and `reference` take the arguments of a launch, by position. The names in `outputs`,
    `inplace` and `reset` are parameter names of `problem`. Every config that a method returns has its
    constants in the order of the kernel's parameters.
    """

    name: str
    """The kernel's lower-case name, unique among all kernels; the table's file has it too."""

    package: str
    """``__package__`` of the declaring module; its tables are in ``<top-level package>/tuned_configs``."""

    kernel: Any
    """The ``@ct.kernel`` object, without the hints that are searched; or a dict of several by name, of which
    each config names one: ``Config(kernel="persistent", ...)``."""

    axes: Mapping[str, Axis]
    """The sizes of a problem, each ``Pow2()`` or ``Exact()``."""

    problem: Callable[..., Mapping[str, object]]
    """Launch arguments -> sizes and dtypes; the choice of a config depends on nothing else."""

    search_space: Callable[[Arch, Problem], Sequence[Config]] | Sequence[Config]
    """(arch, problem) -> candidates, or one list for all problems. Pure: it never looks at the machine."""

    default: Callable[[Arch, Problem], Config] | None = None
    """(arch, problem) -> the config for untuned problems, of the search space; None takes the first of it."""

    grid_fn: Callable[[Config, Device, Problem], tuple[int, ...]]
    """(config, device, problem) -> one to three block counts."""

    args_fn: Callable[..., tuple[Any, ...]]
    """(config, *launch arguments) -> the kernel's arguments. With a keyword-only parameter ``device`` it is
    given the `Device` of the launch too."""

    make_args: Callable[[Problem, Any, int], tuple[Any, ...]]
    """(problem, torch device, seed) -> realistic random launch arguments; must take device "meta" too."""

    reference: Callable[..., Mapping[str, Close | torch.Tensor] | Close | torch.Tensor]
    """Launch arguments before the kernel ran -> a `Close` for each mutated one; alone if there is but one. A
    tensor in place of a `Close` is compared by the tolerances of its argument's dtype."""

    typical: Sequence[Mapping[str, object]]
    """The problems to sweep; a list or tuple as a value means each of its members (a product of all)."""

    legal: Callable[[Config, Arch, Problem], bool | str] = lambda config, arch, problem: True
    """(config, arch, problem) -> whether the config may run; a str says why not. No other code decides it."""

    fits: Callable[[Config, Device, Problem], bool | str] = lambda config, device, problem: True
    """(config, device, problem) -> whether the config may run on this very GPU, which may be smaller than
    others of its arch; a str says why not. Like `legal` it is not part of the source hash."""

    batch_axes: Sequence[str] = ()
    """The Pow2 axes that grow with a batch. Where one choice for every batch is asked for, their sizes do not
    influence the config."""

    invariant: Callable[[Config, Problem], bool | str] | None = None
    """(config, problem) -> whether a row of the result has the same bits at every size on `batch_axes`; a str
    says why not. None stands for every config. Like `legal` it is not part of the source hash."""

    outputs: Sequence[str] | None = None
    """Arguments that the kernel writes whole; they are poisoned before a check. None stands for those that
    its source stores to and never loads: `output_names`. Like those of `inplace` and `reset`, each is a
    tensor, a list of tensors, or None where a launch goes without it."""

    inplace: Sequence[str] = ()
    """Arguments that the kernel reads and changes; they are restored before every trial."""

    reset: Sequence[str] = ()
    """Arguments that the kernel adds to, or needs at zero and leaves at zero; zeroed before every trial."""

    tiles: Callable[[Config, Problem], int] | None = None
    """(config, problem) -> the number of blocks of work, by which times are scaled between sizes."""

    work: Callable[[Config, Problem], Work] | None = None
    """(config, problem) -> the cost of one block of work, for the model, and between equally fast configs
    on another card than the one that was measured; not for occupancy-only spaces."""

    programmatic_dependent_launch: bool = False
    """Whether the kernel may be launched before the one before it in its stream has ended, for which it calls
    ``ct.grid_dependency_control_wait()`` itself. From sm90 on."""

    tables: Path | None = None
    """The folder of the kernel's tables, where it is not the package's own."""

    distribution: str | None = None
    """The installed distribution that ships the kernel, where its name differs from the package's."""

    # What follows from the fields ---------------------------------------------------------------------------

    @lazy
    def parameters(self) -> tuple[str, ...]:
        """The names of the launch arguments."""
        return tuple(inspect.signature(self.problem).parameters)

    @lazy
    def kernels(self) -> Mapping[str | None, Any]:
        """The kernels by the names that configs call them: by None where there is one."""
        return dict(self.kernel) if isinstance(self.kernel, Mapping) else {None: self.kernel}

    def kernel_of(self, config: Config) -> Any:
        """The kernel that a config is for.

        Raises:
            DeclarationError: The config names a kernel that is not declared, or none where there are several.
        """
        try:
            return self.kernels[config.kernel]
        except KeyError:
            raise DeclarationError(f"{self.name}: {self.kernel_missing(config)}") from None

    def kernel_missing(self, config: Config) -> str | None:
        """What is wrong with the kernel that a config names, and what to write; None where it is declared."""
        if config.kernel in self.kernels:
            return None
        if None in self.kernels:
            return f"the config {config} names a kernel, and there is one alone; leave kernel= out"
        declared = " or ".join(f"kernel={name!r}" for name in self.kernels)
        return f"the config {config} is for {config.kernel or 'no kernel'}; write {declared} in it"

    def constants_of(self, kernel: str | None) -> tuple[str, ...]:
        """The ``ct.Constant`` parameters of the kernel that configs call so, in order."""
        return self._constants.get(kernel, ())

    @lazy
    def _constants(self) -> dict[str | None, tuple[str, ...]]:
        return {name: cutile.constant_parameters(kernel) for name, kernel in self.kernels.items()}

    @lazy
    def constant_names(self) -> tuple[str, ...]:
        """The ``ct.Constant`` parameters of all kernels, each once, in order."""
        return tuple(dict.fromkeys(name for names in self._constants.values() for name in names))

    @lazy
    def takes_device(self) -> bool:
        """Whether `args_fn` has a keyword-only parameter ``device``."""
        code = getattr(self.args_fn, "__code__", None)
        if code is not None:
            return "device" in code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        try:
            parameter = inspect.signature(self.args_fn).parameters.get("device")
        except (TypeError, ValueError):
            return False
        return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY

    def args_fn_on(self, device: Device) -> Callable[..., tuple[Any, ...]]:
        """`args_fn` as it is called for launches on a device."""
        return partial(self.args_fn, device=device) if self.takes_device else self.args_fn

    @property
    def mutated(self) -> tuple[str, ...]:
        """The names of all arguments that the kernel writes: `outputs`, `inplace` and `reset`."""
        return (*self.output_names, *self.inplace, *self.reset)

    @lazy
    def output_names(self) -> tuple[str, ...]:
        """The names of `outputs`; where it is left out, of what the kernel's source only stores to.

        The source is not read at import, but when this is first asked for.
        """
        if self.outputs is not None:
            return tuple(self.outputs)
        return tuple(name for name in self.written.whole if name not in (*self.inplace, *self.reset))

    @lazy
    def written(self) -> Written:
        """What the kernel's source writes."""
        from aot_tune.declare.kernel_source.outputs import written

        return written(self.kernel, self.args_fn, self.parameters)

    def problem_of(self, *args: Any) -> Problem:
        """The problem of these launch arguments."""
        return Problem(self.problem(*args))

    def bucket_of(self, problem: Problem) -> Problem:
        """The bucket that a problem belongs to."""
        return bucket_of(self.axes, problem)

    def declared_space(self, arch: Arch, problem: Problem) -> Sequence[Config]:
        """The search space as it is declared, its hints those of the arch."""
        space = self.search_space(arch, problem) if callable(self.search_space) else self.search_space
        if isinstance(space, list | tuple) and True in [getattr(one, "by_target", None) for one in space]:
            # Two that differ elsewhere may be the same here.
            return list(dict.fromkeys(config_on(config, arch) for config in space))
        return space

    def declared_default(self, arch: Arch, problem: Problem) -> Config:
        """The default as it is declared: without a function the first of the search space.

        Raises:
            DeclarationError: The search space is empty there.
        """
        if self.default is None:
            space = self.declared_space(arch, problem)
            if not space:
                raise DeclarationError(
                    f"{self.name}: search_space({arch}, {problem}) is empty; return at least the default"
                )
            return space[0]
        return config_on(self.default(arch, problem), arch)

    def space(self, arch: Arch, problem: Problem) -> tuple[Config, ...]:
        """The search space, constants in the kernel's order. Keeps duplicates, for the check to find them."""
        return tuple(map(self._ordered, self.declared_space(arch, problem)))

    def _ordered(self, config: Config) -> Config:
        return config.with_constant_order(self.constants_of(config.kernel))

    def default_config(self, arch: Arch, problem: Problem) -> Config:
        """The default with its constants in the kernel's order."""
        return self._ordered(self.declared_default(arch, problem))

    def config_constants(self, arch: Arch, kernel: str | None = None) -> tuple[str, ...]:
        """The constants that every config has, in the kernel's order; `args_fn` computes the others.

        Args:
            arch: The arch.
            kernel: The name of the kernel of these configs, where there are several.
        """
        default = self.default_config(arch, self.typical_problems[0])
        if kernel == default.kernel:
            return tuple(default.constants)
        spaces = (self.space(arch, problem) for problem in self.typical_problems)
        return next((tuple(c.constants) for space in spaces for c in space if c.kernel == kernel), ())

    def refusal(self, config: Config, arch: Arch, problem: Problem) -> str | None:
        """Why `legal` refuses a config, or None when it may run."""
        verdict = self.legal(config, arch, problem)
        if isinstance(verdict, str):
            return verdict
        return None if verdict else "legal() refuses it"

    def batch_refusal(self, config: Config, problem: Problem) -> str | None:
        """Why a row's bits may depend on the batch with this config; None where they do not."""
        verdict: object = True if self.invariant is None else self.invariant(config, problem)
        if isinstance(verdict, str) and verdict:
            return verdict
        if isinstance(verdict, bool):
            return None if verdict else "invariant() refuses it"
        return f"invariant() returned {verdict!r:.80}, neither True nor the reason as a text"

    def grid(self, config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        """The grid that `grid_fn` returns.

        Raises:
            LaunchError: The config cannot run on this very GPU, according to `fits` or `grid_fn`.
        """
        verdict = self.fits(config, device, problem)
        if verdict is not True:
            reason = verdict if isinstance(verdict, str) else "fits() refuses it"
            raise LaunchError(f"{self.name}: {config} cannot run {problem} on {device.name}: {reason}")
        return tuple(self.grid_fn(config, device, problem))

    def candidates(self, arch: Arch, problem: Problem) -> tuple[Config, ...]:
        """The search space without the configs that `legal` refuses."""
        return tuple(c for c in self.space(arch, problem) if self.refusal(c, arch, problem) is None)

    @lazy
    def typical_problems(self) -> tuple[Problem, ...]:
        """`typical` expanded, in order, without repetitions."""
        return tuple(dict.fromkeys(expanded(self.typical)))

    @lazy
    def buckets(self) -> tuple[Problem, ...]:
        """The buckets of the typical problems, in order, without repetitions."""
        return tuple(dict.fromkeys(self.bucket_of(problem) for problem in self.typical_problems))

    @property
    def module_option(self) -> str:
        """The option --module that a printed command needs to find the kernel; empty for a shipped kernel."""
        if self.package.partition(".")[0] == "aot_tune":
            return ""
        return f" --module {getattr(self.problem, '__module__', None) or self.package}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.package}:{self.name})"


def config_on(config: Config, arch: Arch) -> Config:
    """The config with the hints that it has on an arch, where its author gave some by ``ct.ByTarget``.

    Raises:
        DeclarationError: cuTile would refuse such a value.
    """
    if not getattr(config, "by_target", False):
        return config
    on_arch = {name: cutile.hint_on(value, arch) for name, value in config.hints.items()}
    hints = {name: number for name, number in on_arch.items() if number is not None}
    return Config(constants=config.constants, hints=hints, kernel=config.kernel)


def expanded(typical: Iterable[Mapping[str, object]]) -> Iterable[Problem]:
    """Expand `Declaration.typical`: a list or tuple means each of its members, several all combinations."""
    for shape in typical:
        choices = [value if isinstance(value, list | tuple) else (value,) for value in shape.values()]
        for values in itertools.product(*choices):
            yield Problem(dict(zip(shape, values, strict=True)))


def is_name(name: object) -> bool:
    """Whether a value is a plain lower-case name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: object) -> None:
    """Refuse a name that is not a plain file name: ``../x``, an absolute path, NUL, 300 characters.

    Raises:
        DeclarationError: The name is not a plain lower-case one.
    """
    if not is_name(name):
        raise DeclarationError(
            f"a kernel is called {name!r:.80}; write a lower-case name of letters, digits and underscores, "
            "at most 64 characters, such as 'rms_norm'"
        )
