"""`aot-tune profile`: what bounds a config, by evidence, and what one change in the space gains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.choose.choice import named
from aot_tune.cli.command import say
from aot_tune.cli.explain import explain
from aot_tune.cli.json_text import json_text, plain
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.selection import parse_problem
from aot_tune.errors import UsageError
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.serve import loader
from aot_tune.tables.files import read_bytes, write_atomic
from aot_tune.tuner.choose.times import TIE
from aot_tune.tuner.profile.facts import Facts
from aot_tune.tuner.profile.rules import Expected, at_ceiling, difference
from aot_tune.tuner.profile.run import Profile, profile
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

PROFILES = Path("build/profile")
"""Folder where profiles are kept."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """An earlier profile, as far as a later one is compared with it."""

    path: Path
    """Its file."""

    config: str
    """Its config, as text."""

    us: float | None
    """Its time, measured there or from the table, microseconds."""

    findings: tuple[str, ...]
    """The names of its findings."""

    counters: Mapping[str, float]
    """Its counters."""


def profiled(
    kernel: FoundKernel, arch: Arch, problem: Problem, config: str | None, option: str | None
) -> tuple[Profile, str]:
    """Profile a config on a problem.

    Args:
        kernel: The kernel.
        arch: The arch.
        problem: The problem.
        config: A member of the search space as ``name=value,...``, what differs from the launched config; by
            default the config that a launch would run.
        option: The option --module, for remarks.

    Returns:
        The profile, and why this config was profiled.

    Raises:
        UsageError: The config is not in the search space.
        TuneError: It does not compile, or the GPU is taken or lost.
    """
    answer = explain(kernel.tunable, arch, problem, option=option)
    chosen, why = answer.config, answer.reason
    if config is not None:
        chosen, why = _chosen(kernel, arch, problem, chosen, config), "as named by --config"
    gpu = next((gpu.index for gpu in visible_gpus() or () if gpu.arch == arch), None)
    table_us = _table_us(kernel, arch, problem, chosen)
    ratios = {each.config: each.ratio for each in answer.compared}
    expected = {
        other: Expected(ratio=ratio / ratios[chosen], by="table")
        for other, ratio in ratios.items()
        if chosen in ratios
    }
    result = profile(
        kernel, arch, problem, chosen, gpu=gpu, table_us=table_us, expected=expected, on_event=say
    )
    return result, why


def _chosen(kernel: FoundKernel, arch: Arch, problem: Problem, launched: Config, text: str) -> Config:
    """Return the member of the search space that differs from the launched config as named."""
    wanted = parse_problem(text)
    known = {**launched.constants, **launched.hints}
    space = kernel.tunable.space(arch, problem)
    unknown = [name for name in wanted if all(name not in {**c.constants, **c.hints} for c in space)]
    if unknown:
        raise UsageError(f"--config: {kernel.tunable.name} has no {unknown[0]}; it has {' '.join(known)}")
    target = {**known, **wanted}
    for member in space:
        values = {**member.constants, **member.hints}
        if all(values.get(name) == value for name, value in target.items()):
            return member
    members = [{**member.constants, **member.hints} for member in space]
    others = {name: list(dict.fromkeys(str(member.get(name)) for member in members)) for name in wanted}
    listed = ", ".join(f"{name} {' '.join(values)}" for name, values in others.items())
    raise UsageError(
        f"--config {text}: no config of the search space has these values, and else those of the launched "
        f"config, at {named(problem)}; it has {listed}"
    )


def _table_us(kernel: FoundKernel, arch: Arch, problem: Problem, config: Config) -> float | None:
    """Return a config's time in the table at exactly this problem, microseconds; None without one."""
    match = loader.load(kernel.tunable, arch).own(problem)
    if match is None:
        return None
    entry, portfolio = match.entry, match.table.portfolio
    if problem == entry.bucket and config == entry.config:
        return entry.mean_us
    default = kernel.tunable.default_config(arch, problem)
    for point in entry.points:
        if entry.bucket.replaced(**point.size) == problem:
            times = dict(zip(portfolio, point.us, strict=False))
            return times.get(config, point.us[-1] if config == default else None)
    return None


