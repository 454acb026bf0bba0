"""Sweep kernels of other packages, and compare the winners with their authors' configs.

The declarations are those of the modules that are named. Each kernel is swept by itself with all of the tuner
and nothing of an earlier run: its candidates are compiled, compared with the reference, and timed; table,
journal and cubins lie in a folder that is removed. The default of each declaration is the authors' config.
Where the authors always search, the result of their own search is reported too (`OWN_SEARCHES`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from aot_tune.bench import words
from aot_tune.bench.sections.part import Part, Request
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel, find_tunables
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.declare.selection import chosen_arch
from aot_tune.errors import AotTuneError
from aot_tune.nvidia import cutile
from aot_tune.tables import store
from aot_tune.tables.table import Entry, geometric_mean
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep import journal
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepRequest, SweptKernel
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

OWN_SEARCHES: dict[str, Callable[[Config], bool]] = {
    "tilegym_bmm": lambda config: config.hints["num_ctas"] == 2,
    "tilegym_group_gemm": lambda config: (
        (*config.constants.values(), config.hints["num_ctas"]) in ((128, 128, 128, 1), (256, 256, 64, 2))
    ),
}
"""Configs that a kernel's authors search on sm90, by kernel, where its host function always searches."""


def run(request: Request) -> Iterator[Part]:
    """Sweep each kernel of the named modules; yield a part for each, as soon as its table is complete.

    Raises:
        UsageError: A module cannot be imported, or no kernel of theirs has a name that is asked for.
    """
    kernels = chosen(request)
    arch = chosen_arch(None)
    started = time.monotonic()
    for kernel in kernels:
        if time.monotonic() - started > request.limit_s:
            print(
                f"   stopped before {kernel.tunable.name}: the limit of {request.limit_s:.0f} s is over",
                flush=True,
            )
            return
        try:
            figures = swept(kernel, arch)
        except AotTuneError as error:  # the others may still be swept
            figures = {"failed": str(error)}
        yield Part(name=kernel.tunable.name, figures=figures)


def chosen(request: Request) -> list[FoundKernel]:
    """Return the requested kernels, in the order of the modules.

    Raises:
        UsageError: A module cannot be imported, or no kernel of theirs has a name that is asked for.
    """
    kernels = find_tunables(request.modules)
    words.check_known(request.kernels, kernels, "no kernel of these modules is called")
    return [kernels[name] for name in request.kernels or kernels]


def swept(kernel: FoundKernel, arch: Arch) -> dict[str, Any]:
    """Sweep a kernel on the first GPU; return its figures, or why it has none.

    Raises:
        AotTuneError: It cannot be swept.
    """
    tunable = kernel.tunable
    with tempfile.TemporaryDirectory(prefix="aot-tune-declared-") as temporary:
        folder = Path(temporary)
        request = SweepRequest(
            kernels=(kernel,), arch=arch, gpus=(0,), out=folder / "tables", journal=folder / "journal",
            cubins=folder / "cubins",
        )  # fmt: skip
        report = sweep.run(request, PlainProgress())
        row = report.rows[0]
        if not row.complete:
            return {"failed": "; ".join((*row.refusals, *row.left_out))}
        table = store.read_table(store.table_path(folder / "tables", arch, tunable.name))
        first = first_times(kernel, request)
    return {
        "module": kernel.module,
        "library": library_of(tunable),
        "source_hash": source_hash(tunable),
        **_sums(row, report.seconds, verified=sum(map(len, first.values()))),
        **gains(table.entries),
        **over_own_search(table.entries, first, OWN_SEARCHES.get(tunable.name)),
    }


def first_times(kernel: FoundKernel, request: SweepRequest) -> dict[Problem, dict[Config, float]]:
    """Return the microseconds of every verified and timed candidate, by bucket, before the finals.

    Args:
        kernel: A kernel that was just swept.
        request: What it was swept by; its journal is read.
    """
    done = request.journal_path(kernel).with_suffix(".done")
    results = SweepResults(None, journal.read(done, accepts).records)
    times: dict[Problem, dict[Config, float]] = {}
    for bucket in request.buckets(kernel):
        outcomes = {
            config: results.outcome("candidates", bucket, config)
            for config in kernel.tunable.candidates(request.arch, bucket)
        }
        times[bucket] = {
            config: outcome.mean_us
            for config, outcome in outcomes.items()
            if isinstance(outcome, Measurement)
        }
    return times


def _sums(row: SweptKernel, seconds: float, *, verified: int) -> dict[str, Any]:
    return {
        "problems": row.problems,
        "candidates verified": verified,
        "candidates failed": row.failures,
        "sweep_s": round(seconds, 1),
        "of it until the last compilation_s": round(row.compile_s, 1),
        "of it verifying_s": round(row.verify_s, 1),
        "of it timing_s": round(row.measure_s, 1),
    }


def gains(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the default's time over the winner's at each bucket's edge, from finals, timed in turn."""
    return {
        "default over winner": _summary([entry.gain for entry in entries]),
        "rows": [
            {
                "problem": str(entry.bucket),
                "default_us": entry.default_us,
                "winner_us": entry.mean_us,
                "margin_us": entry.error_margin_us,
                "default over winner": entry.gain,
                "winner": str(entry.config),
            }
            for entry in entries
        ],
    }


def over_own_search(
    entries: Sequence[Entry],
    first: Mapping[Problem, Mapping[Config, float]],
    searched: Callable[[Config], bool] | None,
) -> dict[str, Any]:
    """Return the time of the authors' fastest searched config over the winner's, from the first run of all.

    Args:
        entries: The winners.
        first: Bucket to the times of its candidates.
        searched: Whether the authors search a config; None where they launch without a search.
    """
    if searched is None:
        return {}
    ratios = []
    for entry in entries:
        times = first[entry.bucket]
        own = [config for config in times if searched(config)]
        if own and entry.config in own:
            ratios.append(1.0)  # their search has the winner too
        elif own and entry.config in times:
            ratios.append(min(times[config] for config in own) / times[entry.config])
    return {"best of their search over winner": _summary(ratios)} if ratios else {}


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    return {"geometric mean": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}


def library_of(tunable: Declaration) -> str:
    """Return distribution and version of the kernel's code: ``tilegym 1.5.1``; empty where it has none."""
    kernel = next(iter(tunable.kernels.values()))
    package = cutile.python_function(kernel).__module__.partition(".")[0]
    names = metadata.packages_distributions().get(package, ())
    return f"{names[0]} {metadata.version(names[0])}" if names else ""
