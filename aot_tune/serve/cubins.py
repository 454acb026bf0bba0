"""Prebuilt cubins for one declaration: which archive may serve it, and a cubin of it. Compiles nothing.

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

from aot_tune.cubins.archive import FILE_NAME, Archive, Hints, Section
from aot_tune.cubins.origin import difference
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import AotTuneError, ArchiveError, CubinWarning
from aot_tune.nvidia import cutile
from aot_tune.serve.choose import loader
from aot_tune.values.arch import Arch


class Cubins:
    """The prebuilt cubins of one declaration, on every arch. Reads nothing until it is asked.

    Args:
        tunable: The declaration; its tables' folders are where archives are looked for.
    """

    def __init__(self, tunable: Declaration) -> None:
        self._tunable = tunable
        self._sections: dict[Arch, tuple[Section, ...]] = {}
        self._told: set[object] = set()

    def source(self, hints: Mapping[str, int]) -> cutile.CubinSource:
        """What `cutile.with_hints` asks for the cubins of a kernel with these hints."""
        key = tuple(hints.items())
        return lambda signature, arch: self.find(key, signature, arch)

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
                f"{_named(error)}; {self._tunable.name} is compiled at its first launch on {arch}: {_AGAIN}"
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
                    f"{_named(error)}; {self._tunable.name} is compiled for {signature}, and for all else of "
                    f"it that cannot be read there: {_AGAIN}",
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


_AGAIN = "build it again with aot-tune compile"
_MOST_TOLD = 32

_archives: dict[tuple[Path, int, int], Archive] = {}
"""Opened once for all kernels of a package, while the file is the same."""


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


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, AotTuneError) else f"{type(error).__name__}: {error}"
