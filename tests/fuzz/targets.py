"""What is fuzzed: every reader of bytes that something else wrote, with the outcomes that it documents.

A target is given bytes and says in a word what came of them. A value that was accepted must keep its reader's
promises: written and read again it is the same, and serving can use it. Whatever else is raised is a finding.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aot_tune.choose.index import Index
from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import resolve
from aot_tune.cubins.archive import HEADER, MAGIC, SCHEMA, Archive
from aot_tune.cubins.origin import Origin
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.declare.missed_problems import problems_of_files
from aot_tune.errors import ArchiveError, TableError, TuneError, UsageError
from aot_tune.replay import document
from aot_tune.replay.nearest import ANY, distance, larger
from aot_tune.serve.launch.messages import passed_over_message
from aot_tune.serve.search.cache import UserCache
from aot_tune.tables import reader, writer
from aot_tune.tables.fit import entry_complaints, mismatch, portfolio_complaints, undeclared, without
from aot_tune.tables.table import Table
from aot_tune.tunable import Tunable
from aot_tune.tuner.compile.job import CompileFailure
from aot_tune.tuner.measure.worker.backend import Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.tuner.process.codec import MessageError, decode, encode
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.results import Listed, SweepResults, accepts
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.recorded_tables import TABLE
from tests.support.samples import scale_in
from tests.support.user_cache import CONFIG, KEY

CORPUS = Path(__file__).parent / "corpus"
"""What fuzzing once found, a folder for each target."""

SHIPPED = Path(__file__).parents[2] / "tuned_configs"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader and the bytes to begin with."""

    run: Callable[[bytes], str]
    """Reads bytes and says what came of them, alike for what is alike. It raises only on a finding."""

    seeds: Callable[[], list[bytes]]
    """Makes inputs that the reader accepts, from shipped files where there are such."""


def corpus(name: str) -> dict[str, bytes]:
    """What was once found in a target, by its file's name."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / name).glob("*"))}


@cache
def _folder() -> Path:
    """A folder for the files of this process, which is removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="aot_tune-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A shipped kernel, what is asked of its tables, and which configs may run."""

    tunable: Tunable
    arch: Arch
    legality: Legality
    problems: tuple[Problem, ...]
    declared: frozenset[Config]
    """The configs of all search spaces that it declares."""


