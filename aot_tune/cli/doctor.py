"""`aot-tune doctor`: GPU, driver, compiler, tables and cache of this process. Writes nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from aot_tune import __version__, environment
from aot_tune.cli.documents import find
from aot_tune.cli.documents.declared import TableState, gpu_model_remarks, table_states
from aot_tune.cli.documents.recorded import RecordedState, recorded_states, state_lines
from aot_tune.errors import AotTuneError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import Gpu, driver_version, visible_gpus
from aot_tune.serve.rank import ranked_by
from aot_tune.serve.search import cache
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned, counted


@dataclass(frozen=True, kw_only=True)
class Variable:
    """Environment variable that aot_tune reads."""

    name: str
    """Variable's name."""

    value: str | None
    """Variable's value; None when unset."""

    meaning: str
    """Variable's effect, in one line."""


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """User's cache of live searches."""

    folder: Path | None
    """Cache's folder; None when there is no place for a cache."""

    state: str
    """Number of remembered winners, or why the cache is not used."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Report of `aot-tune doctor` about this process."""

    aot_tune: str
    """Version of aot_tune."""

    python: str
    """Version of the Python interpreter."""

    torch: str | None
    """Version of torch; None when torch is not installed."""

    cuda_tile: str | None
    """Version of cuda-tile; None when cuda-tile is not installed."""

    compiler: str | None
    """Version of cuTile's compiler, tileiras; None when no compiler is installed."""

    driver: str | None
    """Version of the GPU driver; None when NVML does not answer."""

    gpus: tuple[Gpu, ...] | None
    """GPUs that this process may use; None when NVML does not answer."""

    arch: Arch
    """Arch of the tables below."""

    ranked: str | None
    """Variable that makes the process a rank, which never searches and reads no cache; None for no rank."""

    tables: tuple[TableState, ...]
    """Files that are read for each kernel's table, in reading order."""

    recorded: tuple[RecordedState, ...]
    """Recorded tables that replaying would read, in reading order."""

    recorded_folders: tuple[Path, ...]
    """Folders that were searched for recorded tables, with the packages of named modules."""

    cache: CacheState
    """User's cache of live searches."""

    variables: tuple[Variable, ...]
    """Environment variables that aot_tune reads."""

    remarks: tuple[str, ...]
    """Faults and unusual conditions, each with what to do; empty when all is well."""


def diagnose(arch: Arch, modules: Sequence[str] = ()) -> Diagnosis:
    """Examine the machine, the installation and the tables for one arch. Writes nothing.

    Raises:
        UsageError: A named module cannot be imported or declares no kernel.
        DeclarationError: A declaration of a named module contradicts itself.
    """
    remarks = list(_installation_remarks())
    tables: list[TableState] = []
    try:
        declared = find.survey(modules)
        remarks += map(str, declared.broken)
        for kernel in declared.found.values():
            tables += table_states(kernel.tunable, arch)
    except AotTuneError as error:
        if modules:
            raise
        # The rest of the diagnosis is worth printing even if the installed kernels cannot be imported.
        remarks.append(str(error))
    gpus = visible_gpus()
    remarks += gpu_model_remarks(tables, gpus or (), arch)
    folders = find.folders(modules)
    return Diagnosis(
        aot_tune=__version__,
        python=platform.python_version(),
        torch=_installed("torch"),
        cuda_tile=cutile.version() or None,
        compiler=cutile.compiler_version(),
        driver=driver_version(),
        gpus=gpus,
        arch=arch,
        ranked=_ranked_by(),
        tables=tuple(tables),
        recorded=tuple(recorded_states(folders, arch)),
        recorded_folders=tuple(folders),
        cache=_cache_state(),
        variables=variables(),
        remarks=tuple(remarks),
    )


def variables() -> tuple[Variable, ...]:
    """Return every environment variable that aot_tune reads, with its present value."""
    return tuple(
        Variable(name=name, value=os.environ.get(name), meaning=meaning)
        for name, meaning in environment.DESCRIPTIONS.items()
    )


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as text for the user."""
    gpus = [
        f"cuda:{gpu.index} {gpu.name} {gpu.arch or '(an arch cuTile does not know)'}"
        for gpu in diagnosis.gpus or ()
    ]
    facts = [
        ("aot_tune", diagnosis.aot_tune),
        ("python", diagnosis.python),
        ("torch", diagnosis.torch or "not installed"),
        ("cuda-tile", diagnosis.cuda_tile or "not installed"),
        (
            "compiler",
            f"tileiras {diagnosis.compiler}" if diagnosis.compiler else "none: only prebuilt cubins launch",
        ),
        ("driver", diagnosis.driver or "none found"),
        ("GPUs", ", ".join(gpus) or ("NVML does not answer" if diagnosis.gpus is None else "none")),
        ("arch", f"{diagnosis.arch}" + ("" if gpus else " (no GPU is visible)")),
        ("rank", f"yes, by {diagnosis.ranked}: shipped tables only, no search" if diagnosis.ranked else "no"),
        ("cache", f"{diagnosis.cache.folder or 'none'}: {diagnosis.cache.state}"),
    ]
    tables = [("  " + file.kernel, file.state, str(file.path)) for file in diagnosis.tables]
    settings = [
        (f"  {variable.name}", "unset" if variable.value is None else repr(variable.value), variable.meaning)
        for variable in diagnosis.variables
    ]
    return [
        *aligned(facts),
        f"tables for {diagnosis.arch}, in the order in which they are looked for:",
        *aligned(tables),
        *state_lines(diagnosis.recorded, diagnosis.recorded_folders, diagnosis.arch),
        "environment:",
        *aligned(settings),
        *(f"remark: {remark}" for remark in diagnosis.remarks),
    ]


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _ranked_by() -> str | None:
    try:
        return ranked_by()
    except AotTuneError:  # `_installation_remarks` reports it
        return None


def _installation_remarks() -> Iterator[str]:
    if not cutile.version():
        yield "cuda-tile is not installed; pip install cuda-tile"
    elif not cutile.private_names_known():
        tested = " and ".join(f"{major}.{minor}" for major, minor in cutile.TESTED_VERSIONS)
        yield f"cuda-tile {cutile.version()} was not tested ({tested} were): prebuilt cubins are not used"
    for read in environment.CHECKED:
        try:
            read()
        except AotTuneError as error:
            yield str(error)
    yield from find.folder_remarks()


def _cache_state() -> CacheState:
    folder = cache.folder_here()
    if folder is None:
        return CacheState(
            folder=None,
            state=f"there is no place for it; name one in {environment.CACHE_DIR}, as an absolute path",
        )
    if reason := cache.UserCache(folder).refusal():
        return CacheState(folder=folder, state=f"not used: {reason}")
    if not folder.exists():
        return CacheState(folder=folder, state="not there yet; a live search makes it")
    winners = sum(1 for _ in (folder / f"v{cache.SCHEMA}").glob("*/*/*.json"))
    return CacheState(folder=folder, state=f"{counted(winners, 'remembered winner')}")
