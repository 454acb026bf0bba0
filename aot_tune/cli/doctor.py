"""What this process would use, as data: GPU, driver, cuda-tile, compiler, tables, cache. Changes nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from aot_tune import __version__, environment
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import survey
from aot_tune.declare.fingerprint import hashing
from aot_tune.errors import AotTuneError, StoreError, TableError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import Gpu, driver_version, visible_gpus
from aot_tune.serve.choose import loader
from aot_tune.serve.rank import is_rank
from aot_tune.serve.search import cache
from aot_tune.tables import store
from aot_tune.tables.fit import mismatch
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned, counted


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable."""

    name: str
    """Its name."""

    value: str | None
    """What it holds; None where it is unset."""

    meaning: str
    """What it does, one line."""


@dataclass(frozen=True, kw_only=True)
class TableState:
    """One place where a kernel's table is looked for."""

    kernel: str
    """The kernel."""

    path: Path
    """The file."""

    state: str
    """What is there, or what is wrong with it."""

    usable: bool
    """Whether a launch would read entries from it."""


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """The user's cache of live searches."""

    folder: Path | None
    """Where it lies; None where this process has none."""

    state: str
    """Whether it is there, how much it holds, and why it would not be used."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `aot-tune doctor` says of a process."""

    aot_tune: str
    """This release."""

    python: str
    """The interpreter's version."""

    torch: str | None
    """torch's version; None when it is not installed."""

    cuda_tile: str | None
    """cuda-tile's version; None when it is not installed."""

    compiler: str | None
    """The version of cuTile's compiler; None when none is installed."""

    driver: str | None
    """The GPU driver's version; None where NVML does not tell."""

    gpus: tuple[Gpu, ...] | None
    """The GPUs this process may use; None where NVML does not tell."""

    arch: Arch
    """The arch that the tables below are of."""

    ranked: bool
    """Whether it is one of several ranks: it never searches, and reads no cache."""

    tables: tuple[TableState, ...]
    """Where each kernel's table is looked for, in the order of the search."""

    cache: CacheState
    """The user's cache."""

    variables: tuple[Variable, ...]
    """Every environment variable that aot_tune reads."""

    remarks: tuple[str, ...]
    """What is wrong or unusual, with what to do; empty when all is well."""


def diagnose(arch: Arch, modules: Sequence[str] = ()) -> Diagnosis:
    """Look at the machine, the installation and the tables for one arch. Reads much and writes nothing.

    Raises:
        UsageError: A module that is named cannot be imported or declares nothing.
        DeclarationError: A declaration of a module that is named contradicts itself.
    """
    remarks = list(_installation_remarks())
    tables: list[TableState] = []
    try:
        declared = survey(modules)
        remarks += map(str, declared.broken)
        for found in declared.found.values():
            tables += _table_states(found.tunable, arch)
    except AotTuneError as error:
        if modules:
            raise
        # Without the installed kernels the rest is still worth telling.
        remarks.append(str(error))
    return Diagnosis(
        aot_tune=__version__,
        python=platform.python_version(),
        torch=_installed("torch"),
        cuda_tile=cutile.version() or None,
        compiler=cutile.compiler_version(),
        driver=driver_version(),
        gpus=visible_gpus(),
        arch=arch,
        ranked=_is_rank(),
        tables=tuple(tables),
        cache=_cache_state(),
        variables=variables(),
        remarks=tuple(remarks),
    )


def variables() -> tuple[Variable, ...]:
    """Every environment variable that aot_tune reads, with what it holds now."""
    return tuple(
        Variable(name=name, value=os.environ.get(name), meaning=meaning)
        for name, meaning in environment.DESCRIPTIONS.items()
    )


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis for a person."""
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
        ("GPUs", ", ".join(gpus) or ("NVML does not tell" if diagnosis.gpus is None else "none")),
        ("arch", f"{diagnosis.arch}" + ("" if gpus else ", for want of a GPU")),
        ("rank", "yes: shipped tables only, no search" if diagnosis.ranked else "no"),
        ("cache", f"{diagnosis.cache.folder or 'none'}: {diagnosis.cache.state}"),
    ]
    tables = [("  " + one.kernel, one.state, str(one.path)) for one in diagnosis.tables]
    settings = [
        (f"  {one.name}", "unset" if one.value is None else repr(one.value), one.meaning)
        for one in diagnosis.variables
    ]
    return [
        *aligned(facts),
        f"tables for {diagnosis.arch}, in the order they are looked for:",
        *aligned(tables),
        "environment:",
        *aligned(settings),
        *(f"remark: {remark}" for remark in diagnosis.remarks),
    ]


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_rank() -> bool:
    try:
        return is_rank()
    except AotTuneError:  # which is a remark
        return False


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
    for folder in environment.table_folders():
        if mistake := loader.folder_mistake(folder):
            yield mistake


def _table_states(tunable: Declaration, arch: Arch) -> Iterator[TableState]:
    for folder, _ in loader.folders(tunable):
        path = store.table_path(folder, arch, tunable.name)
        state, usable = _table_state(path, tunable, arch)
        yield TableState(kernel=tunable.name, path=path, state=state, usable=usable)


def _table_state(path: Path, tunable: Declaration, arch: Arch) -> tuple[str, bool]:
    if not path.exists():
        return "no table", False
    try:
        table = store.read_table(path)
    except (TableError, StoreError) as error:
        return f"not used: {error}", False
    if reason := mismatch(tunable, arch, table):
        return f"not used: {reason}", False
    evidence = "+".join(sorted({entry.evidence for entry in table.entries})) or "empty"
    fresh = table.source_hash == hashing.source_hash(tunable)
    stale = "" if fresh else "; the kernel's code has changed since: tune again"
    entries = counted(len(table.entries), "entry", "entries")
    return f"{entries}, {evidence}, {table.built_with.device_name}{stale}", bool(table.entries)


def _cache_state() -> CacheState:
    folder = cache.folder_here()
    if folder is None:
        return CacheState(folder=None, state=f"no place for one; name a folder in {environment.CACHE_DIR}")
    if reason := cache.UserCache(folder).refusal():
        return CacheState(folder=folder, state=f"left out: {reason}")
    if not folder.exists():
        return CacheState(folder=folder, state="not there yet; a live search makes it")
    winners = sum(1 for _ in (folder / f"v{cache.SCHEMA}").glob("*/*/*.json"))
    return CacheState(folder=folder, state=f"{counted(winners, 'remembered winner')}")