@cache
def _small_tables() -> dict[str, bytes]:
    """Each shipped table with three of its entries."""
    tables = {}
    for path in sorted(SHIPPED.glob("*/*.json")):
        document = json.loads(path.read_bytes())
        entries = document["entries"]
        document["entries"] = [entries[0], entries[len(entries) // 2], entries[-1]]
        tables[document["kernel"]] = writer.dump(reader.parse(json.dumps(document)))
    return tables


def _table_seeds() -> list[bytes]:
    _kernels()  # imports torch and every kernel before the first input
    return [*_small_tables().values(), *map(_with_every_key, ("matmul", "rms_norm"))]


def _with_every_key(kernel: str) -> bytes:
    """A small table with every optional key."""
    document = json.loads(_small_tables()[kernel])
    entry = document["entries"][0]
    document |= {"kind": "declared", "slopes": {"inside": [0.5] * 2, "outside": [-0.25] * 2}}
    entry["disturbed"] = "the clock was held back by the power cap"
    entry["states"] = {"loaded": {"mean_us": entry["mean_us"], "default_us": entry["default_us"]}}
    for point in entry["points"]:
        point["states"] = {"loaded": point["us"]}
    for config in (*document["portfolio"], *(one["config"] for one in document["entries"])):
        config["kernel"] = kernel
    return writer.dump(reader.parse(json.dumps(document)))


@cache
def _kernels() -> dict[str, _Kernel]:
    from aot_tune.kernels import TUNABLES

    found = {}
    for tunable in TUNABLES:
        if tunable.name not in _small_tables():
            continue
        table = reader.parse(_small_tables()[tunable.name])
        list(entry_complaints(table, tunable, table.entries[0], own=True))  # its first call takes seconds
        problems: list[Problem] = []
        for entry in table.entries:
            inside = entry.points[0].size if entry.points else {}
            smaller = {axis: max(size - 1, 1) for axis, size in inside.items()}
            problems += [entry.bucket, entry.bucket.replaced(**smaller)]
        found[tunable.name] = _Kernel(
            tunable=tunable,
            arch=table.arch,
            legality=Legality(tunable, table.arch),
            problems=tuple(problems),
            declared=frozenset(
                config
                for problem in tunable.typical_problems
                for config in tunable.declared_space(table.arch, problem)
            ),
        )
    return found


def _table(data: bytes) -> str:
    try:
        table = reader.parse(data)
    except TableError as error:
        return f"{type(error).__name__}: {error.path}: {error.problem:.20}"
    text = writer.dump(table)
    again = reader.parse(text)
    assert writer.dump(again) == text, "a table that was read and written comes back otherwise"
    assert [entry.bucket for entry in again.entries] == [entry.bucket for entry in table.entries]
    assert again.portfolio == table.portfolio
    kernel = _kernels().get(table.kernel)
    if kernel is None or mismatch(kernel.tunable, kernel.arch, table) is not None:
        return "a table of no shipped kernel"
    if zlib.crc32(data) % 16 == 0:  # not always: it makes arguments for each entry
        for entry in table.entries:
            list(entry_complaints(table, kernel.tunable, entry, own=True))
        list(portfolio_complaints(table, kernel.tunable))
        assert not set(undeclared(kernel.tunable, table)) & kernel.declared
    return "a table: " + " ".join(_chosen(kernel, table))


def _chosen(kernel: _Kernel, table: Table) -> Iterator[str]:
    """Choose as serving does; give the steps of the ladder that the choices came from."""
    tunable = kernel.tunable
    # As `loader.load` does it, which looks for a foreign config in each space anew.
    table = without(table, set(table.portfolio) - kernel.declared)
    index = Index(tunable.axes, tunable.tiles, {Path("table.json"): table})
    for problem in kernel.problems:
        choice = resolve(problem, index, kernel.legality)
        assert kernel.legality.refusal(choice.config, problem) is None, f"{choice.config} may not run"
        assert choice.reason
        passed_over_message(tunable, table.arch, problem, choice)
        yield choice.source


# Recorded tables --------------------------------------------------------------------------------------------


def _recorded(data: bytes) -> str:
    try:
        table = document.parse(data)
    except TableError as error:
        return f"{type(error).__name__}: {error.path}: {error.problem:.20}"
    text = document.dump(table)
    again = document.parse(text)
    assert document.dump(again) == text, "a recorded table that was read and written comes back otherwise"
    for entries in table.by_space.values():
        for one in entries:
            assert one.text
            assert distance(one.problem, entries[0].problem, ANY) in (None, *range(10_000))
            larger(one.problem)
    return f"a recorded table of {len(table.entries)}"


# Missed problems --------------------------------------------------------------------------------------------


def _missed_seeds() -> list[bytes]:
    searched = b'{"search": "lib.ops.kernel", "arch": "sm90", "arguments": {}}\n'
    lines = [
        {"kernel": "scale", "arch": "sm90", "problem": {"dtype": "bfloat16", "M": m, "N": 1024}}
        for m in (300, 5)
    ]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines) + searched]


def _missed(data: bytes) -> str:
    path = _folder() / "missed"
    path.write_bytes(data)
    (kernel,) = kernels = tuple(scale_in(_folder()).values())
    try:
        chosen, notes = problems_of_files(kernels, [path], Arch(9, 0))
    except UsageError as error:
        return f"refused: {str(error).splitlines()[-1].partition(': ')[2][:20]}"
    for problem in chosen["scale"]:
        assert kernel.tunable.bucket_of(problem).size("M") >= problem.size("M") >= 1
    assert all(f"{path}, line " in note for note in notes)
    return f"{len(chosen['scale'])} problems, {len(notes)} notes"


# The user's cache -------------------------------------------------------------------------------------------


@cache
def _cache() -> UserCache:
    folder = _folder() / "cache"
    folder.mkdir(mode=0o700)
    return UserCache(folder)


def _cache_seeds() -> list[bytes]:
    _cache().write(KEY, CONFIG, 12.5)
    return [(_folder() / "cache" / KEY.place).read_bytes()]


