"""The JSON text of recorded tables: the same bytes, strictly read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.errors import NewerSchemaError, TableError
from aot_tune.replay.document import dump, parse
from aot_tune.replay.problem import Array, Fixed, Items, Problem, Real, Varying, Whole
from aot_tune.replay.table import Launched, file_name
from tests.support.recorded_tables import TABLE, entry


def test_a_table_comes_back_from_its_text() -> None:
    text = dump(TABLE)
    assert parse(text) == TABLE
    assert dump(parse(text)) == text


def test_the_order_of_entries_does_not_change_the_bytes() -> None:
    backwards = dataclasses.replace(TABLE, entries=TABLE.entries[::-1])
    assert dump(backwards) == dump(TABLE)


def test_entries_of_one_problem_keep_their_order() -> None:
    one, other = entry(config={"dict": {"TILE": 32}}), entry(config={"dict": {"TILE": 16}})
    for entries in ((one, other), (other, one)):
        assert parse(dump(dataclasses.replace(TABLE, entries=entries))).entries == entries


def test_what_entries_have_in_common_is_read_once_for_each_table() -> None:
    first, second = parse(dump(TABLE)).entries
    assert first.config is second.config
    assert first.problem.arguments[4] is second.problem.arguments[4]  # the sizes before it differ
    assert parse(dump(TABLE)).entries[0].config is not first.config  # nothing outlives a table


def test_launches_beside_the_searches_come_back_and_are_compiled_too() -> None:
    own = Launched((("num_ctas", 1), ("occupancy", 2)), TABLE.entries[0].signature)
    others = [Launched((("occupancy", occupancy),), "scale_kernel_Kt1_A1f16") for occupancy in (4, 2)]
    table = dataclasses.replace(TABLE, launched=tuple(sorted(others)))
    text = dump(table)
    assert parse(text) == table
    assert dump(dataclasses.replace(table, launched=tuple(others))) == text
    assert dump(dataclasses.replace(table, launched=())) == dump(TABLE)
    assert TABLE.compilations == (own,)
    assert set(table.compilations) == {own, *others}


def test_an_entry_is_one_line() -> None:
    lines = dump(TABLE).decode().splitlines()
    assert sum('"arguments"' in line for line in lines) == len(TABLE.entries)


def changed(change: Callable[[Any], object]) -> str:
    document = json.loads(dump(TABLE))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("library"), "'library' is missing"),
        (lambda d: d.update(more=1), "'more' is unknown"),
        (lambda d: d.update(schema=1), "schema is 1, this release reads 2; tune again"),
        (lambda d: d.update(kind="declared"), "expected a table of the kind 'recorded'"),
        (lambda d: d.update(launched=[{"hints": {}}]), r"'signature' is missing \(at launched\[0\]"),
        (lambda d: d.update(launched=[{"hints": {}, "signature": "a b"}]), r"launched\[0\].signature"),
        (lambda d: d.update(launched=[{"hints": {"x": 1}, "signature": "a"}]), r"launched\[0\].hints"),
        (lambda d: d.update(launched=[{"hints": {}, "signature": "a"}] * 1001), "at most 1000"),
        (lambda d: d.update(arch="SM90"), "arch"),
        (lambda d: d.update(arch="sm7"), "an arch this release knows"),
        (lambda d: d["entries"][0].update(space="xyz"), r"16 hex digits.*entries\[0\]\.space"),
        (lambda d: d["entries"][0].update(mean_us=0), "a number above 0"),
        (lambda d: d["entries"][0].update(grid=[]), r"1 to 3 numbers.*entries\[0\]\.grid"),
        (
            lambda d: d["entries"][0].update(hints={"num_ctas": 3}),
            r"one of 1, 2, 4, 8, 16.*entries\[0\]\.hints\.num_ctas",
        ),
        (lambda d: d["entries"][0].update(config="x" * 9000), "characters, more than"),
        (lambda d: d["entries"][0].update(signature="a b"), "a mangled symbol"),
        (lambda d: d["entries"][0].update(count=True), "a whole number of 1 or more"),
        (lambda d: d["entries"][0]["arguments"].update(x={"tensor": "f"}), "'shape' is missing"),
        (lambda d: d["entries"][0]["arguments"].update(x=7), "an argument"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(change: Callable[[Any], object], said: str) -> None:
    with pytest.raises(TableError, match=said):
        parse(changed(change))


def test_a_newer_schema_is_refused_as_that() -> None:
    with pytest.raises(NewerSchemaError, match="schema is 3, this release reads 2; upgrade"):
        parse(changed(lambda d: d.update(schema=3, unheard_of=1)))


def test_file_names_hold_the_module_and_no_brackets() -> None:
    assert file_name("mylib.ops", "make.<locals>.kernel") == "mylib.ops.make.locals.kernel.json"


ARGUMENTS = st.recursive(
    st.one_of(
        st.builds(
            Array,
            dtype=st.sampled_from(["float16", "int32"]),
            shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
            layout=st.sampled_from(["contiguous", "1,16", "-"]),
            aligned=st.booleans(),
        ),
        st.builds(Whole, st.integers(-(2**62), 2**62)),
        st.sampled_from([Real(), Varying(), Fixed("null"), Fixed("1.5"), Fixed('{"tuple":[1,"x"]}')]),
    ),
    lambda inner: st.builds(Items, st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)


@given(st.lists(ARGUMENTS, max_size=4))
def test_every_problem_comes_back(arguments: list[Any]) -> None:
    names = tuple(f"p{at}" for at in range(len(arguments)))
    problem = Problem(names=names, arguments=tuple(arguments), sm_count=132)
    table = dataclasses.replace(TABLE, entries=(entry(problem=problem),))
    assert parse(dump(table)) == table
