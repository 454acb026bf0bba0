"""Check that a table fits its kernel's declaration. Reads no file and needs no GPU.

Mistakes that show without the declaration (types, edges, columns) are refused by `aot_tune.tables.reader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aot_tune.tables.table import Entry, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Pow2
from aot_tune.values.problem import Problem

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

Complaint = tuple[str, str]
"""A pair: what is wrong, and what to do about it, which is empty where the advice is to tune again."""


def entry_complaints(table: Table, tunable: Declaration, entry: Entry, *, own: bool) -> Iterator[Complaint]:
    """List what is wrong with one entry.

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
    yield from _config_complaints(table, tunable, entry)
    if entry.mean_us > entry.default_us:
        yield f"slower than the default: {entry.mean_us} us against {entry.default_us}", ""
    edge = {name: entry.bucket.size(name) for name, axis in tunable.axes.items() if isinstance(axis, Pow2)}
    if edge and (not entry.points or entry.points[-1].size != edge):
        yield "its last point is not the bucket's edge", ""


def portfolio_complaints(table: Table, tunable: Declaration) -> Iterator[Complaint]:
    """List what is wrong with a table's portfolio."""
    constants = tunable.config_constants(table.arch)
    for config in table.portfolio:
        if tuple(config.constants) != constants:
            wanted = " ".join(constants) or "none"
            yield f"{config} does not hold the declaration's constants in the kernel's order: {wanted}", ""
        elif not any(config in tunable.candidates(table.arch, entry.bucket) for entry in table.entries):
            yield f"{config} is legal and in the search space for no entry", ""


def _key_complaints(tunable: Declaration, bucket: Problem) -> Iterator[Complaint]:
    """List why no launch would ever look this bucket up."""
    pattern = tunable.typical_problems[0]
    if bucket.keys() != pattern.keys():
        yield f"its keys are {' '.join(bucket)}, the kernel's problems have {' '.join(pattern)}", ""
        return
    for name, value in bucket.items():
        if type(value) is not type(pattern[name]):
            yield f"{name} is {value!r}, which is of another type than the kernel's {pattern[name]!r}", ""
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
    if tuple(config.constants) != tuple(default.constants):
        wanted = " ".join(default.constants) or "none"
        yield f"{config} does not hold the declaration's constants in the kernel's order: {wanted}", ""
        return
    if config not in tunable.space(table.arch, entry.bucket):
        yield f"{config} is outside the search space", ""
    refusal = tunable.refusal(config, table.arch, entry.bucket)
    if refusal is not None:
        yield f"{config} is not legal: {refusal}", ""
    if config != default and config not in table.portfolio:
        yield f"{config} is neither in the portfolio nor the default", ""
    if config == default and entry.mean_us != entry.default_us:
        yield f"the default won with {entry.mean_us} us, but default_us is {entry.default_us}", ""


def mismatch(tunable: Declaration, arch: Arch, table: Table) -> str | None:
    """Why a well-formed table cannot serve this declaration on this arch; None when it can."""
    if table.kind != "declared":
        return f"it is a {table.kind} table, which serves no declaration"
    if table.kernel != tunable.name:
        return f"it is the table of {table.kernel!r}, and not of {tunable.name!r}"
    if table.arch != arch:
        return f"it is the table of {table.arch}, and not of {arch}"
    declared = {name: axis.kind for name, axis in tunable.axes.items()}
    kinds = {name: axis.kind for name, axis in table.axes.items()}
    if kinds != declared:
        return f"its axes are {kinds}, the declaration's {declared}"
    constants = tunable.config_constants(arch)
    for config in (*table.portfolio, *(entry.config for entry in table.entries)):
        if config.constants.keys() != set(constants):
            return (
                f"its configs have the constants {' '.join(config.constants) or 'none'}, "
                f"the declaration's have {' '.join(constants) or 'none'}"
            )
    return None
