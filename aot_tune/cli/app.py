"""Verbs of the command line. Each parses its arguments, gets data from other modules and prints it.

Data goes to stdout, progress and errors to stderr. The exit code is 0 for success, 1 when the verb failed or
found a problem, and 2 when it was called in a wrong way; of `verify` 3 when nothing can be said.
"""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aot_tune import __version__
from aot_tune.cli import command
from aot_tune.cli.command import (
    AllowWorse,
    ArchName,
    AsJson,
    Kernel,
    Kernels,
    Modules,
    ProblemFiles,
    Problems,
    Program,
    Verbose,
    guarded,
)
from aot_tune.cli.json_text import json_text
from aot_tune.declare import selection
from aot_tune.errors import DeclarationError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aot_tune.declare.discovery import FoundKernel
    from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
    from aot_tune.values.arch import Arch
    from aot_tune.values.problem import Problem

app = typer.Typer(
    name="aot-tune",
    help="Tune cuTile kernels ahead of time: sweep, review, ship.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and one-line usage errors, whatever the terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        command.put(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@guarded
def new(
    kernel: Annotated[
        str,
        typer.Argument(metavar="lib.kernels:NAME", help="The module of a @ct.kernel, and its name there."),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="The template: elementwise, in-place, row-reduction, product, persistent-product, "
            "attention, varlen-attention, grouped-product or dual-product; by default what is proven.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A new file to write to; by default it is printed.")
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of recorded tables, read after the library's own; may be repeated."),
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="Triton configs whose tiles become the search space, or a JSON."
        ),
    ] = None,
    constants: Annotated[
        str, typer.Option(metavar="tile_m=BLOCK_M,...", help="The kernel's constants in these configs.")
    ] = "",
    verbose: Verbose = False,
) -> None:
    """Begin a declaration from a kernel's source, with blanks.

    What the source proves is written, and all else is a blank with an example of the kernel's kind. Where
    searches of the kernel were recorded, they give the search space and the typical problems.
    """
    from aot_tune.cli.start.new import begin, summary, write

    begun = begin(kernel, kind, tables or (), triton, constants)
    for note in begun.notes:
        command.say(note)
    if out is None:
        command.put(begun.text.rstrip("\n"))
    else:
        write(begun, out)
    command.say(summary(begun, out))


@app.command()
@guarded
def init(
    module: Annotated[
        str | None,
        typer.Argument(
            metavar="lib.kernels",
            help="The module that declares kernels; by default the file's entry point.",
        ),
    ] = None,
    pyproject: Annotated[Path, typer.Option(metavar="FILE", help="The package's pyproject.toml.")] = Path(
        "pyproject.toml"
    ),
    verbose: Verbose = False,
) -> None:
    """Print what a package's pyproject.toml needs for its tables.

    The lines for hatchling and setuptools are TOML to append. Comments name what the file has already.
    Nothing is written.
    """
    from aot_tune.cli.start.init import init_lines

    command.put(init_lines(pyproject, module))


