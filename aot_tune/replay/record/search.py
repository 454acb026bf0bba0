"""Make a library's search once, by this project's ways, in the process where its tensors are.

1. Each config is tried ahead where that is possible (`aot_tune.replay.record.ahead`): one that would end this
   process is passed over. Then it is launched once on what the tensors held before; one whose outputs differ
   from the first config's cannot win, because the library gives no reference to compare with.
2. Each right config is timed. Those near the fastest are timed again, interleaved in rounds, until their
   order is outside the noise.
3. Configs that tie go to the one that comes first in the search space.
4. The tensors get back what they held.

Each outcome is in the journal before the next config runs. A config that was begun and has none killed the
process: it is passed over in the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aot_tune.errors import NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.problem import Problem, read_argument, read_problem
from aot_tune.replay.record.ahead import Tried
from aot_tune.replay.record.journal import SearchJournal
from aot_tune.replay.record.memory import Memory, observed, saved
from aot_tune.serve.runtime import runtime
from aot_tune.tuner.choose.times import finalists, is_tie
from aot_tune.tuner.measure.rounds import MOST_ROUNDS, combined, in_turn, settled, usable
from aot_tune.tuner.outcome import Failure, Measurement, Stage
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.text import error_in_words


@dataclass(frozen=True, kw_only=True)
class Identified:
    """A search that can be told from others."""

    texts: tuple[str, ...]
    """The configs, spelled."""

    problem: Problem
    """What it is for."""

    same_launches: int
    """The number of configs that are the same launch as an earlier one: grid, hints and arguments."""


@dataclass(kw_only=True)
class Searched:
    """What a search found; a config is named by its place in the search space."""

    times: dict[int, Measurement] = field(default_factory=dict)
    """The time of each right config; a finalist's from the rounds."""

    failures: dict[int, tuple[type[BaseException], str]] = field(default_factory=dict)
    """The exception and the message of each config that failed."""

    wrong: dict[int, str] = field(default_factory=dict)
    """What each config computed otherwise than the first one that ran."""

    @property
    def winner(self) -> int:
        """The fastest; of those that tie with it, the first of the search space."""
        fastest = min(self.times.values(), key=lambda one: one.mean_us)
        return min(at for at, one in self.times.items() if is_tie(one, fastest))


class WrongResultError(Exception):
    """A config computes something else than the first config."""


class PassedOverError(Exception):
    """A config is not tried: it ended this process in an earlier run, or failed where it was tried first."""


def identified(call: SearchCall, texts: tuple[str, ...], device: Device) -> Identified:
    """Read what a search is for. It calls `args_fn` for every config, as the search will.

    Raises:
        NotRecordableError: It cannot be told from others.
    """
    kernel = call.kernel_of(call.space[0])
    constants = set(cutile.constant_parameters(kernel))
    parameters = [(name, name in constants) for name, _ in cutile.parameters(kernel)]
    read: list[tuple[Any, ...]] = []
    launches: list[Any] = []
    failed = ""
    for config in call.space:
        asked = "args_fn"
        try:
            args = tuple(call.args_fn(config))
            asked = "grid_fn"
            grid = call.grid_fn(config)
            asked = "hints_fn"
            hints = call.hints_fn(config) if call.hints_fn else {}
        except Exception as error:  # this config fails in the search, too, and is listed there
            failed = f"{asked} raises {error_in_words(error)}"
            continue
        if len(args) != len(parameters):
            raise NotRecordableError(
                f"args_fn gives {len(args)} arguments, the kernel takes {len(parameters)}"
            )
        described = tuple(
            read_argument(name, arg, compiled_in=compiled_in)
            for arg, (name, compiled_in) in zip(args, parameters, strict=True)
        )
        read.append(described)
        launches.append((described, tuple(grid), repr(sorted(hints.items(), key=lambda item: item[0]))))
    if not read:
        raise NotRecordableError(f"{failed}, and no other config has arguments, grid and hints either")
    varying = [at for at in range(len(parameters)) if len({one[at] for one in read}) > 1]
    problem = read_problem(parameters, call.args_fn(call.space[0]), varying, device.sm_count)
    return Identified(texts=texts, problem=problem, same_launches=len(launches) - len(set(launches)))


