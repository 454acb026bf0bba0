"""`aot-tune bench --report`: the recorded results and the gains of the committed tables, in Markdown.

``--report`` prints all blocks. ``--report --write`` replaces the text between these two lines in README
files, for each name in `BLOCKS`, and draws the picture of `aot_tune.bench.picture`::

    <!-- report: NAME -->
    <!-- report: end -->

A row is marked as out of date where the source or the portfolio of a kernel that it depends on has changed.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from aot_tune.bench import left_out, picture, records, words
from aot_tune.bench.every_batch import cost
from aot_tune.bench.gpu import shipped
from aot_tune.bench.kernels.standing import COPY, LARGE_BYTES, Shape
from aot_tune.bench.records import Record
from aot_tune.bench.sections import replay, scaling
from aot_tune.bench.undeclared.figures import TOGETHER
from aot_tune.bench.undeclared.problems import KERNELS
from aot_tune.declare.discovery import OWN_KERNELS
from aot_tune.errors import StoreError, UsageError
from aot_tune.tables import store
from aot_tune.tables.table import Table, geometric_mean
from aot_tune.values.arch import Arch

RUNS: Mapping[str, str] = {
    "kernels": "aot-tune bench --kernels --record",
    "serving": "aot-tune bench serving --record",
    "launch": "aot-tune bench launch --record",
    "lookups": "aot-tune bench lookups --record",
    "inside": "aot-tune bench inside --record",
    "regret": "aot-tune bench regret --record",
    "replay": "aot-tune bench replay --record",
    "scaling": "aot-tune bench scaling --problems 16 --record",
    "declared": "aot-tune bench declared --module tests.support.tilegym_declared.bmm --record",
}
"""Command that records a section on a GPU host, by section."""

SM90 = Arch.parse("sm90")
"""Arch of the committed tables."""

_CHECKOUT = Path(__file__).parents[2]
"""Folder of the top README."""

_GOOD = 0.8
"""Target efficiency of a sweep on several GPUs, part of the ideal."""

_OUT_OF_DATE = " (out of date)"
"""Suffix of the name of a row whose kernels have changed since it was measured."""

_MARKED = re.compile(r"(<!-- report: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- report: end -->)", re.S)


def main(arguments: Sequence[str]) -> int:
    """Print the blocks, or write them into the README files; return the exit status."""
    return words.called(_reported, arguments, "aot-tune bench --report")


def _reported(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="README", help="For --write; by default this checkout's own."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Replace the blocks in README files.")] = False,
    results: words.Results = records.RESULTS,
) -> int:
    """Print the recorded results and the gains of the committed tables, in Markdown.

    With --write they replace the text between two lines of README files:
    <!-- report: NAME --> and <!-- report: end -->. Without README files these are this checkout's, whose
    picture of first calls is drawn too.
    """
    if paths and not write:
        named = " ".join(map(str, paths))
        raise UsageError(f"without --write no file is read or written; add --write, or leave {named} out")
    records.check_held(results, RUNS)
    if not write:
        for name in BLOCKS:
            print(f"## {name}\n\n{block(name, results)}")
        return 0
    before = {path: _text(path) for path in paths or readmes()}
    # All texts are made before the first is written: a refused file leaves the others unchanged.
    after = {path: filled(text, results, where=str(path)) for path, text in before.items()}
    if not paths and (calls := picture.first_calls(results)) is not None:
        drawn = _CHECKOUT / picture.FILE
        before[drawn], after[drawn] = drawn.read_text() if drawn.exists() else "", picture.svg(calls)
    for path, text in after.items():
        if text != before[path]:
            path.write_text(text, encoding="utf-8")
        print(f"{path}: {'written' if text != before[path] else 'up to date'}")
    return 0


def _text(path: Path) -> str:
    """Read the text of a README file that can be written.

    Raises:
        StoreError: The file cannot be read, or not be written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(f"cannot read {path}: {reason}; name a README file") from error
    if not os.access(path, os.W_OK):
        raise StoreError(f"cannot write {path}: it is read-only; allow writing")
    return text