@app.command(cls=command.Tune)
@guarded
def tune(
    kernel: Kernels = None,
    arch: ArchName = None,
    module: Modules = None,
    problem: Problems = None,
    problems_file: ProblemFiles = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most buckets of each kernel, evenly spread.")
    ] = None,
    only_stale: Annotated[
        bool,
        typer.Option("--only-stale", help="Only entries that source, compiler or declaration made stale."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Without a GPU: predict all of every kernel, not a first look.")
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="0,1|all", help="Indexes of the GPUs to measure on; all of the arch by default."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Measure on the nodes of a Ray cluster. Without an address Ray's own default is taken, else "
            "a cluster is started on this machine.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of tables; the package's own by default."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of journals; build/journal by default.")
    ] = None,
    cubins: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of compiled cubins; build/cubins by default."),
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure every candidate.")] = False,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="20m", help="Measure for this time, first the buckets that may gain most."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compiling processes; one for each usable core by default."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over where a journal could be resumed.")
    ] = False,
    require: Annotated[
        str | None, typer.Option(metavar="measured", help="Fail where times could only be predicted.")
    ] = None,
    allow_worse: AllowWorse = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Sweep kernels and write their tables.

    Times are measured on this machine's GPUs; without a GPU of the arch they are predicted. A prediction
    without a choice of kernels is a first look at all: few buckets, few candidates.
    """
    from aot_tune.declare.blanks import refuse_blanks
    from aot_tune.declare.discovery import find_tunables
    from aot_tune.declare.missed_problems import problems_of_files
    from aot_tune.tuner.sweep.report import SweepRequest

    budget_s = command.seconds("--time-budget", time_budget) if time_budget is not None else None
    if require not in (None, "measured"):
        raise UsageError(f"--require {require!r}: write measured, or leave it out to allow predictions")
    if ray is not None:
        _check_ray(arch, gpus)
    target = selection.chosen_arch(arch)
    kernels = selection.chosen_kernels(find_tunables(module or ()), kernel or ())
    refuse_blanks(*(found.tunable for found in kernels))
    problems = selection.problems_by_kernel(kernels, problem or ())
    if problems_file:
        missed, notes = problems_of_files(kernels, problems_file, target)
        for note in notes:
            command.say(note)
        for name, missed_problems in missed.items():
            problems[name] = tuple(dict.fromkeys((*problems.get(name, ()), *missed_problems)))
    required = require is not None
    devices = selection.chosen_gpus(target, gpus, require_measured=required) if ray is None else ()
    if budget_s is not None and ray is None and not devices:
        raise UsageError(
            f"--time-budget is for measuring, but without an {target} GPU times are predicted; leave it out, "
            "or predict fewer buckets: --limit 4"
        )
    report = _sweep(
        SweepRequest(
            kernels=tuple(swept for swept in kernels if not problems or swept.tunable.name in problems),
            arch=target,
            modules=tuple(module or ()),
            problems=problems,
            limit=limit,
            first_look=not devices
            and ray is None
            and not (kernel or module or problems or limit or exhaustive or full),
            exhaustive=exhaustive,
            require_measured=required,
            out=out,
            time_budget_s=budget_s,
            jobs=jobs,
            gpus=tuple(device.index for device in devices),
            ray=ray,
            journal=journal,
            cubins=cubins,
            fresh=fresh,
            allow_worse=allow_worse,
            verbose=verbose,
        ),
        only_stale=only_stale,
    )
    command.put(json_text(report) if as_json else (str(row.path) for row in report.rows if row.path))
    command.leave(failed=not report.complete)


def _check_ray(arch: str | None, gpus: str | None) -> None:
    """Check that the options go with --ray, and that Ray is installed.

    Raises:
        UsageError: They do not. The message names what to write or to install.
    """
    from aot_tune.nvidia.nvml import visible_gpus
    from aot_tune.tuner.ray.cluster import installed

    if gpus is not None:
        raise UsageError("--ray and --gpus: choose one; a sweep on a cluster uses all of its GPUs")
    if arch is None and not visible_gpus():
        raise UsageError("--ray on a machine without a GPU: name the arch to tune for, as --arch sm90")
    installed()


def _sweep(request: SweepRequest, *, only_stale: bool) -> SweepReport:
    """Sweep with progress on stderr. After a signal, print the command that goes on."""
    from aot_tune.nvidia.cutile import compiler_version
    from aot_tune.tuner.sweep import run as sweep
    from aot_tune.tuner.sweep import stale
    from aot_tune.tuner.sweep.progress import prediction_notice, progress_on
    from aot_tune.tuner.sweep.report import SweepReport

    with closing(progress_on(sys.stderr)) as progress, command.signals_stop():
        if only_stale:
            request = stale.only_stale(request, progress)
            if not request.kernels:
                progress.note("nothing is stale" + (" and not predicted yet" if request.predicts else ""))
                return SweepReport(arch=request.arch, device_name="", rows=(), seconds=0.0)
        if request.predicts:
            progress.note("\n".join(prediction_notice(request, compiler_version())))
        try:
            return sweep.run(request, progress)
        except KeyboardInterrupt:
            command.ignore_signals()
            kept = "what was compiled is kept" if request.predicts else "what was measured is saved"
            with suppress(OSError):  # the terminal may be gone
                progress.close()
                command.say(f"stopped; {kept}. To go on: {request.command()}")
            raise


@app.command()
@guarded
def compile(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="ARCH", help="More archs, as in --arch sm90 sm100.")
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="sm90", help="An arch; by default this machine's GPU's, else sm100."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="A kernel; all kernels by default; may be repeated.")
    ] = None,
    module: Modules = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write archives to; by default each package's folder of tables."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compiling processes; one a usable core by default.")
    ] = None,
    cubins: Annotated[
        Path | None, typer.Option(help="Folder that keeps compiled cubins; build/archive-cubins by default.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Compile cubins for serving without a compiler.

    All defaults, every config that a table can choose and the launches of recorded tables are compiled, into
    one archive for each arch. Where a library has no table of yours, --module compiles the shipped ones, into
    the first folder of AOT_TUNE_TABLES; --kernel compiles a shipped one beside yours.
    """
    from aot_tune.cli.documents import find
    from aot_tune.declare.discovery import module_names
    from aot_tune.replay.archives import shipped_beside, tabled_kernels
    from aot_tune.replay.files import listed_recorded
    from aot_tune.tables import store
    from aot_tune.tuner.archives.build import build
    from aot_tune.tuner.archives.report import CUBINS, CubinRequest, report_lines

    named = [*(arch or ()), *(more or ())]
    declared = find.declared(module or ())
    if kernels := [name for name in named if name in declared]:
        raise UsageError(f"{kernels[0]} is a kernel, not an arch: write --kernel {kernels[0]}")
    command.remark(find.folder_remarks())
    names, dotted = find.split(kernel or ())
    tables = listed_recorded(find.folders(module or ()))
    archs = tuple(dict.fromkeys(map(selection.chosen_arch, named or [None])))
    tables += shipped_beside(tables, module or (), dotted)
    alone = not names and bool(dotted or (tables and not declared))
    if alone and not kernel:
        find.check_any(tables, archs)
    request = CubinRequest(
        kernels=() if alone else selection.chosen_kernels(declared, names),
        archs=archs,
        only_these=bool(kernel),
        modules=tuple(module_names(module)) if module else (),
        elsewhere=tuple(path.stem for path in listed_recorded([store.libraries_folder()])),
        out=out,
        jobs=jobs,
        cubins=cubins or CUBINS,
    )
    chosen = find.chosen(tables, dotted, archs) if kernel else tables
    command.remark(find.left_out_remarks(tables, () if kernel else module or (), archs))
    with command.signals_stop():
        try:
            reports = build(request, command.say, tabled_kernels(chosen, archs, command.say))
        except KeyboardInterrupt:
            command.ignore_signals()
            kept = f"what was compiled is kept in {request.cubins}"
            with suppress(OSError):  # the terminal may be gone
                command.say(f"stopped; {kept}. To go on, run the same command again")
            raise
    for report in reports:
        for line in report.failures:
            command.say(f"not compiled: {line}")
    command.put(
        json_text(reports) if as_json else (line for report in reports for line in report_lines(report))
    )
    command.leave(failed=any(report.failures for report in reports))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
