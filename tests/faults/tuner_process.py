"""The command line's own process in a faulty world: ``python -m tests.faults.tuner_process tune ...``.

NVML is the stand-in, the worker's backend is `tests.faults.gpu`, and system calls on journal and table fail
or end the process as the plan says.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.faults import injector, nvml

SHORT_LIMITS = {"start_s": 20.0, "canary_s": 10.0, "open_s": 10.0, "config_s": 2.0, "patience_s": 1.0}
"""Time limits of the worker, seconds: two seconds of silence prove a hang here."""

_CALLS = ("open", "write", "fsync", "replace", "ftruncate")
_descriptors: dict[int, str] = {}
"""The open files of journal and table, by descriptor."""


def _place(path: object) -> str:
    """``journal`` or ``tables`` where a path lies below one of these folders of the scenario; else empty."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return ""
    text = os.path.abspath(os.fsdecode(path))
    return next((one for one in ("journal", "tables") if text.startswith(f"{injector.here()}/{one}")), "")


def _wrapped(name: str, real: Callable[..., Any], faults: list[injector.Fault]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        file = args[0] if args else None
        place = _descriptors.get(file, "") if isinstance(file, int) else _place(file)
        if not place:
            return real(*args, **named)
        occasions = {"": injector.tally("calls"), name: injector.tally(f"calls {name} {place}")}
        due = [
            one for one in faults if one.config in ("", place) and _is_due(one, occasions.get(one.phase, -1))
        ]
        for fault in due:
            _harm(fault, name, real, args)
        result = real(*args, **named)
        if name == "open":
            _descriptors[result] = place
        if due:  # those that come after the call
            injector.injected()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def _is_due(fault: injector.Fault, occasion: int) -> bool:
    return fault.after <= occasion < fault.after + fault.times


def _harm(fault: injector.Fault, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if fault.kind == "kill after":
        return
    injector.injected()
    if fault.kind == "kill before":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "kill amid":
        if name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "short" and name == "write":
        real(args[0], bytes(args[1])[: len(args[1]) // 2])
    number = getattr(errno, fault.kind, errno.ENOSPC)
    raise OSError(number, os.strerror(number))


def _fail_calls(plan: injector.Plan) -> None:
    faults = list(plan.calls)
    if faults:
        for name in _CALLS:
            setattr(os, name, _wrapped(name, getattr(os, name), faults))
        real_close = os.close

        def close(descriptor: int) -> None:
            _descriptors.pop(descriptor, None)
            real_close(descriptor)

        os.close = close


def _log_acknowledged() -> None:
    """Write down each timing that the sweep takes for done: its record was written before."""
    from aot_tune.tuner.outcome import Measurement
    from aot_tune.tuner.sweep.results import TIMINGS, Step, SweepResults

    write = SweepResults.write

    def written(
        self: Any,
        step: Step,
        problem: Any,
        outcome: Any,
        number: int | None = None,
        *,
        gpu: str,
        state: str | None = None,
    ) -> None:
        write(self, step, problem, outcome, number, gpu=gpu, state=state)
        # Finals are written round by round, and once more when they are over. In a state of the GPU several
        # are timed in turn, and told when all of them are.
        if (
            state is None
            and isinstance(outcome, Measurement)
            and (number is not None or TIMINGS[step] != "finals")
        ):
            timed = f"time {problem['M']} {outcome.config['tile_m']}-{outcome.config['tile_n']}"
            injector.log(f"{timed} in {step}, round {number}", "acknowledged")

    SweepResults.write = written  # type: ignore[method-assign]


def main() -> None:
    """Prepare the process, then run the command line with this one's arguments."""
    # Under nohup, or in a script's background, the tests ignore one of them, and so would their children.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = injector.plan()
    if plan.ignores_children:
        injector.injected()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    nvml.install()
    _fail_calls(plan)
    _log_acknowledged()
    from aot_tune.nvidia import cutile
    from aot_tune.tuner.measure import session, supervise
    from tests.faults import compilers

    defaults = session.MeasureSession.__init__.__kwdefaults__
    assert "backend" in defaults
    defaults["backend"] = "tests.faults.gpu:FaultyGpu"
    if not plan.real_limits:
        limits = supervise.Limits.__init__.__kwdefaults__
        limits.update({name: seconds for name, seconds in SHORT_LIMITS.items() if name in limits})
    if plan.compilers:
        compilers.install()
    if any(fault.kind == "absent" for fault in plan.compilers):
        injector.injected()
        cutile.compiler_version = lambda: None
    if plan.jump_s:
        began, real = time.time(), time.time
        time.time = lambda: began + (real() - began) * 1e6
    from aot_tune.__main__ import main as command_line

    sys.argv = ["aot-tune", *sys.argv[1:]]
    command_line()


if __name__ == "__main__":
    main()
