"""Turn a call into a launch: look its plan up, or make it.

`aot_tune.serve.loader` reads the tables, `aot_tune.choose` chooses, `aot_tune.serve.search` answers a miss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from aot_tune import environment
from aot_tune.choose.choice import Choice, Options, Source
from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import Live, resolve
from aot_tune.declare.declaration import Declaration, config_on
from aot_tune.errors import CompilerMissingError, LaunchError, MissError
from aot_tune.nvidia import cutile
from aot_tune.serve import loader
from aot_tune.serve.fork import ForkSafe
from aot_tune.serve.kernels import HintedKernels
from aot_tune.serve.launch.checks import check_arguments, check_problem, checked_grid, explain, refused, unfit
from aot_tune.serve.launch.function import MISSED, CallPattern, Kind, LaunchFunction, argument_maker
from aot_tune.serve.launch.messages import Messages
from aot_tune.serve.launch.reads import (
    ArgumentReads,
    ProblemReads,
    Read,
    follow_args,
    follow_problem,
    lists_tensors,
)
from aot_tune.serve.rank import evidence, is_primed, is_rank
from aot_tune.serve.runtime import Runtime, runtime, with_tensors
from aot_tune.serve.search.cache import Winners
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.lazy import lazy
from aot_tune.values.parts import flat
from aot_tune.values.problem import Problem

if TYPE_CHECKING:
    from aot_tune.choose.batch import BatchInvariant
    from aot_tune.serve.search.live import LiveSearch

_FOUND_LIVE: frozenset[Source] = frozenset({"cached", "searched"})
"""Sources of choices that no rank makes."""

_MOST_PLANS = 4096
"""Most plans that each memo keeps: a few MB per kernel, and more shapes than a server soon meets again."""


class LaunchPlan(NamedTuple):
    """Everything that a launch of a problem needs in addition to its arguments."""

    choice: Choice
    """Config, and why it was chosen."""

    grid: tuple[int, ...]
    """Number of blocks along one to three dimensions."""

    kernel: Any
    """Kernel with the config's hints."""


class Machine:
    """GPU of this process, with the tables and the legality of its arch."""

    def __init__(self, device: Device, index: Index, legality: Legality) -> None:
        self.device, self.index, self.legality = device, index, legality

    @lazy
    def invariant(self) -> BatchInvariant:
        """Choices that hold for every size of a batch."""
        from aot_tune.choose.batch import BatchInvariant  # few processes ask for them

        return BatchInvariant(self.index, self.legality)


SLOW_PATH = ForkSafe()
"""Lock of the slow path of all declarations."""


class UnrankedRow:
    """Row of the launch function's memo that is valid only while this process is no rank.

    It holds a config that a live search found, now or before, which a rank must not use. The launch function
    unpacks a row, so only these rows take the time of a check, 0.3 us.
    """

    def __init__(self, row: tuple[Any, ...], unranked: tuple[object, ...]) -> None:
        self._row = row
        self._unranked = unranked

    def __iter__(self) -> Iterator[Any]:
        if evidence() != self._unranked:
            raise KeyError("the process may have become a rank")  # the launch function asks the slow path
        return iter(self._row)


def attach(tunable: Declaration) -> None:
    """Give a declaration its `launch`: read its tables for this machine's GPUs and make their kernels."""
    dispatcher = Dispatcher(tunable)
    for arch in loader.archs_to_load(tunable):
        dispatcher.load(arch)
    object.__setattr__(tunable, "_dispatcher", dispatcher)
    object.__setattr__(tunable, "launch", dispatcher.launch)
    object.__setattr__(tunable, "config_for", dispatcher.config_for)


def dispatcher_of(tunable: Declaration) -> Dispatcher:
    """Return the dispatcher that `attach` made for a declaration."""
    dispatcher: Dispatcher = vars(tunable)["_dispatcher"]
    return dispatcher