@guarded
def bench(context: typer.Context) -> None:
    """Measure the README's figures on a GPU, in a checkout.

    --kernels compares each kernel with its alternatives.
    """
    try:
        from aot_tune.bench.__main__ import main
    except ModuleNotFoundError as error:
        if error.name != "aot_tune.bench":
            raise
        raise UsageError(
            "bench runs in a checkout, since the wheel does not contain it: clone aot_tune and call "
            "make bench ARGS='launch lookups' there"
        ) from None
    raise typer.Exit(main(context.args))


@app.command()
@guarded
def show(
    kernel: Kernel = None,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="sm90", help="One arch; all archs by default.")
    ] = None,
    module: Modules = None,
    folder: Annotated[
        Path | None, typer.Option(help="Read this folder of tables only, such as build/tuned_configs.")
    ] = None,
    archives: Annotated[
        bool, typer.Option("--archives", help="Print the sizes of archives of cubins, by kernel and arch.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Print a summary of tables, or one kernel's entries.

    The name of a recorded kernel has a dot. -v prints the entries of all tables.
    """
    from aot_tune.cli.documents import find
    from aot_tune.cli.show import archive_lines, archives_found, table_lines
    from aot_tune.errors import AotTuneError
    from aot_tune.values.arch import Arch

    target = Arch.parse(arch) if arch is not None else None
    unreadable: list[AotTuneError]
    if folder is None:
        command.remark(find.folder_remarks())
    if archives:
        sizes, unreadable = archives_found(kernel, target, module or (), folder)
        command.put(json_text(sizes) if as_json else archive_lines(sizes))
    else:
        tables, unreadable = find.tables_found(kernel, target, module or (), folder, libraries=True)
        whole = kernel is not None or verbose
        command.put(
            json_text([table.data() for table in tables]) if as_json else table_lines(tables, whole=whole)
        )
    for error in unreadable:
        command.say(f"aot-tune: {error}")
    command.leave(failed=bool(unreadable))


@app.command()
@guarded
def journal(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|KERNEL", help="Journals, folders of journals or names of kernels; all by default."
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="sm90", help="One arch; all archs by default.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--journal", help="Folder of journals; build/journal by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each record as a line of JSON.")] = False,
    seconds: Annotated[
        bool,
        typer.Option("--seconds", help="Print the use of the GPUs' seconds, a row for each kernel."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Print results of sweeps and recordings so far.

    Running sweeps are not disturbed. Exit code 1 when a journal cannot be read.
    """
    from aot_tune.cli.journal import (
        contents,
        damage_lines,
        json_lines,
        paths_of,
        seconds_lines,
        summary_lines,
    )
    from aot_tune.tuner.sweep.report import JOURNALS
    from aot_tune.values.arch import Arch

    if as_json and seconds:
        raise UsageError("--json and --seconds: choose one")
    target = Arch.parse(arch) if arch is not None else None
    journals, unreadable = contents(paths_of(which or (), target, folder or JOURNALS))
    if seconds:
        lines, left_out = seconds_lines(journals)
        for line in left_out:
            command.say(line)
        command.put(lines)
    elif as_json:
        command.put(json_lines(journals))
    else:
        command.put(line for document in journals for line in summary_lines(document))
    for document in journals if as_json or seconds else ():
        for line in damage_lines(document):
            command.say(f"{document.path}: {line}")
    for line in unreadable:
        command.say(f"aot-tune: {line}")
    command.leave(failed=bool(unreadable))


@app.command()
@guarded
def check(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="A table, an archive or a folder of them; by default all kernels' folders."
        ),
    ] = None,
    module: Modules = None,
    archives: Annotated[
        bool,
        typer.Option("--archives", help="Check the archives of cubins alone, and print those that fit too."),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Check tables and archives against the declarations.

    A pull request should pass. Exit code 1 when a problem is found; remarks do not count.
    """
    from aot_tune.cli.check import archive_lines, broken_findings
    from aot_tune.cli.check import archives as archive_fits
    from aot_tune.cli.check import check as findings_of
    from aot_tune.cli.documents import find
    from aot_tune.values.text import counted

    if path is None:
        command.remark(find.folder_remarks())
    bare = find.bare_folders(module or ())
    if archives:
        fits = archive_fits(find.declared(module or ()), path, bare)
        command.put(json_text(fits) if as_json else archive_lines(fits))
        command.leave(failed=any(fit.faults for fit in fits))
        return
    declared = find.survey(module or ())
    findings = [*broken_findings(declared.broken), *findings_of(declared.found, path, bare)]
    command.put(json_text(findings) if as_json else (str(finding) for finding in findings))
    faults = sum(not finding.remark for finding in findings)
    remarks = f", {counted(len(findings) - faults, 'remark')}" if len(findings) > faults else ""
    command.say((f"{counted(faults, 'problem')} found" if faults else "no problems found") + remarks)
    command.leave(failed=bool(faults))


@app.command()
@guarded
def verify(
    kernel: Kernels = None,
    module: Modules = None,
    folder: Annotated[
        Path | None, typer.Option(help="A folder of tables; by default the tables that launches read.")
    ] = None,
    entries: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Entries to measure, at least one a kernel; by default as many as bound the rest below 5 %.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed of the sample; today's date by default.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            metavar="'python ...'", help="Recorded tables: search again what this program searches."
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure a sample of tables' entries on this GPU.

    Each winner is checked on fresh seeds and timed with its default and its rivals. Of recorded tables a
    program of the library searches again. Exit code 0: the tables hold; 1: they do not; 3: nothing can be
    said, as without a GPU or on a busy one.
    """
    from datetime import date

    from aot_tune.cli.documents import find
    from aot_tune.cli.measure.verify import recorded_verification, verification, verification_lines
    from aot_tune.errors import TuneError, UsageError
    from aot_tune.tuner.sweep.progress import progress_on

    if folder is None:
        command.remark(find.folder_remarks())
    if program is not None and (entries, seed) != (None, None):
        raise UsageError("--program verifies all that it searches: leave out --entries and --seed")
    today = int(f"{date.today():%Y%m%d}")
    with closing(progress_on(sys.stderr)) as progress, command.signals_stop():
        try:
            if program is not None:
                result = recorded_verification(program, kernel or (), module or (), folder, progress)
            else:
                result = verification(
                    kernel or (), module or (), folder, entries, today if seed is None else seed,
                    progress,
                )  # fmt: skip
        except TuneError as error:
            command.say(f"aot-tune: {error}")
            raise typer.Exit(command.EXIT_UNKNOWN) from None
    command.put(json_text(result) if as_json else verification_lines(result))
    command.leave(failed=result.holds is False)
    if result.holds is None:
        raise typer.Exit(command.EXIT_UNKNOWN)


@app.command()
@guarded
def profile(
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="The name of a kernel.")],
    problem: Annotated[
        str,
        typer.Option("--problem", metavar="M=300,...", help="A whole problem, or the part that names one."),
    ],
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="NAME=VALUE,...",
            help="What differs from the config that a launch would run, within the search space.",
        ),
    ] = None,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="FILE", help="An earlier profile to compare with.")
    ] = None,
    arch: ArchName = None,
    module: Modules = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what bounds a config, and measure one change.

    Machine code, roofs, waves and the compiler's remarks; on a GPU its time, its counters where the driver
    allows them, and the change of one value that addresses the worst finding. Exit code 1 when the config
    does not compile or run.
    """
    from aot_tune.cli.measure.profile import earlier, keep, profile_lines, profiled
    from aot_tune.declare.blanks import refuse_blanks
    from aot_tune.declare.discovery import find_tunables

    target = selection.chosen_arch(arch)
    (found,) = selection.chosen_kernels(find_tunables(module or ()), [kernel])
    command.remark(selection.arch_remarks(arch))
    refuse_blanks(found.tunable)
    problems = selection.problems_by_kernel([found], [problem])[kernel]
    if len(problems) > 1:
        raise UsageError(
            f"--problem {problem}: {len(problems)} problems agree, such as {problems[0]}; name one"
        )
    before = None if diff is None else earlier(diff, (kernel, problems[0]))
    with command.signals_stop():
        result, why = profiled(found, target, problems[0], config, found.module_option)
    path = keep(result)
    command.put(json_text(result) if as_json else profile_lines(result, why, before))
    command.say(f"kept as {path}")
    command.leave(failed=bool(result.failure))


@app.command()
@guarded
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A table, or a folder of tables.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The later table, or the later folder.")],
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with code 1 when they differ.")
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print for GitHub: a pull request's comment or a job's summary."),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Print what changed between two tables or folders."""
    from aot_tune.cli.diff import diff_data, diff_lines, diff_markdown, diff_paths

    if markdown and as_json:
        raise UsageError("--markdown and --json are two forms of the output; give one of them")
    diffs = diff_paths(old, new)
    command.put(
        diff_markdown(diffs) if markdown else json_text(diff_data(diffs)) if as_json else diff_lines(diffs)
    )
    command.leave(failed=exit_code and not all(difference.empty for difference in diffs))


