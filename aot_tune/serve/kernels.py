"""Kernels of a declaration with hints, and the prebuilt cubins of any kernel. Compiles nothing.

A kernel is made once per name and distinct set of hints and never dropped: the process aborts when a
launched kernel is garbage-collected while a graph is captured.

A cubin is served where four conditions hold: the archive is for the GPU's arch; the cubin was compiled from
the installed code of the kernel (`aot_tune.cubins.origin`); signature and hints are the same; and loading
cubins was tested with the installed release of cuda-tile. Otherwise cuTile compiles, and one `CubinWarning`
gives the reason. A checkout without archives is served without warnings.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from aot_tune import environment
from aot_tune.cubins.archive import FILE_NAME, Archive, Hints, Section
from aot_tune.cubins.origin import KernelCode, declared_code, difference, next_step
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import ArchiveError, CubinWarning, LaunchError, MissError
from aot_tune.nvidia import cutile
from aot_tune.serve import loader
from aot_tune.serve.rank import may_compile
from aot_tune.serve.runtime import runtime
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import error_in_words
from aot_tune.warn import warn

_KEPT: list[dict[tuple[str | None, Hints], Any]] = []
"""All kernels with hints of this process, kept even when their declarations are dropped."""

_AGAIN = "build it again with aot-tune compile"
"""Next step in warnings about an archive that cannot be used."""

_MOST_WARNINGS = 32
"""Most warnings about the cubins of a kernel."""

_REPORTED_AT = "10, 100 and so on"
"""Counts of signatures without a cubin at which a warning is given."""

_archives: dict[tuple[Path, int, int], Archive] = {}
"""Open archives by path, inode and time of change, so that all kernels of a package share one."""


class HintedKernels:
    """Kernels of a declaration by name and hints; they launch prebuilt cubins where possible."""

    def __init__(self, tunable: Declaration) -> None:
        self._tunable = tunable
        self.cubins = declared_cubins(tunable)
        self._made: dict[tuple[str | None, Hints], Any] = {}
        self._loaded: set[tuple[Hints, str, Arch]] = set()
        _KEPT.append(self._made)

    def of(self, config: Config) -> Any:
        """Return the kernel of a config with its hints; made once, which takes 10 us."""
        hints = tuple(config.hints.items())
        key = (config.kernel, hints)
        kernel = self._made.get(key)
        if kernel is None:
            asked = weakref.ref(self)  # the kernel is kept, the declaration is not

            def cubin(signature: str, arch: Arch) -> cutile.Cubin | None:
                kernels = asked()
                return None if kernels is None else kernels._cubin(hints, signature, arch)

            made = cutile.with_hints(self._tunable.kernel_of(config), config.hints, cubin)
            kernel = self._made.setdefault(key, made)  # where two threads make it, both take the first
        return kernel

    def is_ready(self, config: Config, kernel_args: tuple[Any, ...], arch: Arch) -> bool:
        """Whether a launch would compile nothing: the kernel was loaded before or has a cubin (1 ms)."""
        try:
            signature = cutile.signature_of(self._tunable.kernel_of(config), kernel_args)
        except Exception:  # only cuTile itself can derive the signature of some arguments
            return False
        hints = tuple(config.hints.items())
        return (hints, signature, arch) in self._loaded or self.cubins.has(hints, signature, arch)

    def _cubin(self, hints: Hints, signature: str, arch: Arch) -> cutile.Cubin | None:
        """Return the cubin for cuTile, which asks before it loads or compiles; refuse it during a capture."""
        name = self._tunable.name
        step = f"aot_tune.prime(...) with the declaration of {name}, or one launch of these shapes"
        refuse_capture(name, signature, arch, step)
        cubin = self.cubins.find(hints, signature, arch)
        if cubin is None:
            refuse_compiling(name, signature, arch)
        self._loaded.add((hints, signature, arch))
        return cubin


def refuse_capture(name: str, signature: str, arch: Arch, step: str) -> None:
    """Refuse to load a kernel while a graph is captured.

    Raises:
        LaunchError: A graph is captured; the message ends with the next step.
    """
    if runtime().capturing():
        raise LaunchError(
            f"{name} would be loaded during graph capture, for the signature {signature} on {arch}, and "
            f"that would break the graph; load it before: {step}"
        )


def refuse_compiling(name: str, signature: str, arch: Arch) -> None:
    """Refuse to compile a kernel where this process may not.

    Raises:
        MissError: The process was primed, and AOT_TUNE_ON_MISS is ``error``.
    """
    if not may_compile():
        raise MissError(
            f"{name} would be compiled for the signature {signature} on {arch} after aot_tune.prime, and "
            f"{environment.ON_MISS}=error; ship its cubin (aot-tune compile --arch {arch}), or launch these "
            "shapes before prime"
        )


def declared_cubins(tunable: Declaration) -> Cubins:
    """Return the cubins of a declaration's kernel, from archives in the folders of its tables."""
    return Cubins(declared_code(tunable), lambda: [folder for folder, _ in loader.folders(tunable)])


