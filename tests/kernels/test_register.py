"""The register of compiler behaviour in the README of the kernels, held against kernels and tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from aot_tune import kernels
from tests.support.violations import assert_none

KERNELS = Path(str(kernels.__file__)).parent
TESTS = Path(__file__).parent
REFERENCE = re.compile(r"([A-Za-z0-9-]+)\s+(?:#\s+)?\(README\)")


@dataclass(frozen=True)
class Row:
    """One behaviour of the compiler."""

    id: str
    seen_with: str
    effect: str
    remedy: str
    test: str


def register() -> list[Row]:
    """The rows of the table, without its head."""
    text = (KERNELS / "README.md").read_text().partition("## Register of compiler behaviour")[2]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [Row(*(cell.strip() for cell in row)) for row in cells]


ROWS = register()
REFERENCES = {
    path.relative_to(KERNELS).as_posix(): set(REFERENCE.findall(path.read_text()))
    for path in sorted(KERNELS.rglob("*.py"))
}
"""File below aot_tune/kernels to the ids that it refers to."""


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_id_is_one_plain_word_and_stands_once() -> None:
    ids = [row.id.strip("`") for row in ROWS]
    assert len(ids) > 20
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", one) for one in ids)


def test_every_reference_of_a_kernel_file_has_a_row() -> None:
    known = {row.id.strip("`") for row in ROWS}
    assert {path: found - known for path, found in REFERENCES.items() if found - known} == {}


def wrong_files(row: Row) -> list[str]:
    """The files that refer to a row and that it does not name, and those that it names in vain."""
    referring = {path for path, found in REFERENCES.items() if row.id.strip("`") in found}
    named = {one for one in quoted(row.remedy) if one.endswith(".py")}
    wrong = [path for path in referring if not any(path.endswith(one) for one in named)]
    wrong += [one for one in named if not any(path.endswith(one) for path in referring)]
    return wrong if referring or row.remedy == "none" else ["no file", *wrong]


def test_a_row_names_the_files_that_refer_to_it() -> None:
    assert_none(f"{row.id}: {path}" for row in ROWS for path in wrong_files(row))


def is_there(test: str) -> bool:
    [named] = quoted(test)
    path, _, name = named.partition("::")
    return (TESTS / path).exists() and f"def {name}(" in (TESTS / path).read_text()


def test_a_row_names_a_test_that_exists_or_says_none() -> None:
    assert_none(f"{row.id}: {row.test}" for row in ROWS if row.test != "none" and not is_there(row.test))


def test_no_kernel_file_names_a_version_of_the_compiler_beside_the_register() -> None:
    named = {path for path in REFERENCES if re.search(r"tileiras\s+\d", (KERNELS / path).read_text())}
    assert named == set()