@app.command()
@guarded
def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[[OLD] NEW]", help="Folders of tables; by default those that are installed."),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="sm90", help="One arch; all archs by default.")
    ] = None,
    module: Modules = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; build/report.html by default.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Draw tables as one page, which opens without a network.

    Each table's gains, winners, regrets and the worth of its configs, as SVG. Of two folders it also draws
    what changed.
    """
    from aot_tune.cli.report.page import page
    from aot_tune.cli.report.sources import shown_tables
    from aot_tune.tables.files import write_atomic
    from aot_tune.values.arch import Arch
    from aot_tune.values.text import counted

    if len(folders or ()) > 2:
        raise UsageError("give at most two folders of tables: the former one and the present one")
    target = Arch.parse(arch) if arch is not None else None
    shown, remarks, unreadable = shown_tables(folders or (), target, module or ())
    text, path = page(shown, remarks).encode(), out or Path("build/report.html")
    write_atomic(path, text)
    command.put(f"{path}: {counted(len(shown), 'table')}, {len(text) / 1e6:.1f} MB")
    command.remark(remarks)
    for error in unreadable:
        command.say(f"aot-tune: {error}")
    command.leave(failed=bool(unreadable))


@app.command(context_settings=command.BEFORE_PROGRAM)
@guarded
def record(
    program: Program = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of tables; by default in each library's own package.")
    ] = None,
    package: Annotated[
        str | None, typer.Option(metavar="lib", help="Record only kernels of this package.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--journal", help="Folder of journals; build/record by default.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run a program and record its searches and launches.

    For example: aot-tune record -- python -m pytest tests. The exit code is the program's.
    """
    from aot_tune.cli.record import recording_lines
    from aot_tune.replay.record import program as recorded
    from aot_tune.replay.record.recorder import JOURNALS

    recording = recorded.record(program or (), out=out, package=package, journals=folder or JOURNALS)
    for line in recording_lines(recording):
        command.say(line)
    raise typer.Exit(recording.exit_code)