def readmes() -> list[Path]:
    """Return the README files of this checkout that hold blocks."""
    rooms = ("bench", "declare", "serve")
    return [
        _CHECKOUT / "README.md",
        _CHECKOUT / "tuned_configs" / "README.md",
        *(_CHECKOUT / "aot_tune" / room / "README.md" for room in rooms),
        _CHECKOUT / "aot_tune" / "serve" / "INSIDE.md",
    ]


def filled(text: str, folder: Path = records.RESULTS, *, where: str = "the text") -> str:
    """Replace a text's blocks by the present ones.

    Args:
        text: Markdown.
        folder: The recorded results.
        where: Name of the text in errors.

    Raises:
        UsageError: A marker names no block, or has no end.
    """
    opened = len(re.findall(r"^<!-- report: (?!end -->)", text, re.M))
    marked = list(_MARKED.finditer(text))
    if opened != len(marked) or any("<!-- report:" in match["text"] for match in marked):
        raise UsageError(f"{where}: each <!-- report: NAME --> needs its own <!-- report: end -->")
    unknown = [match["name"] for match in marked if match["name"] not in BLOCKS]
    if unknown:
        raise UsageError(f"{where}: no block is called {' '.join(unknown)}; there is {' '.join(BLOCKS)}")
    return _MARKED.sub(lambda match: match[1] + block(match["name"], folder) + match[4], text)


def block(name: str, folder: Path = records.RESULTS) -> str:
    """Return the Markdown of one block, which ends in a line break."""
    return "\n".join(BLOCKS[name](folder)) + "\n"


# Kernels ----------------------------------------------------------------------------------------


SUMMARY = ("matmul", "matmul_fp8", "attention", "attention_decode", "rms_norm", "softmax")
"""Kernels of the README at the top: one of each family that has a rival of PyTorch's own."""


def _summary(folder: Path) -> Iterator[str]:
    """Yield six kernels: the gain of the tables, and the fastest rival."""
    tables = _tables()
    device = _device_of(tables)
    recorded = records.read(folder, "kernels").get(device, {})
    rows = []
    for kernel in SUMMARY:
        record = recorded.get(kernel)
        rivals = record.figures["rivals"] if record else []
        rows.append(
            [
                _named(kernel, record),
                *_gains(tables.get(kernel)),
                _fastest_of(rivals),
                *_over(record, rivals),
            ]
        )
    yield from _table(
        ["kernel", "tuned over default", "best", "fastest rival", "tuned over rival", "worst"], rows
    )
    yield ""
    if recorded:
        yield f"Measured on {device}. Geometric means over shapes; above 1 the tuned kernel is faster."
    else:
        yield _not_measured("kernels", f"The rivals on {device}: not")


def _kernels(folder: Path) -> Iterator[str]:
    """Yield two tables: the gain of tuning, and each rival, with the bandwidth of a copy where it applies."""
    tables = _tables()
    yield from _table(
        ["kernel", "declared shapes", "tuned over default", "best", "portfolio"],
        [
            [f"`{kernel}`", str(len(table.entries)), *_gains(table), str(len(table.portfolio))]
            for kernel, table in sorted(tables.items())
        ],
    )
    yield ""
    yield f"From the committed tables, which were swept on {_device_of(tables)}."
    all_records = records.read(folder, "kernels")
    if not all_records:
        yield ""
        yield _not_measured("kernels", "Other implementations: not")
    for device, recorded in all_records.items():
        yield ""
        rows = [row for kernel in _order({}, recorded) for row in _rival_rows(kernel, recorded[kernel])]
        heads = ["kernel", "shapes", "rival", "tuned over rival", "worst", "worst at"]
        yield from _table([*heads, "of a copy's bandwidth", "worst"], rows)
        yield ""
        yield from _made_with(device, recorded)


