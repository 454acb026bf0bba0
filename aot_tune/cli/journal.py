"""`aot-tune journal`: what journals of sweeps and recordings hold, for a person and as rows for a script.

It takes no lock and changes nothing, so one that is being written may be looked at.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from aot_tune.cli.recorded import journal as recorded
from aot_tune.cli.seconds import Seconds, seconds_of
from aot_tune.errors import JournalMismatchError, UsageError
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep.journal import JournalContent, JournalWriteError, Record
from aot_tune.tuner.sweep.results import ALSO, Timing, accepts, outcome_of
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem, problem_option
from aot_tune.values.text import aligned, counted, duration

SUFFIXES = (".jsonl", ".done", ".old")
"""The ends of journals' names: one that goes on, one whose table is published, one that --fresh set aside."""

COLUMNS = (
    "journal", "kind", "gpu", "step", "problem", "config", "round", "state", "mean_us", "error_margin_us",
    "num_samples", "provisional", "disturbed", "stage", "message", "key", "code", "transient", "seconds",
    "measure_s",
    "verify_s", *ALSO, "search", "what",
)  # fmt: skip
"""The columns of --csv. A record leaves those empty that it does not have. One of a recorded search has the
config's place in the search space as its config."""


@dataclass(kw_only=True)
class StepSummary:
    """One step of a sweep on one problem."""

    measured: set[Config] = field(default_factory=set)
    """Configs whose result stands, or that passed when they were verified again."""

    provisional: set[Config] = field(default_factory=set)
    """Configs with a time that was to be taken again."""

    failed: set[Config] = field(default_factory=set)
    """Configs that failed."""

    rounds: int = 0
    """Number of times taken in rounds."""

    fastest: Measurement | None = None
    """The shortest time that stands."""


def paths_of(words: Sequence[str], arch: Arch | None, folder: Path) -> list[Path]:
    """The journals that are asked for: files, all of folders, and all of kernels named.

    Args:
        words: Paths and names of kernels; all journals in `folder` where there is none.
        arch: Only those of this arch, where journals are looked for by name.
        folder: The folder of journals, ``build/journal`` unless another is named.

    Raises:
        UsageError: A path does not exist, or there is no such journal.
    """
    found: list[Path] = []
    for word in words or [""]:
        path = Path(word)
        if word and ("/" in word or path.suffix in (*SUFFIXES, ".damaged")):
            found += _at(path)
            continue
        here = [
            one for one in _below(folder, arch) if not word or word in (one.name.partition(".")[0], one.stem)
        ]
        if not here:
            of = f" of {word}" if word else ""
            on = f" on {arch}" if arch else ""
            raise UsageError(
                f"no journal{of}{on} is in {folder}; name the folder with --journal, or give a journal's path"
            )
        found += here
    return list(dict.fromkeys(found))