def _cache_entry(data: bytes) -> str:
    path = _folder() / "cache" / KEY.place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = _cache().read(KEY)
        if config is None and not caught:
            return "a newer release's"
        if config is None:
            (warned,) = caught
            return str(warned.message).removeprefix(str(path))[:40]
        assert not caught
        _cache().write(KEY, config, 1.0)
        assert _cache().read(KEY) == config
    return "a config"


# Archives ---------------------------------------------------------------------------------------------------


@cache
def _archive_seed() -> bytes:
    origin = Origin(
        source_hash="0123456789abcdef", files={"a.py": "00"}, values={"b": "1"}, complete=True,
        cuda_tile="1.7.0", tileiras="13.4.92",
    )  # fmt: skip
    code = b"\x7fELF" + bytes(range(200))
    cubins = {((("occupancy", n),), name): code + name.encode() for n in (1, 2) for name in "ab"}
    kernels = [
        KernelCubins(kernel=name, symbol=f"{name}_kernel", origin=origin, cubins=cubins)
        for name in ("one", "two")
    ]
    return pack(Arch(9, 0), kernels)


@cache
def _archive_parts() -> tuple[bytes, bytes, bytes]:
    """The index, the body and the text of the first kernel's section."""
    data = _archive_seed()
    length = HEADER.unpack(data[: HEADER.size])[2]
    index, body = data[HEADER.size : HEADER.size + length], data[HEADER.size + length :]
    offset, stored, *_ = json.loads(index)["kernels"]["one"]
    return index, body, zlib.decompress(body[offset : offset + stored])


def _archive(data: bytes) -> str:
    path = _folder() / "cubins.aot"
    path.write_bytes(data)
    try:
        archive = Archive(path)
        kernels = []
        for name in archive.kernels:
            section = archive.section(name)
            assert section is not None
            section.sizes()
            kernels.append(KernelCubins.unpacked(name, section))
    except ArchiveError as error:
        return str(error).removeprefix(str(path))[:100]
    again = pack(archive.arch, kernels)
    path.write_bytes(again)
    packed = Archive(path)
    for one in kernels:
        section = packed.section(one.kernel)
        assert section is not None
        assert KernelCubins.unpacked(one.kernel, section) == one, "cubins come back otherwise"
    return f"an archive of {len(kernels)}"


def _archive_of(index: bytes, body: bytes) -> bytes:
    return HEADER.pack(MAGIC, SCHEMA, len(index), hashlib.sha256(index).digest()) + index + body


def _archive_index(data: bytes) -> str:
    """An index whose hash is right, before an intact body."""
    return _archive(_archive_of(data, _archive_parts()[1]))


def _archive_section(data: bytes) -> str:
    """A section whose hash is right, of one kernel whose blocks are intact."""
    body, packed = _archive_parts()[1], zlib.compress(data, 1)
    place = [len(body), len(packed), len(data), hashlib.sha256(data).hexdigest()]
    index = json.dumps({"arch": "sm90", "kernels": {"one": place}}).encode()
    return _archive(_archive_of(index, body + packed))


# Journals ---------------------------------------------------------------------------------------------------

IDENTITY = {"driver": "580.159.04", "tileiras": "13.4.92", "source": "3f0c9a51d2e4b678"}


PROBLEM = Problem({"dtype": "bfloat16", "M": 64})
MEASURED = Measurement(config=CONFIG, mean_us=12.5, error_margin_us=0.1, num_samples=20)
FAILED = Failure(config=CONFIG, stage="fault", message="an illegal access")


def _opened(path: Path) -> Journal:
    return Journal.open(path, IDENTITY, accepts=accepts)