def _rival_rows(kernel: str, record: Record) -> Iterator[list[str]]:
    rivals = record.figures["rivals"]
    shapes = _shapes(record)
    name = _named(kernel, record)
    large = [shape for shape in shapes if shape.bytes >= LARGE_BYTES]
    copy = _ratios(large, [COPY])
    of_copy = [_figure(geometric_mean(copy.values())), _figure(min(copy.values()))] if copy else ["", ""]
    for rival in rivals or [""]:
        ratios = _ratios(shapes, [rival])
        worst = min(ratios, key=lambda at: ratios[at]) if ratios else ""
        row = [name, str(len(ratios) if rival else len(shapes)), rival, *_mean_and_worst(ratios)]
        yield [*row, f"`{worst}`" if worst else "", *of_copy]
        name, of_copy = "", ["", ""]


def _gains(table: Table | None) -> list[str]:
    """Return the geometric mean and the largest of the default's time over the tuned one's in a table."""
    if table is None or not table.entries:
        return ["", ""]
    gains = [entry.gain for entry in table.entries]
    return [f"{geometric_mean(gains):.2f}x", f"{max(gains):.2f}x"]


def _over(record: Record | None, rivals: Sequence[str]) -> list[str]:
    return _mean_and_worst(_ratios(_shapes(record), rivals)) if record else ["", ""]


def _mean_and_worst(ratios: Mapping[str, float]) -> list[str]:
    if not ratios:
        return ["", ""]
    return [_figure(geometric_mean(ratios.values())), _figure(min(ratios.values()))]


def _ratios(shapes: Sequence[Shape], over: Sequence[str]) -> dict[str, float]:
    """Return each shape's time of the fastest of some contenders over the tuned one's."""
    return {str(shape): ratio for shape in shapes if (ratio := shape.ahead(over)) is not None}


def _shapes(record: Record) -> list[Shape]:
    return [Shape(**shape) for shape in record.figures["shapes"]]


def _fastest_of(rivals: Sequence[str]) -> str:
    return " or ".join(rivals)


def _tables() -> dict[str, Table]:
    """Return the committed tables of measured entries by kernel, for the arch that has most of them."""
    by_arch: dict[str, dict[str, Table]] = {}
    for path in store.listed(store.folder_of_package(OWN_KERNELS)):
        table = store.read_table(path)
        if all(entry.evidence == "measured" for entry in table.entries):
            by_arch.setdefault(str(table.arch), {})[table.kernel] = table
    return max(by_arch.values(), key=len, default={})


def _device_of(tables: Mapping[str, Table]) -> str:
    devices = sorted({table.built_with.device_name for table in tables.values()})
    return " and ".join(devices) or "no GPU"


def _order(tables: Mapping[str, Table], recorded: Mapping[str, Record]) -> list[str]:
    return sorted({*tables, *recorded})


def _first_call(folder: Path) -> Iterator[str]:
    """Yield the picture, as the README at the top shows it."""
    calls = picture.first_calls(folder)
    yield f"![{calls}]({picture.FILE})" if calls is not None else _not_measured("replay")


# Serving, launch, look-ups, inside, regret, replay, declared --------------------------------------------


_LAUNCHED = ("rms_norm", "matmul", "rope")
"""Kernels that `serving` launches first in a process, in this order."""

_AT_FIRST = {
    "arguments": "checked, and followed through `problem` and `args_fn`",
    "look-ups": "the bucket's entry is read and its points prepared, the rule chooses",
    "archives": "the section of this kernel, which was read at import",
    "decompression": "of the cubin, and of its archive's dictionary once",
    "the driver's consent": "whether it takes the archive's code, once for an archive",
    "cuTile and driver": "the signature, the library, the launch",
    "memo": "the launch function is compiled, the plan stored",
}
"""What a first launch does in each part of its profile."""


