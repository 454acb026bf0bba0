"""Answer a library's ``exhaustive_search`` from recorded tables, for authors and for `install`.

1. The same problem was recorded: its winner, with its recorded time.
2. A near problem was recorded (`aot_tune.replay.nearest`): its winner.
3. Neither, which is a miss. AOT_TUNE_ON_MISS decides what happens:

   ====================================  ================  =======  =======  ======
   the process                           search            nearest  default  error
   ====================================  ================  =======  =======  ======
   may search                            cuTile's search   nearest  first    raises
   is a rank, captures, was primed,
   or DISABLE_AUTOTUNE is set            nearest           nearest  first    raises
   ====================================  ================  =======  =======  ======

   *nearest* is the winner of the nearest recorded problem at any distance, with its recorded mean, or the
   first config where nothing comparable was recorded. *first* is the first config of the search space, with
   a mean of infinity.

A search that cannot be identified (a config of a type that cannot be spelled, an argument of an unknown kind)
is a miss. A search of an empty space goes to cuTile, which raises.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aot_tune import environment
from aot_tune.errors import MissError, MissWarning, NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.places import recorder
from aot_tune.replay.answer.records import ByCode, Found, KernelRecords
from aot_tune.replay.document import arguments_json
from aot_tune.replay.nearest import ANY, NEAR
from aot_tune.replay.problem import read_problem
from aot_tune.replay.spelling import Space, space_of, texts_of
from aot_tune.replay.table import RecordedEntry, name_of
from aot_tune.serve.missed import note
from aot_tune.serve.rank import is_primed, rank_in_words
from aot_tune.serve.runtime import runtime, with_tensors
from aot_tune.values.arch import Arch
from aot_tune.values.text import error_in_words
from aot_tune.warn import warn


@dataclass(frozen=True, kw_only=True)
class SearchCall:
    """Arguments of one call of ``exhaustive_search``."""

    space: Sequence[Any]
    """Configs."""

    stream: Any
    """Stream, as the library passed it."""

    grid_fn: Callable[[Any], tuple[int, ...]]
    """Config -> grid."""

    kernel: Any
    """Kernel, or a function from a config to a kernel."""

    args_fn: Callable[[Any], tuple[Any, ...]]
    """Config -> the kernel's arguments."""

    hints_fn: Callable[[Any], Mapping[str, Any]] | None
    """Config -> compiler hints."""

    options: Mapping[str, Any]
    """Keyword arguments, ``quiet`` and those of later releases, as they were passed."""

    def kernel_of(self, config: Any) -> Any:
        """Return the kernel for a config, without its hints."""
        return self.kernel if cutile.is_kernel(self.kernel) else self.kernel(config)

    def args_of(self, config: Any) -> tuple[Any, ...]:
        """Return the kernel's arguments for a config, with other libraries' arrays as tensors."""
        return with_tensors(tuple(self.args_fn(config)), runtime())

    def space_on(self, arch: Arch) -> Space:
        """Return the search space, with the hints of each config's launch on an arch.

        Raises:
            UnspelledError: A config cannot be spelled.
        """
        texts, launched = texts_of(self.space), list[dict[str, int] | None]()
        made: dict[str, dict[str, int]] = {}  # a kernel takes 60 us
        for config in self.space:
            hints = None
            with suppress(Exception):  # the library's functions fail: the search lists the config
                kernel, given = self.kernel_of(config), self.hints_fn(config) if self.hints_fn else {}
                key = repr((cutile.default_hints(kernel), given))
                hints = made.get(key) or cutile.hints_of(cutile.with_hints(kernel, given), arch)
                made[key] = hints
            launched.append(hints)
        return space_of(texts, cutile.hints_of(self.kernel_of(self.space[0]), arch), launched)

    def kernel_name(self) -> str | None:
        """Return the kernel's module and name; None where there is no kernel."""
        try:
            function = cutile.python_function(self.kernel_of(self.space[0]))
            return name_of(function.__module__, function.__qualname__)
        except Exception:  # not a kernel, or the library's function raises: the search itself reports that
            return None

    def search(self) -> Any:
        """Make cuTile's own search."""
        return cutile.own_search()(
            self.space, self.stream, self.grid_fn, self.kernel, self.args_fn, self.hints_fn, **self.options
        )


_records = ByCode()
"""Records by kernel, then arch."""

_misses: dict[str, int] = {}
"""Number of misses of each kernel."""


def forget() -> None:
    """Read recorded tables anew at the next search."""
    _records.clear()
    _misses.clear()


def answered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that replaces cuTile's: same name, signature, errors and results.

    Args:
        original: cuTile's ``exhaustive_search``.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def exhaustive_search(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises the error that the caller expects
        arguments = dict(bound.arguments)
        call = SearchCall(
            space=arguments.pop("search_space"),
            stream=arguments.pop("stream"),
            grid_fn=arguments.pop("grid_fn"),
            kernel=arguments.pop("kernel"),
            args_fn=arguments.pop("args_fn"),
            hints_fn=arguments.pop("hints_fn", None),
            options=arguments,
        )
        return (recorder() or answer)(call)

    return cutile.standing_in(exhaustive_search, original)