class Cubins:
    """Prebuilt cubins of a kernel on every arch. Reads nothing until the first call.

    Args:
        code: The kernel and its code.
        folders: Returns the folders of the kernel's archives, in reading order.
        missing: Signatures without a cubin that were warned of; shared where a library makes a kernel often.
    """

    def __init__(
        self, code: KernelCode, folders: Callable[[], Sequence[Path]], missing: set[str] | None = None
    ) -> None:
        self._code = code
        self._folders = folders
        self._sections: dict[Arch, tuple[Section, ...]] = {}
        self._refused: dict[Arch, str] = {}
        self._warned: set[object] = set()
        self._missing: set[str] = set() if missing is None else missing
        self._without: set[Arch] = set()

    def find(self, hints: Hints, signature: str, arch: Arch) -> cutile.Cubin | None:
        """Return the cubin to launch for a signature; None where cuTile has to compile one.

        1. the cubin that was compiled for exactly this signature and these hints
        2. on a machine without a compiler, the cubin with the weakest assumptions: each default has one, and
           each recorded launch

        The weakest loads element by element, without TMA or vectors. Where there is a compiler, compiling
        once is cheaper than always running the weakest.

        Args:
            hints: The hints in their canonical order.
            signature: The signature as cuTile writes it.
            arch: The arch of the GPU.

        Raises:
            LaunchError: The driver refuses the cubins, and there is no compiler.
        """
        cubin = self._stored(self.sections(arch), hints, signature, arch)
        if cubin is None and arch in self._refused and not cutile.may_have_compiler():
            raise LaunchError(
                f"{self._refused[arch]}; no compiler is here: install a newer driver, or the compiler"
            )
        if cubin is not None or not (self.sections(arch) or arch in self._without):
            return cubin
        missing = f"no cubin of {self._code.name} for {signature} on {arch}"
        if cutile.may_have_compiler():
            if not self.has(hints, signature, arch):  # `_stored` warned of a damaged cubin
                self._warn_missing(signature, f"{missing}; cuTile compiles it")
            return None
        weakest = cutile.weakest_signature(self._code.of_signature(signature), signature)
        weak = self._stored(self.sections(arch), hints, weakest, arch)
        if weak is not None:
            self._warn_missing(
                signature,
                f"{missing}, and no compiler here; the cubin that assumes nothing of strides and "
                "alignment runs instead, which is slower",
            )
        return weak

    def has(self, hints: Hints, signature: str, arch: Arch) -> bool:
        """Whether exactly this signature has a cubin; a launch then only loads it, in about 1 ms."""
        return any(section.has(hints, signature) for section in self.sections(arch))

    def source_hash(self, arch: Arch) -> str | None:
        """Return the code's source hash from an archive that may be served; None without such an archive."""
        return next((section.origin.source_hash for section in self.sections(arch)), None)

    def compiler(self, arch: Arch) -> str | None:
        """Return the version of the compiler of the running code: the archive's, else the installed one.

        None where neither is known without a call of the compiler.
        """
        made = next((section.origin.tileiras for section in self.sections(arch)), None)
        return made or cutile.packaged_compiler()

    def sections(self, arch: Arch) -> tuple[Section, ...]:
        """Return the sections of an arch's archives that hold this kernel and may be served; read once."""
        sections = self._sections.get(arch)
        if sections is None:
            # No lock: a fork could inherit it locked. Two threads may read; both take the first.
            sections = self._sections.setdefault(arch, self._read(arch))
        return sections

    def _read(self, arch: Arch) -> tuple[Section, ...]:
        paths = [folder / str(arch) / FILE_NAME for folder in self._folders()]
        if not cutile.private_names_known():
            for path in filter(os.path.lexists, paths):
                _warn_untested(cutile.version(), path)
                break
            return ()
        return tuple(section for path in paths if (section := self._section(path, arch)) is not None)

    def _section(self, path: Path, arch: Arch) -> Section | None:
        if not os.path.lexists(path):
            return None
        try:
            archive = opened(path)
            if archive.arch != arch:
                raise ArchiveError(f"{path} is for {archive.arch}, not for {arch}")
            section = archive.section(self._code.name)
            if section is None and _package(self._code.name) in map(_package, archive.kernels):
                self._without.add(arch)
            reason = difference(self._code, section.origin) if section is not None else None
        except Exception as error:  # whatever a file holds, serving goes on
            self._warn(
                f"{error_in_words(error)}; {self._code.name} is compiled at its first launch on {arch}: "
                f"{_AGAIN}"
            )
            return None
        if reason is not None:
            self._warn(f"{path} is left out for {self._code.name} because {reason}: {next_step(_AGAIN)}")
            return None
        return section

    def _stored(
        self, sections: tuple[Section, ...], hints: Hints, signature: str, arch: Arch
    ) -> cutile.Cubin | None:
        for listed in sections:
            section = listed
            try:
                try:
                    code = section.cubin(hints, signature)
                except Exception:  # a block is damaged, or the file was replaced or removed
                    section = self._reopened(section, arch)
                    code = section.cubin(hints, signature)
            except Exception as error:
                # Warn once per section: one block may be the dictionary of all others.
                self._warn(
                    f"{error_in_words(error)}; {self._code.name} is compiled for {signature}, and for "
                    f"every other signature that cannot be read in this archive: {_AGAIN}",
                    section,
                )
                continue
            if code is None:
                continue
            reason = _refusal(section, code)
            if reason is None:
                return cutile.Cubin(code, section.symbol)
            self._leave_out(section, arch, reason)
        return None

    def _leave_out(self, section: Section, arch: Arch, reason: str) -> None:
        """Serve a section no more, because the driver refuses its code. Warn once for an archive."""
        path = section.archive.path
        self._sections[arch] = tuple(other for other in self.sections(arch) if other is not section)
        self._refused[arch] = f"no cubin of {self._code.name} in {path} can be loaded on {arch}: {reason}"
        if path not in _refused:
            _refused.add(path)
            warn(
                f"{self._refused[arch]}; where there is a compiler, kernels are compiled at their first "
                "launch: install a newer driver, or build the archive with an older compiler",
                CubinWarning,
            )

    def _reopened(self, section: Section, arch: Arch) -> Section:
        """Return the kernel's section of the replaced archive; the old section where it may not be served.

        A server goes on when its archive is replaced by another build of the same code.
        """
        path = section.archive.path
        try:
            replaced = opened(path) is not section.archive
        except ArchiveError:  # it was removed: reading the section again reports this
            return section
        renewed = self._section(path, arch) if replaced else None
        if renewed is None:
            return section
        sections = self._sections[arch]
        self._sections[arch] = tuple(renewed if known is section else known for known in sections)
        return renewed

    def _warn_missing(self, signature: str, message: str) -> None:
        """Warn of the first signature without a cubin, then of the 10th, the 100th and so on.

        A kernel that compiles in a size or a scalar has a new signature for each value, perhaps each token.
        """
        if signature in self._missing:
            return
        self._missing.add(signature)
        count = len(self._missing)
        if count == 1:
            warn(f"{message}; further ones are counted, and reported at {_REPORTED_AT}", CubinWarning)
        elif str(count).strip("0") == "1":
            name = self._code.name
            step = (
                "record these launches (aot-tune record), then aot-tune compile"
                if _package(name)
                else f"aot-tune doctor {name} reports whether a size or a scalar is compiled in, so that "
                "each value makes a new signature"
            )
            warn(f"{message}; it is the {count}th of {name}: {step}", CubinWarning)

    def _warn(self, message: str, about: object = None) -> None:
        """Warn once about each subject, at most `_MOST_WARNINGS` times."""
        about = about or message
        if about not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(about)
            warn(message, CubinWarning)