def _first_launch(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    """Yield the milliseconds of each part of the launches from cubins, the first of each kernel."""
    for figures in (record.figures for record in recorded.values()):
        if not any(name.startswith("rms_norm: ") for name in figures):
            continue
        whole = {kernel: figures[f"{kernel}_ms"] for kernel in _LAUNCHED}
        parts = {
            f"{part}: {what}": {kernel: figures.get(f"{kernel}: {part}_ms", 0.0) for kernel in _LAUNCHED}
            for part, what in _AT_FIRST.items()
        }
        rest = {kernel: ms - sum(part[kernel] for part in parts.values()) for kernel, ms in whole.items()}
        parts |= {"all else: the tables' source, the grid, messages": rest, "all": whole}
        rows = [[name, *(f"{ms:.2f}" for ms in part.values())] for name, part in parts.items()]
        yield from _table(["part, ms", *(f"`{kernel}`" for kernel in _LAUNCHED)], rows)


def _serving(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    first, other = [], []
    for name, record in recorded.items():
        figures, title = record.figures, _marked(name, record)
        if name.startswith("first launch: "):
            row = [_marked(name.removeprefix("first launch: "), record)]
            row += [_ms(figures, kernel) for kernel in _LAUNCHED]
            first.append([*row, str(figures.get("processes", 1))])
        elif name.startswith("launch, "):
            for what, key in (("", ""), (", grad off", "grad off: ")):
                text = f"{_us(figures, f'{key}above_us')} above a bare `ct.launch` of"
                other.append([f"{title}{what}", f"{text} {_us(figures, 'bare_us')}"])
        elif name == "after prime":
            other += _after_prime(title, figures["processes"])
        elif name == "a miss, searched live over cubins":
            times = [f"{value:.1f} ms" for key, value in figures.items() if key.endswith(" ms")]
            other.append([title, ", ".join(times)])
        elif name == "loading":
            text = f"{figures['tables']} tables {figures['tables_ms']:.1f} ms, {figures['tables_mb']:.1f} MB"
            more = f"{figures['sections']} sections of an archive {figures['archive_ms']:.1f} ms"
            other.append([title, f"{text}; {more}, {figures['archive_mb']:.1f} MB"])
        elif name == "imports":
            context = "no CUDA context" if figures["no CUDA context"] else "they create a CUDA context"
            added = f"the kernels {figures['kernels_ms']:.0f} ms beyond torch and cuTile"
            other.append([title, f"`aot_tune` {figures['aot_tune_ms']:.0f} ms, {added}; {context}"])
        elif name.startswith("client: "):
            other += _client(title, figures)
        elif name == "archive":
            other.append([title, f"{figures['kb'] / 1024:.1f} MiB for {figures['kernels']} kernels"])
    if first:
        yield from _table(["first launch, waited for", *_LAUNCHED, "processes"], first)
        yield ""
    if other:
        yield from _table(["serving", "measured"], other)


def _client(title: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    def took(*names: str) -> str:
        texts = (f"{figures[f'{name}_ms']:.1f} ms ({figures[f'{name}_cpu_ms']:.1f} of CPU)" for name in names)
        return ", ".join(texts)

    yield [f"{title}: process start, import of transformers", took("start", "torch_import")]
    if "import_ms" in figures:
        yield [
            f"{title}: import of cuTile, serving, the kernels",
            took("cutile_import", "serve_import", "import"),
        ]
        yield [f"{title}: of the kernels' import", _parts(figures, "import", "import_ms")]
    yield [f"{title}: first request, another length next", took("first", "next")]
    if "import_ms" in figures:
        yield [f"{title}: of the first request", _parts(figures, "first", "first_ms")]
    steady = (
        f"{name[8:-3]} {ms:.2f} ms"
        for name, ms in figures.items()
        if name.startswith("steady, ") and name.endswith("_ms")
    )
    yield [f"{title}: steady", ", ".join(steady)]


def _parts(figures: Mapping[str, Any], of: str, whole: str) -> str:
    """Return the milliseconds of the parts of a whole, those of at least 0.05 ms, and of all else."""
    begin = f"{of}: "
    own = {
        name[len(begin) : -3]: ms
        for name, ms in figures.items()
        if name.startswith(begin) and name.endswith("_ms")
    }
    rest = {"all else": figures[whole] - sum(own.values())}
    return ", ".join(f"{part} {ms:.1f}" for part, ms in (own | rest).items() if ms >= 0.05) + " ms"


def _after_prime(title: str, processes: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    seconds = statistics.median(process["prime_seconds"] for process in processes)
    loaded, plans = processes[-1]["signatures loaded"], processes[-1]["plans"]
    yield [f"{title}: `prime`", f"{seconds:.1f} s for {loaded} signatures and {plans} problems"]
    for kernel in ("rms_norm", "matmul", "rope"):
        ratios = [process[kernel]["waited for: first / later"] for process in processes]
        text = f"{statistics.median(ratios):.2f}, highest {max(ratios):.2f}"
        yield [f"{title}: first launch over later ones, `{kernel}`", text]


def _launch(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    record = recorded["launch"]
    named = ("", ", grad off", ", config given")
    ways = ["bare ct.launch", *(f"Tunable.launch{how}" for how in named), "tune-once pattern by hand"]
    heads = ["host time of a launch", _marked("median", record)]
    yield from _table(heads, [[way, _us(record.figures, way)] for way in ways if way in record.figures])


def _lookups(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    heads = ["kernel", "look-ups", "median", "99.9 %", "99.99 %", "under 200 us", "memory added"]
    rows = [
        [
            _named(kernel, record),
            f"{record.figures['look-ups']:,}",
            *(f"{record.figures[f'{part}_us']:.0f} us" for part in ("median", "99.9 %", "99.99 %")),
            f"{record.figures['under 200 us']:.2%}",
            f"{record.figures['grown_mb']:.1f} MB",
        ]
        for kernel, record in recorded.items()
    ]
    yield from _table(heads, rows)


def _inside(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    heads = ["kernel", "sizes", "config taken", "95 %", "worst", "default", "95 %", "worst"]
    heads += ["model's first", "best of its first 3", "of its first 5"]
    rows = []
    for kernel in sorted(recorded):
        figures = recorded[kernel].figures
        row = [_named(kernel, recorded[kernel]), str(figures["problems"])]
        for what in ("resolver", "default"):
            keys = ("geometric mean %", "95th percentile %", "worst %")
            row += [f"{figures[what][key]:.1f} %" for key in keys]
        model = figures.get("model", {})
        tops = (model.get(f"best of top {top}") for top in (1, 3, 5))
        row += [f"{top['geometric mean %']:.1f} %" if top else "" for top in tops]
        rows.append(row)
    yield from _table(heads, rows)


def _regret(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    heads = ["kernel", "problems", "config taken, worst state", "95 %", "worst", "default", "95 %", "worst"]
    heads += ["behind the default", "cuBLAS over it, tight", "worst"]
    rows = []
    for kernel in [
        *(name for name in KERNELS if name in recorded),
        *(name for name in recorded if name == TOGETHER),
    ]:
        figures = recorded[kernel].figures
        measured, drawn = figures["problems"], figures["drawn"]
        row = [
            _named(kernel, recorded[kernel]),
            f"{measured}" if measured == drawn else f"{measured} of {drawn}",
        ]
        for what in ("regret", "default"):
            keys = ("geometric mean %", "95th percentile %", "worst %")
            row += [f"{figures[what]['worst state'][key]:.1f} %" for key in keys]
        row.append(str(len(figures["behind the default"])))
        rival = figures.get("cuBLAS over the choice", {}).get("tight")
        rows.append(
            [*row, *([f"{rival[key]:.2f}" for key in ("geometric mean", "worst")] if rival else ["", ""])]
        )
    yield from _table(heads, rows)


def _replay(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    operations = {name: recorded[name].figures for name in replay.SHAPES if name in recorded}
    heads = ["operation", "shape", "first call as it comes", "replayed, compiled", "from cubins"]
    heads += ["later call as it comes", "replayed", "GPU as it comes", "recorded winner over own"]
    rows = []
    for name, figures in operations.items():
        title = f"`{name}`" if figures["searches"] else f"`{name}`, no search"
        for shape, times in figures["shapes"].items():
            first = [_ms({"_ms": times["first_ms"].get(process)}, "") for process in replay.VARIANTS]
            if replay.COMPILED in times:
                first[-1] += ", compiled"
            elif replay.OURS in times:
                first[-1] += f", of it ours {sum(times[replay.OURS].values()):.1f}"
            later, gpu = times["later_us"], times["gpu_us"]
            ratio = times["gpu, replayed / bare"]["compiled"]
            row = [title, f"`{shape}`", *first, f"{later['bare']:.1f} us", f"{later['compiled']:.1f} us"]
            spread = f"{ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f})"
            rows.append([*row, f"{gpu['bare']:.1f} us", spread])
            title = ""
    yield from _table(heads, rows)
    yield ""
    totals = replay.summary(operations)
    for process in replay.VARIANTS[1:]:
        if (ups := totals.get(f"speed-up, {process}")) is not None:
            where = "from cubins" if process == "cubins" else "compiled on the spot"
            yield (
                f"First calls {where}: {ups['geometric mean']:.1f} times as fast as the library comes "
                f"where it searches (geometric mean), at least {ups['least']:.1f} times (`{ups['at']}`)."
            )
    compared = [
        equal
        for figures in operations.values()
        for times in figures["shapes"].values()
        for equal in times.get("bits equal", {}).values()
    ]
    if compared:
        yield f"Bits as the library's own in {sum(compared)} of {len(compared)} first calls."
    if replay.OURS in totals:
        of_first, of_next = totals[replay.OURS], totals.get(f"{replay.OURS}, of next ones")
        more = f"; of the next ones {of_next['most']:.1f} ms (`{of_next['at']}`)" if of_next else ""
        yield (
            f"Ours of a process's first call from cubins: at most {of_first['most']:.1f} ms "
            f"(`{of_first['at']}`){more}. Nearly all else is the library, cuTile and the driver."
        )
    for do, title in (
        ("recorded winner over own", "Recorded winners"),
        ("later calls over bare", "Later calls"),
    ):
        slower = [f"`{at}`" for at in totals[do]["slower beyond noise"]] if do in totals else []
        yield f"{title} that are slower beyond noise: {'; '.join(slower) or 'none'}."
    means = replay.later_means(operations)
    if means:
        listed = ", ".join(f"{where} {mean:.2f}" for where, mean in means.items())
        yield f"Later calls over those of the library as it comes, geometric means: {listed}."


def _scaling(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    """Yield a row of each number of GPUs, then the winners that do not tie with those of one GPU."""
    heads = ["GPUs", "cores", "sweep", "of ideal", "measuring", "starting processes", "waiting for compilers"]
    heads += ["idle", "compiling, of all cores", "winners unlike one GPU's", "of these tie"]
    runs = {name: recorded[name].figures for name in sorted(recorded, key=_gpus_in)}
    rows = []
    for name, figures in runs.items():
        seconds, gpus = figures["GPUs' seconds"], _gpus_in(name)[0]
        parts = ("measuring", "starting processes", "waiting for compilers", "idle")
        winners = figures["winners"]
        rows.append(
            [
                *(_without_unit(name), f"{figures['cores']}"),
                *(f"{figures['sweep_s']:.0f} s", f"{figures['efficiency']:.2f}"),
                *(f"{seconds[part] / gpus:.0f} s" for part in parts),
                f"{figures['compiling, seconds of cores'] / figures['cores']:.0f} s",
                *(f"{winners['differ']} of {winners['entries']}", f"{winners['of these tie']}"),
            ]
        )
    yield from _table(heads, rows)
    yield ""
    whole = {_gpus_in(name)[0]: run["sweep_s"] for name, run in runs.items() if scaling.KILLED not in name}
    if len(whole) > 1:
        shared, fixed = statistics.linear_regression([1 / gpus for gpus in whole], list(whole.values()))
        off = max(abs(fixed + shared / gpus - seconds) for gpus, seconds in whole.items())
        yield (
            f"By least squares, without the run with a killed worker: {fixed:.0f} s that more GPUs do not "
            f"shorten, and {shared:.0f} s that they share; each sweep is within {off:.0f} s of that. By it a "
            f"sweep of as many kernels reaches {_GOOD} of the ideal on {max(whole)} GPUs where it takes "
            f"{fixed * (1 + (_GOOD * max(whole) - 1) / (1 - _GOOD)) / 60:.0f} minutes on one."
        )
        yield ""
    apart = [
        [
            *(_without_unit(name), f"`{entry['kernel']}`", f"`{entry['problem']}`"),
            *(f"`{config}`" for config in entry["winners"]),
            "yes" if entry["in both portfolios"] else "no",
            *(" and ".join(f"{us:.2f}" for us in pair) if pair else "" for pair in entry["us"]),
        ]
        for name, figures in runs.items()
        for entry in figures["winners"]["apart"]
    ]
    if apart:
        heads = ["GPUs", "kernel", "problem", "winner", "winner on one GPU"]
        heads += ["members of both portfolios", "us of both", "us on one GPU"]
        yield from _table(heads, apart)


def _without_unit(name: str) -> str:
    """Return the name of a run without the word for GPUs, which is in the head of the column."""
    return re.sub(" GPUs?", "", name)


def _gpus_in(name: str) -> tuple[int, str]:
    """Return the number of GPUs in the name of a run, and the name."""
    return int(name.partition(" ")[0]), name


def _declared(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    """Yield a row of each kernel, then a row of each problem."""
    heads = ["kernel", "of", "problems", "candidates verified", "sweep", "authors' config over winner"]
    heads += ["least", "most", "best of the authors' own search over winner"]
    rows = []
    for kernel in sorted(recorded):
        figures = recorded[kernel].figures
        counts = [f"{figures[key]}" for key in ("problems", "candidates verified")]
        own = figures.get("best of their search over winner")
        rows.append(
            [
                *(_named(kernel, recorded[kernel]), figures["library"], *counts),
                *(f"{figures['sweep_s']:.0f} s", *_spread(figures["default over winner"])),
                f"{own['geometric mean']:.2f}x" if own else "",
            ]
        )
    yield from _table(heads, rows)
    yield ""
    problems = [
        [
            *(f"`{kernel}`", f"`{row['problem']}`"),
            *(f"{row[which]:.1f} us" for which in ("default_us", "winner_us")),
            *(f"{row['default over winner']:.2f}x", f"`{row['winner']}`"),
        ]
        for kernel in sorted(recorded)
        for row in recorded[kernel].figures["rows"]
    ]
    yield from _table(["kernel", "problem", "authors' config", "winner", "over it", "which"], problems)


def _gained(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    """Yield the gain on kernels of others, in one sentence and a row of each."""
    every = [figures for name in sorted(recorded) for figures in recorded[name].figures["rows"]]
    gain = geometric_mean(row["default over winner"] for row in every)
    seconds = sum(record.figures["sweep_s"] for record in recorded.values())
    yield (
        f"Swept in {seconds:.0f} s, with each candidate's result compared, they run {gain:.2f} times as fast "
        f"as under their authors' configs (geometric mean of {len(every)} problems)."
    )
    yield ""
    rows = [
        [_named(name, recorded[name]), *_spread(recorded[name].figures["default over winner"])]
        for name in sorted(recorded)
    ]
    yield from _table(["kernel", "authors' config over winner", "least", "most"], rows)


def _spread(figures: Mapping[str, float]) -> list[str]:
    return [f"{figures[key]:.2f}x" for key in ("geometric mean", "least", "most")]


def _by_device(
    section: str, lines: Callable[[str, Mapping[str, Record]], Iterator[str]]
) -> Callable[[Path], Iterator[str]]:
    """Make a block with the lines of each device, or one line where a section was not measured."""

    def made(folder: Path) -> Iterator[str]:
        recorded = records.read(folder, section)
        if not recorded:
            yield _not_measured(section)
        for place, (device, by_name) in enumerate(recorded.items()):
            if place:
                yield ""
            yield from lines(device, by_name)
            yield ""
            yield from _made_with(device, by_name)

    return made


# Markdown ---------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |")


def _not_measured(section: str, begin: str = "Not") -> str:
    return f"{begin} measured yet; run: `{RUNS[section]}`"


def _made_with(device: str, recorded: Mapping[str, Record]) -> Iterator[str]:
    """Yield one line for each set of versions and day; where there are several, with its rows."""
    groups: dict[str, list[str]] = {}
    for name, record in recorded.items():
        made = record.made_with
        versions = f"driver {made.driver}, cuda-tile {made.cuda_tile}, tileiras {made.tileiras}"
        line = f"{device}, {versions}, torch {made.torch}, {made.cores} CPU cores, {made.date}"
        groups.setdefault(line, []).append(name)
    for place, (line, names) in enumerate(groups.items()):
        if place:
            yield ""
        yield f"{line}{': ' + ', '.join(names) if len(groups) > 1 else ''}."


def _named(kernel: str, record: Record | None) -> str:
    return _marked(f"`{kernel}`", record)


def _marked(name: str, record: Record | None) -> str:
    return f"{name}{_OUT_OF_DATE}" if record is not None and records.out_of_date(record) else name


def _figure(value: float) -> str:
    return f"{value:.2f}"


def _ms(figures: Mapping[str, Any], kernel: str) -> str:
    value = figures.get(f"{kernel}_ms")
    if value is None:
        return ""
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _us(figures: Mapping[str, Any], name: str) -> str:
    return f"{figures[name]:.2f} us"


# From the committed tables ----------------------------------------------------------------------


def _left_out(_: Path) -> Iterator[str]:
    """Yield the regret of the rule between measured sizes with sizes left out, and what each part gives."""
    heads = ["sizes", "geometric mean", "95th percentile", "worst", "slower than the default"]

    def row(title: str, total: left_out.Summary) -> list[str]:
        figures = (total.mean, total.high, total.worst, total.lost)
        return [title, str(total.sizes), *(f"{figure:.1f} %" for figure in figures)]

    every = [*left_out.parts(list(shipped()), SM90)]
    kernels = [(name, way, total) for name, way, total in left_out.by_kernel(every[0][1]) if name != "all"]
    yield from _table(["left out", *heads], [row(f"{way}, `{name}`", total) for name, way, total in kernels])
    yield ""
    parts = left_out.ablated(every)
    yield from _table(
        ["rule, left out", *heads], [row(f"{title}, {way}", total) for title, way, total in parts]
    )


def _every_batch(_: Path) -> Iterator[str]:
    """Yield the cost of one config for every batch."""
    heads = ["kernel", "batch axes", "other sizes", "worst regret over the batch, geometric mean", "largest"]
    rows = []
    for name, kernel in shipped().items():
        if kernel.tunable.batch_axes:
            costs = cost(kernel.tunable, SM90)
            figures = [
                "not measured" if regret is None else f"{regret:.0f} %"
                for regret in (costs.mean, costs.worst)
            ]
            unseen = f", {costs.partly} not at each batch" if costs.partly else ""
            axes = ", ".join(f"`{axis}`" for axis in costs.axes)
            rows.append([f"`{name}`", axes, f"{costs.groups}{unseen}", *figures])
    yield from _table(heads, rows)


BLOCKS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "first-call": _first_call,
    "summary": _summary,
    "kernels": _kernels,
    "serving": _by_device("serving", _serving),
    "first-launch": _by_device("serving", _first_launch),
    "launch": _by_device("launch", _launch),
    "lookups": _by_device("lookups", _lookups),
    "inside": _by_device("inside", _inside),
    "regret": _by_device("regret", _regret),
    "replay": _by_device("replay", _replay),
    "scaling": _by_device("scaling", _scaling),
    "declared": _by_device("declared", _declared),
    "gained": _by_device("declared", _gained),
    "left-out": _left_out,
    "every-batch": _every_batch,
}
"""Functions that make the lines of a block from a folder of results, by name."""
