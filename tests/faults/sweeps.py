"""The faults of the rows A of `aot_tune/tuner/README.md`, each done to whole sweeps. `SCENARIOS` lists them.

A faulty config is compared with a sweep whose declaration refuses that config: the same bytes must come out.
Where the fault passes, the sweep is compared with an undisturbed one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from tests.faults import injector
from tests.faults.injector import DEFAULT, Fault, Plan
from tests.faults.world import Ended, Sweep, Tally, World, patience

NAMES = [f"{m}-{n}" for m in (16, 32, 64) for n in (32, 64, 128, 256)]
EDGES = (16, 64, 256)
WINNERS = tuple({min(NAMES, key=lambda name: injector.us_of(m, name)): m for m in EDGES})
"""The fastest config at each edge."""

OTHERS = tuple(name for name in NAMES if name not in (*WINNERS, DEFAULT))
SLOWEST = max(OTHERS, key=lambda name: min(injector.us_of(m, name) for m in EDGES))
"""A config whose absence changes no table."""

ALL = ("--gpus", "all")
"""What a sweep is told that measures on all GPUs."""

Scenario = Callable[[World, Tally, bool], None]
"""Does one row's faults; told whether to do many of them."""


def _fast(*configs: str) -> tuple[Fault, ...]:
    """Faulty configs that would win by far."""
    return tuple(Fault(kind="factor", config=config, value=0.3) for config in configs)


def _without(world: World, *configs: str) -> bytes | None:
    """The table of an undisturbed sweep that has not these configs."""
    return world.reference(Plan(without=tuple(sorted(configs)))).table()


def _undisturbed(world: World) -> bytes | None:
    return world.reference().table()


def _one(world: World, tally: Tally, name: str, plan: Plan, wanted: bytes | None) -> Ended:
    """Run one sweep and compare its table."""
    sweep = world.sweep(name, tally)
    ended = sweep.run(plan)
    sweep.judge(wanted, ended)
    return ended


def _resumed(
    world: World, tally: Tally, sweep: Sweep, *, damaged: int = 0, wanted: bytes | None = None
) -> None:
    """Run the same command again after a stop: the same table, and nothing acknowledged is measured again.

    Args:
        world: Where the undisturbed sweep is found.
        tally: Takes what was lost or wrong.
        sweep: The stopped sweep.
        damaged: Measurements that may be made again, because their records were damaged.
        wanted: The table; that of the undisturbed sweep when None.
    """
    saved, before = sweep.acknowledged(), sweep.timed()
    ended = sweep.run(Plan())
    sweep.judge(wanted or _undisturbed(world), ended)
    again = saved + (sweep.timed() - before) - world.reference().timed()
    lost = max(0, sum(count for line, count in again.items() if saved[line]) - damaged)
    tally.add(
        "lost", lost, f"{sweep.name}: {lost} of {sum(saved.values())} timings again: {dict(again)}"[:300]
    )


# A1 to A7: configs, workers, compilers ----------------------------------------------------------------------


def crashes(world: World, tally: Tally, more: bool) -> None:
    """A1: configs end the worker, poison its context, talk nonsense, or write into the checker's memory."""
    for names, kinds in (
        (OTHERS[:3], ("SEGV", "poison", "silent")),
        (OTHERS[3:6], ("exit", "garbage", "KILL")),
    ):
        pairs = list(zip(names, kinds, strict=True))
        always = tuple(Fault(kind=kind, config=name) for name, kind in pairs)
        _one(world, tally, "A1-always", Plan(launches=always, times=_fast(*names)), _without(world, *names))
        once = tuple(Fault(kind=kind, config=name, times=1, after=3) for name, kind in pairs)
        _one(world, tally, "A1-once", Plan(launches=once), _undisturbed(world))
    scribbles = Plan(launches=(Fault(kind="scribble", config=SLOWEST),))
    _one(world, tally, "A1-scribble", scribbles, _undisturbed(world))
    timed = Plan(launches=(Fault(kind="scribble", config=SLOWEST, phase="time"),))
    _one(world, tally, "A1-scribble-timed", timed, _undisturbed(world))
    canary = Plan(worker=(Fault(kind="poison", phase="canary", times=1),))
    _one(world, tally, "A1-canary", canary, _undisturbed(world))