@app.command(context_settings=command.BEFORE_PROGRAM)
@guarded
def run(
    program: Program = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            file_okay=False, help="A folder of recorded tables, read after a library's own; may be repeated."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run a program with recorded winners in place of searches.

    For example: aot-tune run -- python serve.py. This process becomes the program: signals and the exit code
    are the program's.
    """
    from aot_tune.cli.documents import find
    from aot_tune.replay.answer.program import become

    command.remark(find.folder_remarks())
    for folder in tables or ():
        if not folder.is_dir():
            command.say(f"aot-tune: the folder of recorded tables {folder} does not exist yet")
    become(program or (), tables=[str(folder.absolute()) for folder in tables or ()])


def _coverage(
    kernels: Sequence[FoundKernel],
    arch: Arch,
    given: Sequence[Problem],
    files: Sequence[Path],
    *,
    as_json: bool,
) -> None:
    """Print what the table of one kernel has no times for."""
    from aot_tune.cli.coverage import coverage, coverage_lines
    from aot_tune.declare.missed_problems import problems_of_files

    listed = [*given]
    if files:
        missed, notes = problems_of_files(kernels, files, arch)
        for note in notes:
            command.say(note)
        listed += missed[kernels[0].tunable.name]
    answer = coverage(kernels[0].tunable, arch, listed or None)
    command.put(json_text(answer) if as_json else coverage_lines(answer))


@app.command()
@guarded
def doctor(
    kernel: Kernel = None,
    problem: Problems = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="What the kernel's table has no times for.")
    ] = False,
    problems_file: ProblemFiles = None,
    arch: ArchName = None,
    module: Modules = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Explain the environment, or each problem's config.

    Without a kernel: GPU, compiler, tables and cache. For a declared kernel: each problem's config, and a
    checklist; with --coverage what its table has no times for, among the problems of --problems or in the
    table's own space. For a recorded kernel, whose name has a dot: the answered problems. Exit code 1 when
    the declaration is wrong.
    """
    from aot_tune.cli.checklist import checklist
    from aot_tune.cli.doctor import diagnose, diagnosis_lines
    from aot_tune.cli.documents import find
    from aot_tune.cli.documents.recorded import answered_lines
    from aot_tune.cli.explain import explain, explanation_lines, overview_lines
    from aot_tune.declare.blanks import blank_mistakes, refuse_blanks
    from aot_tune.declare.checks import declaration_problems
    from aot_tune.declare.discovery import find_tunables
    from aot_tune.replay.files import listed_recorded, shipped_for

    target = selection.chosen_arch(arch)
    if problems_file and not coverage:
        raise UsageError("--problems goes with --coverage: aot-tune doctor KERNEL --coverage --problems FILE")
    if kernel is None:
        if problem or coverage:
            option = "--coverage" if coverage else "--problem M=300,..."
            option += " --problems FILE" if problems_file else ""
            raise UsageError(f"{option.split()[0]} needs a kernel: aot-tune doctor KERNEL {option}")
        diagnosis = diagnose(target, module or ())
        command.put(json_text(diagnosis) if as_json else diagnosis_lines(diagnosis))
        return
    command.remark(find.folder_remarks())
    if "." in kernel:
        if problem or coverage or as_json:
            raise UsageError(f"{kernel} is a recorded kernel: doctor prints all its problems, as text")
        paths = [*listed_recorded(find.folders(module or ())), *shipped_for([kernel])]
        command.put(answered_lines(kernel, paths, find.archs_of(paths, kernel), target))
        return
    kernels = selection.chosen_kernels(find_tunables(module or ()), [kernel])
    command.remark(selection.arch_remarks(arch))
    tunable = kernels[0].tunable
    if blank_mistakes(tunable):
        if as_json:
            refuse_blanks(tunable)
        command.put(map(str, checklist(kernels[0], target, ())))
        command.leave(failed=True)
    if coverage:
        given = selection.problems_by_kernel(kernels, problem or ()).get(kernel, ())
        _coverage(kernels, target, given, problems_file or (), as_json=as_json)
        return
    chosen = selection.problems_by_kernel(kernels, problem or ()).get(kernel, tunable.typical_problems)
    mistakes = [] if problem else declaration_problems(tunable, target)
    try:
        option = kernels[0].module_option
        answers = [explain(tunable, target, wanted, option=option) for wanted in chosen]
    except Exception:
        # The author's functions raise: the declaration's mistakes explain more than the exception.
        if not (mistakes := declaration_problems(tunable, target)):
            raise
        raise DeclarationError("\n".join(mistakes)) from None
    if as_json:
        command.put(json_text(answers))
    elif problem:
        command.put(line for answer in answers for line in explanation_lines(answer))
    else:
        command.put(overview_lines(answers))
        command.put(map(str, checklist(kernels[0], target, mistakes)))
    command.leave(failed=bool(mistakes) or any(answer.mistakes for answer in answers))