def answer(call: SearchCall) -> Any:
    """Answer a search from the recorded tables, or as AOT_TUNE_ON_MISS decides."""
    mode = environment.on_miss()
    restricted = why_not_searched() is not None
    if not _is_sequence(call.space) or not len(call.space):
        return call.search()  # raises as the caller expects
    found = _look_up(call, ANY if mode == "nearest" or (restricted and mode == "search") else NEAR)
    if isinstance(found, Found):
        return answer_of(call.space[found.place], found.entry)
    name = call.kernel_name() or "a kernel"
    if environment.missed_file() is not None:
        _note(call, name)
    what = f"no recorded search of {name} answers this call"
    if mode == "error":
        raise MissError(
            f"{what} ({found.why()}), and {environment.ON_MISS}=error: record it with aot-tune record"
        )
    searched = mode == "search" and not restricted
    if found.tabled or not searched:
        count = len(call.space)
        taken = (
            f"its {count} configs are searched" if searched else f"the first of its {count} configs is taken"
        )
        _warn_of_miss(name, lambda: f"{what} ({found.why()}); {taken}")
    if searched:
        return call.search()
    return _result(call.space[0], math.inf, math.inf, 0)


def answer_of(config: Any, entry: RecordedEntry) -> Any:
    """Return the ``TuningResult`` of a recorded winner: `config`, with the time of its entry."""
    return _result(config, entry.mean_us, entry.error_margin_us, entry.num_samples)


def _result(config: Any, mean_us: float, error_margin_us: float, num_samples: int) -> Any:
    """Return a ``TuningResult`` with one measured config, the best."""
    best = cutile.measurement(
        config, mean_us=mean_us, error_margin_us=error_margin_us, num_samples=num_samples
    )
    return cutile.result_of(best, (best,))


@dataclass(frozen=True, kw_only=True)
class _Miss:
    """No recorded answer to a search."""

    why: Callable[[], str]
    """Returns the reason in words."""

    tabled: bool = False
    """Whether other searches of the kernel were recorded."""


def _look_up(call: SearchCall, most: float) -> Found | _Miss:
    """Return the recorded answer, or why there is none."""
    here = runtime()
    tabled = False
    try:
        device = here.device(here.current_device())
        kernel = call.kernel_of(call.space[0])
        records = records_of(kernel, device.arch)
        if not records.tables:
            nothing = f"nothing was recorded for it on {device.arch}"
            return _Miss(why=lambda: "; ".join(records.left_out) or nothing)
        tabled = True
        space = call.space_on(device.arch)
        args = call.args_of(call.space[0])
        recorded = records.find(space, args, device.sm_count, most=most)
    except Exception as error:  # the library's own function failed: cuTile's search meets that too
        reason = error_in_words(error)
        return _Miss(why=lambda: reason, tabled=tabled)
    if recorded is None:
        return _Miss(why=lambda: records.why_not(space, args, device.sm_count, most=most), tabled=True)
    return recorded


def _note(call: SearchCall, name: str) -> None:
    """Append the problem to the file of AOT_TUNE_RECORD, with every argument for the first config."""
    here = runtime()
    with suppress(Exception):  # the library's own function failed, or an argument cannot be identified
        device = here.device(here.current_device())
        kernel = call.kernel_of(call.space[0])
        parameters = [(parameter, True) for parameter, _ in cutile.parameters(kernel)]
        problem = read_problem(parameters, call.args_of(call.space[0]), (), device.sm_count)
        note({"search": name, "arch": str(device.arch), "arguments": arguments_json(problem)})


def records_of(kernel: Any, arch: Arch) -> KernelRecords:
    """Return a kernel's recorded searches, read once for its code.

    Raises:
        NotRecordableError: `kernel` is no kernel.
    """
    if not cutile.is_kernel(kernel):
        raise NotRecordableError(f"the kernel is a {type(kernel).__name__}, not a ct.kernel")
    known = _records.of(kernel)
    records: KernelRecords | None = known.get(arch)
    if records is None:
        # No lock: a fork could inherit it locked. Two threads may read; both take the first.
        records = known.setdefault(arch, KernelRecords(kernel, arch))
    assert records is not None
    return records


def why_not_searched() -> str | None:
    """Return why this process makes no search now, in words; None where it may."""
    if reason := rank_in_words():
        return reason
    if is_primed():
        return "this process was primed"
    if environment.search_disabled():
        return f"{environment.DISABLE} or {environment.DISABLE_OURS} is set"
    return "a graph is captured" if runtime().capturing() else None


def _is_sequence(space: object) -> bool:
    return hasattr(space, "__len__") and hasattr(space, "__getitem__")


def _warn_of_miss(name: str, message: Callable[[], str]) -> None:
    """Warn of a kernel's first miss, then of the tenth, the hundredth and so on."""
    count = _misses[name] = _misses.get(name, 0) + 1
    if count == 1:
        warn(message(), MissWarning)
    elif math.log10(count).is_integer():
        warn(f"{count} searches of {name} were not recorded", MissWarning)
