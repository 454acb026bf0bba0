"""Make a library's search once, with the tuner's measurements, in the process where its tensors are.

1. Each config is tried ahead where possible (`aot_tune.replay.record.ahead`). A config that would end this
   process is skipped. Then each is launched once on the tensors' contents from before the search, with poison
   in those that the kernel only stores to. A config whose outputs differ from the first config's cannot win,
   since the library gives no reference.
2. Each right config is timed. The configs near the fastest are timed again, interleaved in rounds, until
   their order is outside the noise.
3. Of configs that tie the first of the search space wins.
4. The tensors get their contents back.

Each outcome is in the journal before the next config runs. A config that was begun and has no outcome ended
the process, and is skipped in the next run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aot_tune.errors import NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.problem import Problem, parameters_of, read_argument, read_problem
from aot_tune.replay.record.ahead import Tried
from aot_tune.replay.record.journal import SearchJournal
from aot_tune.replay.record.memory import Memory, stores_of
from aot_tune.replay.table import Launched
from aot_tune.serve.runtime import runtime
from aot_tune.tuner.choose.times import finalists, is_tie
from aot_tune.tuner.measure.rounds import MOST_ROUNDS, combined, in_turn, settled, usable
from aot_tune.tuner.outcome import Failure, Measurement, Stage
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.text import error_in_words


@dataclass(frozen=True, kw_only=True)
class Identified:
    """Search that can be recorded."""

    texts: tuple[str, ...]
    """Configs, spelled."""

    problem: Problem
    """Problem of the search."""

    same_launches: int
    """Number of configs with the grid, hints and arguments of an earlier config."""


@dataclass(kw_only=True)
class Searched:
    """Results of a search, by the config's place in the search space."""

    times: dict[int, Measurement] = field(default_factory=dict)
    """Time of each right config. A finalist's is from the rounds."""

    failures: dict[int, tuple[type[BaseException], str]] = field(default_factory=dict)
    """Exception and message of each config that failed."""

    wrong: dict[int, str] = field(default_factory=dict)
    """How each wrong config's results differ from those of the first that ran."""

    in_parts: set[str] = field(default_factory=set)
    """Parameters to which configs stored different numbers of parts of the same sums."""

    @property
    def winner(self) -> int:
        """Return the fastest config's place. Of configs that tie the first wins."""
        fastest = min(self.times.values(), key=lambda time: time.mean_us)
        return min(at for at, time in self.times.items() if is_tie(time, fastest))


class WrongResultError(Exception):
    """A config computes something else than the first config."""


class PassedOverError(Exception):
    """A config is skipped: it ended this process in an earlier run, or failed where it was tried ahead."""


def identified(call: SearchCall, texts: tuple[str, ...], device: Device) -> Identified:
    """Read the problem of a search. Calls `args_fn` for every config, as the search will.

    Raises:
        NotRecordableError: The search cannot be identified.
    """
    parameters = parameters_of(call.kernel_of(call.space[0]))
    read: list[tuple[Any, ...]] = []
    launches: list[Any] = []
    failed = ""
    for config in call.space:
        called = "args_fn"
        try:
            args = call.args_of(config)
            called = "grid_fn"
            grid = call.grid_fn(config)
            called = "hints_fn"
            hints = call.hints_fn(config) if call.hints_fn else {}
        except Exception as error:  # the search fails too, and lists the config
            failed = f"{called} raises {error_in_words(error)}"
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
    varying = [at for at in range(len(parameters)) if len({arguments[at] for arguments in read}) > 1]
    problem = read_problem(parameters, call.args_of(call.space[0]), varying, device.sm_count)
    return Identified(texts=texts, problem=problem, same_launches=len(launches) - len(set(launches)))


