"""aot_tune.cli.documents.former: tables of an earlier form, read by the keys that are compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.documents.recorded import RecordedDocument
from aot_tune.errors import NewerSchemaError, TableError
from aot_tune.replay import document
from aot_tune.tables.reader import TABLE
from aot_tune.tables.writer import dump
from tests.rewrite_tables import SHIPPED, rewritten
from tests.support.recorded_tables import TABLE as TABLE_OF_SEARCHES
from tests.support.tables import WITH_STATES

DECLARED, RECORDED = DeclaredDocument.form, RecordedDocument.form


def changed(change: Callable[[Any], object]) -> str:
    values = json.loads(dump(WITH_STATES))
    change(values)
    return json.dumps(values)


def test_a_table_of_the_present_form_has_no_unknown_key_and_no_difference() -> None:
    values, unknown = json.loads(dump(WITH_STATES)), set[str]()
    assert TABLE.known(values, unknown) == values
    assert not unknown
    assert DECLARED.parse_former(dump(WITH_STATES)) is None
    assert RECORDED.parse_former(document.dump(TABLE_OF_SEARCHES)) is None


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda d: d.update(schema=1), "(schema 1, read 2)"),
        (lambda d: d.update(rule="steps"), "(with rule)"),
        (lambda d: d["built_with"].update(cudnn="9"), "(with cudnn)"),
        (lambda d: d["portfolio"][0].update(rank=1), "(with rank)"),
        (lambda d: d["entries"][0]["config"].update(rank=1), "(with rank)"),
        (lambda d: d["entries"][0]["points"][0].update(weight=1), "(with weight)"),
        (lambda d: [entry.pop("points") for entry in d["entries"]], "(without points)"),
        (
            lambda d: (d.update(schema=1, rule=1), d["entries"][0].pop("regret")),
            "(schema 1, read 2; with rule; without regret)",
        ),
    ],
)
def test_an_earlier_form_is_read_with_what_is_compared(
    change: Callable[[Any], object], difference: str
) -> None:
    former = DECLARED.parse_former(changed(change))
    assert former is not None
    table, form = former
    assert table.entries == tuple(map(DECLARED.only_compared, WITH_STATES.entries))
    assert dataclasses.replace(table, entries=WITH_STATES.entries) == WITH_STATES
    assert form == (
        f"another form {difference}: entries are compared by config, mean_us, default_us, evidence"
    )


def test_slopes_of_another_form_are_left_out() -> None:
    slopes = {"inside": [0.1] * 8, "outside": [0.1] * 8}
    for schema, form in ((2, "(other slopes)"), (1, "(schema 1, read 2; other slopes)")):
        former = DECLARED.parse_former(
            changed(lambda d, schema=schema: d.update(schema=schema, slopes=slopes))
        )
        assert former is not None
        assert former[0].slopes is None
        assert form in former[1]
    with pytest.raises(TableError, match="slopes"):
        TABLE.read(json.loads(changed(lambda d: d.update(slopes=slopes))))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema=1) or d["entries"][0].pop("mean_us"),
        lambda d: d.update(schema=1, axes={}),
        lambda d: d.update(schema=1, entries=3),
        lambda d: d.update(schema=1, portfolio=[3]),
        lambda d: d.update(schema=1) or d["entries"][0].pop("config"),
        lambda d: d.update(schema=True),
    ],
)
def test_a_compared_key_that_is_missing_or_wrong_is_refused(change: Callable[[Any], object]) -> None:
    with pytest.raises(TableError):
        DECLARED.parse_former(changed(change))


def test_a_recorded_table_of_an_earlier_form_is_read_too() -> None:
    earlier = json.loads(document.dump(TABLE_OF_SEARCHES))
    earlier |= {"schema": 1, "host": "x"}
    for entry in earlier["entries"]:
        del entry["signature"]
    former = RECORDED.parse_former(json.dumps(earlier))
    assert former is not None
    table, form = former
    assert table.entries == tuple(map(RECORDED.only_compared, TABLE_OF_SEARCHES.entries))
    assert form == (
        "another form (schema 1, read 2; with host; without signature): entries are compared by config, "
        "hints, mean_us, first_us"
    )


def test_a_later_form_is_refused() -> None:
    with pytest.raises(NewerSchemaError):
        DECLARED.parse_former(changed(lambda d: d.update(schema=3)))
    with pytest.raises(TableError):
        DECLARED.parse_former("[]")


def test_rewriting_a_shipped_table_changes_no_byte() -> None:
    paths = sorted(SHIPPED.glob("*/*.json"))
    assert len(paths) >= 16
    for path in paths:
        assert rewritten(path.read_bytes()) == path.read_bytes(), path


def test_rewriting_leaves_out_a_key_that_the_present_form_has_not() -> None:
    shipped = (SHIPPED / "sm90" / "rope.json").read_bytes()
    document = json.loads(shipped)
    document |= {"schema": 1, "rule": "steps"}
    document["entries"][0]["rank"] = 1
    assert rewritten(json.dumps(document).encode()) == shipped