def hangs(world: World, tally: Tally, more: bool) -> None:
    """A2: configs hang, the GPU is lost, and the arguments of one problem cannot be made."""
    stuck = OTHERS[:2]
    faults = tuple(Fault(kind=kind, config=name) for name, kind in zip(stuck, ("hang", "STOP"), strict=True))
    _one(world, tally, "A2-always", Plan(launches=faults, times=_fast(*stuck)), _without(world, *stuck))
    once = Plan(launches=(Fault(kind="spin", config=OTHERS[2], phase="time", times=1, after=2),))
    _one(world, tally, "A2-once", once, _undisturbed(world))
    sweep = world.sweep("A2-lost", tally)
    gone = Plan(
        launches=(Fault(kind="poison", config=OTHERS[5], times=1, only_on=64),),
        worker=(Fault(kind="poison", phase="canary", after=1, times=3),),
    )
    sweep.refused(sweep.run(gone), "GPU")
    _resumed(world, tally, sweep)
    others = world.reference(Plan(problems=(16, 256))).table()
    for kind in ("KILL", "broken", "hang") if more else ("KILL", "broken"):
        faults = tuple(Fault(kind=kind, phase="arguments", only_on=m) for m in range(33, 65))
        _one(world, tally, f"A2-arguments-{kind}", Plan(worker=faults), others)


def compilers(world: World, tally: Tally, more: bool) -> None:
    """A3: compiling processes crash, hang, leave children and write nonsense, always or once."""
    names, kinds = OTHERS[:4], ("SEGV", "leaves a child", "noise", "hang")
    faults = tuple(
        Fault(kind=kind, config=name, phase="compile") for name, kind in zip(names, kinds, strict=True)
    )
    _one(world, tally, "A3-always", Plan(compilers=faults), _without(world, *names))
    sweep = world.sweep("A3-transient", tally)
    once = (Fault(kind="KILL", config=SLOWEST, phase="compile", times=1),)
    _stopped(sweep, Plan(compilers=once), at=30)
    _resumed(world, tally, sweep)


def slow_starts(world: World, tally: Tally, more: bool) -> None:
    """A4: workers and compiling processes die or hang before they are ready."""
    dead = Plan(
        worker=(Fault(kind="KILL", phase="start", times=2),),
        compilers=(Fault(kind="dies", phase="start", times=2, config=OTHERS[0]),),
    )
    _one(world, tally, "A4-dead", dead, _undisturbed(world))
    slow = Plan(worker=(Fault(kind="hang", phase="start", times=1),))
    _one(world, tally, "A4-slow", slow, _undisturbed(world))


WRONG = ("half", "last", "nan", "inf", "nothing")


def wrong_results(world: World, tally: Tally, more: bool) -> None:
    """A5: the fastest configs compute wrong results, everywhere or at one moment alone."""
    names = OTHERS[: len(WRONG)]
    faults = tuple(Fault(kind=kind, config=name) for name, kind in zip(names, WRONG, strict=True))
    _one(world, tally, "A5-wrong", Plan(launches=faults, times=_fast(*names)), _without(world, *names))
    fast, wanted = OTHERS[5], _without(world, OTHERS[5])
    inside = Plan(launches=(Fault(kind="wrong", config=fast, only_on=213),), times=_fast(fast))
    _one(world, tally, "A5-inside", inside, wanted)
    timed = Plan(launches=(Fault(kind="wrong", config=fast, phase="time"),), times=_fast(fast))
    _one(world, tally, "A5-timed", timed, wanted)
    late = Plan(launches=(Fault(kind="wrong", config=fast, phase="recheck"),), times=_fast(fast))
    _one(world, tally, "A5-recheck", late, wanted)
    sweep = world.sweep("A5-recheck-killed", tally)
    kill = (Fault(kind="kill before", config="tables", phase="replace", times=1),)
    sweep.run(dataclasses.replace(late, calls=kill))
    ended = sweep.run(dataclasses.replace(late, launches=()))
    sweep.judge(wanted, ended)


