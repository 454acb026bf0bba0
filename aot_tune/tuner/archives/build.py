"""Compile the cubins that serving tables can need, and write archives: `aot-tune compile`."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune import environment
from aot_tune.cubins.archive import FILE_NAME, Archive, Section
from aot_tune.cubins.origin import KernelCode, declared_code, file_digest
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.declare.blanks import refuse_blanks
from aot_tune.declare.checks import declaration_problems, declaration_remarks, first_arch
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import ArchiveError, DeclarationError, TableError, TuneError
from aot_tune.nvidia import cutile
from aot_tune.tables import files, store
from aot_tune.tables.fit import mismatch
from aot_tune.tables.table import Table
from aot_tune.tuner.archives.report import ArchivedKernel, ArchiveReport, CubinRequest
from aot_tune.tuner.archives.signatures import Compilation, compilations
from aot_tune.tuner.archives.tabled import TabledKernel
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, CompileResult
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import NO_COMPILER, DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted, duration

COMPILE_SECONDS = 600.0
"""The compiler's limit for one cubin, seconds. The weakest variant (no alignment, no strides assumed)
compiles slowly: 45 s of an idle core for a kernel with two products (tileiras 13.4). A sweep can drop a
config that compiles so slowly; an archive needs its cubin."""

_POLL_SECONDS = 1.0
"""Longest wait for results between two looks at the clock, seconds."""

_SAY_SECONDS = 10.0
"""Least seconds between two lines of progress."""


@dataclass(frozen=True, kw_only=True)
class _KernelJobs:
    """The jobs of one kernel on one arch, and the folder of its archive."""

    code: KernelCode
    arch: Arch
    folder: Path
    jobs: Mapping[Compilation, CompileJob]


def build(
    request: CubinRequest, say: Callable[[str], None], others: Iterable[TabledKernel] = ()
) -> tuple[ArchiveReport, ...]:
    """Compile the missing cubins and write the archives, each whole or not at all.

    Args:
        request: The kernels and archs to compile.
        say: Receives progress, a line at a time.
        others: Kernels without a declaration, with the compilations that their tables need.

    Returns:
        One report for each archive, by arch and then by folder.

    Raises:
        TuneError: Nothing can be compiled here.
        TableError: A kernel's table cannot be read or used, so that its archive would lack cubins.
        StoreError: A folder cannot be written.
        DeclarationError: A declaration has a mistake.
    """
    refuse_blanks(*(kernel.tunable for kernel in request.kernels))
    for kernel in request.kernels:
        arch = first_arch(kernel.tunable)  # an arch that can run it; others leave it out, which is no mistake
        if mistakes := declaration_problems(kernel.tunable, arch):
            raise DeclarationError("\n".join(mistakes))
        for remark in declaration_remarks(kernel.tunable, arch):
            say(f"remark: {remark}")
    tabled: list[TabledKernel] = []
    for arch in request.archs:
        for kernel in request.kernels:
            if _has_space(kernel.tunable, arch):
                tabled += _declared(request, kernel, arch)
            else:
                say(f"{kernel.tunable.name}: no search space on {arch}; nothing is compiled for it there")
    wanted = list(_wanted(request, [*tabled, *others]))
    for kernel_jobs in wanted:
        files.check_writable(kernel_jobs.folder / str(kernel_jobs.arch))
    results = _compiled(request, [job for kernel_jobs in wanted for job in kernel_jobs.jobs.values()], say)
    places = dict.fromkeys((kernel_jobs.arch, kernel_jobs.folder) for kernel_jobs in wanted)
    return tuple(_written(request, place, wanted, results, say) for place in places)


def _has_space(tunable: Declaration, arch: Arch) -> bool:
    try:
        return len(tunable.declared_space(arch, tunable.typical_problems[0])) > 0
    except Exception:  # the author's function need not know every arch
        return False


def _declared(request: CubinRequest, kernel: FoundKernel, arch: Arch) -> Iterator[TabledKernel]:
    """Yield a declaration's tables by folder, each with an archive in the same folder.

    So the predictions of a folder of AOT_TUNE_TABLES never get into the package's archive, which has only
    the defaults where there is no table.
    """
    here = DeviceKernel(kernel, arch)
    own = store.package_folder(kernel.tunable)
    code = declared_code(kernel.tunable, kernel.module)
    named = [folder for folder in environment.table_folders() if not store.same_folder(folder, own)]
    own_is_named = len(named) < len(environment.table_folders())
    tables: dict[Path, list[Table]] = {request.out or own: []}
    for folder in (*named, own):
        table = table_of(folder, arch, kernel.tunable)
        if table is not None and folder == own and not own_is_named:
            _check_measured(store.table_path(own, arch, kernel.tunable.name), table)
        if table is not None:
            tables.setdefault(request.out or folder, []).append(table)
    for folder, of_folder in tables.items():
        yield TabledKernel(code=code, arch=arch, folder=folder, compilations=compilations(here, of_folder))


def _check_measured(path: Path, table: Table) -> None:
    """Refuse to compile predictions of a package's own table: serving would not use them.

    Raises:
        TuneError: The table has a predicted entry.
    """
    predicted = sum(entry.evidence == "predicted" for entry in table.entries)
    if predicted:
        raise TuneError(
            f"{path}: {counted(predicted, 'entry', 'entries')} of a package's own table are predicted, and "
            "their archive would be among measured ones; move the table to a folder of its own and name the "
            f"folder in {environment.TABLES}, or tune on a GPU"
        )


def _wanted(request: CubinRequest, tabled: Sequence[TabledKernel]) -> Iterator[_KernelJobs]:
    """Yield the jobs of each kernel for each archive, next to its tables or in the request's folder."""
    if tabled and cutile.compiler_version() is None:
        raise TuneError(NO_COMPILER)
    needed: dict[tuple[Arch, Path, str], dict[Compilation, None]] = {}
    codes: dict[str, KernelCode] = {}
    for kernel in tabled:
        codes.setdefault(kernel.code.name, kernel.code)
        place = (kernel.arch, request.out or kernel.folder, kernel.code.name)
        needed.setdefault(place, {}).update(dict.fromkeys(kernel.compilations))
    sources = {name: f"{code.finder} {code.source_hash()}" for name, code in codes.items()}
    for (arch, folder, name), at_place in needed.items():
        jobs = {item: _job(codes[name], sources[name], arch, item) for item in at_place}
        yield _KernelJobs(code=codes[name], arch=arch, folder=folder, jobs=jobs)


