"""`tuned_configs/schema.json` is what the readers say, and describes every table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from aot_tune.replay import document as recorded
from aot_tune.tables import writer
from tests.support.recorded_tables import TABLE as RECORDED
from tests.support.tables import TABLE, WITH_STATES
from tests.table_schema import PATH, generated

SHIPPED = sorted(PATH.parent.glob("*/*.json"))


@pytest.fixture(scope="module")
def validator() -> Any:
    from jsonschema import Draft202012Validator

    schema = json.loads(PATH.read_bytes())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_file_is_what_the_readers_say() -> None:
    assert PATH.read_bytes() == generated(), "run python -m tests.table_schema"


def test_every_shipped_table_is_valid(validator: Any) -> None:
    assert len(SHIPPED) >= 16
    for path in SHIPPED:
        assert not list(validator.iter_errors(json.loads(path.read_bytes()))), path


@pytest.mark.parametrize(
    "data",
    [writer.dump(TABLE), writer.dump(WITH_STATES), recorded.dump(RECORDED)],
    ids=["declared", "every optional key", "recorded"],
)
def test_written_tables_are_valid(validator: Any, data: bytes) -> None:
    assert not list(validator.iter_errors(json.loads(data)))


def _wrong(table: str, path: str, change: Callable[[Any], object]) -> Any:
    return pytest.param(table, path, change, id=f"{table}-{path}")


@pytest.mark.parametrize(
    ("table", "path", "change"),
    [
        _wrong("declared", "$", lambda d: d.update(more=1)),
        _wrong("declared", "$.schema", lambda d: d.update(schema=1)),
        _wrong("declared", "$.kernel", lambda d: d.update(kernel="../x")),
        _wrong("declared", "$.arch", lambda d: d.update(arch="sm_90")),
        _wrong("declared", "$.entries[0]", lambda d: d["entries"][0].pop("points")),
        _wrong("declared", "$.entries[0].mean_us", lambda d: d["entries"][0].update(mean_us=0)),
        _wrong("declared", "$.entries[0].config.hints.num_ctas",
               lambda d: d["entries"][0]["config"]["hints"].update(num_ctas=3)),
        _wrong("declared", "$.slopes", lambda d: d.update(slopes={"inside": [0.5] * 2})),
        _wrong("recorded", "$", lambda d: d.pop("library")),
        _wrong("recorded", "$.entries[0].grid", lambda d: d["entries"][0].update(grid=[])),
        _wrong("recorded", "$.entries[0].space", lambda d: d["entries"][0].update(space="xyz")),
        _wrong("recorded", "$.entries[0].arguments.x",
               lambda d: d["entries"][0]["arguments"].update(x={"tensor": "float16"})),
    ],
)  # fmt: skip
def test_a_wrong_table_is_invalid_at_its_place(
    validator: Any, table: str, path: str, change: Callable[[Any], object]
) -> None:
    document = json.loads({"declared": writer.dump(WITH_STATES), "recorded": recorded.dump(RECORDED)}[table])
    change(document)
    assert [error.json_path for error in validator.iter_errors(document)] == [path]