def _package(name: str) -> str:
    """Return a recorded kernel's top-level package; empty for a declared kernel, whose name has no dot."""
    package, dot, _ = name.partition(".")
    return package if dot else ""


_refused: set[Path] = set()
"""Archives that a warning has reported as refused by the driver."""

_refusals: WeakKeyDictionary[Archive, dict[str, str | None]] = WeakKeyDictionary()
"""Why the driver refuses code of an archive, by the version of the compiler; None where it loads it."""


def _refusal(section: Section, code: bytes) -> str | None:
    """Return why the driver refuses a section's code. Only the first code of each compiler is tried."""
    by_compiler = _refusals.setdefault(section.archive, {})
    compiler = section.origin.tileiras
    if compiler not in by_compiler:
        reason = cutile.refusal(code)
        by_compiler[compiler] = reason and f"{reason}; tileiras {compiler} compiled it"
    return by_compiler[compiler]


@cache
def _warn_untested(version: str, path: Path) -> None:
    """Warn once for all kernels of a package that cubins are not loaded."""
    tested = " and ".join(f"{major}.{minor}" for major, minor in cutile.TESTED_VERSIONS)
    warn(
        f"{path} is left out because loading cubins was not tested with cuda-tile "
        f"{version or '(no version)'} ({tested} were); kernels are compiled at their "
        "first launch: install a tested release of cuda-tile",
        CubinWarning,
    )


def opened(path: Path) -> Archive:
    """Open an archive, once for all kernels of this process until the file is replaced.

    Raises:
        ArchiveError: The file cannot be read or is no archive.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error
    key = (path, status.st_ino, status.st_mtime_ns)
    archive = _archives.get(key)
    if archive is None:
        archive = _archives.setdefault(key, Archive(path))
        for old in [known for known in _archives.copy() if known[0] == path and known != key]:
            _archives.pop(old, None)  # the file was replaced
    return archive
