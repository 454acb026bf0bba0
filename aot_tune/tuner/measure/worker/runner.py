"""Run trials in the worker process, and report each before it starts so that faults have an owner.

Imports no GPU library: a `Backend` launches and times.

Long kernels bring a GPU to its power cap, which it may exceed for milliseconds after a pause: of kernels
timed one after another the first would be 10 % too fast (H200). So the long kernels near the fastest are
timed launch by launch, in turn, and large products keep the GPU busy before each launch, as a server does.
The winner depends on it: an fp8 tile of 128 x 128 was 1.5 % faster than a tile of 64 x 128 after pauses and
4 % slower under load.

The L2 cache's contents at the start of a launch change some configs by a third and others by nothing. So
configs that may win are timed in other states of the GPU as well (`aot_tune.tables.states`), launch by launch
and in turn, one state after another.

Impossible times are discarded: zero, negative and not finite values, and times shorter than moving the
problem's arguments takes. Samples taken while the GPU was throttled or shared are discarded too. All are
measured again, a bounded number of times. A config that leads by more than the tie band is timed again as
well, before its time decides which configs are near: one sample that is too fast would exclude all real
contenders.

After the turns each config is launched once more in the same state, on poisoned outputs, which are compared:
a config may be wrong in such launches alone.

Each time is reported as provisional when it is taken, so that a later fault throws none away. The parent
hands the provisional times back with the rest of a request whose worker broke.

A launch may also write where nothing faults. So after each config the worker makes sure that the expected
values and saved copies are as they were made (`Backend.damage`). Where they are not, the config that ran is
blamed and the process runs no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import NoReturn

from aot_tune.errors import DeclarationError
from aot_tune.tables.states import State
from aot_tune.tuner.choose.states import LONG_US
from aot_tune.tuner.choose.times import is_tie
from aot_tune.tuner.measure.rounds import RESOLUTION_US, from_samples, in_turn, usable
from aot_tune.tuner.measure.worker.backend import Backend, Counters, Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement, Outcome, Stage
from aot_tune.tuner.process.worker import Report
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import error_in_words

TRIES = 3
"""Most timings of one config whose times are unusable or uncertain."""

WIDE = 0.05
"""A config is timed again when its error margin is above this fraction of its mean. One bad sample of five
suffices for that."""

NEAR = 1.25
"""Long kernels are timed in turn up to this multiple of the fastest time; slower ones have lost."""

SAMPLES = 8
"""Launches of each config in one round of turns."""

STATE_SAMPLES = 4
"""Launches of each config that are timed in another state of the GPU."""

MOST_STATE_SAMPLES = 12
"""Most such launches of a config whose margin of error is wide. An interruption of two launches out of four
moves their median, and a worst state decides winners."""

BUSY_FIRST_S = 0.1
"""Seconds of large products before a round of turns. An H200 may exceed its power cap for some 50 ms after a
pause."""

BUSY_BETWEEN_S = 0.001
"""Seconds of large products before each launch of a round of turns."""

LEAST_LAUNCHES = 50
"""Least number of repeated launches of a config, however long they take."""

LAUNCHES_SECONDS = 0.3
"""Seconds after which a config gets no more than `LEAST_LAUNCHES`. A sweep launches the configs of a problem
some 1500 times, so that these launches add a few percent."""

MOST_TEXT = 4000
"""Most characters of an error that a failure repeats: a compiler may write megabytes, and each is kept."""

PAUSE_SECONDS = 0.5
"""Seconds of waiting before spoilt samples are taken again."""

PATIENCE_SECONDS = 60.0
"""Most seconds of waiting for undisturbed samples in the life of one worker. Afterwards spoilt samples are
kept and reported as disturbed: another user's idle process may stay on the GPU all day."""


_Run = Callable[[Trial], "Outcome | None"]
"""Runs a trial; returns its outcome, None where it was only checked and is correct."""


class _ContextDead(Exception):
    """Nothing more can be run in this process."""


