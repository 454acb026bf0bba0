"""Declaration of a kernel: all data for builds and launches. Checks and launches nothing.

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
"""Pattern of a kernel's name, which is also the name of its table's file."""

_NAME = re.compile(NAME)


@dataclass(frozen=True, kw_only=True)
class Close:
    """Expected output with its tolerances: ``|output - value| <= atol + rtol * |value|``."""

    value: torch.Tensor
    """Correct result of the output's shape, of any float dtype, more precise than the kernel's."""

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
    """Cost of one tile (block of work), for the performance model and for launches on other GPU models."""

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
    """Declared cuTile kernel: its search space, its rules and the shapes that it meets in practice.

    `problem`, `args_fn` and `reference` take the arguments of a launch, by position. The names in `outputs`,
    `inplace` and `reset` are parameter names of `problem`. Every config that a method returns has its
    constants in the order of the kernel's parameters.
    """

    name: str
    """Lower-case name of the kernel and its table's file, unique among all kernels."""

    package: str
    """``__package__`` of the declaring module; its tables are in ``tuned_configs`` of the topmost
    package that has an ``__init__``."""

    kernel: Any
    """Object of ``@ct.kernel``, without the searched hints; or a dict of several by name, of which each
    config names one: ``Config(kernel="persistent", ...)``."""

    axes: Mapping[str, Axis]
    """Sizes of a problem, each ``Pow2()`` or ``Exact()``."""

    problem: Callable[..., Mapping[str, object]]
    """Launch arguments -> sizes and dtypes; the choice of a config depends only on these."""

    search_space: Callable[[Arch, Problem], Sequence[Config]] | Sequence[Config]
    """(arch, problem) -> candidates, or one list for all problems. Pure: never queries the machine."""

    default: Callable[[Arch, Problem], Config] | None = None
    """(arch, problem) -> the config for untuned problems; None takes the first of the search space."""

    grid_fn: Callable[[Config, Device, Problem], tuple[int, ...]]
    """(config, device, problem) -> one to three block counts."""

    args_fn: Callable[..., tuple[Any, ...]]
    """(config, *launch arguments) -> the kernel's arguments. A keyword-only parameter ``device`` gets the
    `Device` of the launch."""

    make_args: Callable[[Problem, Any, int], tuple[Any, ...]]
    """(problem, torch device, seed) -> realistic random launch arguments; must accept device "meta"."""

    reference: Callable[..., Mapping[str, Close | torch.Tensor] | Close | torch.Tensor]
    """Launch arguments before the kernel ran -> a dict with a `Close` for each mutated argument; for a single
    mutated argument a `Close` alone. A tensor in place of a `Close` is compared by the tolerances of its
    argument's dtype."""

    typical: Sequence[Mapping[str, object]]
    """Problems to sweep; a list or tuple as a value means each of its members (a product of all)."""

    legal: Callable[[Config, Arch, Problem], bool | str] = lambda config, arch, problem: True
    """(config, arch, problem) -> True if the config may run, else the reason. No other code decides this."""

    fits: Callable[[Config, Device, Problem], bool | str] = lambda config, device, problem: True
    """(config, device, problem) -> True if the config may run on this particular GPU, which may be smaller
    than others of its arch, else the reason. Like `legal` it is not part of the source hash."""

    batch_axes: Sequence[str] = ()
    """Pow2 axes that grow with a batch. Where one config serves every batch, it does not depend on them."""

    invariant: Callable[[Config, Problem], bool | str] | None = None
    """(config, problem) -> True if a row of the result has equal bits at every size on `batch_axes`, else the
    reason. None means True for every config. Like `legal` it is not part of the source hash."""

    outputs: Sequence[str] | None = None
    """Arguments that the kernel writes completely; they are poisoned before a check. None means the arguments
    that its source stores to and never loads: `output_names`. Each is a tensor, a list of tensors, or None in
    a launch without it, as in `inplace` and `reset`."""

    inplace: Sequence[str] = ()
    """Arguments that the kernel reads and changes; they are restored before every trial."""

    reset: Sequence[str] = ()
    """Arguments that the kernel adds to, or needs at zero and leaves at zero; zeroed before every trial."""

    tiles: Callable[[Config, Problem], int] | None = None
    """(config, problem) -> number of blocks of work, by which times are scaled between sizes."""

    work: Callable[[Config, Problem], Work] | None = None
    """(config, problem) -> cost of one block of work, for the model, and between equally fast configs on
    another GPU model than the measured one; not for occupancy-only spaces."""

    programmatic_dependent_launch: bool = False
    """Whether the kernel may start before the previous launch in its stream has ended. The kernel must call
    ``ct.grid_dependency_control_wait()``. From sm90 on."""

    tables: Path | None = None
    """Folder of the kernel's tables, where it is not the package's own."""

    distribution: str | None = None
    """Installed distribution that ships the kernel, where its name differs from the package's."""

    # What follows from the fields ---------------------------------------------------------------------------

    @lazy
    def parameters(self) -> tuple[str, ...]:
        """Names of the launch arguments."""
        return tuple(inspect.signature(self.problem).parameters)

    @lazy
    def kernels(self) -> Mapping[str | None, Any]:
        """Kernels by the names that configs use; by None where there is only one."""
        return dict(self.kernel) if isinstance(self.kernel, Mapping) else {None: self.kernel}

    def kernel_of(self, config: Config) -> Any:
        """Return the kernel that a config is for.

        Raises:
            DeclarationError: The config names a kernel that is not declared, or none where there are several.
        """
        try:
            return self.kernels[config.kernel]
        except KeyError:
            raise DeclarationError(f"{self.name}: {self.kernel_missing(config)}") from None

    def kernel_missing(self, config: Config) -> str | None:
        """Return the mistake in a config's kernel, and what to write; None where the kernel is declared."""
        if config.kernel in self.kernels:
            return None
        if None in self.kernels:
            return f"the config {config} names a kernel, and there is one alone; leave kernel= out"
        declared = " or ".join(f"kernel={name!r}" for name in self.kernels)
        return f"the config {config} is for {config.kernel or 'no kernel'}; write {declared} in it"

    def constants_of(self, kernel: str | None) -> tuple[str, ...]:
        """Return the ``ct.Constant`` parameters of a kernel, by the name that configs use, in order."""
        return self._constants.get(kernel, ())

    @lazy
    def _constants(self) -> dict[str | None, tuple[str, ...]]:
        return {name: cutile.constant_parameters(kernel) for name, kernel in self.kernels.items()}

    @lazy
    def constant_names(self) -> tuple[str, ...]:
        """Parameters of all kernels that are ``ct.Constant``, each once, in order."""
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
        """Return `args_fn` as it is called for launches on a device."""
        return partial(self.args_fn, device=device) if self.takes_device else self.args_fn

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of all arguments that the kernel writes: `outputs`, `inplace` and `reset`."""
        return (*self.output_names, *self.inplace, *self.reset)

    @lazy
    def output_names(self) -> tuple[str, ...]:
        """Names of `outputs`; where it is left out, of the arguments that the source only stores to.

        The source is not read at import, but at the first use.
        """
        if self.outputs is not None:
            return tuple(self.outputs)
        return tuple(name for name in self.written.whole if name not in (*self.inplace, *self.reset))

    @lazy
    def written(self) -> Written:
        """Arguments that the kernel's source writes."""
        from aot_tune.declare.kernel_source.outputs import written

        return written(self.kernel, self.args_fn, self.parameters)

    def problem_of(self, *args: Any) -> Problem:
        """Return the problem of these launch arguments."""
        return Problem(self.problem(*args))

    def bucket_of(self, problem: Problem) -> Problem:
        """Return the bucket of a problem."""
        return bucket_of(self.axes, problem)

    def declared_space(self, arch: Arch, problem: Problem) -> Sequence[Config]:
        """Return the search space as declared, with the arch's hints."""
        space = self.search_space(arch, problem) if callable(self.search_space) else self.search_space
        if not isinstance(space, list | tuple):
            return space
        if True in [getattr(config, "by_target", None) for config in space]:
            # Configs that differ on other archs may be equal on this one.
            return list(dict.fromkeys(config_on(config, arch) for config in space))
        return space

    def declared_default(self, arch: Arch, problem: Problem) -> Config:
        """Return the default as declared; without a function, the first of the search space.

        Raises:
            DeclarationError: The search space is empty.
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
        """Return the search space, constants in the kernel's order. Keeps duplicates for the check."""
        return tuple(map(self._ordered, self.declared_space(arch, problem)))

    def _ordered(self, config: Config) -> Config:
        return config.with_constant_order(self.constants_of(config.kernel))

    def default_config(self, arch: Arch, problem: Problem) -> Config:
        """Return the default with its constants in the kernel's order."""
        return self._ordered(self.declared_default(arch, problem))

    def config_constants(self, arch: Arch, kernel: str | None = None) -> tuple[str, ...]:
        """Return the constants that every config has, in the kernel's order; `args_fn` computes others.

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
        """Return why `legal` refuses a config; None where it may run."""
        verdict = self.legal(config, arch, problem)
        if isinstance(verdict, str):
            return verdict
        return None if verdict else "legal() refuses it"

    def batch_refusal(self, config: Config, problem: Problem) -> str | None:
        """Return why a row's bits may depend on the batch with this config; None where they do not."""
        verdict: object = True if self.invariant is None else self.invariant(config, problem)
        if isinstance(verdict, str) and verdict:
            return verdict
        if isinstance(verdict, bool):
            return None if verdict else "invariant() refuses it"
        return f"invariant() returned {verdict!r:.80}, neither True nor the reason as a text"

    def grid(self, config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        """Return the grid of `grid_fn`.

        Raises:
            LaunchError: The config cannot run on this particular GPU, according to `fits` or `grid_fn`.
        """
        verdict = self.fits(config, device, problem)
        if verdict is not True:
            reason = verdict if isinstance(verdict, str) else "fits() refuses it"
            raise LaunchError(f"{self.name}: {config} cannot run {problem} on {device.name}: {reason}")
        return tuple(self.grid_fn(config, device, problem))

    def candidates(self, arch: Arch, problem: Problem) -> tuple[Config, ...]:
        """Return the search space without the configs that `legal` refuses."""
        return tuple(c for c in self.space(arch, problem) if self.refusal(c, arch, problem) is None)

    @lazy
    def typical_problems(self) -> tuple[Problem, ...]:
        """Problems of `typical`, expanded, in order, without repetitions."""
        return tuple(dict.fromkeys(expanded(self.typical)))

    @lazy
    def buckets(self) -> tuple[Problem, ...]:
        """Buckets of the typical problems, in order, without repetitions."""
        return tuple(dict.fromkeys(self.bucket_of(problem) for problem in self.typical_problems))

    @property
    def module_option(self) -> str:
        """Option --module that a printed command needs to find the kernel; empty for a shipped kernel."""
        if self.package.partition(".")[0] == "aot_tune":
            return ""
        return f" --module {getattr(self.problem, '__module__', None) or self.package}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.package}:{self.name})"


def config_on(config: Config, arch: Arch) -> Config:
    """Return a config with its hints on an arch, where its author gave some by ``ct.ByTarget``.

    Raises:
        DeclarationError: cuTile would refuse such a value.
    """
    if not getattr(config, "by_target", False):
        return config
    on_arch = {name: cutile.hint_on(value, arch) for name, value in config.hints.items()}
    hints = {name: number for name, number in on_arch.items() if number is not None}
    return Config(constants=config.constants, hints=hints, kernel=config.kernel)


def expanded(typical: Iterable[Mapping[str, object]]) -> Iterable[Problem]:
    """Expand `Declaration.typical`: a list or tuple means each of its members, several mean the product."""
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
        DeclarationError: The name is not a plain lower-case name.
    """
    if not is_name(name):
        raise DeclarationError(
            f"a kernel is called {name!r:.80}; write a lower-case name of letters, digits and underscores, "
            "at most 64 characters, such as 'rms_norm'"
        )