class Dispatcher:
    """Launches a declaration. `launch` is the function that users call; the rest is its slow path.

    It keeps two memos, both bounded and both read without a lock. The first maps the parts of a call's
    arguments that are read to the row that the launch function unpacks. The second maps GPU, problem and
    given config to the `LaunchPlan`.

    Args:
        tunable: The declaration.
        of: The declaration's dispatcher, where this one serves the calls that pass ``batch_invariant``: so
            neither takes the other's plans.
        batch_invariant: The value that these calls pass; None follows AOT_TUNE_BATCH_INVARIANT.
    """

    def __init__(
        self, tunable: Declaration, of: Dispatcher | None = None, batch_invariant: bool | None = None
    ) -> None:
        self._tunable = tunable
        self._of = of
        self._batch_invariant = batch_invariant
        self._by_batch_invariant: dict[bool, Dispatcher] = {}
        self.kernels: HintedKernels = HintedKernels(tunable) if of is None else of.kernels
        self._function = LaunchFunction(tunable.name, tunable.problem, self._slow)
        self.launch: Callable[..., None] = MethodType(self._function.call, self)
        self._pattern: CallPattern | None = None
        self._memo: dict[Any, tuple[Any, ...] | UnrankedRow] = {}
        self._plans: dict[tuple[int, Problem, Config | None], LaunchPlan] = {}
        self._uncompiled: dict[tuple[int, Problem, str], LaunchPlan] = {}
        self._keys_hold_layouts = False
        self._indexes: dict[Arch, Index] = {} if of is None else of._indexes
        self._machines: dict[int, Machine] = {} if of is None else of._machines
        self._messages: Messages = Messages(tunable) if of is None else of._messages
        self._ranked = False

    def __reduce__(self) -> tuple[Callable[[Declaration], Dispatcher], tuple[Declaration]]:
        """Pickle and copy `launch` and `config_for` with the declaration, which has one dispatcher."""
        return dispatcher_of, (self._tunable,)

    # Loading ------------------------------------------------------------------------------------------------

    def load(self, arch: Arch) -> Index:
        """Read the tables for an arch once, and make the kernels of their configs and the default."""
        with SLOW_PATH.lock:
            if arch not in self._indexes:
                index = loader.load(self._tunable, arch)
                # The entries of a table name no config but its portfolio's and the default.
                portfolios = (config for table in index.tables.values() for config in table.portfolio)
                default = self._tunable.default_config(arch, self._tunable.typical_problems[0])
                for config in (*portfolios, default):
                    self.kernels.of(config)
                # Compares the code with the archives', and reads no cubin: a first launch may take 2 ms.
                self.kernels.cubins.sections(arch)
                self._indexes[arch] = index
            return self._indexes[arch]

    def machine(self, device_index: int, here: Runtime) -> Machine:
        """Return a GPU of this process, after its tables were read."""
        machine = self._machines.get(device_index)
        if machine is None:
            environment.check()  # a wrong value is reported by the first launch, not by the first miss
            device = here.device(device_index)
            legality = Legality(self._tunable, device.arch)
            machine = self._machines[device_index] = Machine(device, self.load(device.arch), legality)
        self._messages.source(machine.device, machine.index, self.kernels.cubins)
        return machine

    @lazy
    def _search(self) -> LiveSearch:
        if self._of is not None:
            return self._of._search
        # Imported late: a process whose problems are all tuned does not need it.
        from aot_tune.serve.search.live import LiveSearch

        return LiveSearch(self._tunable, self.kernels, self._winners)

    @lazy
    def _winners(self) -> Winners:
        return Winners(self._tunable, self.kernels) if self._of is None else self._of._winners

    # Choosing -----------------------------------------------------------------------------------------------

    def config_for(self, *args: Any, batch_invariant: bool | None = None) -> Config:
        """Return the config that a launch of these arguments would get, without a launch or a search.

        A problem that misses is appended to the file of AOT_TUNE_RECORD, as by a launch.

        Raises:
            LaunchError: The arguments cannot be launched, or a size is 0, so that nothing would be launched.
            MissError: Nothing was tuned for the problem or near it, and AOT_TUNE_ON_MISS=error.
        """
        if batch_invariant is not None and batch_invariant is not self._batch_invariant:
            return self._with_batch_invariant(batch_invariant).config_for(*args)
        here = runtime()
        args = with_tensors(args, here)
        device_index = check_arguments(self._tunable, args, here)
        problem = follow_problem(self._tunable.problem, args, here.tensor_types).problem
        if not check_problem(self._tunable, problem, args):
            raise LaunchError(f"{self._tunable.name}: nothing is launched for {problem}, so it has no config")
        known = self._plans.get((device_index, problem, None))
        if known is not None and is_rank() == self._ranked:
            return known.choice.config
        device = self.machine(device_index, here).device
        try:
            choice = self.choice(device.arch, problem, device=device, on_miss=environment.on_miss())
        except MissError:
            self._messages.missed(device.arch, problem)
            raise
        if choice.missed:
            self._messages.missed(device.arch, problem)
        config = choice.config
        if unfit(self._tunable, config, device, problem) is None:
            return config
        fitting = self.choice(
            device.arch,
            problem,
            unfit=lambda other: unfit(self._tunable, other, device, problem),
            device=device,
        )
        return fitting.config

    def choice(
        self,
        arch: Arch,
        problem: Problem,
        *,
        unfit: Callable[[Config], str | None] | None = None,
        device: Device | None = None,
        on_miss: environment.OnMiss | None = None,
    ) -> Choice:
        """Return the choice that a launch of this problem would make on an arch, without a search.

        Without a `device`, waves are counted for the GPU that a table was measured on, and the GPU model is
        that of this machine's first GPU of the arch, if any.

        Without `on_miss`, AOT_TUNE_ON_MISS decides, but ``error`` counts as ``nearest``.
        """
        usual = environment.on_miss()
        if device is not None:
            name = device.name
        else:
            name = next((gpu.name for gpu in loader.gpus() or () if gpu.arch == arch), "")
        remembered = None if is_rank() else lambda bucket: self._winners.of(arch, name, bucket)
        options = Options(
            asked_default=environment.forces_default(),
            on_miss=on_miss or ("nearest" if usual == "error" else usual),
            sm_count=device.sm_count if device is not None else None,
            gpu_model=name or None,
        )
        legality = Legality(self._tunable, arch)
        return resolve(
            problem,
            self.load(arch),
            legality if unfit is None else legality.fitting(unfit),
            options,
            live=Live(remembered=remembered),
            every_batch=self.every_batch(arch) if self._keeps_one() else None,
        )

    def every_batch(self, arch: Arch) -> BatchInvariant:
        """Return the choices that hold for every batch, on an arch that needs no GPU in this machine."""
        from aot_tune.choose.batch import BatchInvariant

        return BatchInvariant(self.load(arch), Legality(self._tunable, arch))

    def _keeps_one(self) -> bool:
        """Whether one config must serve every batch."""
        passed = self._batch_invariant
        requested = environment.batch_invariant() if passed is None else passed
        return requested and bool(self._tunable.batch_axes)

    def _with_batch_invariant(self, batch_invariant: bool) -> Dispatcher:
        """Return the dispatcher of the calls that pass this `batch_invariant`; made once."""
        if batch_invariant and not self._tunable.batch_axes:
            raise LaunchError(
                f"{self._tunable.name}: batch_invariant=True, but its declaration has no batch_axes; name "
                "in them the axes that grow with a batch"
            )
        key = bool(batch_invariant)
        dispatcher = self._by_batch_invariant.get(key)
        if dispatcher is None:
            made = Dispatcher(self._tunable, of=self, batch_invariant=key)
            dispatcher = self._by_batch_invariant.setdefault(key, made)
        return dispatcher

    def _plan(
        self, device_index: int, problem: Problem, given: Config | None, args: tuple[Any, ...], here: Runtime
    ) -> LaunchPlan:
        ranked = is_rank()
        if ranked != self._ranked:  # the process became a rank: ranks must agree, so its own choices must go
            with SLOW_PATH.lock:
                self._ranked = ranked
                self._plans.clear()
                self._uncompiled.clear()
                self._memo.clear()
        key = (device_index, problem, given)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(device_index, problem, given, args, here)
            with SLOW_PATH.lock:
                _put(self._plans, key, plan)
        return plan

    def _new_plan(
        self, device_index: int, problem: Problem, given: Config | None, args: tuple[Any, ...], here: Runtime
    ) -> LaunchPlan:
        machine = self.machine(device_index, here)
        arch = machine.device.arch
        given = config_on(given, arch) if given is not None else None

        def remembered(bucket: Problem) -> Config | None:
            return self._winners.of(arch, machine.device.name, bucket)

        def search(wanted: Problem, nearest: Match | None) -> Config | None:
            from aot_tune.serve.search.live import Occasion

            occasion = Occasion(
                problem=wanted,
                args=args,
                device_index=device_index,
                device=machine.device,
                index=machine.index,
                legality=machine.legality,
                nearest=nearest,
                runtime=here,
            )
            return self._search.winner(occasion)

        options = Options(
            given=given,
            asked_default=environment.forces_default(),
            on_miss=environment.on_miss(),
            sm_count=machine.device.sm_count,
            gpu_model=machine.device.name,
        )
        live = Live(
            remembered=None if self._ranked else remembered,
            search=None if self._ranked or is_primed() else search,
        )
        every_batch = machine.invariant if self._keeps_one() else None
        choosing = partial(resolve, problem, machine.index, options=options, every_batch=every_batch)
        try:
            choice = choosing(machine.legality, live=live)
        except MissError:
            self._messages.missed(arch, problem)
            raise
        try:
            grid = self.grid(machine.device, choice.config, problem)
        except LaunchError:  # this GPU is smaller than others of its arch
            if given is not None:
                raise
            smaller = machine.legality.fitting(
                lambda config: unfit(self._tunable, config, machine.device, problem)
            )
            choice = choosing(smaller, live=live._replace(search=None))
            grid = self.grid(machine.device, choice.config, problem)
        self._messages.choice(arch, problem, choice)
        return LaunchPlan(choice=choice, grid=grid, kernel=self.kernels.of(choice.config))

    def grid(self, device: Device, config: Config, problem: Problem) -> tuple[int, ...]:
        """Return the grid that `grid_fn` gives, checked."""
        return checked_grid(self._tunable, config, device, problem)

    # Launching ----------------------------------------------------------------------------------------------

    def _slow(
        self, args: tuple[Any, ...], config: Config | None, batch_invariant: bool | None = None
    ) -> None:
        """Launch a call that has no plan in the memo, or has tensors that require grad.

        A call with other libraries' arrays is made anew with tensors, so that it shares plans with tensors.
        """
        if batch_invariant is not None and config is None:
            self._with_batch_invariant(batch_invariant).launch(*args)
            return
        here = runtime()
        viewed = with_tensors(args, here)
        if viewed is not args:
            self.launch(*viewed, config)
            return
        device_index = check_arguments(self._tunable, args, here, config=config)
        followed = follow_problem(self._tunable.problem, args, here.tensor_types)
        if not check_problem(self._tunable, followed.problem, args):
            return
        plan = self._plan(device_index, followed.problem, config, args, here)
        device = self._machines[device_index].device
        kernel_args, passed = self._follow_args(plan, args, followed, device)
        try:
            self._fire(device_index, (followed.problem, plan), args, kernel_args, here)
        except CompilerMissingError:
            if config is not None or self._keeps_one():
                raise
            chosen, plan = plan, self._with_code(device_index, followed.problem, plan, args)
            if plan is chosen:
                raise
            kernel_args, passed = self._follow_args(plan, args, followed, device)
            self._fire(device_index, (followed.problem, plan), args, kernel_args, here)
        if followed.reads is not None:
            self._remember(device_index, args, (followed, passed), plan, here, config)

    def _with_code(
        self, device_index: int, problem: Problem, plan: LaunchPlan, args: tuple[Any, ...]
    ) -> LaunchPlan:
        """Return the plan of calls for whose layout the chosen config has neither a cubin nor a compiler.

        It runs the best config that has a cubin for the layout, else the default, whose weakest cubin serves
        every layout; `plan` itself where neither has any. From then on keys hold layouts, so that
        other layouts keep the chosen config.
        """
        tunable, machine = self._tunable, self._machines[device_index]
        device, args_fn = machine.device, tunable.args_fn_on(machine.device)
        default = tunable.default_config(device.arch, problem)
        portfolios = (table.portfolio for table in machine.index.tables.values())
        compiled = {default, *itertools.chain.from_iterable(portfolios)}

        def signature(config: Config) -> str:
            return cutile.signature_of(tunable.kernel_of(config), args_fn(config, *args))

        def has(config: Config, signature: str) -> bool:
            return self.kernels.cubins.has(tuple(config.hints.items()), signature, device.arch)

        def without_code(config: Config) -> str | None:
            if config in compiled and has(config, signature(config)):
                return unfit(tunable, config, device, problem)
            return "it has no cubin"

        self._keys_hold_layouts = True
        key = (device_index, problem, signature(plan.choice.config))
        fallback = self._uncompiled.get(key)
        if fallback is None:
            try:
                config = self.choice(device.arch, problem, unfit=without_code, device=device).config
            except LaunchError:  # no config has one
                weakest = cutile.weakest_signature(tunable.kernel_of(default), signature(default))
                config = default if has(default, weakest) else plan.choice.config
            if config == plan.choice.config:
                return plan
            why = f"there is no cubin of {plan.choice.config} for such arguments, and no compiler here"
            choice = replace(plan.choice, config=config, why=lambda: why, entry=None)
            fallback = LaunchPlan(
                choice=choice, grid=self.grid(device, config, problem), kernel=self.kernels.of(config)
            )
            self._messages.uncompiled(device.arch, problem, choice)
            with SLOW_PATH.lock:
                _put(self._uncompiled, key, fallback)
        return fallback

    def prepare(self, device_index: int, args: tuple[Any, ...], here: Runtime) -> LaunchPlan:
        """Make and remember the plan of a call on a GPU; the call's tensors may be on device "meta"."""
        followed = follow_problem(self._tunable.problem, args, here.tensor_types)
        plan = self._plan(device_index, followed.problem, None, args, here)
        device = self._machines[device_index].device
        _, passed = self._follow_args(plan, args, followed, device)
        reads = (followed.reads or frozenset()) | (passed.reads if passed else frozenset())
        if followed.reads is not None and not any(what in ("device", "devices") for _, what in reads):
            self._remember(device_index, args, (followed, passed), plan, here)
        return plan

    def _follow_args(
        self, plan: LaunchPlan, args: tuple[Any, ...], followed: ProblemReads, device: Device
    ) -> tuple[tuple[Any, ...], ArgumentReads | None]:
        return follow_args(
            self._tunable.args_fn_on(device),
            config=plan.choice.config,
            args=args,
            tensor_types=runtime().tensor_types,
            keyed=followed.reads,
        )

    def _fire(
        self,
        device_index: int,
        planned: tuple[Problem, LaunchPlan],
        args: tuple[Any, ...],
        kernel_args: tuple[Any, ...],
        here: Runtime,
    ) -> None:
        from cuda.tile import TileError

        problem, plan = planned
        launch, stream = self._launcher(here), here.raw_stream(device_index)
        try:
            if not stream and here.current_device() != device_index:
                with here.entered(device_index):
                    launch(stream, plan.grid, plan.kernel, kernel_args)
            else:
                launch(stream, plan.grid, plan.kernel, kernel_args)
        except (TypeError, ValueError, TileError) as error:
            explain(self._tunable, error, args, here)
            raise refused(self._tunable, problem, plan.choice.config, args, error) from error

    def _remember(
        self,
        device_index: int,
        args: tuple[Any, ...],
        read: tuple[ProblemReads, ArgumentReads | None],
        plan: LaunchPlan,
        here: Runtime,
        config: Config | None = None,
    ) -> None:
        followed, passed = read
        unranked = evidence()
        found_live = plan.choice.source in _FOUND_LIVE
        if found_live and is_rank():  # the process became a rank since the plan was made
            return
        with SLOW_PATH.lock:
            pattern = self._grown(args, followed, passed, here)
            if config is not None and not pattern.given:
                pattern = pattern._replace(given=True)
            if pattern != self._pattern:
                self._memo = self._function.rewrite(pattern, self._names(here))
                self._pattern = pattern
            if pattern.layout is None:
                chosen = self._bound(device_index, plan, passed) if self._binds else plan.choice.config
                row: tuple[Any, ...] = (plan.grid, plan.kernel, chosen)
            else:
                assert passed is not None
                row = (plan.grid, plan.kernel, *passed.constants)
            kept = UnrankedRow(row, unranked) if found_live else row
            try:
                _put(self._memo, pattern.key(device_index, args, here.tensor_types, config), kept)
            except TypeError:
                return  # an argument used by its value has no hash: each such launch takes the slow path

    def _grown(
        self, args: tuple[Any, ...], followed: ProblemReads, passed: ArgumentReads | None, here: Runtime
    ) -> CallPattern:
        """Return the call pattern after this call; it only grows, so that it settles."""
        kinds: tuple[Kind, ...] = tuple(_kind(arg, here.tensor_types) for arg in args)
        reads = (followed.reads or frozenset()) | (passed.reads if passed else frozenset())
        reads |= self._reads_of_expanded(args, here) | self._reads_of_layouts(args, here)
        layout = passed.layout if passed else None
        known = self._pattern
        if known is not None:
            pairs = zip(kinds, known.kinds, strict=True)
            kinds = tuple(
                now if now == before else "list" if "list" in (now, before) else "mixed"
                for now, before in pairs
            )
            reads |= known.reads
            layout = layout if layout == known.layout else None
        several = here.device_count() > 1
        given = known is not None and known.given
        return CallPattern(kinds=kinds, reads=reads, layout=layout, several_devices=several, given=given)

    def _reads_of_expanded(self, args: tuple[Any, ...], here: Runtime) -> frozenset[Read]:
        """Return the strides of written tensors, where nothing else keeps expanded views from a launch.

        Usually cuTile's key does, because code for arrays whose elements may share memory is loaded only for
        checked arguments (`cutile.with_hints`). But a stride of 0 along a dimension of size 1 is harmless and
        has the same code as an expanded view; and an untested release of cuda-tile loads code without asking.
        """
        written = [
            (place, arg, _kind(arg, here.tensor_types))
            for place, (name, arg) in enumerate(zip(self._tunable.parameters, args, strict=True))
            if name in self._tunable.mutated and _kind(arg, here.tensor_types) != "plain"
        ]
        tensors = flat([arg for _, arg, _ in written])
        if cutile.private_names_known() and not any(0 in tensor.stride() for tensor in tensors):
            return frozenset()
        return frozenset((place, "arrays" if kind == "list" else "stride") for place, _, kind in written)

    def _reads_of_layouts(self, args: tuple[Any, ...], here: Runtime) -> frozenset[Read]:
        """Return strides and alignments of all tensors, once a layout had no code for a chosen config."""
        if not self._keys_hold_layouts:
            return frozenset()
        kinds = [(place, _kind(arg, here.tensor_types)) for place, arg in enumerate(args)]
        reads: set[Read] = {(place, "arrays") for place, kind in kinds if kind == "list"}
        for place, kind in kinds:
            if kind == "tensor":
                reads |= {(place, "stride"), (place, "aligned")}
        return frozenset(reads)

    def _names(self, here: Runtime) -> dict[str, Any]:
        from cuda.tile import TileError

        return {
            "ct_launch": self._launcher(here),
            "missed": (*MISSED, TileError),
            "raw_stream": here.raw_stream,
            "current_device": here.current_device,
            "grad_enabled": here.grad_enabled,
            "entered": here.entered,
            "tensors": frozenset(here.tensor_types),
            "args_fn": _call if self._binds else self._tunable.args_fn,
        }

    @lazy
    def _binds(self) -> bool:
        """Whether a row holds a function that makes the kernel's arguments, instead of a config."""
        return self._tunable.takes_device or len(self._tunable.kernels) > 1

    def _bound(
        self, device_index: int, plan: LaunchPlan, passed: ArgumentReads | None
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the function that makes the kernel's arguments from a launch's."""
        if passed is not None:
            made: Callable[..., tuple[Any, ...]] = argument_maker(self._function.names, passed.layout)(
                *passed.constants
            )
            return made
        args_fn = self._tunable.args_fn_on(self._machines[device_index].device)
        return partial(args_fn, plan.choice.config)

    def _launcher(self, here: Runtime) -> Callable[..., Any]:
        """Return the function that launches; it serves all GPUs, so the oldest GPU decides."""
        dependent = self._tunable.programmatic_dependent_launch
        if not dependent:
            return cutile.launching()
        oldest = min(here.device(index).arch for index in range(here.device_count()))
        return cutile.launcher(programmatic_dependent_launch=True, arch=oldest)


def _kind(arg: object, tensor_types: tuple[type, ...]) -> Kind:
    """Return the kind of an argument of a call."""
    if type(arg) in tensor_types:
        return "tensor"
    return "list" if lists_tensors(arg, tensor_types) else "plain"


def _call(bound: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """Replace `args_fn` where a row holds a function of the launch arguments alone."""
    return bound(*args)


def _put(memo: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to a bounded memo; a full memo first drops its older half, so that other additions stay cheap."""
    if len(memo) >= _MOST_PLANS:
        for old in list(itertools.islice(memo, _MOST_PLANS // 2)):
            memo.pop(old, None)
    memo[key] = value