def flaky_results(world: World, tally: Tally, more: bool) -> None:
    """A5: one config is five times as fast and wrong in a part of its launches.

    Wrong in every tenth launch it may be published in none of 25 sweeps, in every fiftieth in one of them.
    """
    fast = OTHERS[5]
    for chance, allowed in ((0.1, 0), (0.02, 1)):
        published = []
        for seed in range(25):
            sweep = world.sweep(f"A5-flaky-{chance}", tally)
            faults = (Fault(kind="wrong", config=fast, chance=chance),)
            sweep.run(Plan(launches=faults, times=_fast(fast), seed=seed + world.seed))
            chosen = {f"{c['tile_m']}-{c['tile_n']}" for c, _ in sweep.winners().values()}
            if fast in chosen or not chosen:
                published.append(seed)
        beyond = max(0, len(published) - allowed)
        tally.add("wrong", beyond, f"wrong in {chance:.0%} of launches, published with seeds {published}")


def changed_inputs(world: World, tally: Tally, more: bool) -> None:
    """A6: a config changes an argument that the declaration does not name, when checked or when timed."""
    for phase in ("check", "time"):
        sweep = world.sweep(f"A6-{phase}", tally)
        fault = Fault(kind="changes input", config=OTHERS[1], phase=phase)
        ended = sweep.run(Plan(launches=(fault,), times=_fast(OTHERS[1])))
        sweep.judge(None, ended)
        sweep.refused(ended, "source")


def full_memory(world: World, tally: Tally, more: bool) -> None:
    """A7: the GPU's memory is full: for a config, once or always, and when a problem is opened."""
    always = Plan(launches=(Fault(kind="memory", config=OTHERS[0]),), times=_fast(OTHERS[0]))
    _one(world, tally, "A7-always", always, _without(world, OTHERS[0]))
    once = Plan(launches=(Fault(kind="memory", config=OTHERS[1], times=1, after=2),))
    _one(world, tally, "A7-once", once, _undisturbed(world))
    first = Plan(worker=(Fault(kind="memory", phase="arguments", times=1),))
    _one(world, tally, "A7-open-fresh", first, _undisturbed(world))
    later = Plan(worker=(Fault(kind="memory", phase="arguments", times=1, after=5),))
    _one(world, tally, "A7-open-used", later, _undisturbed(world))
    # The arguments of the recheck are the first that the sweep's second worker makes.
    made = injector.count(world.reference().folder, "arguments made") - 2 * len(EDGES)
    recheck = Plan(worker=(Fault(kind="memory", phase="arguments", times=1, after=made),))
    _one(world, tally, "A7-open-recheck", recheck, _undisturbed(world))


# A8 to A12: kills, disks, signals, others -------------------------------------------------------------------


def _stopped(
    sweep: Sweep,
    plan: Plan,
    *more: str,
    at: int,
    on: int = 0,
    with_signal: int = signal.SIGKILL,
    late_s: float = 0.0,
) -> Ended:
    """Run a sweep, and send it a signal after its GPU has timed `at` configs, and `late_s` seconds more.

    It has begun `on` problems by then.
    """

    def early() -> bool:
        lines = injector.logged(sweep.folder)
        return len(lines) < at or len({line.split()[1] for line in lines}) < on

    def stop(process: subprocess.Popen[str]) -> None:
        until = time.monotonic() + 120
        while early() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(late_s)
        if process.poll() is None:
            injector.injected(sweep.folder)
            process.send_signal(with_signal)

    return sweep.run(plan, *more, meanwhile=stop)


def kills(world: World, tally: Tally, more: bool) -> None:
    """A8: SIGKILL at calls on journal and table, and at random instants; then the same command again."""
    calls = injector.count(_counted(world).folder, "calls")
    pick = random.Random(world.seed)
    number = 40 if more else 5
    for place in range(number):
        at = round((place + pick.random()) * calls / number)
        kind = ("kill before", "kill amid", "kill after")[place % 3]
        sweep = world.sweep(f"A8-call{at}", tally)
        sweep.run(Plan(calls=(Fault(kind=kind, after=at, times=1),)))
        _resumed(world, tally, sweep)
    for _ in range(40 if more else 4):
        sweep = world.sweep("A8-random", tally)
        _stopped(sweep, Plan(), at=pick.randrange(1, 100), late_s=pick.random() * 0.05)
        _resumed(world, tally, sweep)
    sweep = world.sweep("A8-between", tally)
    earlier = Plan(without=(WINNERS[1],))
    sweep.run(earlier)
    other = world.sweep("A8-beside", tally)
    other.run(earlier)
    other.run(Plan())
    sweep.run(Plan(calls=(Fault(kind="kill after", config="tables", phase="replace", times=1),)))
    ended = sweep.run(Plan())
    sweep.judge(other.table(), ended)
    again = sweep.timed() - other.timed()
    tally.add("lost", sum(again.values()), f"{sweep.name}: {dict(again)}")