@cache
def _journal_seed() -> bytes:
    """A journal with a record of each kind."""
    path = _folder() / "seed.jsonl"
    with _opened(path) as journal:
        results = SweepResults(journal)
        results.write_compiled(
            "candidates", PROBLEM, CONFIG, CompileFailure(key="2", message="no", seconds=1.0), gpu="GPU-0"
        )
        listed = Listed(configs=(CONFIG,), twins={CONFIG: CONFIG})
        results.write_listed(PROBLEM, [CONFIG], listed, exhaustive=False, gpu="GPU-0")
        results.write("candidates", PROBLEM, MEASURED, gpu="GPU-0")
        results.write("candidate finals", PROBLEM, MEASURED, 1, gpu="GPU-0")
        results.write("portfolio", PROBLEM, FAILED, gpu="GPU-0")
        results.write("portfolio states", PROBLEM, MEASURED, gpu="GPU-0", state="tight")
        results.write_unopened("portfolio", PROBLEM, "no arguments", gpu="GPU-0")
        results.write_recheck(PROBLEM, CONFIG, None, gpu="GPU-0")
        states = [{"clock_mhz": 1980}]
        results.write_spent(
            "candidates", PROBLEM, measure_s=1.0, verify_s=0.5, conditions=states, gpu="GPU-0", idle_s=1.0
        )
    return path.read_bytes()


def _journal(data: bytes) -> str:
    path = _folder() / "kernel.jsonl"
    path.write_bytes(data)
    try:
        with _opened(path) as journal:
            records, damage = journal.records, journal.damage
            results = SweepResults(journal)
            results.listed(PROBLEM, [CONFIG], exhaustive=False)
            resumed = results.resumed
    except TuneError as error:
        return f"{type(error).__name__}: {str(error).removeprefix(str(path))[:60]}"
    if zlib.crc32(data) % 8 == 0:  # not always: opening a journal takes a millisecond
        with _opened(path) as journal:
            assert journal.records == records, "a journal that was opened and closed comes back otherwise"
            assert journal.damage is None
    path.with_name("kernel.jsonl.damaged").unlink(missing_ok=True)  # it would grow with each input
    return f"{len(records)} records, {resumed} results, {'damaged' if damage else 'intact'}"


def _journal_records(data: bytes) -> str:
    """Records whose lengths and checksums are right, one a line."""
    digest = _journal_seed().split(b" ")[2]
    bodies = (digest + b" " + line for line in data.split(b"\n"))
    return _journal(b"".join(b"%08x %d %b\n" % (zlib.crc32(body), len(body), body) for body in bodies))


def _journal_texts() -> bytes:
    return b"\n".join(line.split(b" ", 3)[3] for line in _journal_seed().splitlines())


# Messages of a worker ---------------------------------------------------------------------------------------


def _messages() -> list[bytes]:
    named = Config(constants=CONFIG.constants, hints=CONFIG.hints, kernel="other")
    trials = [Trial(config=CONFIG, cubin=Path("x.cubin")), Trial(config=named, launches=3)]
    told = [Running(config=CONFIG), Done(outcome=MEASURED, verify_s=0.1), Done(outcome=FAILED)]
    ended = [Poisoned(config=None, stage="fault", message="no"), GpuState(), Device.reference(Arch(9, 0))]
    values: list[object] = [["result", {"trials": trials, "problem": PROBLEM}], told, ended]
    assert [decode(encode(value)) for value in values] == values
    return [encode(value) for value in values]


def _message(data: bytes) -> str:
    try:
        value = decode(data)
    except MessageError as error:
        return str(error)[:60]
    text = encode(value)
    assert encode(decode(text)) == text, "a message that was read and sent arrives otherwise"
    return f"a message: {type(value).__name__}"


TARGETS: dict[str, Target] = {
    "table": Target(run=_table, seeds=_table_seeds),
    "recorded": Target(run=_recorded, seeds=lambda: [document.dump(TABLE)]),
    "missed_problems": Target(run=_missed, seeds=_missed_seeds),
    "cache_entry": Target(run=_cache_entry, seeds=_cache_seeds),
    "archive": Target(run=_archive, seeds=lambda: [_archive_seed()]),
    "archive_index": Target(run=_archive_index, seeds=lambda: [_archive_parts()[0]]),
    "archive_section": Target(run=_archive_section, seeds=lambda: [_archive_parts()[2]]),
    "journal": Target(run=_journal, seeds=lambda: [_journal_seed()]),
    "journal_records": Target(run=_journal_records, seeds=lambda: [_journal_texts()]),
    "message": Target(run=_message, seeds=_messages),
}
"""Every reader by name. Where a checksum guards a text, a target of its own gives any text the right one."""