# Files ------------------------------------------------------------------------------------------------------


def keep(result: Profile) -> Path:
    """Write a profile where it is found again, one file for each config and problem; return its path."""
    text = f"{result.arch} {result.problem} {result.config}"
    path = PROFILES / f"{result.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    data: Any = plain(result)
    write_atomic(path, (json_text({**data, "text": str(result.config)}) + "\n").encode())
    return path


def earlier(path: Path, result_of: tuple[str, Problem]) -> Earlier:
    """Read an earlier profile of the same kernel and problem.

    Args:
        path: The file.
        result_of: The kernel's name and the problem.

    Raises:
        UsageError: The file is no such profile.
        StoreError: It cannot be read.
    """
    data = read_bytes(path)
    try:
        content = json.loads(data)
        us = content["here_us"] or content["table_us"]
        found = Earlier(
            path=path,
            config=str(content["text"]),
            us=None if us is None else float(us),
            findings=tuple(str(finding["rule"]) for finding in content["findings"]),
            counters={str(name): float(value) for name, value in content["facts"]["counters"].items()},
        )
        of = str(content["kernel"]), content["problem"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--diff {path}: it is no profile that this release wrote; profile again") from error
    if of != (result_of[0], plain(result_of[1])):
        raise UsageError(f"--diff {path}: it is of another kernel or problem: {of[0]}")
    return found


# Text -------------------------------------------------------------------------------------------------------


def profile_lines(result: Profile, why: str, before: Earlier | None) -> list[str]:
    """Return a profile as text: facts, findings with evidence, the one change, and the decision."""
    return [
        f"{result.kernel} {result.problem} on {result.device}",
        f"  config:    {result.config} ({why})",
        f"  counters:  {_counters(result)}",
        f"  overall:   {_overall(result)}",
        *_facts_lines(result.facts),
        *(f"  compiler:  {remark.text} ({remark.times} times)" for remark in result.facts.remarks),
        "  findings:" + ("" if result.findings else " none that these facts prove"),
        *(f"    [{found.severity.upper()}] {found.rule}: {found.evidence}" for found in result.findings),
        *_change_lines(result),
        *_diff_lines(result, before),
        f"  decision:  {decision(result, before)}",
    ]


def _counters(result: Profile) -> str:
    if result.counters.values:
        return (
            f"{len(result.counters.values)} metrics in {result.counters.passes} passes, L2 read before; a "
            "profiled launch is never a time"
        )
    return f"none: {result.counters.refusal}; static facts only"


def _overall(result: Profile) -> str:
    times = [
        f"{us:.2f} us {where}"
        for us, where in ((result.here_us, "here"), (result.table_us, "in the table"))
        if us is not None
    ]
    if result.failure:
        return f"it does not run here: {result.failure.splitlines()[0]}"
    if result.bound is None:
        return "unknown: no time, here or in the table; aot-tune show has the sizes with times"
    counted = "" if result.counters.values else ", by static facts"
    unknown = result.bound == "latency" and counted and not result.facts.memory_us
    return f"{'latency- or memory' if unknown else result.bound}-bound{counted}; {', '.join(times)}"


def _facts_lines(facts: Facts) -> Iterator[str]:
    parts = []
    if facts.us or facts.counters:
        known = facts.memory_us or facts.counters
        parts += [
            f"memory {facts.part_of('memory'):.0%}" if known else "memory unknown: arguments read in part"
        ]
        parts += [f"tensor {facts.part_of('tensor'):.0%}"] if facts.tensor_us else []
    least = max(facts.memory_us, facts.tensor_us)
    which = "memory" if facts.memory_us >= facts.tensor_us else "tensor"
    bound = f"at least {least:.2f} us by the datasheet ({which})" if least else ""
    yield f"  roofline:  {'; '.join(filter(None, [', '.join(parts), bound]))}"
    if facts.resources is not None:
        used = facts.resources
        yield (
            f"  code:      {used.registers} registers, stack of {used.stack_bytes} bytes, "
            f"{used.shared_bytes} bytes of shared memory, {used.threads} threads"
        )
        yield (
            f"  occupancy: {counted(facts.resident, 'block')} a multiprocessor: {facts.occupancy:.0%} of its "
            f"threads, limited by {facts.limiter}"
        )
    waves = "" if facts.waves is None else f" in {facts.waves:.2f} waves"
    yield f"  blocks:    {facts.blocks:,} for {facts.tiles:,} tiles{waves}"


def _words(before: Config, after: Config) -> str:
    changed = difference(before, after)
    assert changed is not None
    name, old, new = changed
    return f"{name} {'unset' if old is None else old} -> {'unset' if new is None else new}"


def _change_lines(result: Profile) -> Iterator[str]:
    tried = result.tried
    if tried is None:
        return
    wanted = tried.change
    addressed = f"for {wanted.finding.rule}: {wanted.finding.remedy}"
    if (expected := wanted.expected) is not None:
        addressed += f"; the {expected.by} expects {expected.ratio - 1:+.1%}"
    yield f"  change:    {_words(result.config, wanted.config)} ({addressed})"
    if tried.before_us is not None and tried.after_us is not None:
        by = tried.after_us / tried.before_us - 1
        yield (
            f"             measured in turn, each in its worst state: {tried.before_us:.2f} -> "
            f"{tried.after_us:.2f} us, {by:+.1%}"
        )
    elif tried.failure:
        yield f"             {tried.failure.splitlines()[0]}"
    else:
        yield "             not measured: there is no GPU of the arch here"
        if expected is not None and expected.worth:
            yield f"             the model's choices for this kernel: {expected.worth}"


def _diff_lines(result: Profile, before: Earlier | None) -> Iterator[str]:
    if before is None:
        return
    mine = tuple(finding.rule for finding in result.findings)
    gone = [name for name in before.findings if name not in mine]
    new = [name for name in mine if name not in before.findings]
    yield f"  against:   {before.path}: {before.config}"
    us = result.here_us or result.table_us
    if us is not None and before.us is not None:
        yield f"    time {before.us:.2f} -> {us:.2f} us, {us / before.us - 1:+.1%}"
    yield f"    findings gone: {', '.join(gone) or 'none'}; new: {', '.join(new) or 'none'}"
    for name, value in result.facts.counters.items():
        former = before.counters.get(name)
        if former is not None and abs(value - former) > TIE * max(abs(value), abs(former)):
            yield f"    {name} {former:,.4g} -> {value:,.4g}"


def decision(result: Profile, before: Earlier | None = None) -> str:
    """Return what to do next: continue, stop at the ceiling, or roll back."""
    us = result.here_us or result.table_us
    if result.failure:
        return "roll back: this config does not run here"
    if before is not None and us is not None and before.us is not None and us > before.us * (1 + TIE):
        return f"roll back: {before.config} was faster"
    if at_ceiling(result.findings):
        return "at the ceiling: stop"
    tried = result.tried
    if tried is None and result.bound is None:
        return (
            "profile on a GPU, or a size with a time in the table: no fact without a time asks for a change"
        )
    if tried is None:
        return "stop: no config that differs in one value addresses a finding"
    words = _words(result.config, tried.change.config)
    if tried.better:
        return f"continue: take {words}, profile it with --config and compare with --diff"
    if tried.before_us is None and not tried.failure:
        expected = tried.change.expected
        if expected is not None and expected.by == "table" and expected.ratio > 1 + TIE:
            return f"stop: the table has {words} slower"
        return f"continue on a GPU: it measures {words}"
    return f"roll back {words}: it is not better"