def started_afresh(world: World, tally: Tally, more: bool) -> None:
    """A8: `--fresh` by a second tuner, on another GPU, on the journal of one that runs."""
    first = world.sweep("A8-fresh", tally)
    other = world.sweep("A8-fresh-other", tally)

    def second(process: subprocess.Popen[str]) -> None:
        _wait_for(first, 20, process)
        with _stopped_meanwhile(process):
            injector.injected(first.folder)
            began = time.monotonic()
            beside = other.start(Plan(), "--fresh", "--journal", str(first.folder / "journal"))
            first.refused(other.finish(beside, began), "holds this journal")
            process.kill()

    first.run(Plan(), meanwhile=second)
    _resumed(world, tally, first)


@contextlib.contextmanager
def _stopped_meanwhile(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop a tuner, so that another surely meets it, and let it go on."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _wait_for(sweep: Sweep, at: int, process: subprocess.Popen[str]) -> None:
    while len(injector.logged(sweep.folder)) < at and process.poll() is None:
        time.sleep(0.01)


def _counted(world: World) -> Sweep:
    """An undisturbed sweep whose system calls on journal and table are counted."""
    return world.reference(Plan(calls=(Fault(kind="none", after=injector.ALWAYS),)))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda data: data[: -len(data.splitlines()[-1]) // 2],
    "flipped": lambda data: _with_byte(data, len(data) // 2, data[len(data) // 2] ^ 4),
    "zeros": lambda data: data[: len(data) // 3] + b"\0" * 64 + data[len(data) // 3 :],
    "spliced": lambda data: data.replace(b"\n", b"", 3),
    "doubled": lambda data: b"".join(line * 2 for line in data.splitlines(keepends=True)),
    "crlf": lambda data: data.replace(b"\n", b"\r\n"),
    "shuffled": lambda data: b"".join(reversed(data.splitlines(keepends=True))),
    "deleted": lambda data: data[: len(data) // 2] + data[len(data) // 2 + 3 :],
}


def _with_byte(data: bytes, at: int, byte: int) -> bytes:
    return data[:at] + bytes([byte]) + data[at + 1 :]


def damaged_journals(world: World, tally: Tally, more: bool) -> None:
    """A9: the journal of a killed sweep is damaged; what the damage did not touch is kept."""
    killed = world.sweep("A9-killed", tally)
    _stopped(killed, Plan(), at=60)
    whole = killed.journal.read_bytes()
    for name in DAMAGES if more else ("torn", "flipped", "zeros", "doubled", "shuffled"):
        sweep = world.sweep(f"A9-{name}", tally)
        shutil.copytree(killed.folder, sweep.folder, dirs_exist_ok=True)
        sweep.uuid = killed.uuid  # on another GPU a problem that was begun is measured anew
        data = DAMAGES[name](whole)
        sweep.journal.write_bytes(data)
        injector.injected(sweep.folder)
        tally.injected += 1
        kept = {line.strip() for line in data.splitlines()}
        gone = sum(line.strip() not in kept for line in whole.splitlines())
        _resumed(world, tally, sweep, damaged=gone)


def full_disks(world: World, tally: Tally, more: bool) -> None:
    """A10: calls on journal and table fail; the sweep stops with one error and goes on when there is room."""
    cases = [
        ("journal", "open", "EROFS", 0),
        ("journal", "write", "ENOSPC", 3),
        ("journal", "fsync", "EIO", 5),
        ("journal", "write", "short", 4),
        ("tables", "replace", "ENOSPC", 0),
        ("journal", "replace", "EROFS", 1),
    ]
    for place, call, kind, after in cases:
        sweep = world.sweep(f"A10-{place}-{call}-{kind}", tally)
        fault = Fault(kind=kind, config=place, phase=call, after=after)
        sweep.told(sweep.run(Plan(calls=(fault,))))
        _resumed(world, tally, sweep)


def signals(world: World, tally: Tally, more: bool) -> None:
    """A11: signals at random instants and in a hang; the sweep ends in seconds and says how to go on."""
    pick = random.Random(world.seed)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * (10 if more else 1):
        sweep = world.sweep(f"A11-{number.name}", tally)
        ended = _stopped(sweep, Plan(), at=pick.randrange(5, 80), with_signal=number)
        if ended.code != 0 and "To go on: " not in ended.said:
            tally.add("wrong", 1, f"{sweep.name}: it does not say how to go on")
        _resumed(world, tally, sweep)
    sweep = world.sweep("A11-hang", tally)
    hang = Plan(launches=(Fault(kind="hang", config=OTHERS[4], times=1),), real_limits=True)
    began = time.monotonic()
    ended = _stopped(sweep, hang, at=4, with_signal=signal.SIGINT, late_s=2.0)
    tally.add("hung", int(time.monotonic() - began > patience(60)), f"{sweep.name}: {ended.seconds:.0f} s")
    _resumed(world, tally, sweep)


def others(world: World, tally: Tally, more: bool) -> None:
    """A12: a second tuner on the GPU, also with another TMPDIR; a GPU throttled twice or for ever."""
    for with_its_own in (False, True):
        first = world.sweep("A12-first", tally)
        other = world.sweep("A12-other", tally)
        plan = dataclasses.replace(Plan(), uuid=first.uuid)
        variables = {"TMPDIR": str(other.folder)} if with_its_own else {}

        def second(
            process: subprocess.Popen[str],
            first: Sweep = first,
            other: Sweep = other,
            plan: Plan = plan,
            variables: dict[str, str] = variables,
        ) -> None:
            _wait_for(first, 20, process)
            with _stopped_meanwhile(process):
                injector.injected(first.folder)
                began = time.monotonic()
                beside = other.start(plan, **variables)
                first.refused(other.finish(beside, began), "is taken by")

        ended = first.run(Plan(), meanwhile=second)
        first.judge(_undisturbed(world), ended)
    _one(world, tally, "A12-throttled-twice", Plan(throttled=2), _undisturbed(world))
    sweep = world.sweep("A12-throttled", tally)
    ended = sweep.run(Plan(throttled=injector.ALWAYS))
    if ended.code == 0 and "thermal" not in ended.said and b"thermal" not in (sweep.table() or b""):
        tally.add("wrong", 1, f"{sweep.name}: disturbed times are published and nobody is told")


# A13 to A15: times, conditions, tables ----------------------------------------------------------------------


def impossible_times(world: World, tally: Tally, more: bool) -> None:
    """A13: times that cannot be, once or always; times that are too good once; clocks that jump."""
    values = (float("nan"), float("inf"), 0.0, -5.0)
    once = tuple(
        Fault(kind="is", config=name, value=value, times=1)
        for name, value in zip(OTHERS, values, strict=False)
    )
    _one(world, tally, "A13-once", Plan(times=once, jump_s=3.15e8), _undisturbed(world))
    always = tuple(
        Fault(kind="is", config=name, value=value) for name, value in zip(OTHERS, values, strict=False)
    )
    _one(world, tally, "A13-always", Plan(times=always), _without(world, *OTHERS[: len(values)]))
    tiny = Plan(times=(Fault(kind="is", config=OTHERS[0], value=1e-9),))
    _one(world, tally, "A13-tiny", tiny, _without(world, OTHERS[0]))
    for factor in (0.5, 0.1, 1e-4):
        glitch = Plan(
            times=(
                Fault(
                    kind="is", config=SLOWEST, only_on=64, times=1, value=factor * injector.us_of(64, SLOWEST)
                ),
            )
        )
        _one(world, tally, f"A13-glitch-{factor}", glitch, _undisturbed(world))


def other_conditions(world: World, tally: Tally, more: bool) -> None:
    """A14: driver, GPU, reference or make_args changed before a resume."""
    killed = world.sweep("A14-killed", tally)
    _stopped(killed, Plan(), at=60)
    for name, plan, word in (
        ("driver", Plan(driver="590.2"), "driver"),
        ("gpu", Plan(gpu="NVIDIA H100 80GB HBM3"), "gpu"),
        ("reference", Plan(changed=("reference",)), "check"),
        ("make_args", Plan(changed=("make_args",)), "check"),
    ):
        sweep = world.sweep(f"A14-{name}", tally)
        shutil.copytree(killed.folder, sweep.folder, dirs_exist_ok=True)
        before = sweep.journal.read_bytes()
        injector.injected(sweep.folder)
        tally.injected += 1
        ended = sweep.run(plan)
        sweep.refused(ended, word)
        if not sweep.journal.exists() or sweep.journal.read_bytes() != before:
            tally.add("lost", 1, f"{sweep.name}: the journal was changed")
    _resumed(world, tally, killed)


def tables_there(world: World, tally: Tally, more: bool) -> None:
    """A15: the table that is there is damaged, or good while a config of the new sweep is wrong late."""
    sweep = world.sweep("A15-cut", tally)
    sweep.run(Plan())
    whole = sweep.table() or b""
    sweep.path.write_bytes(whole[:200])
    injector.injected(sweep.folder)
    tally.injected += 1
    sweep.refused(sweep.run(Plan()), "scale.json")
    sweep.judge(whole[:200])
    late = Fault(kind="wrong", config=OTHERS[5], only_on=213)
    for name, fault in (("late", late), ("scribble", Fault(kind="scribble", config=SLOWEST))):
        sweep = world.sweep(f"A15-good-{name}", tally)
        sweep.run(Plan(without=(OTHERS[5],)) if name == "late" else Plan())
        before = sweep.winners()
        ended = sweep.run(Plan(launches=(fault,), times=_fast(OTHERS[5]) if name == "late" else ()))
        sweep.told(ended)
        after = sweep.winners()
        worse = [m for m, (_, gain) in before.items() if m not in after or after[m][1] < 0.98 * gain]
        tally.add("wrong", len(worse), f"{sweep.name}: worse at M={worse} than the table that was there")
    parts = world.sweep("A15-parts", tally)
    for m in EDGES:
        parts.told(parts.run(Plan(), "--problem", f"M={m}"))
    missing = set(EDGES) - set(parts.winners())
    tally.add("lost", len(missing), f"{parts.name}: partial sweeps left out M={sorted(missing)}")


# A16 and A19: what compiles later, defaults that fail -------------------------------------------------------


def compiled_later(world: World, tally: Tally, more: bool) -> None:
    """A16: the winners' compilers are killed, and the tuner when all problems are listed without them."""
    wanted = _undisturbed(world)  # it compiles what the others copy
    sweep = world.sweep("A16", tally)
    killed = tuple(Fault(kind="KILL", config=name, phase="compile", times=2) for name in WINNERS)
    _stopped(sweep, Plan(compilers=killed), at=1, on=len(EDGES))
    sweep.judge(wanted, sweep.run(Plan()))


def failing_defaults(world: World, tally: Tally, more: bool) -> None:
    """A19: the default faults at an edge or inside a bucket; it is wrong, at once or late."""
    for m in (64, 213):
        sweep = world.sweep(f"A19-fault-{m}", tally)
        ended = sweep.run(Plan(launches=(Fault(kind="poison", config=DEFAULT, only_on=m),)))
        sweep.refused(ended, f"failed at dtype=bfloat16 M={m}")
        served, wanted = set(sweep.winners()), {16, 256} if m == 64 else {16, 64}
        tally.add("wrong", int(served != wanted), f"{sweep.name}: buckets {served} are served")
    for phase in ("check", "recheck"):
        sweep = world.sweep(f"A19-{phase}", tally)
        wrong = Plan(launches=(Fault(kind="half", config=DEFAULT, phase=phase, only_on=64),))
        ended = sweep.run(wrong)
        sweep.judge(None, ended)
        sweep.refused(ended, "computed a wrong result")


# A21: several GPUs ------------------------------------------------------------------------------------------


def lost_gpus(world: World, tally: Tally, more: bool) -> None:
    """A21: of several GPUs one is lost or wrong, or all are lost, or the tuner goes on with other ones."""
    several = Plan(gpus=3)
    dying = Fault(kind="poison", gpu="-1", times=1, after=40)
    gone = Fault(kind="poison", phase="canary", after=1, gpu="-1")
    sweep = world.sweep("A21-one", tally)
    ended = sweep.run(dataclasses.replace(several, launches=(dying,), worker=(gone,)), *ALL)
    sweep.judge(_undisturbed(world), ended)
    if "is lost and leaves the sweep" not in ended.said:
        tally.add("wrong", 1, f"{sweep.name}: nobody is told")
    sweep = world.sweep("A21-wrong", tally)
    wrong = Fault(kind="half", config=DEFAULT, gpu="-1")
    ended = sweep.run(dataclasses.replace(several, launches=(wrong,)), *ALL)
    sweep.judge(_undisturbed(world), ended)
    if ended.code or "leaves the sweep: it computes the default" not in ended.said:
        tally.add("wrong", 1, f"{sweep.name}: exit code {ended.code}, or the GPU is not named")
    sweep = world.sweep("A21-all", tally)
    all_gone = Plan(gpus=2, worker=(Fault(kind="poison", phase="canary", after=2, times=6),))
    poison = tuple(Fault(kind="poison", gpu=gpu, times=1, after=60) for gpu in ("-0", "-1"))
    sweep.refused(sweep.run(dataclasses.replace(all_gone, launches=poison), *ALL), "GPU")
    sweep.judge(_undisturbed(world), sweep.run(several, *ALL))
    for number, then in enumerate(((*ALL,), ("--gpus", "1"), ("--gpus", "0,2"))[: 3 if more else 2]):
        sweep = world.sweep(f"A21-killed-{number}", tally)
        _stopped(sweep, several, *ALL, at=50)
        sweep.judge(_undisturbed(world), sweep.run(several, *then))


# A17 and A18: configs that are wrong here alone -------------------------------------------------------------


def wrong_sizes(world: World, tally: Tally, more: bool) -> None:
    """A17: a winner is wrong at one declared size, which is no edge, or at odd sizes."""
    for winner in WINNERS if more else WINNERS[:1]:
        without = Plan(problems=(16, 34, 256), without=(winner,))
        wanted = world.reference(without).table()
        for name, fault in (
            ("declared", Fault(kind="half", config=winner, only_on=34)),
            ("odd", Fault(kind="half", config=winner, odd=True)),
        ):
            plan = dataclasses.replace(without, launches=(fault,), without=())
            _one(world, tally, f"A17-{name}", plan, wanted)


def wrong_states(world: World, tally: Tally, more: bool) -> None:
    """A18: a winner is wrong in the launches of one state of the GPU, or under load."""
    for winner in WINNERS if more else WINNERS[:1]:
        for state, slow in (("written", 1.0), ("tight", 1.0), ("read", 100.0), ("load", 100.0)):
            kind = "nothing" if state == "tight" else "half"
            fault = Fault(kind=kind, config=winner, phase=f"time {state}")
            wanted = world.reference(Plan(without=(winner,), slow=slow)).table()
            _one(world, tally, f"A18-{state}", Plan(launches=(fault,), slow=slow), wanted)


# A20: the compiler -----------------------------------------------------------------------------------------

LACKS = {
    "gone": "the compiler is gone",
    "full": "No space left on device",
    "no cubin": "left no cubin",
    "absent": "no cuTile compiler",
}
"""What compiling lacks on a machine, and what the message must name."""


def nothing_compiles(world: World, tally: Tally, more: bool) -> None:
    """A20: every compilation fails, over a good table and a good archive; or SIGCHLD is ignored."""
    sweep = world.sweep("A20", tally)
    sweep.run(Plan())
    sweep.run(Plan(), "compile")
    good = sweep.table(), sweep.archive.read_bytes()
    for kind, words in LACKS.items():
        plan = Plan(compilers=(Fault(kind=kind, phase="tuner" if kind == "absent" else "compile"),))
        for verb in ((), ("compile",)):
            ended = sweep.run(plan, *verb)
            sweep.refused(ended, words)
            if (sweep.table(), sweep.archive.read_bytes()) != good:
                tally.add("lost", 1, f"{sweep.name}: table or archive is replaced, {kind}")
            if "repair the kernel" in ended.said:
                tally.add("wrong", 1, f"{sweep.name}: the kernel is blamed, {kind}")
    fresh, ignoring = world.sweep("A20-ignored", tally), Plan(ignores_children=True)
    fresh.judge(_undisturbed(world), fresh.run(ignoring, "--cubins", "fresh"))
    fresh.told(fresh.run(ignoring, "compile", "--cubins", "fresh"))
    if not fresh.archive.exists() or fresh.archive.read_bytes() != good[1]:
        tally.add("wrong", 1, f"{fresh.name}: another archive")


# One config in ten ------------------------------------------------------------------------------------------

WAYS: dict[str, Sequence[Fault]] = {
    "poison": (Fault(kind="poison"),),
    "SEGV": (Fault(kind="SEGV"),),
    "hang": (Fault(kind="hang"),),
    "wrong": (Fault(kind="wrong"),),
    "NaN": (Fault(kind="nan"),),
    "launch": (Fault(kind="launch error"),),
    "memory": (Fault(kind="memory"),),
    "silent": (Fault(kind="silent"),),
    "flaky hang": (Fault(kind="hang", times=1, after=3),),
    "late": (Fault(kind="wrong", only_on=213),),
}
MOST_TIMES = 1.5
"""How much longer than an undisturbed sweep a sweep may take of which one config in ten fails."""


def one_in_ten(world: World, tally: Tally, more: bool) -> None:
    """One config in ten fails in one of ten ways: the same winners, in at most 1.5 times the launches.

    A hang costs time and no launches: there the time counts, a launch takes 20 ms, and the tuner's own time
    limits hold.
    """
    for slow in (1.0, 20.0):
        for way, faults in WAYS.items():
            flaky, hangs = way == "flaky hang", "hang" in way
            plan = Plan(slow=slow, launch_s=0.02 if hangs else 0.0, real_limits=hangs)
            faults = tuple(dataclasses.replace(fault, config=OTHERS[5]) for fault in faults)
            like = world.reference(dataclasses.replace(plan, without=() if flaky else (OTHERS[5],)))
            base = world.reference(plan)
            sweep = world.sweep(f"ten-{way}-{slow:g}".replace(" ", "-"), tally)
            failing = dataclasses.replace(plan, launches=faults, times=() if flaky else _fast(OTHERS[5]))
            ended = sweep.run(failing)
            sweep.told(ended)
            if _configs(sweep) != _configs(like):
                tally.add("wrong", 1, f"{sweep.name}: other winners {_configs(sweep)} than {_configs(like)}")
            ratio = injector.count(sweep.folder, "launches") / injector.count(base.folder, "launches")
            if hangs:
                ratio = ended.seconds / base.seconds
            what = "time" if hangs else "launches"
            tally.add("wrong", int(ratio > MOST_TIMES), f"{sweep.name}: {ratio:.2f} times the {what}")


def _configs(sweep: Sweep) -> dict[int, dict[str, int]]:
    return {m: config for m, (config, _) in sweep.winners().items()}


SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "A1": (crashes,),
    "A2": (hangs,),
    "A3": (compilers,),
    "A4": (slow_starts,),
    "A5": (wrong_results,),
    "A6": (changed_inputs,),
    "A7": (full_memory,),
    "A8": (kills, started_afresh),
    "A9": (damaged_journals,),
    "A10": (full_disks,),
    "A11": (signals,),
    "A12": (others,),
    "A13": (impossible_times,),
    "A14": (other_conditions,),
    "A15": (tables_there,),
    "A16": (compiled_later,),
    "A17": (wrong_sizes,),
    "A18": (wrong_states,),
    "A19": (failing_defaults,),
    "A20": (nothing_compiles,),
    "A21": (lost_gpus,),
}
"""By row of the README's table."""

LONG: dict[str, tuple[Scenario, ...]] = {"A5": (flaky_results,), "one in ten": (one_in_ten,)}
"""Scenarios that take minutes: only `--full` does them."""
