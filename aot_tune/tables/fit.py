"""Check that a table fits its kernel's declaration. Reads no file and uses no GPU.

Mistakes that show without the declaration (types, edges, columns) are refused by `aot_tune.tables.reader`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import described, shortened

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

Complaint = tuple[str, str]
"""Pair of the mistake and the next step; the step is empty where it is to tune again."""


def entry_complaints(table: Table, tunable: Declaration, entry: Entry, *, own: bool) -> Iterator[Complaint]:
    """List the mistakes of an entry.

    Args:
        table: The entry's table, which has the declaration's axes.
        tunable: The kernel's declaration.
        entry: The entry.
        own: Whether the table is in the package's own folder, where predictions are refused.
    """
    if own and entry.evidence != "measured":
        yield (
            "a prediction in a package's own tables",
            "measure it on a GPU, or read it through AOT_TUNE_TABLES",
        )
    unreachable = list(_key_complaints(tunable, entry.bucket))
    yield from unreachable
    if unreachable:
        return  # the declaration's functions may only be called with problems of the kernel
    try:
        yield from list(_config_complaints(table, tunable, entry))
    except Exception as error:  # the author's functions may raise at some sizes only
        yield f"a function of the declaration raises {described(error)}", "correct the declaration"
    if entry.mean_us > entry.default_us and not any(
        times.mean_us <= times.default_us for times in entry.states.values()
    ):
        everywhere = " and in each other state" if entry.states else ""
        yield f"slower than the default: {entry.mean_us} us against {entry.default_us}{everywhere}", ""
    edge = {name: entry.bucket.size(name) for name, axis in tunable.axes.items() if isinstance(axis, Pow2)}
    if edge and (not entry.points or entry.points[-1].size != edge):
        yield "its last point is not the bucket's edge", ""


def portfolio_complaints(table: Table, tunable: Declaration) -> Iterator[Complaint]:
    """List the mistakes of a table's portfolio."""
    for config in table.portfolio:
        if complaint := _other_constants(table, tunable, config):
            yield complaint, ""
        elif not any(config in _candidates(tunable, table, entry) for entry in table.entries):
            yield f"{config} is legal and in the search space for no entry", ""


def _other_constants(table: Table, tunable: Declaration, config: Config) -> str | None:
    constants = tunable.config_constants(table.arch, config.kernel)
    if tuple(config.constants) == constants:
        return None
    wanted = " ".join(constants) or "none"
    return f"{config} does not hold the declaration's constants in the kernel's order: {wanted}"


def _candidates(tunable: Declaration, table: Table, entry: Entry) -> tuple[Config, ...]:
    """Return the candidates of an entry's bucket; none where the author's code raises for it."""
    try:
        return tunable.candidates(table.arch, entry.bucket)
    except Exception:  # whatever it is, `_key_complaints` gives the bucket's mistake
        return ()


def _key_complaints(tunable: Declaration, bucket: Problem) -> Iterator[Complaint]:
    """List the reasons why no launch looks this bucket up."""
    pattern = tunable.typical_problems[0]
    if bucket.keys() != pattern.keys():
        yield f"its keys are {' '.join(bucket)}, the kernel's problems have {' '.join(pattern)}", ""
        return
    for name, value in bucket.items():
        if type(value) is not type(pattern[name]):
            yield f"{name} is {value!r}, of another type than the kernel's {pattern[name]!r}", ""
            return
    if tunable.bucket_of(bucket) != bucket:
        yield f"no size is looked up here: its bucket is {tunable.bucket_of(bucket)}", ""
        return
    try:
        stated = tunable.problem_of(*tunable.make_args(bucket, "meta", 0))
    # This is the author's code on a bucket from a file: whatever it raises, no call has this problem.
    except Exception as error:
        yield f"make_args cannot make it: {type(error).__name__}: {error}", ""
        return
    if stated != bucket:
        yield f"no call has this problem: the arguments made for it have {stated}", ""