class TrialRunner:
    """The object that lives in a measuring worker; its public methods are the requests.

    Args:
        report: Sends `Running`, `Done` and `Poisoned` to the parent.
        backend: ``package.module:Class`` of a `Backend`.
        arguments: The backend's keyword arguments.
        patience_s: Seconds to wait, in all, for disturbances to end.
    """

    def __init__(
        self,
        report: Report,
        *,
        backend: str,
        arguments: Mapping[str, object],
        patience_s: float = PATIENCE_SECONDS,
    ) -> None:
        module, _, name = backend.partition(":")
        self._backend: Backend = getattr(import_module(module), name)(**arguments)
        self._report = report
        self._patience_s = patience_s
        self._verify_s = 0.0
        self._least_us = 0.0
        self._careful = False
        self._timed_alone: dict[Config, Measurement] = {}
        """First time of each config on the open problem, taken config by config, not in turn."""

    def turn_to(self, arguments: Mapping[str, object]) -> None:
        """Run the trials of another kernel from here on.

        Args:
            arguments: The backend's keyword arguments for it.
        """
        self._timed_alone.clear()
        self._backend.turn_to(**arguments)

    def canary(self) -> None:
        """Run a computation whose result is known; raise unless it is right."""
        self._backend.canary()

    def device(self) -> Device:
        """Return the GPU as grids are computed for it."""
        return self._backend.device()

    def state(self) -> GpuState:
        """Return the present clocks, and the reasons why they are not higher."""
        return self._backend.state()

    def open(self, problem: Problem, seeds: Sequence[int]) -> str | None:
        """Make a problem's arguments and references.

        Returns:
            None, or a message where the GPU's memory is too small.
        """
        self._timed_alone.clear()
        try:
            self._backend.open(problem, seeds)
        except DeclarationError:
            raise
        except Exception as error:
            if self._backend.stage(error) != "memory":
                raise
            return f"arguments and reference: {error_in_words(error)}"
        return None

    def measure(
        self,
        trials: Sequence[Trial],
        known: Sequence[Measurement] = (),
        least_us: float = 0.0,
        careful: bool = False,
    ) -> tuple[GpuState, GpuState]:
        """Verify and time each config; time long ones near the fastest in turn.

        Args:
            trials: The configs.
            known: Times that were taken before. Their configs are not verified and timed alone again; times
                of other configs serve for comparison only.
            least_us: Least possible time, microseconds.
            careful: Whether to look for damage after each launch of a turn.

        Returns:
            The GPU's state before and after.
        """
        before = self._backend.state()
        self._least_us, self._careful = least_us, careful
        self._timed_alone.update((timing.config, timing) for timing in known)
        with suppress(_ContextDead):
            new = [trial for trial in trials if trial.config not in self._timed_alone]
            self._run_each(new, self._verify_and_time)
            configs = {timing.config for timing in known} | {trial.config for trial in trials}
            self._time_leader_again(trials, configs)
            timed = [trial for trial in trials if trial.config in self._timed_alone]
            fastest = self._fastest(configs)
            near = [trial for trial in timed if self._timed_alone[trial.config].mean_us <= NEAR * fastest]
            self._report_final(timed, self._timed_alone, self._loaded(near if fastest >= LONG_US else []))
        return before, self._backend.state()

    def time(
        self, trials: Sequence[Trial], known: Sequence[Measurement] = (), careful: bool = False
    ) -> tuple[GpuState, GpuState]:
        """Time each config for one round of the finals, in turn if even the fastest is long.

        Args:
            trials: The configs.
            known: Times that were taken alone in this round, in a worker that broke.
            careful: As for `measure`.

        Returns:
            The GPU's state before and after.
        """
        before = self._backend.state()
        self._least_us, self._careful = 0.0, careful
        taken = {timing.config: timing for timing in known}
        for config, timing in taken.items():
            self._timed_alone.setdefault(config, timing)
        with suppress(_ContextDead):
            configs = {trial.config for trial in trials}
            if not (configs <= self._timed_alone.keys() and self._fastest(configs) >= LONG_US):
                new = [trial for trial in trials if trial.config not in taken]
                taken |= self._run_each(new, self._check_and_time)
            else:
                taken = {config: self._timed_alone[config] for config in configs}
            timed = [trial for trial in trials if trial.config in taken]
            long = timed if self._fastest(configs) >= LONG_US else []
            self._report_final(timed, taken, self._loaded(long))
        return before, self._backend.state()

    def time_in_state(
        self,
        trials: Sequence[Trial],
        state: State,
        known: Sequence[Measurement] = (),
        careful: bool = False,
    ) -> tuple[GpuState, GpuState]:
        """Time configs that were verified in one state of the GPU, launch by launch, in turn.

        Args:
            trials: The configs.
            state: The state.
            known: Times of other configs from a worker that broke; not used.
            careful: As for `measure`.

        Returns:
            The GPU's state before and after.
        """
        before = self._backend.state()
        self._least_us, self._careful = 0.0, careful
        with suppress(_ContextDead):
            turns = self._in_turn(trials, state, STATE_SAMPLES, load=False, most=MOST_STATE_SAMPLES)
            self._report_final(trials, {}, turns)
        return before, self._backend.state()

    def check(self, trials: Sequence[Trial]) -> None:
        """Verify each config with its trial's number of launches, without timing it."""
        with suppress(_ContextDead):
            self._run_each(trials, self._verify)

    def counters(self, trial: Trial) -> Counters:
        """Read the GPU's counters of one launch of a verified config."""
        return self._backend.counters(trial)

    def _fastest(self, configs: Iterable[Config]) -> float:
        """Return the shortest time of some configs, microseconds; infinite where none was timed."""
        times = (self._timed_alone.get(config) for config in configs)
        return min((timing.mean_us for timing in times if timing is not None), default=math.inf)

    def _run_each(self, trials: Sequence[Trial], run: _Run) -> dict[Config, Measurement]:
        """Run each trial, report its outcome (times as provisional), and return the times."""
        taken: dict[Config, Measurement] = {}
        for trial in trials:
            self._report(Running(config=trial.config))
            self._verify_s = 0.0
            outcome = self._guarded(trial, run)
            if isinstance(outcome, Measurement):
                self._timed_alone.setdefault(trial.config, outcome)
                taken[trial.config] = outcome
                outcome = replace(outcome, provisional=True)
            self._report(Done(outcome=outcome, verify_s=self._verify_s))
        return taken

    def _time_leader_again(self, trials: Sequence[Trial], rivals: Iterable[Config]) -> None:
        """Time leaders again until the leader is confirmed or ties with the second.

        Where a leader's two times do not tie, a third is taken and the middle time counts.
        """
        rivals, sure = set(rivals), set[Config]()
        by_config = {trial.config: trial for trial in trials}
        while True:
            timed = self._timed_alone
            order = sorted(timed.keys() & rivals, key=lambda config: timed[config].mean_us)
            if len(order) < 2 or order[0] in sure or order[0] not in by_config:
                return
            first, second = (self._timed_alone[config] for config in order[:2])
            if is_tie(first, second):
                return
            sure.add(first.config)
            times = [first]
            while len(times) < 3 and not (len(times) == 2 and is_tie(*times)):
                self._report(Running(config=first.config))
                outcome = self._guarded(by_config[first.config], self._time)
                if not isinstance(outcome, Measurement):
                    del self._timed_alone[first.config]
                    self._report(Done(outcome=outcome))
                    break
                times.append(outcome)
            else:
                if len(times) == 3:
                    self._timed_alone[first.config] = sorted(times, key=lambda timing: timing.mean_us)[1]

    def _loaded(self, trials: Sequence[Trial]) -> dict[Trial, Outcome]:
        """Time trials launch by launch, in turn, on a busy GPU; return the outcome of each."""
        if trials:
            self._backend.busy(BUSY_FIRST_S)
        return self._in_turn(trials, "read", SAMPLES, load=True)

    def _in_turn(
        self, trials: Sequence[Trial], state: State, samples: int, *, load: bool, most: int = 0
    ) -> dict[Trial, Outcome]:
        """Time trials launch by launch, in turn; return the outcome of each.

        Trials with a wide margin of error are then timed again, `samples` launches more each time, until a
        launch is disturbed or gives no time. Earlier samples are kept. After the turns the output of one more
        launch of each trial is compared.

        Args:
            trials: The configs.
            state: The GPU's state before each launch.
            samples: Timed launches of each config.
            load: Whether large products keep the GPU busy before each launch. Without them the first turn
                warms up and does not count; a tight row warms up by itself.
            most: Most timed launches of a config with a wide margin of error.
        """
        taken: dict[Trial, list[float]] = {trial: [] for trial in trials}
        failed: dict[Trial, Outcome] = {}
        disturbed: dict[Trial, str] = {}
        left = list(trials)
        for number in range(0 if load or state == "tight" else -1, max(samples, most)):
            left = [trial for trial in left if trial not in failed]
            if number >= samples and number % samples == 0:
                wide = (trial for trial in left if _is_wide(from_samples(trial.config, taken[trial])))
                left = [trial for trial in wide if trial not in disturbed]  # further turns would be, too
            if not left:
                break  # a wait for a disturbance to end would report nothing, and look like a hang
            outcomes, disturbed_by = self._one_turn(left, state, number, load=load)
            for trial, outcome in outcomes.items():
                if isinstance(outcome, Measurement):
                    taken[trial] += [outcome.mean_us] if number >= 0 else []
                elif isinstance(outcome, Failure) and outcome.stage == "timing" and number >= samples:
                    left.remove(trial)  # its earlier samples are kept
                elif outcome is not None:
                    failed[trial] = outcome
                if disturbed_by and number >= 0:
                    disturbed.setdefault(trial, disturbed_by)
        harm = self._tried(trials[-1], self._harm) if trials else None
        if isinstance(harm, Failure) and harm.stage == "verify":
            self._report(Poisoned(config=None, stage="verify", message=harm.message))
            raise _ContextDead
        for trial in [trial for trial in trials if trial not in failed]:
            wrong = self._guarded(trial, lambda trial: self._compare(trial, state, load=load))
            if wrong is not None:
                failed[trial] = wrong
        return {
            trial: failed.get(trial)
            or replace(from_samples(trial.config, us), disturbed=disturbed.get(trial))
            for trial, us in taken.items()
        }

    def _compare(self, trial: Trial, state: State, *, load: bool) -> Failure | None:
        """Launch a config in a state of the GPU, untimed, and compare its output.

        A config with a wrong result that must be confirmed is launched as often as in `_verify`.
        """
        for number in self._launches(max(1, trial.launches)):
            self._report(Running(config=trial.config))
            self._backend.prepare()
            if load:
                self._backend.busy(BUSY_BETWEEN_S)
            self._backend.sample(trial, state)
            if wrong := self._backend.check():
                where = "under load" if load else f"in the state {state}"
                message = f"{wrong}, {where}, at launch {number + 1} that is compared"
                return Failure(config=trial.config, stage="verify", message=message)
        return None

    def _one_turn(
        self, trials: Sequence[Trial], state: State, number: int, *, load: bool
    ) -> tuple[dict[Trial, Outcome | None], str | None]:
        """Launch each trial once; repeat while a disturbance and the patience last.

        Returns:
            The outcome of each trial, and the disturbance of the last turn.
        """
        while True:
            order = in_turn(trials, max(number, 0))
            outcomes = {trial: self._sample(trial, state, load=load) for trial in order}
            disturbance = self._backend.disturbance()  # not between launches, where the GPU would rest
            if not (disturbance and self._wait()):
                return outcomes, disturbance

    def _report_final(
        self, trials: Sequence[Trial], alone: Mapping[Config, Measurement], turns: Mapping[Trial, Outcome]
    ) -> None:
        """Report final outcomes, failures first: a failure may make the parent retry the group."""
        outcomes = {trial: turns.get(trial) or alone[trial.config] for trial in trials}
        for trial in sorted(trials, key=lambda trial: isinstance(outcomes[trial], Measurement)):
            self._report(Running(config=trial.config))
            outcome = outcomes[trial]
            if isinstance(outcome, Measurement):
                outcome = replace(outcome, provisional=False)
            self._report(Done(outcome=outcome))

    def _guarded(self, trial: Trial, run: _Run, *, look: bool = True) -> Outcome | None:
        """Run a trial; an exception becomes a failure of its stage.

        Args:
            trial: The trial.
            run: Function that runs it.
            look: Whether to look for damage.

        Raises:
            _ContextDead: The trial left a dead context or damage, and the parent was informed.
            DeclarationError: The kernel changed an argument that the declaration does not name.
        """
        outcome = self._tried(trial, run)
        # A launch is asynchronous: a fault may show only now. The next trial must not be blamed for it.
        if not self._backend.healthy():
            self._dead(trial, "fault", "the GPU's context is dead after this config ran")
        if look:
            harm = self._tried(trial, self._harm)
            if isinstance(harm, Failure) and harm.stage == "verify":
                self._dead(trial, "verify", harm.message)
            outcome = harm or outcome
        return outcome

    def _tried(self, trial: Trial, run: _Run) -> Outcome | None:
        try:
            return run(trial)
        except DeclarationError as error:
            raise DeclarationError(f"{error} (the config that ran last: {trial.config})") from error
        except Exception as error:
            stage, message = self._backend.stage(error), error_in_words(error)[:MOST_TEXT]
            if stage == "fault":
                self._dead(trial, stage, message, error)
            return Failure(config=trial.config, stage=stage, message=message)

    def _dead(self, trial: Trial, stage: Stage, message: str, error: Exception | None = None) -> NoReturn:
        self._report(Poisoned(config=trial.config, stage=stage, message=message))
        raise _ContextDead from error

    def _harm(self, trial: Trial) -> Failure | None:
        damage = self._backend.damage()
        message = f"the kernel writes outside of its arguments: {damage}"
        return Failure(config=trial.config, stage="verify", message=message) if damage else None

    def _verify(self, trial: Trial) -> Failure | None:
        began = time.monotonic()
        wrong = self._backend.verify(trial)
        for number in self._launches(trial.launches):
            if wrong:
                break
            self._report(Running(config=trial.config))  # many launches are no hang
            wrong = self._backend.again(trial, number)
            if wrong:
                wrong = f"{wrong}, at launch {number + 1} after a correct one"
        self._verify_s = time.monotonic() - began
        return None if wrong is None else Failure(config=trial.config, stage="verify", message=wrong)

    def _launches(self, most: int) -> Iterator[int]:
        """Count launches, up to `LEAST_LAUNCHES` or as many as `LAUNCHES_SECONDS` suffice for."""
        began = time.monotonic()
        for number in range(most):
            if number >= LEAST_LAUNCHES and time.monotonic() - began > LAUNCHES_SECONDS:
                return
            yield number

    def _verify_and_time(self, trial: Trial) -> Outcome:
        return self._verify(trial) or self._time(trial)

    def _check_and_time(self, trial: Trial) -> Outcome:
        """Time a verified config; verify it first where its last result was wrong."""
        return (self._verify(trial) if trial.launches else None) or self._time(trial)

    def _time(self, trial: Trial) -> Outcome:
        """Time a config, and compare the output of the last timed launch."""
        outcome = self._timed(trial)
        wrong = self._backend.check() if isinstance(outcome, Measurement) else None
        if wrong:
            return Failure(config=trial.config, stage="verify", message=f"{wrong}, after timed launches")
        return outcome

    def _timed(self, trial: Trial) -> Outcome:
        """Time a config until the result is usable, `TRIES` times at most.

        A disturbed try does not count while there is patience to wait for the disturbance's end.
        """
        best: Measurement | None = None
        refused: list[str] = []
        tries = 0
        while tries < TRIES:
            self._report(Running(config=trial.config))  # measuring again, or waiting, is not hanging
            taken = self._backend.time(trial)
            disturbance = self._backend.disturbance()
            if disturbance and self._wait():
                continue
            tries += 1
            taken = replace(taken, disturbed=disturbance)
            if not self._possible(taken):
                refused.append(f"{taken.mean_us:g} us ± {taken.error_margin_us:g}")
                continue
            if best is None or taken.error_margin_us < best.error_margin_us:
                best = taken
            if disturbance or not _is_wide(best):
                break
        return best or self._untimed(trial, refused)

    def _sample(self, trial: Trial, state: State, *, load: bool) -> Outcome | None:
        """Return the time of one launch, or a failure."""
        self._report(Running(config=trial.config))

        def sample(trial: Trial) -> Outcome:
            refused: list[str] = []
            for _ in range(TRIES):
                if load:
                    self._backend.busy(BUSY_BETWEEN_S)
                us = self._backend.sample(trial, state)
                timing = Measurement(config=trial.config, mean_us=us, error_margin_us=0.0, num_samples=1)
                if self._possible(timing):
                    return timing
                refused.append(f"{us:g} us")
            return self._untimed(trial, refused)

        return self._guarded(trial, sample, look=self._careful)

    def _possible(self, taken: Measurement) -> bool:
        return usable(taken) and taken.mean_us >= self._least_us

    def _untimed(self, trial: Trial, refused: Sequence[str]) -> Failure:
        message = f"no usable time in {TRIES} tries: {', '.join(refused)}"
        if self._least_us:
            message += f" (less than {self._least_us:.3g} us is impossible)"
        return Failure(config=trial.config, stage="timing", message=message)

    def _wait(self) -> bool:
        """Wait for a disturbance to end; return False when the patience is used up."""
        if self._patience_s <= 0:
            return False
        self._patience_s -= PAUSE_SECONDS
        time.sleep(min(PAUSE_SECONDS, max(self._patience_s, 0.0)))
        return True


def _is_wide(taken: Measurement) -> bool:
    """Return whether a margin of error is so wide that the config is timed again."""
    return taken.error_margin_us > max(WIDE * taken.mean_us, RESOLUTION_US)
