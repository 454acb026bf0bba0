"""The READMEs, held to their word: their code runs, their commands exist, their tables are the code's."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.declare import checks
from aot_tune.declare.discovery import find_tunables
from aot_tune.replay import document as recorded
from aot_tune.replay.answer import searches
from aot_tune.replay.record import launches, recorder
from aot_tune.tables import reader, writer
from aot_tune.tunable import Tunable
from aot_tune.tuner.sweep.report import JOURNALS
from aot_tune.values.arch import Arch
from tests.support import forked
from tests.support.recorded_tables import TABLE
from tests.support.violations import assert_none

ROOT = Path(__file__).parents[1]
PLACES = {
    str(path.relative_to(ROOT)): path
    for path in (
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "tuned_configs" / "README.md",
        *(ROOT / ".github").glob("*.md"),
        *(ROOT / "aot_tune").rglob("*.md"),
    )
}
"""Every page of the project, by its place."""

TEXTS = {place: path.read_text() for place, path in sorted(PLACES.items())}
TOP, PACKAGE, DECLARE = TEXTS["README.md"], TEXTS["aot_tune/README.md"], TEXTS["aot_tune/declare/README.md"]
FORMAT = TEXTS["tuned_configs/README.md"]
ALL = "\n".join(TEXTS.values())

MOST_LINES = 160
"""Lines of the README at the top, without what the report prints: the rest is in the folders' READMEs."""

PROBLEM_ROWS, PROBLEM_COLS = 1000, 4096
"""The size that the README's example launches: inside the bucket of 1024 rows."""


def example(name: str) -> str:
    """The code block below ``<!-- example: name -->`` in any README."""
    found = re.findall(rf"<!-- example: {re.escape(name)} -->\n```\w+\n(.*?)^```$", ALL, re.S | re.M)
    assert len(found) == 1, f"the READMEs have {len(found)} examples called {name}"
    return str(found[0])


def commands(text: str = ALL) -> list[str]:
    """Every line that a console block gives to a shell, without its comment."""
    blocks = re.findall(r"^ *```console\n(.*?)^ *```$", text, re.S | re.M)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines]


ON_THE_STAND_IN = "tests.support.children.code_on_the_stand_in"
"""The module that runs code on the stand-in driver."""


# The own package --------------------------------------------------------------------------------------------


