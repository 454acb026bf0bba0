"""A declaration's kernels with hints, and the prebuilt cubins that they launch. Compiles nothing.

Kernels are made once per distinct set of hints and never dropped: the process aborts when a launched kernel
is collected while a graph is being captured.

A cubin is served where the archive is of the GPU's arch, the kernel's code is what it was compiled from
(`aot_tune.cubins.origin`), signature and hints are the same, and the installed cuda-tile is a release whose
contract for loading cubins was tested. Otherwise cuTile compiles, and one `CubinWarning` says why. A checkout
without archives is served silently.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from aot_tune.cubins.archive import FILE_NAME, Archive, Hints, Section
from aot_tune.cubins.origin import difference
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import ArchiveError, CubinWarning, LaunchError
from aot_tune.nvidia import cutile
from aot_tune.serve.choose import loader
from aot_tune.serve.runtime import runtime
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import error_in_words

_KEPT: list[dict[Hints, Any]] = []
"""Every hinted kernel of this process, whatever becomes of its declaration."""

_AGAIN = "build it again with aot-tune compile"
"""What to do about an archive that cannot be used."""

_MOST_TOLD = 32
"""Warnings of one declaration, at most."""

_archives: dict[tuple[Path, int, int], Archive] = {}
"""Opened once for all kernels of a package, while the file is the same."""


class HintedKernels:
    """The kernels of one declaration, by their hints; what they launch is prebuilt where that may be."""

    def __init__(self, tunable: Declaration) -> None:
        self._tunable = tunable
        self.cubins = Cubins(tunable)
        self._made: dict[Hints, Any] = {}
        self._loaded: set[tuple[Hints, str, Arch]] = set()
        _KEPT.append(self._made)

    def of(self, hints: Mapping[str, int]) -> Any:
        """The kernel with these hints; making it costs 52-65 us, once."""
        key = tuple(hints.items())
        kernel = self._made.get(key)
        if kernel is None:
            made = cutile.with_hints(
                self._tunable.kernel, hints, lambda signature, arch: self._cubin(key, signature, arch)
            )
            kernel = self._made.setdefault(key, made)  # of two threads that make it, both take the first
        return kernel

    def is_ready(self, config: Config, kernel_args: tuple[Any, ...], arch: Arch) -> bool:
        """Whether launching this would compile nothing: it was loaded before, or has a cubin (1 ms)."""
        try:
            signature = cutile.signature_of(self._tunable.kernel, kernel_args)
        except Exception:  # an argument whose signature only cuTile itself can tell
            return False
        hints = tuple(config.hints.items())
        return (hints, signature, arch) in self._loaded or self.cubins.has(hints, signature, arch)

    def _cubin(self, hints: Hints, signature: str, arch: Arch) -> cutile.Cubin | None:
        """Asked for before cuTile loads or compiles: the last moment to leave a capture untouched."""
        name = self._tunable.name
        if runtime().capturing():
            raise LaunchError(
                f"{name} would be loaded during graph capture, for the signature {signature} on {arch}, and "
                f"that would break the graph; load it before: aot_tune.prime(...) with the declaration of "
                f"{name}, or one launch of these shapes"
            )
        self._loaded.add((hints, signature, arch))
        return self.cubins.find(hints, signature, arch)


class Cubins:
    """The prebuilt cubins of one declaration, on every arch. Reads nothing until it is asked.

    Args:
        tunable: The declaration; its tables' folders are where archives are looked for.
    """

    def __init__(self, tunable: Declaration) -> None:
        self._tunable = tunable
        self._sections: dict[Arch, tuple[Section, ...]] = {}
        self._told: set[object] = set()

    def find(self, hints: Hints, signature: str, arch: Arch) -> cutile.Cubin | None:
        """The cubin to launch a signature with, or None where cuTile has to compile one.

        1. the cubin compiled for exactly this signature and these hints
        2. without a compiler on this machine, the one for the weakest assumptions; each default has one

        The weakest loads element by element, without TMA or vectors. Where there is a compiler, compiling
        once is cheaper than running that ever after.

        Args:
            hints: In their canonical order.
            signature: cuTile's.
            arch: The GPU's.
        """
        sections = self.sections(arch)
        cubin = self._stored(sections, hints, signature)
        if cubin is not None or not sections:
            return cubin
        missing = f"no cubin of {self._tunable.name} for {signature} on {arch}"
        if cutile.may_have_compiler():
            if not self.has(hints, signature, arch):  # a damaged one was told of
                self._tell(f"{missing}; cuTile compiles it", signature)
            return None
        weak = self._stored(sections, hints, cutile.weakest_signature(self._tunable.kernel, signature))
        if weak is not None:
            self._tell(
                f"{missing}, and no compiler here; the one that assumes nothing of strides and alignment "
                "runs instead, which is slower",
                signature,
            )
        return weak

    def has(self, hints: Hints, signature: str, arch: Arch) -> bool:
        """Whether there is a cubin for exactly this: what a launch costs then is loading it, about 1 ms."""
        return any(section.has(hints, signature) for section in self.sections(arch))

    def source_hash(self, arch: Arch) -> str | None:
        """The declaration's source hash, read off an archive that may be served: faster than computing it."""
        return next((section.origin.source_hash for section in self.sections(arch)), None)

    def sections(self, arch: Arch) -> tuple[Section, ...]:
        """What the archives for an arch have of this kernel and may serve; read once."""
        found = self._sections.get(arch)
        if found is None:
            # Without a lock, which a fork could inherit locked: two threads may read it, both take the first.
            found = self._sections.setdefault(arch, self._read(arch))
        return found

    def _read(self, arch: Arch) -> tuple[Section, ...]:
        paths = [folder / str(arch) / FILE_NAME for folder, _ in loader.folders(self._tunable)]
        if not cutile.private_names_known():
            for path in filter(os.path.lexists, paths):
                _tell_untested(cutile.version(), path)
                break
            return ()
        return tuple(section for path in paths if (section := self._section(path, arch)) is not None)

    def _section(self, path: Path, arch: Arch) -> Section | None:
        if not os.path.lexists(path):
            return None
        try:
            archive = _opened(path)
            if archive.arch != arch:
                raise ArchiveError(f"{path} is of {archive.arch}, and not of {arch}")
            section = archive.section(self._tunable.name)
            reason = difference(self._tunable, section.origin) if section is not None else None
        except Exception as error:  # whatever a file holds, the process that serves goes on
            self._tell(
                f"{error_in_words(error)}; {self._tunable.name} is compiled at its first launch on {arch}: "
                f"{_AGAIN}"
            )
            return None
        if reason is not None:
            self._tell(f"{path} is left out for {self._tunable.name}, since {reason}: {_AGAIN}")
            return None
        return section

    def _stored(self, sections: tuple[Section, ...], hints: Hints, signature: str) -> cutile.Cubin | None:
        for section in sections:
            try:
                code = section.cubin(hints, signature)
            except Exception as error:  # a block that is damaged, or a file that was replaced or removed
                # Of a section once: one block may be the dictionary of all others.
                self._tell(
                    f"{error_in_words(error)}; {self._tunable.name} is compiled for {signature}, and for all "
                    f"else of it that cannot be read there: {_AGAIN}",
                    section,
                )
                continue
            if code is not None:
                return cutile.Cubin(code, section.symbol)
        return None

    def _tell(self, message: str, about: object = None) -> None:
        """Warn once of each thing, and of at most `_MOST_TOLD`."""
        about = about or message
        if about not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(about)
            warnings.warn(message, CubinWarning, stacklevel=2)


@cache
def _tell_untested(version: str, path: Path) -> None:
    """Once for all kernels of a package."""
    tested = " and ".join(f"{major}.{minor}" for major, minor in cutile.TESTED_VERSIONS)
    warnings.warn(
        f"{path} is left out, since loading cubins was not tested with cuda-tile {version or '(no version)'} "
        f"({tested} were); kernels are compiled at their first launch: install a tested release of cuda-tile",
        CubinWarning,
        stacklevel=2,
    )


def _opened(path: Path) -> Archive:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error
    key = (path, status.st_ino, status.st_mtime_ns)
    archive = _archives.get(key)
    if archive is None:
        archive = _archives.setdefault(key, Archive(path))
    return archive