class LibrarySearch:
    """One search of a library.

    Args:
        call: What the library asked for.
        known: What the search is for.
        journal: Takes each outcome.
        device_index: The GPU.
        ahead: Tries configs, named by their places, before this process runs them.
    """

    def __init__(
        self,
        call: SearchCall,
        known: Identified,
        journal: SearchJournal,
        device_index: int,
        ahead: Callable[[Sequence[int]], Mapping[int, Tried]] = lambda places: {},
    ) -> None:
        self._call = call
        self._known = known
        self._journal = journal
        self._device_index = device_index
        self._ahead = ahead
        self._tried: Mapping[int, Tried] = {}
        self._names = known.problem.names
        self._memory: Memory | None = None
        self._original: tuple[Any, ...] = ()
        self._kernels: dict[int, Any] = {}
        self._found = Searched()

    def run(self) -> Searched:
        """Do all of it; the tensors are restored whatever happens."""
        places = range(len(self._call.space))
        try:
            self._tried = self._ahead([at for at in places if self._is_new(at)])
            for at in places:
                self._measure(at)
            self._finals()
        finally:
            if self._memory is not None:
                self._memory.restore(self._original)
        return self._found

    def kernel(self, at: int) -> Any:
        """The kernel of a config with its hints; made once, because a launched one may not be dropped."""
        if at not in self._kernels:
            config = self._call.space[at]
            hints = self._call.hints_fn(config) if self._call.hints_fn is not None else {}
            # A plain kernel would compile again in each round: cuTile's search asks it for one without hints.
            kernel = self._call.kernel_of(config)
            tried = self._tried.get(at)
            cubin = tried.cubin if tried is not None else None
            cubins = {} if cubin is None else {cubin.symbol: cubin}
            self._kernels[at] = cutile.with_hints(
                kernel, hints, cubins=lambda signature, arch: cubins.get(signature)
            )
        return self._kernels[at]

    def args(self, at: int) -> tuple[Any, ...]:
        """The arguments of a config, with what they held before the search."""
        args = tuple(self._call.args_fn(self._call.space[at]))
        if self._memory is not None:
            self._memory.restore(args)
        return args

    # One config ---------------------------------------------------------------------------------------------

    def _is_new(self, at: int) -> bool:
        """Whether a config will run, and no earlier run has shown that it lets the process live."""
        return self._journal.outcome(at) is None and not self._journal.killed(at)

    def _measure(self, at: int) -> None:
        known = self._journal.outcome(at)
        # The first that runs must run in this process too: the others are compared with what it leaves.
        if known is not None and (self._memory is not None or not isinstance(known, Measurement)):
            self._keep(at, known)
            return
        if self._journal.killed(at):
            self._fail(at, PassedOverError("it ended the process in an earlier run"))
            return
        if at in self._tried and self._tried[at].passed_over:
            self._fail(at, PassedOverError(self._tried[at].passed_over))
            return
        self._journal.begin(at)
        try:
            self._launch(at)
            outcome = known if isinstance(known, Measurement) else self._timed(at)
        except Exception as error:
            self._fail(at, error)
            return
        except BaseException:  # Ctrl-C: the config is not to blame
            self._journal.abandon(at)
            raise
        self._found.times[at] = outcome
        self._journal.write(at, outcome)

    def _keep(self, at: int, outcome: Measurement | Failure) -> None:
        if isinstance(outcome, Measurement):
            self._found.times[at] = outcome
        elif outcome.stage == "verify":
            self._wrong(at, outcome.message)
        else:
            self._found.failures[at] = (RuntimeError, outcome.message)

    def _launch(self, at: int) -> None:
        """Launch a config once, and look at what it changed."""
        kernel, grid = self.kernel(at), self._call.grid_fn(self._call.space[at])
        args = self.args(at)
        before = saved(args) if self._memory is None else {}
        cutile.launch(self._call.stream, grid, kernel, args)
        runtime().synchronize(self._device_index)
        if self._memory is None:
            self._memory, self._original = observed(before, args), args
        elif difference := self._memory.difference(args, self._names):
            raise WrongResultError(difference)

    def _timed(self, at: int) -> Measurement:
        result = cutile.search(
            [at],
            self._call.stream,
            kernel=lambda _: self.kernel(at),
            grid_of=lambda _: self._call.grid_fn(self._call.space[at]),
            args_of=lambda _: tuple(self._call.args_fn(self._call.space[at])),
            flush_l2=bool(self._call.options.get("flush_l2", True)),
        )
        best = result.best
        taken = Measurement(
            config=_named(at),
            mean_us=float(best.mean_us),
            error_margin_us=float(best.error_margin_us),
            num_samples=int(best.num_samples),
        )
        if not usable(taken):
            raise RuntimeError(f"its time is {taken.mean_us:g} us")
        return taken

    def _fail(self, at: int, error: Exception) -> None:
        message = str(error)
        if isinstance(error, WrongResultError):
            self._wrong(at, message)
        else:
            self._found.failures[at] = (type(error), message)
        stage: Stage = "verify" if isinstance(error, WrongResultError) else "launch"
        self._journal.write(at, Failure(config=_named(at), stage=stage, message=message))

    def _wrong(self, at: int, message: str) -> None:
        self._found.wrong[at] = message
        self._found.failures[at] = (WrongResultError, message)

    # Those near the fastest ---------------------------------------------------------------------------------

    def _finals(self) -> None:
        times = {one.config: one for one in self._found.times.values()}
        chosen = finalists(times, [_named(at) for at in list(self._found.times)[:1]])
        places = {_named(at): at for at in self._found.times}
        if len(chosen) < 2:
            return
        taken: dict[Config, list[Measurement]] = {config: [] for config in chosen}
        for number in range(MOST_ROUNDS):
            for config in in_turn(list(taken), number):
                at = places[config]
                round_before = self._journal.round(at, number)
                try:
                    one = round_before or self._timed(at)
                except Exception as error:
                    del taken[config]
                    del self._found.times[at]
                    self._fail(at, error)
                    continue
                if round_before is None:
                    self._journal.write(at, one, number=number)
                taken[config].append(one)
            if not taken or settled(list(taken.values())):
                break
        for config, rounds in taken.items():
            self._found.times[places[config]] = combined(config, rounds)


def _named(at: int) -> Config:
    """A config's place in the search space, as the tuner's values name it."""
    return Config(constants={"place": at})


def raise_as_cutile(call: SearchCall, failures: Mapping[int, tuple[type[BaseException], str]]) -> None:
    """Raise what cuTile's search raises where no config ran.

    Raises:
        ValueError: Always.
    """
    at, (kind, message) = next(iter(failures.items()))
    raise ValueError(
        f"No valid config found in search space.\nConfig: {call.space[at]}\n{kind.__name__}: {message}"
    )


def as_result(call: SearchCall, found: Searched) -> Any:
    """The ``TuningResult`` that the library gets."""
    measured = {
        at: cutile.measurement(
            call.space[at],
            mean_us=one.mean_us,
            error_margin_us=one.error_margin_us,
            num_samples=one.num_samples,
        )
        for at, one in sorted(found.times.items())
    }
    failures = [(call.space[at], kind, message) for at, (kind, message) in sorted(found.failures.items())]
    return cutile.result_of(measured[found.winner], tuple(measured.values()), tuple(failures))