class LibrarySearch:
    """Search of a library.

    Args:
        call: The library's search.
        known: The problem of the search.
        journal: Receives each outcome.
        device_index: The GPU's number.
        ahead: Tries configs, given by their places, before this process runs them.
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
        self._journal = journal
        self._device_index = device_index
        self._ahead = ahead
        self._tried: Mapping[int, Tried] = {}
        self._names = known.problem.names
        self._memory: Memory | None = None
        self._original: tuple[Any, ...] = ()
        self._kernels: dict[int, Any] = {}
        self._results = Searched()

    def run(self) -> Searched:
        """Search, and restore the tensors whatever happens."""
        places = range(len(self._call.space))
        try:
            self._tried = self._ahead([at for at in places if self._is_new(at)])
            for at in places:
                self._measure(at)
            self._finals()
        finally:
            if self._memory is not None:
                self._restore(self._original)
                self._results.in_parts = self._memory.in_parts
        return self._results

    def kernel(self, at: int) -> Any:
        """Return the kernel of a config with its hints. It is kept, since cuTile must not lose it."""
        if at not in self._kernels:
            config = self._call.space[at]
            hints = self._call.hints_fn(config) if self._call.hints_fn is not None else {}
            # A kernel without these hints would compile again in each round of cuTile's search.
            kernel = self._call.kernel_of(config)
            tried = self._tried.get(at)
            cubin = tried.cubin if tried is not None else None
            cubins = {} if cubin is None else {cubin.symbol: cubin}
            self._kernels[at] = cutile.with_hints(
                kernel, hints, cubins=lambda signature, arch: cubins.get(signature)
            )
        return self._kernels[at]

    def launched(self, at: int, arch: Arch) -> Launched:
        """Return the launch of a config. The arguments keep their contents from before the search.

        Raises:
            CutileError: An argument has no signature.
        """
        kernel, args = self.kernel(at), self._call.args_of(self._call.space[at])
        if self._memory is not None:
            self._restore(args)
        return Launched(tuple(cutile.hints_of(kernel, arch).items()), cutile.signature_of(kernel, args))

    def _restore(self, args: Sequence[Any]) -> None:
        """Restore contents. Torch copies on its own stream, and the library may launch on another."""
        assert self._memory is not None
        self._memory.restore(args)
        runtime().synchronize(self._device_index)

    # One config ---------------------------------------------------------------------------------------------

    def _is_new(self, at: int) -> bool:
        """Return whether a config will run that no earlier run has finished."""
        return self._journal.outcome(at) is None and not self._journal.killed(at)

    def _measure(self, at: int) -> None:
        known = self._journal.outcome(at)
        # The first right config runs in this process too: the others are compared with its results.
        observed = self._memory is not None and self._memory.is_observed
        if known is not None and (observed or not isinstance(known, Measurement)):
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
            with _on_termination(partial(self._journal.abandon, at)):
                self._launch(at)
                outcome = known if isinstance(known, Measurement) else self._timed(at)
        except Exception as error:
            self._fail(at, error)
            return
        except BaseException:  # Ctrl-C: the config is not to blame
            self._journal.abandon(at)
            raise
        self._results.times[at] = outcome
        self._journal.write(at, outcome)

    def _keep(self, at: int, outcome: Measurement | Failure) -> None:
        if isinstance(outcome, Measurement):
            self._results.times[at] = outcome
        elif outcome.stage == "verify":
            self._wrong(at, outcome.message)
        else:
            self._results.failures[at] = (RuntimeError, outcome.message)

    def _launch(self, at: int) -> None:
        """Launch a config once, and check its results."""
        kernel, grid = self.kernel(at), self._call.grid_fn(self._call.space[at])
        args = self._call.args_of(self._call.space[at])
        if self._memory is None:
            self._memory, self._original = Memory(args, stores_of(kernel)), args
        self._memory.prepare(args)
        runtime().synchronize(self._device_index)
        cutile.launch(self._call.stream, grid, kernel, args)
        runtime().synchronize(self._device_index)
        if not self._memory.is_observed:
            self._memory.observe(args)
        elif difference := self._memory.difference(args, self._names):
            raise WrongResultError(difference)

    def _timed(self, at: int) -> Measurement:
        result = cutile.search(
            [at],
            self._call.stream,
            kernel=lambda _: self.kernel(at),
            grid_of=lambda _: self._call.grid_fn(self._call.space[at]),
            args_of=lambda _: self._call.args_of(self._call.space[at]),
            flush_l2=bool(self._call.options.get("flush_l2", True)),
        )
        best = result.best
        time = Measurement(
            config=_named(at),
            mean_us=float(best.mean_us),
            error_margin_us=float(best.error_margin_us),
            num_samples=int(best.num_samples),
        )
        if not usable(time):
            raise RuntimeError(f"its time is {time.mean_us:g} us")
        return time

    def _fail(self, at: int, error: Exception) -> None:
        message = str(error)
        if isinstance(error, WrongResultError):
            self._wrong(at, message)
        else:
            self._results.failures[at] = (type(error), message)
        stage: Stage = "verify" if isinstance(error, WrongResultError) else "launch"
        self._journal.write(at, Failure(config=_named(at), stage=stage, message=message))

    def _wrong(self, at: int, message: str) -> None:
        self._results.wrong[at] = message
        self._results.failures[at] = (WrongResultError, message)

    # Configs near the fastest -------------------------------------------------------------------------------

    def _finals(self) -> None:
        times = {time.config: time for time in self._results.times.values()}
        chosen = finalists(times, [_named(at) for at in list(self._results.times)[:1]])
        places = {_named(at): at for at in self._results.times}
        if len(chosen) < 2:
            return
        rounds: dict[Config, list[Measurement]] = {config: [] for config in chosen}
        for number in range(MOST_ROUNDS):
            for config in in_turn(list(rounds), number):
                at = places[config]
                earlier = self._journal.round(at, number)
                try:
                    time = earlier or self._timed(at)
                except Exception as error:
                    del rounds[config]
                    del self._results.times[at]
                    self._fail(at, error)
                    continue
                if earlier is None:
                    self._journal.write(at, time, number=number)
                rounds[config].append(time)
            if not rounds or settled(list(rounds.values())):
                break
        for config, times_of_config in rounds.items():
            self._results.times[places[config]] = combined(config, times_of_config)


def _named(at: int) -> Config:
    """Return a config of the tuner that holds the place in the search space."""
    return Config(constants={"place": at})


def raise_as_cutile(call: SearchCall, failures: Mapping[int, tuple[type[BaseException], str]]) -> None:
    """Raise the error of cuTile's search where no config ran.

    Raises:
        ValueError: Always.
    """
    at, (kind, message) = next(iter(failures.items()))
    raise ValueError(
        f"No valid config found in search space.\nConfig: {call.space[at]}\n{kind.__name__}: {message}"
    )


def as_result(call: SearchCall, results: Searched) -> Any:
    """Return the results of a search as cuTile's ``TuningResult``."""
    measured = {
        at: cutile.measurement(
            call.space[at],
            mean_us=time.mean_us,
            error_margin_us=time.error_margin_us,
            num_samples=time.num_samples,
        )
        for at, time in sorted(results.times.items())
    }
    failures = [(call.space[at], kind, message) for at, (kind, message) in sorted(results.failures.items())]
    return cutile.result_of(measured[results.winner], tuple(measured.values()), tuple(failures))


@contextmanager
def _on_termination(call: Callable[[], None]) -> Iterator[None]:
    """Call a function before SIGTERM ends this process, where the program leaves that signal alone.

    So torchrun ends the ranks beside one that failed; what they run is not to blame. Signals are handled in
    the main thread; in others nothing is called.
    """

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal, of `aot-tune` and torchrun, changes nothing
        try:
            call()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
