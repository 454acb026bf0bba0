"""Read and write recorded results: ``results/<device>/<section>.json``, each record with its provenance.

A record states how it was made, and which source and portfolio of each kernel it measured, so that a later
reader can check whether it is out of date. Prints nothing and measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.errors import AotTuneError, StoreError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import driver_version, visible_gpus
from aot_tune.tables import files, store
from aot_tune.values.arch import Arch

RESULTS = Path(__file__).with_name("results")
"""Folder of the committed results."""

MOST_SHAPES = 12
"""Most shapes of a kernel that a record holds."""

_WIDTH = 110
"""Characters that a line of a file may have before an object is split over several lines."""

_PLACES = ("--results", "--out", "--journal")
"""Options whose values are paths of the machine, which no record keeps."""

_DIGITS = 5
"""Significant digits of a recorded number that is not an integer."""


@dataclass(frozen=True, kw_only=True)
class MadeWith:
    """Machine, versions and command of a record."""

    device: str
    """Product name of the GPU."""

    arch: str
    """Architecture of the GPU, such as ``sm90``."""

    driver: str
    """Version of the GPU driver."""

    cuda_tile: str
    """Version of cuda-tile."""

    tileiras: str
    """Version of cuTile's compiler."""

    torch: str
    """Version of PyTorch."""

    python: str
    """Version of Python."""

    cores: int
    """CPU cores that the operating system reports."""

    date: str
    """Day of the run in UTC, such as ``2026-01-31``."""

    command: str
    """Command of the run, without the paths it wrote to."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """State of a kernel that a record measured."""

    source_hash: str
    """Hash of the declaration's source, 16 hexadecimal digits."""

    portfolio: str
    """Hash of the portfolio of the kernel's table, 12 hexadecimal digits; empty where there is no table."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Results of a kernel, or of a part of a section."""

    made_with: MadeWith
    """Machine, versions and command."""

    kernels: Mapping[str, Stamp]
    """Measured state of each kernel that the figures depend on, by name."""

    figures: Mapping[str, Any]
    """Measured figures. The keys are the section's own."""


# Provenance -------------------------------------------------------------------------------------


def made_with(words: Sequence[str]) -> MadeWith:
    """Describe this machine and its versions.

    Args:
        words: Arguments of ``aot-tune bench``. Options that name a path of the machine are left out.

    Raises:
        UsageError: This machine has no GPU that cuTile compiles for.
    """
    gpu = next((gpu for gpu in visible_gpus() or () if gpu.arch is not None), None)
    if gpu is None:
        raise UsageError("--record needs a GPU that cuTile compiles for: results are filed by its name")
    kept, left = [], iter(words)
    for word in left:
        if word in _PLACES:
            next(left, None)
        elif word.partition("=")[0] not in _PLACES:
            kept.append(word)
    return MadeWith(
        device=gpu.name,
        arch=str(gpu.arch),
        driver=driver_version() or "unknown",
        cuda_tile=cutile.version(),
        tileiras=cutile.compiler_version() or "unknown",
        torch=metadata.version("torch"),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        date=datetime.now(timezone.utc).date().isoformat(),
        command=" ".join(["aot-tune bench", *kept]),
    )


@cache
def present(arch: str) -> Mapping[str, Stamp]:
    """Return the present state of every shipped kernel. Imports the kernels at the first call."""
    return {
        name: Stamp(source_hash=source_hash(kernel.tunable), portfolio=_portfolio(kernel.tunable, arch))
        for name, kernel in find_tunables([OWN_KERNELS]).items()
    }


def _portfolio(tunable: Declaration, arch: str) -> str:
    path = store.table_path(store.package_folder(tunable), Arch.parse(arch), tunable.name)
    if not path.exists():
        return ""
    text = "\n".join(map(str, store.read_table(path).portfolio))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def out_of_date(record: Record) -> bool:
    """Whether a kernel's source or portfolio has changed since the record was made."""
    now = present(record.made_with.arch)
    return any(now.get(kernel) != stamp for kernel, stamp in record.kernels.items())


# Files ------------------------------------------------------------------------------------------