class Child:
    """Runs commands and code as a new user would, in a folder of its own, with no GPU of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {
            name: value
            for name, value in os.environ.items()
            if name not in environment.DESCRIPTIONS and name != "WORLD_SIZE"
        } | {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            environment.CACHE_DIR: str(folder / "cache"),
        }

    def command(self, line: str) -> subprocess.CompletedProcess[str]:
        """A line of the README; ``aot-tune`` is this checkout's, ``export`` holds for what follows."""
        words = shlex.split(line)
        if words[0] == "export":
            self.variables.update([words[1].split("=", 1)])
            return subprocess.CompletedProcess(words, 0, "", "")
        assert words[0] == "aot-tune", line
        return self._run(["-m", "aot_tune", *words[1:]], "")

    def launch(self, code: str, arch: str, **variables: str) -> tuple[dict[str, object], str]:
        """What some code launched on the stand-in driver, and what it wrote to stderr."""
        done = self._run(["-m", ON_THE_STAND_IN, arch], code, **variables)
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return answer, done.stderr

    def _run(self, words: list[str], text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return forked.python(words, self.folder, self.variables | variables, text)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Child:
    """The README's package, tuned by the README's command: predicted, for want of a GPU."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mylib").mkdir()
    (folder / "mylib" / "__init__.py").touch()
    (folder / "mylib" / "kernels.py").write_text(example("mylib/kernels.py"))
    child = Child(folder)
    (line,) = commands(f"```console\n{example('tune')}```\n")
    done = child.command(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "build/tuned_configs/sm100/scale.json\n"
    return child


LAUNCH = f"""
import torch
from mylib.kernels import scale
x = torch.randn({PROBLEM_ROWS}, {PROBLEM_COLS}, device="cuda", dtype=torch.bfloat16)
scale.launch(x, torch.empty_like(x), 0.5)
"""


@pytest.mark.process
def test_the_own_package_is_tuned_and_its_launch_takes_the_tuned_config_and_grid(own: Child) -> None:
    table = reader.parse((own.folder / "build/tuned_configs/sm100/scale.json").read_bytes())
    (entry,) = (one for one in table.entries if one.bucket.rows == 1024)
    tuned, default = int(entry.config["tile"]), 256
    assert tuned != default, "the example should show that tuning changes something"
    before, _ = own.launch(LAUNCH, "sm100")
    after, said = own.launch(
        LAUNCH, "sm100", AOT_TUNE_TABLES=str(own.folder / "build/tuned_configs"), AOT_TUNE_LOG="1"
    )
    assert [one["grid"] for one in before["launches"]] == [[PROBLEM_ROWS, PROBLEM_COLS // default, 1]]
    assert [one["grid"] for one in after["launches"]] == [[PROBLEM_ROWS, PROBLEM_COLS // tuned, 1]]
    assert f"I{tuned}" in after["launches"][0]["symbol"]
    assert re.search(rf"tile={tuned} .*\(own: ", said)
    assert after["warnings"] == []
    (miss,) = before["warnings"]
    assert "tune it: aot-tune tune scale --arch sm100 --module mylib.kernels --problem " in miss
    assert own.command(miss.partition("tune it: ")[2] + " --limit 1").returncode == 0


@pytest.mark.process
def test_the_command_that_begins_a_declaration_leaves_blanks(own: Child) -> None:
    new, doctor = commands(f"```console\n{example('new')}```\n")
    begun, told = own.command(new), own.command(doctor)
    assert (begun.returncode, told.returncode) == (0, 1), begun.stderr + told.stderr
    blanks = [line for line in told.stdout.splitlines() if line.startswith("[ ]") and " is blank: " in line]
    assert len(blanks) == 7


@pytest.mark.process
def test_the_autograd_example_runs_forward_and_backward(own: Child) -> None:
    code = example("autograd") + "\nmore = [list(x.grad.shape), str(x.grad.dtype)]"
    answer, _ = own.launch(code, "sm100")
    assert len(answer["launches"]) == 2
    assert answer["more"] == [[PROBLEM_ROWS, PROBLEM_COLS], "torch.bfloat16"]


@pytest.mark.process
def test_a_launch_refuses_what_the_autograd_section_says_it_refuses(own: Child) -> None:
    code = LAUNCH.replace("x = torch.randn(", "x = torch.randn(requires_grad=True, size=(").replace(
        f"{PROBLEM_COLS}, device", f"{PROBLEM_COLS}), device"
    )
    caught = code.replace("scale.launch(", "try:\n    scale.launch(") + "except Exception as error:\n"
    answer, _ = own.launch(caught + "    more = [type(error).__name__, str(error)]", "sm100")
    assert answer["launches"] == []
    assert answer["more"][0] == "LaunchError"
    assert "x requires grad while grad is enabled" in answer["more"][1]


@pytest.mark.process
def test_the_commands_that_use_predictions_show_them(own: Child) -> None:
    exported, show, doctor = commands(f"```console\n{example('use predictions')}```\n")
    own.command(exported)
    try:
        shown, told = own.command(show), own.command(doctor)
    finally:
        del own.variables[environment.TABLES]
    assert shown.returncode == 0, shown.stderr
    assert "predicted" in shown.stdout
    assert told.returncode == 0, told.stderr
    assert "own: bucket dtype=bfloat16 rows=1024 cols=4096 of build/tuned_configs" in told.stdout


@pytest.mark.process
def test_without_the_exported_folder_nothing_predicted_is_found(own: Child) -> None:
    done = own.command("aot-tune show scale --module mylib.kernels")
    assert done.returncode == 2
    assert "no table of scale is there" in done.stderr


@pytest.mark.process
def test_the_first_launch_runs_in_at_most_six_lines(tmp_path: Path) -> None:
    code = example("first launch")
    assert len(code.splitlines()) <= 6
    answer, _ = Child(tmp_path).launch(code, "sm90")
    assert [one["grid"] for one in answer["launches"]] == [[64, 1, 1]]


@pytest.mark.process
def test_the_server_of_the_readme_starts_and_launches(own: Child) -> None:
    code = example("server")
    assert len(code.splitlines()) <= 6
    answer, _ = own.launch(code + LAUNCH, "sm100")
    assert [one["grid"] for one in answer["launches"]][-1] == [PROBLEM_ROWS, PROBLEM_COLS // 256, 1]


@pytest.mark.process
def test_the_small_declaration_is_a_whole_module_that_launches(tmp_path: Path) -> None:
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "__init__.py").touch()
    (tmp_path / "mylib" / "double.py").write_text(example("small declaration"))
    child = Child(tmp_path)
    answer, _ = child.launch(
        LAUNCH.replace("kernels import scale", "double import double as scale").replace(", 0.5", ""), "sm90"
    )
    assert [one["grid"] for one in answer["launches"]] == [[PROBLEM_ROWS, PROBLEM_COLS // 256, 1]]
    checked = child.command("aot-tune tune --module mylib.double --arch sm90 --limit 1")
    assert checked.returncode == 0, checked.stderr


def test_the_declaration_of_several_kernels_has_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "summing").mkdir()
    (tmp_path / "summing" / "__init__.py").touch()
    (tmp_path / "summing" / "sums.py").write_text(example("mylib/sums.py"))
    monkeypatch.syspath_prepend(tmp_path)
    declared = importlib.import_module("summing.sums").row_sum
    for arch in map(Arch.parse, ("sm90", "sm100")):
        assert checks.declaration_problems(declared, arch) == []
        assert checks.declaration_remarks(declared, arch) == []


def test_a_library_that_three_kernels_changes_one_import_in_ten_lines() -> None:
    changed, *code = [line for line in example("tune once").splitlines() if line]
    ours, _, theirs = changed.partition("  # before: ")
    assert len(code) <= 9
    text = (ROOT / "tests" / "support" / "three_kernels" / "mylib" / "kernels.py").read_text()
    assert f"\n{theirs}\n" in text  # the package that tests/replay/record/test_program.py changes and records
    assert "\n".join(code) in text
    assert ours == theirs.replace("cuda.tile.tune", "aot_tune")


# What they say of the code ----------------------------------------------------------------------------------


def test_the_readme_at_the_top_is_short() -> None:
    written = re.sub(r"(<!-- report: [\w-]+ -->\n).*?(?=<!-- report: end -->)", r"\1", TOP, flags=re.S)
    assert len(written.splitlines()) <= MOST_LINES


def test_the_table_of_environment_variables_is_the_codes() -> None:
    section = PACKAGE.partition("## Environment variables")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    assert dict(rows) == environment.DESCRIPTIONS
    assert [name for name, _ in rows] == list(environment.DESCRIPTIONS)


def test_every_environment_variable_they_name_is_one_that_the_code_reads() -> None:
    named = set(re.findall(r"\b(?:AOT_TUNE_[A-Z_]+|DISABLE_[A-Z]+)\b", ALL))
    assert named == set(environment.DESCRIPTIONS)


def test_the_example_of_a_table_is_a_table_in_the_bytes_that_are_written() -> None:
    text = example("table")
    assert writer.dump(reader.parse(text)).decode() == text


def test_the_example_of_the_rule_is_of_the_present_table() -> None:
    asked = re.search(r"`aot-tune (doctor matmul .*? --problem \S+)`", FORMAT)
    assert asked is not None
    printed = CliRunner().invoke(app, shlex.split(asked[1])).stdout
    rows = re.findall(r"\| .*?(\d+ tiles), (\d waves?) \| (\S+) x (\S+) \| \**([0-9.]+ us)\** \|", FORMAT)
    assert len(rows) == 4
    for tiles, waves, near, counts, us in rows:
        estimate = rf"{us} .*near x{near}  \* counts x{counts} +{tiles} +{waves} "
        assert re.search(estimate, printed), (estimate, printed)
    [weights] = re.findall(r"^ +((?:\d+ % +)+)weights +(\d+ %)$", FORMAT, re.M)
    assert re.findall(r"\d+", "".join(weights)) == re.findall(r"\((\d+)%\)", printed)


def test_the_example_of_a_recorded_table_is_one_in_the_bytes_that_are_written() -> None:
    assert example("recorded table").encode() == recorded.dump(TABLE)


def test_every_field_of_a_recorded_table_has_a_word() -> None:
    text = example("recorded table")
    part = FORMAT.partition("## Recorded tables")[2].partition("## The rule inside")[0]
    table = json.loads(text)
    above = {"schema", "arch"}
    assert {name for name in (*table, *table["entries"][0]) if f"`{name}`" not in part} == above


def test_every_field_of_a_table_that_needs_a_word_has_one() -> None:
    rows = "".join(re.findall(r"^\| (`.*?) \|", FORMAT, re.M))
    table = json.loads(example("table"))
    plain = {"schema", "kernel", "arch", "axes", "entries"}
    wanted = (table.keys() | table["entries"][0].keys()) - plain
    assert wanted <= set(re.findall(r"`(\w+)`", rows))


def test_every_part_of_a_declaration_is_explained() -> None:
    rows = "".join(re.findall(r"^\| (`.*?) \|", DECLARE, re.M))
    explained, fields = set(re.findall(r"`(\w+)`", rows)), Tunable.__dataclass_fields__
    assert set(fields) - explained == set()


def test_the_table_of_a_missed_search_is_the_codes() -> None:
    section = TEXTS["aot_tune/replay/README.md"].partition("### How a search is answered")[2]
    section = section.partition("\n### ")[0]
    rows = re.findall(r"^\| (\w.*) \|$", section, re.M)
    words = " ".join((searches.__doc__ or "").split())
    assert len(rows) == 3
    for row in rows:
        assert f" {row.replace(' | ', ' ').replace('`', '')} " in words


def test_every_remark_that_is_explained_is_one_that_recording_makes() -> None:
    section = TEXTS["aot_tune/replay/README.md"].partition("### What it reports")[2].partition("\n## ")[0]
    remarks = re.findall(r"^\| `(.*?)` \|", section, re.M)
    code = "".join(Path(one.__file__).read_text() for one in (recorder, launches))
    assert len(remarks) == 15
    assert all(part in code for remark in remarks for part in re.split(r" ?\.\.\. ?", remark))


def _steps(workflow: str, **matrix: str) -> list[str]:
    """The commands of a workflow's jobs, without what they write to files."""
    lines = re.findall(r"^ *- run: (.*)$", example(workflow), re.M)
    for name, value in matrix.items():
        lines = [line.replace(f"${{{{ matrix.{name} }}}}", value) for line in lines]
    return [line.partition(" > ")[0] for line in lines]


def test_the_workflow_of_one_job_a_kernel_names_declared_kernels_and_keeps_their_journals() -> None:
    text = example("one job a kernel")
    (names,) = re.findall(r"matrix: \{kernel: \[(.*)\]", text)
    assert set(names.split(", ")) <= find_tunables(()).keys()
    tuned, kept = text.index("aot-tune tune"), text.index("upload-artifact")
    assert tuned < kept < text.index("if: always()") < text.index(str(JOURNALS)) < text.index("  tables:")


def _aot_tune_lines() -> list[str]:
    quoted = re.findall(r"`(aot-tune [^`]*)`", ALL)
    given = [*commands(), *_steps("one job a kernel", kernel="matmul")]
    return sorted({*quoted, *(line for line in given if line.startswith("aot-tune"))})


def _why_refused(line: str) -> str | None:
    """Why the command line refuses a line of a README; None where it parses."""
    words = shlex.split(line)[1:]
    words = [word for word in words if word != "..."]
    if words and words[-1] == "--problem":
        words.append("M=1")
    if words in (["diff"], ["check"]) or not words:
        words.append("--help")
    command = typer.main.get_command(app)
    try:
        verb, _, rest = command.resolve_command(command.make_context("aot-tune", [*words]), [*words])  # type: ignore[attr-defined]
        if rest != ["--help"]:
            command.commands[verb].make_context(verb, rest)  # type: ignore[attr-defined]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_every_aot_tune_command_line_parses() -> None:
    reasons = {line: _why_refused(line) for line in _aot_tune_lines()}
    assert_none(f"{line}: {why}" for line, why in reasons.items() if why is not None)


def _makefile_targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return set(phony.split())


def test_every_make_target_they_name_exists_and_every_variable_is_read() -> None:
    lines = [*re.findall(r"`(make [^`]*)`", ALL), *(x for x in commands() if x.startswith("make "))]
    words = [shlex.split(line)[1:] for line in lines]
    targets = {word for line in words for word in line if "=" not in word}
    variables = {word.partition("=")[0] for line in words for word in line if "=" in word}
    assert targets <= _makefile_targets()
    assert {"tune", "test", "test-gpu", "check", "bench", "lint", "fmt", "wheel", "clean"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name} \?=", makefile, re.M) for name in variables)


def _named_places() -> list[tuple[str, str]]:
    """Files and folders that a README names: in code, and as links."""
    made_later = ("mylib/", "build/", "dist/", "http", "#")
    found: set[tuple[str, str]] = set()
    for place, text in TEXTS.items():
        paths = {*re.findall(r"`([\w./-]+(?:\.py|\.json|/))`", text), *re.findall(r"\]\(([^)#]+)\)", text)}
        paths |= {path.partition("::")[0] for path in re.findall(r"`([\w./]+\.py)::\w+`", text)}
        found |= {(place, path) for path in paths if not path.startswith(made_later) and "<" not in path}
    return sorted(found)


def _is_there(place: str, path: str) -> bool:
    folders = (PLACES[place].parent, ROOT, ROOT / "aot_tune", ROOT / "tests", *(ROOT / "tests").iterdir())
    return any((folder / path).exists() for folder in folders) or any(
        [*ROOT.glob(f"tests/**/{path}"), *PLACES[place].parent.rglob(path)]
    )


def test_every_file_and_folder_of_the_project_that_they_name_exists() -> None:
    assert_none(f"{place}: {path}" for place, path in _named_places() if not _is_there(place, path))


def _is_test(file: str, name: str) -> bool:
    places = [path for path in (ROOT / "tests").rglob(Path(file).name) if str(path).endswith(f"/{file}")]
    return any(f"def {name}" in path.read_text() for path in places)


def test_every_test_that_they_name_exists() -> None:
    named = sorted(set(re.findall(r"`([\w./]+\.py)::(\w+)", ALL)))
    assert_none(f"{file}::{name}" for file, name in named if not _is_test(file, name))


def test_a_sweep_is_read_in_few_files_and_lines() -> None:
    section = TEXTS["aot_tune/tuner/README.md"].partition("## Reading a sweep")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| .* \| (.*) ?\|$", section, re.M)
    lines = 0
    for path, later in rows:
        text = (ROOT / "aot_tune" / "tuner" / path).read_text()
        for heading in re.findall(r"from \*(.*)\* on", later):
            text, bar, _ = text.partition(f"\n# {heading} ---")
            assert bar, (path, heading)
        lines += len(text.splitlines())
    assert 10 < len(rows) <= 25
    assert lines <= 6500


def test_the_faults_are_listed_one_a_row() -> None:
    """The tests use the codes of these two lists; the last column holds what `tests/faults` injects."""
    numbers_a, numbers_b = range(1, 22), range(1, 21)
    for place, letter, numbers in (
        ("aot_tune/tuner/README.md", "A", numbers_a),
        ("aot_tune/serve/INSIDE.md", "B", numbers_b),
    ):
        rows = re.findall(rf"^\| ({letter}\d+) \|.*\| (\d+) \|$", TEXTS[place], re.M)
        assert [code for code, _ in rows] == [f"{letter}{number}" for number in numbers]
        assert all(int(injected) > 0 for _, injected in rows)