def table_of(folder: Path, arch: Arch, tunable: Declaration) -> Table | None:
    """Read a kernel's table in a folder; None where there is none.

    Raises:
        TableError: The table cannot be read, or serving would not use it.
    """
    path = store.table_path(folder, arch, tunable.name)
    if not os.path.lexists(path):
        return None
    table = store.read_table(path)
    if reason := mismatch(tunable, arch, table):
        raise TableError(f"{path}: {reason}: tune {tunable.name} again")
    return table


def _job(code: KernelCode, source: str, arch: Arch, compilation: Compilation) -> CompileJob:
    symbol = cutile.symbol_of(code.kernel)
    parts = [source, cutile.version(), cutile.compiler_version(), str(arch), symbol]
    text = json.dumps([*parts, compilation.signature, compilation.hints])
    key = hashlib.sha256(text.encode()).hexdigest()
    return CompileJob(
        key=key,
        module=code.module,
        name=code.name,
        kernel=compilation.kernel,
        finder=code.finder,
        signature=compilation.signature,
        hints=dict(compilation.hints),
        arch=arch,
        symbol=symbol,
    )


# Compiling --------------------------------------------------------------------------------------------------


def _compiled(
    request: CubinRequest, jobs: Sequence[CompileJob], say: Callable[[str], None]
) -> dict[str, CompileResult]:
    results: dict[str, CompileResult] = {}
    with CompilePool(request.jobs or usable_cores(), COMPILE_SECONDS, request.cubins) as pool:
        for job in jobs:
            pool.submit(job)
        results |= {result.key: result for result in pool.poll()}
        existing, total = len(results), len({job.key for job in jobs})
        if pool.unfinished:
            say(f"compiling {counted(total - existing, 'cubin')}; {existing} exist already")
        began = reported = time.monotonic()
        while pool.unfinished:
            results |= {result.key: result for result in pool.poll(_POLL_SECONDS)}
            if time.monotonic() - reported > _SAY_SECONDS:
                reported = time.monotonic()
                done, missing = len(results) - existing, total - len(results)
                left = f", about {duration((reported - began) / done * missing)} left" if done else ""
                say(f"compiled {done} of {total - existing}{left}")
    return results


# Writing ----------------------------------------------------------------------------------------------------