def folder_name(device: str) -> str:
    """Return the name of a device's folder: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def add(folder: Path, section: str, name: str, record: Record) -> Path:
    """Write a record to its section's file, in place of an earlier record of the name; return the path.

    The file is replaced in one step, so that an interrupted run keeps all earlier records. Processes that add
    to the same folder at once, each on a GPU of its own, wait for each other.

    Raises:
        StoreError: The file cannot be written.
        AotTuneError: The file is not one that `add` wrote; it is left as it is.
    """
    path = _path(folder, record.made_with.device, section)
    _make(path.parent)
    with files.locked_folder(path.parent, math.inf):
        records: dict[str, Any] = {}
        if path.exists():
            _records(path)  # an unreadable file is not overwritten
            records = json.loads(files.read_bytes(path))
        records[name] = asdict(record)
        files.write_atomic(path, dump(records).encode())
    return path


def check_addable(folder: Path, sections: Iterable[str], device: str) -> None:
    """Make a device's folder, and refuse before measuring what `add` would refuse afterwards.

    Raises:
        StoreError: A section's file cannot be written.
        AotTuneError: A section's file is not one that `add` wrote; it is left as it is.
    """
    for section in sections:
        path = _path(folder, device, section)
        _make(path.parent)
        files.check_writable(path.parent)
        files.check_replaceable(path)
        if path.exists():
            _records(path)


def check_out(path: Path) -> None:
    """Make the folder of the file of a run's figures, and refuse a file that cannot be written.

    Raises:
        StoreError: The file cannot be written, or its path is a folder.
    """
    _make(path.parent)
    if path.is_dir():
        raise StoreError(f"cannot write {path}: it is a directory; name a file in it")
    if not path.exists():
        files.check_writable(path.parent)
    elif not os.access(path, os.W_OK):
        raise StoreError(f"cannot write {path}: it is read-only; allow writing or name another file")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "there is a file" if isinstance(error, FileExistsError) else error.strerror
        raise StoreError(f"cannot make the folder {folder}: {reason}; name another") from error


def _path(folder: Path, device: str, section: str) -> Path:
    return folder / folder_name(device) / f"{section}.json"


def read(folder: Path, section: str) -> dict[str, dict[str, Record]]:
    """Read all records of a section: device to the record's name to the record. Devices are sorted.

    Raises:
        AotTuneError: A file is not one that `add` wrote; the message names it.
    """
    by_device: dict[str, dict[str, Record]] = {}
    for path in sorted(folder.glob(f"*/{section}.json")):
        for name, record in _records(path).items():
            by_device.setdefault(record.made_with.device, {})[name] = record
    return by_device


def check_held(folder: Path, sections: Iterable[str]) -> None:
    """Refuse a folder in which `read` finds no record of any section, such as a mistyped one.

    Raises:
        UsageError: The folder has none; the message names the parent folder where that is the right one.
    """
    names = [f"{section}.json" for section in sections]
    if any((device / name).is_file() for device in folder.glob("*") for name in names):
        return
    right = "name the folder that --record wrote"
    if any((folder / name).is_file() for name in names):
        right = f"it is the folder of one device: name {folder.parent}"
    raise UsageError(f"{folder} holds no results; {right}")


def _records(path: Path) -> dict[str, Record]:
    """Read the records of a file by their names.

    Raises:
        StoreError: The file cannot be read.
        AotTuneError: The file is not one that `add` wrote.
    """
    text = files.read_bytes(path)
    try:
        return {name: _record(value) for name, value in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AotTuneError(
            f"{path} is not a file of bench results: {error!r}; move it away and record it again"
        ) from error


def _record(value: Mapping[str, Any]) -> Record:
    return Record(
        made_with=MadeWith(**value["made_with"]),
        kernels={name: Stamp(**stamp) for name, stamp in value["kernels"].items()},
        figures=value["figures"],
    )


def dump(value: object) -> str:
    """Format JSON for review: numbers are rounded, and each object in a list has its own line."""
    return _lines(_rounded(value), "") + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        if value == 0 or not math.isfinite(value):
            return value
        digits = _DIGITS - 1 - math.floor(math.log10(abs(value)))
        shorter = round(value, digits)
        return int(shorter) if shorter == int(shorter) and abs(shorter) >= 10**_DIGITS else shorter
    return value


def _lines(value: object, indent: str, *, within: int = _WIDTH) -> str:
    flat = json.dumps(value)
    inside = indent + "  "
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(inside + json.dumps(item) for item in value) + f"\n{indent}]"
    if isinstance(value, dict) and value and (len(flat) > within or indent == "" or _nested(value)):
        rows = (f"{inside}{json.dumps(key)}: {_lines(item, inside)}" for key, item in value.items())
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return flat


def _nested(value: Mapping[str, object]) -> bool:
    return any(isinstance(item, dict | list) and item for item in value.values())