def _at(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            here = [one for suffix in SUFFIXES for one in sorted(path.rglob(f"*{suffix}"))]
            if here:
                return here
        elif path.is_file():
            return [path]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a journal's path or a kernel's name") from error
    raise UsageError(f"no journal is at {path}; give a journal's path or a kernel's name")


def _below(folder: Path, arch: Arch | None) -> list[Path]:
    found = [path for path in folder.glob(f"{arch or '*'}/*") if path.suffix in SUFFIXES]
    return sorted(found, key=lambda path: (path.parent.name, path.name.partition(".")[0], path.name))


def contents(paths: Sequence[Path]) -> tuple[list[tuple[Path, JournalContent]], list[str]]:
    """What journals hold, and a line for each that cannot be read."""
    found, unreadable = [], []
    for path in paths:
        try:
            found.append((path, _content(path)))
        except (JournalMismatchError, JournalWriteError) as error:
            unreadable.append(str(error))
    return found, unreadable


def _content(path: Path) -> JournalContent:
    """What a journal of a sweep or of a recording holds: a journal has records of one of them."""
    content = journals.read(path, accepts)
    if not content.records and (searched := journals.read(path, recorded.accepts)).records:
        return searched
    return content


def is_recorded(content: JournalContent) -> bool:
    """Whether a journal is one of `aot-tune record`, which tells searches and no sweep."""
    return any("search" in record for record in content.records)


def steps_of(content: JournalContent) -> dict[tuple[Problem, str], StepSummary]:
    """The steps that a journal holds results of, by problem and step, in the journal's order.

    A step in which the GPU's states are measured counts once for each state.
    """
    steps: dict[tuple[Problem, str], StepSummary] = {}
    for record in content.records:
        if record["kind"] != "result":
            continue
        what = record["step"] if record["state"] is None else f"{record['step']}: {record['state']}"
        step = steps.setdefault((Problem(record["problem"]), what), StepSummary())
        outcome = outcome_of(record)
        config = Config(**record["config"])
        if isinstance(outcome, Failure):
            step.failed.add(config)
        elif outcome is not None and record["round"] is not None:
            step.rounds += 1
        elif outcome is not None and outcome.provisional:
            step.provisional.add(config)
        else:
            step.measured.add(config)
            if outcome and (step.fastest is None or outcome.mean_us < step.fastest.mean_us):
                step.fastest = outcome
    return steps


def summary_lines(path: Path, content: JournalContent) -> list[str]:
    """One journal for a person: its conditions, its totals, its damage, and a row for each step or search."""
    identity = ", ".join(f"{name} {value}" for name, value in content.identity.items())
    made_with = f"made with {identity or 'conditions that the lost first line named'}"
    if is_recorded(content):
        total, rows = recorded.total_line(content.records), recorded.search_lines(content.records)
        return [f"{path}:", made_with, total, *damage_lines(content), *rows]
    return [f"{path}:", made_with, _totals(content.records), *damage_lines(content), *_step_lines(content)]


def _step_lines(content: JournalContent) -> list[str]:
    """A row for each step of a sweep."""
    heads = ("problem", "step", "measured", "failed", "rounds", "provisional", "fastest us", "config")
    rows = [
        (
            str(problem),
            step,
            str(len(summary.measured)),
            str(len(summary.failed)),
            str(summary.rounds or "-"),
            str(len(summary.provisional - summary.measured) or "-"),
            f"{summary.fastest.mean_us:.2f}" if summary.fastest else "-",
            str(summary.fastest.config) if summary.fastest else "-",
        )
        for (problem, step), summary in steps_of(content).items()
    ]
    return aligned([heads, *rows]) if rows else ["no results yet"]


def _totals(records: Sequence[Record]) -> str:
    results = [record for record in records if record["kind"] == "result"]
    failures = sum(isinstance(outcome_of(record), Failure) for record in results)
    compiled = [record for record in records if record["kind"] == "compile"]
    refused = sum("message" in record for record in compiled)
    gpus = sorted({record["gpu"] for record in records})
    return (
        f"{counted(len(results) - failures, 'result')}, {counted(failures, 'failure')}, "
        f"{counted(len(compiled), 'compilation')} ({refused} failed) in "
        f"{_seconds(sum(record.get('seconds', 0.0) for record in compiled))} of cores; "
        + _spent(seconds_of(records))
        + (f"; on {' '.join(gpus)}" if gpus else "")
    )


def _spent(seconds: Seconds) -> str:
    """What the time of the GPUs went into, in words."""
    if not seconds:
        return "how long the GPUs took is not recorded"
    timings = {name: seconds[name] for name in get_args(Timing) if seconds.get(name)}
    parts = ", ".join(f"{_in_seconds(one)} {name}" for name, one in timings.items())
    return (
        f"{_seconds(sum(timings.values()))} timing"
        + (f" ({parts})" if parts else "")
        + f", {_seconds(seconds['verify_s'])} verifying"
        + "".join(f", {_seconds(seconds[name])} {what}" for name, what in ALSO.items() if seconds.get(name))
    )


def _in_seconds(seconds: float) -> str:
    """Seconds, of more than a minute too: what is compared with each other is in one unit."""
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{seconds:.1f} s"


def damage_lines(content: JournalContent) -> list[str]:
    """What is wrong with a journal's file; nothing where it is intact."""
    lines = []
    again = "recording" if is_recorded(content) else "sweep"
    if content.damaged_places:
        lines.append(
            f"damaged in {counted(content.damaged_places, 'place')}: the next {again} sets "
            f"{counted(content.damaged_bytes, 'byte')} aside and measures again what they held"
        )
    if content.foreign:
        what = f"{counted(content.foreign, 'record')} of other conditions"
        lines.append(
            f"{what}: the next recording sets the file aside"
            if is_recorded(content)
            else f"{what}: no sweep resumes it; move it away, or start over with --fresh"
        )
    return lines


def json_lines(found: Sequence[tuple[Path, JournalContent]]) -> Iterator[str]:
    """Each record as one line of JSON, with its journal's path and conditions."""
    for path, content in found:
        for record in content.records:
            yield json.dumps({"journal": str(path), "made_with": content.identity, **record})


def csv_lines(found: Sequence[tuple[Path, JournalContent]]) -> Iterator[str]:
    """Each record as one row of `COLUMNS`, below a row of their names."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for path, content in found:
        for record in content.records:
            table.writerow({**record, **_cells(record), "journal": path})
    return iter(text.getvalue().rstrip("\n").split("\n"))


def _cells(record: Record) -> dict[str, object]:
    """The cells that have another form than in a record: a recorded search has none."""
    if "search" in record:
        return {}
    config = str(Config(**record["config"])) if "config" in record else ""
    return {"problem": problem_option(Problem(record["problem"])), "config": config}