def _written(
    request: CubinRequest,
    place: tuple[Arch, Path],
    everything: Sequence[_KernelJobs],
    results: Mapping[str, CompileResult],
    say: Callable[[str], None],
) -> ArchiveReport:
    arch, folder = place
    wanted = [kernel for kernel in everything if (kernel.arch, kernel.folder) == place]
    path = folder / str(arch) / FILE_NAME
    new = {kernel.code.name: _cubins(kernel, results) for kernel in wanted}
    made = [cubins for cubins in new.values() if cubins.cubins]
    failed = {kernel.code.name for kernel in wanted if kernel.jobs and not new[kernel.code.name].cubins}
    data = path.read_bytes() if path.is_file() else b""
    changed = False
    if made or not failed:  # else nothing is known against the present archive
        kept = _kept(path, arch, set(new) - failed, failed, request, say)
        present, data = data, pack(arch, [*made, *kept])
        changed = not path.is_file() or present != data
    if changed:
        files.write_atomic(path, data)
    compiled = {kernel.code.name: _fresh(kernel, results) for kernel in wanted}
    return ArchiveReport(
        path=path,
        arch=arch,
        bytes=len(data),
        changed=changed,
        kernels=_kernel_reports(Archive(path), compiled) if made or not failed else (),
        failures=tuple(line for kernel in wanted for line in _failures(kernel, results)),
    )


def _cubins(kernel: _KernelJobs, results: Mapping[str, CompileResult]) -> KernelCubins:
    tileiras = cutile.compiler_version() or ""
    cubins = {}
    for compilation, job in kernel.jobs.items():
        result = results[job.key]
        if isinstance(result, Compiled):
            cubins[compilation.hints, compilation.signature] = _read(result.path)
    return KernelCubins(
        kernel=kernel.code.name,
        symbol=cutile.symbol_of(kernel.code.kernel),
        origin=origin_of(kernel.code, tileiras),
        cubins=cubins,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TuneError(f"{path}, compiled a moment ago, cannot be read: {error.strerror}") from error


def _kept(
    path: Path,
    arch: Arch,
    replaced: set[str],
    failed: set[str],
    request: CubinRequest,
    say: Callable[[str], None],
) -> list[KernelCubins]:
    """Return the present archive's kernels that are still declared and have no cubins of now."""
    if not os.path.lexists(path):
        return []
    try:
        archive = Archive(path)
        if archive.arch != arch:
            raise ArchiveError(f"{path} is of {archive.arch}")
        kept, gone = [], []
        for name in archive.kernels:
            section = archive.section(name) if name not in replaced else None
            if section is None:
                continue
            stays = name in failed or name in request.elsewhere or request.only_these
            if stays or _of_other_modules(section, request.modules):
                kept.append(KernelCubins.unpacked(name, section))
            else:
                gone.append(name)
    except ArchiveError as error:
        if failed or request.only_these or request.modules:
            say(f"the kernels of the present archive are lost: {error}; compile all kernels to restore them")
        return []
    names = [cubins.kernel for cubins in kept if cubins.kernel not in {*failed, *request.elsewhere}]
    unchanged = " ".join(cubins.kernel for cubins in kept if cubins.kernel in failed)
    if unchanged:
        say(f"{path} keeps the present cubins of {unchanged}, of which no compilation succeeded")
    if names and not request.only_these:
        named = " and ".join(request.modules)
        kernels = " ".join(names)
        say(f"{path} keeps {kernels}, not of {named}; where no module declares it, remove the file first")
    if gone:
        say(
            f"{path} loses {' '.join(gone)}, no longer declared; if another module declares it, add --module "
            "for it"
        )
    return kept


def _of_other_modules(section: Section, modules: Sequence[str]) -> bool:
    """Return whether a kernel that `modules` do not declare may be another module's.

    It may also be a kernel that they have removed. But removing a declaration changes its file, while a
    module that only contributes a function to the kernel is unchanged.
    """
    named = tuple(modules)
    return bool(named) and all(
        file_digest(module) == digest
        for module, digest in section.origin.files.items()
        if module in named or module.startswith(tuple(f"{package}." for package in named))
    )


def _fresh(kernel: _KernelJobs, results: Mapping[str, CompileResult]) -> int:
    of_kernel = [results[job.key] for job in kernel.jobs.values()]
    return sum(isinstance(result, Compiled) and not result.cached for result in of_kernel)


def _failures(kernel: _KernelJobs, results: Mapping[str, CompileResult]) -> Iterator[str]:
    for compilation, job in kernel.jobs.items():
        result = results[job.key]
        if isinstance(result, CompileFailure):
            hints = " ".join(f"{name}={value}" for name, value in compilation.hints) or "no hints"
            reason = " ".join(result.message.split())
            yield f"{kernel.code.name} on {job.arch} with {hints} for {compilation.signature}: {reason}"


def _kernel_reports(archive: Archive, compiled: Mapping[str, int]) -> tuple[ArchivedKernel, ...]:
    reports = []
    for name in archive.kernels:
        section = archive.section(name)
        assert section is not None
        cubins, stored, unpacked = section.sizes()
        reports.append(
            ArchivedKernel(
                kernel=name,
                signatures=len(section.keys),
                cubins=cubins,
                compiled=compiled.get(name, 0),
                stored_bytes=stored,
                bytes=unpacked,
            )
        )
    return tuple(reports)