def _config_complaints(table: Table, tunable: Declaration, entry: Entry) -> Iterator[Complaint]:
    config, default = entry.config, tunable.default_config(table.arch, entry.bucket)
    if complaint := _other_constants(table, tunable, config):
        yield complaint, ""
        return
    if config not in tunable.space(table.arch, entry.bucket):
        yield f"{config} is outside the search space", ""  # the author's `legal` need not accept it
    elif (refusal := tunable.refusal(config, table.arch, entry.bucket)) is not None:
        yield f"{config} is not legal: {refusal}", ""
    if config != default and config not in table.portfolio:
        yield f"{config} is neither in the portfolio nor the default", ""
    if config == default and entry.mean_us != entry.default_us:
        yield f"the default won with {entry.mean_us} us, but default_us is {entry.default_us}", ""


def undeclared(tunable: Declaration, table: Table) -> list[Config]:
    """Return the table's configs that are in no search space.

    No function of the declaration may be called with them.

    The spaces are those of the declared problems and, for a table of other shapes, of at most `_MOST_BUCKETS`
    of the table's buckets.

    Args:
        tunable: The kernel's declaration.
        table: A table in which `mismatch` finds nothing.
    """
    left = set(table.configs)
    for problem in _searched(tunable, table):
        # The space of a bucket from a file, by the author's code: whatever it raises, it holds no config.
        with contextlib.suppress(Exception):
            left.difference_update(tunable.declared_space(table.arch, problem))
        if not left:
            return []
    return [config for config in table.configs if config in left]


def _searched(tunable: Declaration, table: Table) -> Iterator[Problem]:
    """Return the problems whose spaces `undeclared` searches, declared ones first: they have most configs."""
    yield from tunable.typical_problems
    pattern = tunable.typical_problems[0]
    kinds = {name: type(value) for name, value in pattern.items()}
    own = (entry.bucket for entry in table.entries)
    yield from islice(
        (bucket for bucket in own if {name: type(value) for name, value in bucket.items()} == kinds),
        _MOST_BUCKETS,
    )


_MOST_BUCKETS = 256
"""Most buckets of a table whose search spaces are computed when it is read: a space takes up to 1 ms."""


def without(table: Table, configs: Collection[Config]) -> Table:
    """Return a table without these configs in its portfolio and without their times; entries keep winners."""
    kept = [place for place, config in enumerate(table.portfolio) if config not in configs]
    columns = [*kept, len(table.portfolio)]  # the last column is the default's

    def kept_of(times: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return tuple(times[place] for place in columns)

    def shorter(point: Point) -> Point:
        states = {name: kept_of(times) for name, times in point.states.items()}
        return replace(point, us=kept_of(point.us), states=states)

    return replace(
        table,
        portfolio=tuple(table.portfolio[place] for place in kept),
        entries=tuple(
            replace(entry, points=tuple(map(shorter, entry.points)))
            for entry in table.entries
            if entry.is_sound()
        ),
    )


def mismatch(tunable: Declaration, arch: Arch, table: Table) -> str | None:
    """Return why a well-formed table cannot serve this declaration on this arch; None where it can."""
    if table.kernel != tunable.name:
        return f"it is the table of {table.kernel!r}, not of {tunable.name!r}"
    if table.arch != arch:
        return f"it is the table of {table.arch}, not of {arch}"
    declared = {name: axis.kind for name, axis in tunable.axes.items()}
    kinds = {name: axis.kind for name, axis in table.axes.items()}
    if kinds != declared:
        return f"its axes are {shortened(str(kinds))}, the declaration's {declared}"
    constants: dict[str | None, tuple[str, ...]] = {}
    for config in table.configs:
        if missing := tunable.kernel_missing(config):
            return shortened(missing)
        if config.kernel not in constants:
            constants[config.kernel] = tunable.config_constants(arch, config.kernel)
        wanted = constants[config.kernel]
        if config.constants.keys() != set(wanted):
            return (
                f"its configs have the constants {shortened(' '.join(config.constants) or 'none')}, "
                f"the declaration's have {' '.join(wanted) or 'none'}"
            )
    return None
