"""aot_tune.tables.reader and .writer: tables to text and back, strictly (FAULTS B2)."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_tune.errors import AotTuneError, NewerSchemaError, TableError, TableWarning
from aot_tune.tables import reader, writer
from aot_tune.tables.reader import MOST_ENTRIES, UnreadEntry, parse, parse_as_asked
from aot_tune.tables.strict_json import MOST_BYTES, MOST_VALUES, loads
from aot_tune.tables.table import Entry, Point, Slopes, StateTimes, Table, entry_order
from aot_tune.tables.writer import dump
from aot_tune.values.arch import KNOWN_ARCHS
from aot_tune.values.bucket import Exact, Pow2, bucket_of
from aot_tune.values.config import HINTS, Config
from aot_tune.values.problem import Problem
from tests.support.tables import BUILT_WITH, LARGE, TABLE, WITH_STATES, small_entry

SLOPES = Slopes(inside=(0.0, -0.001), outside=(10.0, -10.0))

SHIPPED = sorted((Path(__file__).parents[2] / "tuned_configs").glob("*/*.json"))

TEXT = """\
{
  "schema": 2,
  "kernel": "matmul",
  "arch": "sm90",
  "source_hash": "3f0c9a51d2e4b678",
  "check_hash": "51d2e4b6783f0c9a",
  "built_with": {"device_name": "NVIDIA H200", "sm_count": 132, "cuda_tile": "1.7.0", "tileiras": "13.4.92", \
"driver": "580.159.04"},
  "axes": {"M": "pow2", "N": "exact"},
  "portfolio": [
    {"constants": {"tile_m": 64}, "hints": {"num_ctas": 1, "occupancy": 2}},
    {"constants": {"tile_m": 128}, "hints": {"num_ctas": 2}}
  ],
  "portfolio_regret": 0.024,
  "entries": [
    {"bucket": {"dtype": "bfloat16", "M": 64, "N": 6144}, "config": {"constants": {"tile_m": 64}, "hints": \
{"num_ctas": 1, "occupancy": 2}}, "mean_us": 23.1, "error_margin_us": 0.1, "default_us": 30.2, \
"regret": 0.01, "evidence": "measured", "points": [{"size": {"M": 40}, "us": [23.0, null, 30.0]}, \
{"size": {"M": 64}, "us": [23.1, 24.0, 30.2]}]}
  ]
}
"""


def all_asked(data) -> Table:
    """The table as a serving process has it when it has asked for everything."""
    table = parse_as_asked(data if isinstance(data, bytes) else data.encode(), "file")
    for entry in table.entries:
        assert entry.mean_us > 0
    return table


# Writing ----------------------------------------------------------------------------------------------------


def test_a_document_is_written_in_the_fixed_order_with_one_config_or_entry_a_line():
    assert dump(dataclasses.replace(TABLE, entries=(small_entry(64),))).decode() == TEXT


def test_what_was_written_is_read_as_the_same_table():
    assert parse(dump(TABLE)) == TABLE


def test_every_shipped_table_is_written_back_as_the_same_bytes():
    assert len(SHIPPED) >= 16
    for path in SHIPPED:
        data = path.read_bytes()
        assert dump(parse(data)) == data, path


def test_optional_keys_are_written_only_where_they_have_a_value():
    text = dump(WITH_STATES).decode()
    assert (
        '"evidence": "measured", "disturbed": "another process ran on the GPU", '
        '"states": {"cool": {"mean_us": 20.0, "default_us": 26.0}}, '
        '"points": [{"size": {"M": 40}, "us": [23.0, null, 30.0], "states": {"cool": [19.0, null, 25.0]}}, '
        '{"size": {"M": 64}, "us": [23.1, 24.0, 30.2]}]},\n'
    ) in text
    assert '    {"kernel": "split_k", "constants": {"tile_m": 64}, "hints": {"num_ctas": 1}}\n' in text


@pytest.mark.parametrize(
    "change",
    [
        {"slopes": SLOPES},
        {"portfolio": WITH_STATES.portfolio},
        *({"entries": (dataclasses.replace(small_entry(64), **values),)} for values in (
            {"disturbed": "x"},
            {"states": {"cool": StateTimes(mean_us=1.0, default_us=2.0)}},
            {"config": WITH_STATES.portfolio[1]},
            {"points": WITH_STATES.entries[0].points},
        )),
    ],
    ids=[
        "slopes", "kernel in the portfolio", "disturbed", "states", "kernel",
        "states of points",
    ],
)  # fmt: skip
def test_each_optional_value_is_written_and_read_back(change):
    table = dataclasses.replace(TABLE, **change)
    data = dump(table)
    assert parse(data) == table
    assert dump(parse(data)) == data


def test_the_kind_is_declared_where_a_table_names_none():
    document = {"schema": 2, "kind": "declared", **json.loads(TEXT)}
    assert dump(parse(json.dumps(document))).decode() == TEXT


def test_entries_and_points_are_sorted_whatever_order_they_were_found_in():
    shuffled = tuple(
        dataclasses.replace(entry, points=entry.points[::-1]) for entry in reversed(TABLE.entries)
    )
    assert dump(dataclasses.replace(TABLE, entries=shuffled)) == dump(TABLE)


def test_lines_that_a_reviewer_reordered_are_read_in_order_and_written_back_in_order():
    lines = dump(TABLE).decode().splitlines()
    first, second, third = (i for i, line in enumerate(lines) if '"bucket"' in line)
    lines[first], lines[second], lines[third] = (
        lines[second], lines[third].rstrip(",") + ",", lines[first].rstrip(","),
    )  # fmt: skip
    reordered = "\n".join([*lines, ""])
    for text in (reordered, reordered.rstrip(), reordered.replace("},\n    {", "}, {")):
        assert parse(text) == TABLE
        assert all_asked(text) == TABLE


def test_a_time_that_rounds_to_nothing_is_written_as_the_smallest_time():
    tiny = dataclasses.replace(small_entry(64), mean_us=1e-9)
    assert parse(dump(dataclasses.replace(TABLE, entries=(tiny,)))).entries[0].mean_us == 0.001


@pytest.mark.parametrize("us", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_table_that_could_not_be_read_again_is_not_written(us):
    with pytest.raises(TableError, match=r"entries\[0\].mean_us"):
        dump(dataclasses.replace(TABLE, entries=(dataclasses.replace(small_entry(64), mean_us=us),)))


def test_a_name_that_could_garble_a_terminal_is_not_written():
    built_with = dataclasses.replace(BUILT_WITH, device_name="H200\x1b[2J")
    with pytest.raises(TableError, match=r"built_with\.device_name"):
        dump(dataclasses.replace(TABLE, built_with=built_with))


# Any table --------------------------------------------------------------------------------------------------

US = st.floats(0.0005, 1e7)
REGRETS = st.floats(0, 100)
CONSTANTS = (
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9) | st.sampled_from(["", 'a"b\\'])
)
AXES = [
    {"M": Pow2()},
    {"N": Exact()},
    {"M": Pow2(), "N": Exact()},
    {"N": Exact(), "M": Pow2(), "B": Pow2()},
]
CLASSES = {"dtype": st.sampled_from(["bfloat16", "float16"]), "causal": st.booleans()}
CONFIGS = st.builds(
    lambda constants, hints, kernel: Config(constants=constants, hints=hints, kernel=kernel),
    st.dictionaries(st.sampled_from(["tile_m", "tile_n", "mode"]), CONSTANTS, max_size=3),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(of) for name, of in HINTS.items()}),
    st.sampled_from([None, None, None, "split_k"]),
)
STATES = st.sampled_from([(), (), ("loaded",), ("loaded", "cool")])


@st.composite
def points(draw, bucket, inside, columns):
    """Up to three different sizes of a bucket with their times."""
    bounds = {name: st.integers(bucket[name] // 2 + 1, bucket[name]) for name in inside}
    sizes = draw(
        st.lists(st.fixed_dictionaries(bounds), max_size=3, unique_by=lambda size: str(sorted(size.items())))
    )
    times = st.lists(st.none() | US, min_size=columns, max_size=columns)
    return tuple(
        Point(size=size, us=tuple(draw(times)), states={name: tuple(draw(times)) for name in draw(STATES)})
        for size in sizes
    )


@st.composite
def tables(draw):
    """Any table the tuner could build, with one or two bucketed axes and none or some classes."""
    axes = draw(st.sampled_from(AXES))
    class_names = draw(st.sampled_from([(), ("dtype",), ("dtype", "causal")]))
    portfolio = tuple(draw(st.lists(CONFIGS, max_size=4, unique=True)))
    inside = [name for name, axis in axes.items() if axis.kind == "pow2"]
    problems = st.fixed_dictionaries(
        {**{name: CLASSES[name] for name in class_names}, **{name: st.integers(1, 1 << 14) for name in axes}}
    )
    buckets = {bucket_of(axes, Problem(found)) for found in draw(st.lists(problems, max_size=4))}
    return Table(
        kernel=draw(st.sampled_from(["matmul", "rms_norm", "x"])),
        arch=draw(st.sampled_from(KNOWN_ARCHS)),
        source_hash=draw(st.sampled_from(["0" * 16, "0123456789abcdef"])),
        check_hash=draw(st.sampled_from(["0" * 16, "0123456789abcdef"])),
        built_with=BUILT_WITH,
        axes=axes,
        portfolio=portfolio,
        portfolio_regret=draw(REGRETS),
        slopes=draw(st.sampled_from([None, SLOPES])),
        entries=tuple(
            Entry(
                bucket=bucket,
                config=draw(st.sampled_from(portfolio) if portfolio else CONFIGS),
                mean_us=draw(US),
                error_margin_us=draw(REGRETS),
                default_us=draw(US),
                regret=draw(REGRETS),
                evidence=draw(st.sampled_from(["measured", "predicted"])),
                points=draw(points(bucket, inside, len(portfolio) + 1)),
                disturbed=draw(st.sampled_from([None, None, "the clocks fell"])),
                states={name: StateTimes(mean_us=draw(US), default_us=draw(US)) for name in draw(STATES)},
            )
            for bucket in buckets
        ),
    )


@settings(max_examples=60)
@given(tables())
def test_writing_what_was_read_gives_the_same_bytes(table):
    data = dump(table)
    assert dump(parse(data)) == data
    assert all_asked(data) == parse(data)
    text = data.decode()
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")
    assert sum('"bucket"' in line for line in text.splitlines()) == len(table.entries)


@settings(max_examples=60)
@given(tables())
def test_reading_changes_nothing_but_the_rounding_and_the_order(table):
    again = parse(dump(table))
    for field in ("kernel", "arch", "source_hash", "check_hash", "built_with", "axes", "portfolio"):
        assert getattr(again, field) == getattr(table, field)
    assert len(again.entries) == len(table.entries)
    for entry in again.entries:
        before = table.entry(entry.bucket)
        assert entry.config == before.config
        assert entry.disturbed == before.disturbed
        assert entry.states.keys() == before.states.keys()
        assert {str(point.size): point.states.keys() for point in entry.points} == {
            str({name: point.size[name] for name in again.axes if name in point.size}): point.states.keys()
            for point in before.points
        }
        assert entry.mean_us == pytest.approx(before.mean_us, abs=0.00051)
        assert {tuple(sorted(point.size.items())) for point in entry.points} == {
            tuple(sorted(point.size.items())) for point in before.points
        }
    order = [entry_order(again.axes, entry.bucket) for entry in again.entries]
    assert order == sorted(order)


def test_problems_that_name_their_sizes_in_another_order_are_written_in_one_order():
    turned = dataclasses.replace(small_entry(128), bucket=Problem({"N": 6144, "M": 128, "dtype": "bfloat16"}))
    table = dataclasses.replace(TABLE, entries=(TABLE.entries[0], turned, TABLE.entries[2]))
    assert dump(table) == dump(TABLE)


# Malformed documents ----------------------------------------------------------------------------------------


def _changed(change, table=TABLE) -> bytes:
    document = json.loads(dump(table))
    change(document)
    entries = document.get("entries")
    texts = {name: writer.line(value) for name, value in document.items()}
    if type(entries) is list:
        texts["entries"] = writer.lines(entries)
    return writer.document(texts).encode("utf-8", "surrogatepass")


def _set(*path):
    """A change that puts the last of `path` at the place that the others lead to."""

    def change(document):
        *way, key, value = path
        for step in way:
            document = document[step]
        document[key] = value

    return change


WRONG = [
    (_set("kernel", "../x"), "kernel"),
    (_set("kernel", "x" * 300), "kernel"),
    (_set("arch", "sm_90"), "arch"),
    (_set("arch", "sm77"), "arch"),
    (_set("arch", 90), "arch"),
    (_set("source_hash", "3F0C9A51D2E4B678"), "source_hash"),
    (_set("source_hash", "3f0c"), "source_hash"),
    (_set("check_hash", "3f0c"), "check_hash"),
    (_set("built_with", "sm_count", True), "built_with.sm_count"),
    (_set("built_with", "sm_count", 0), "built_with.sm_count"),
    (_set("built_with", "driver", None), "built_with.driver"),
    (_set("built_with", []), "built_with"),
    (_set("built_with", "host", "x"), "built_with"),
    (_set("axes", {}), "axes"),
    (_set("axes", "M", "log2"), "axes.M"),
    (_set("axes", "M", ["pow2"]), "axes.M"),
    (_set("axes", "a b", "exact"), "axes"),
    (_set("portfolio", {}), "portfolio"),
    (_set("portfolio", [{"constants": {"tile_m": n}, "hints": {}} for n in range(17)]), "portfolio"),
    (lambda document: document["portfolio"].append(document["portfolio"][0]), "portfolio"),
    (_set("portfolio", 0, "hints", "num_ctas", True), "portfolio[0].hints.num_ctas"),
    (_set("portfolio", 0, "hints", "warps", 4), "portfolio[0].hints"),
    (_set("portfolio", 0, "constants", "tile_m", [64]), "portfolio[0].constants.tile_m"),
    (_set("portfolio", 0, "constants", "tile m", 64), "portfolio[0].constants"),
    (_set("portfolio_regret", -0.1), "portfolio_regret"),
    (_set("portfolio_regret", "0.1"), "portfolio_regret"),
    (_set("entries", None), "entries"),
    (_set("entries", 0, []), "entries[0]"),
    (_set("entries", 1, "note", ""), "entries[1]"),
    (_set("entries", 2, "config", "hints", "num_ctas", 3), "entries[2].config.hints.num_ctas"),
    (_set("entries", 1, "config", "hints", "num_ctas", 1.0), "entries[1].config.hints.num_ctas"),
    (_set("entries", 0, "bucket", "M", 63), "entries[0].bucket.M"),
    (_set("entries", 0, "bucket", "M", True), "entries[0].bucket.M"),
    (_set("entries", 0, "bucket", "N", 0), "entries[0].bucket.N"),
    (_set("entries", 0, "bucket", "N", 10**30), "entries[0].bucket.N"),
    (_set("entries", 0, "bucket", "N", 6144.0), "entries[0].bucket.N"),
    (_set("entries", 0, "bucket", "dtype", 16), "entries[0].bucket.dtype"),
    (_set("entries", 1, "bucket", {"M": 128, "N": 6144, "dtype": "bfloat16"}), "entries[1].bucket"),
    (_set("entries", 1, "bucket", {"dtype": "bfloat16", "M": 64, "N": 6144}), "entries[1].bucket"),
    (_set("entries", 0, "mean_us", 0), "entries[0].mean_us"),
    (_set("entries", 0, "mean_us", "fast"), "entries[0].mean_us"),
    (_set("entries", 0, "default_us", None), "entries[0].default_us"),
    (_set("entries", 0, "error_margin_us", -1), "entries[0].error_margin_us"),
    (_set("entries", 0, "regret", True), "entries[0].regret"),
    (_set("entries", 0, "evidence", "guessed"), "entries[0].evidence"),
    (_set("entries", 0, "evidence", ["measured"]), "entries[0].evidence"),
    (_set("entries", 0, "points", {}), "entries[0].points"),
    (_set("entries", 0, "points", 0, "us", [1.0, 2.0]), "entries[0].points[0].us"),
    (_set("entries", 0, "points", 0, "us", 1, 0.0), "entries[0].points[0].us[1]"),
    (_set("entries", 0, "points", 0, "us", 2, True), "entries[0].points[0].us[2]"),
    (_set("entries", 0, "points", 0, "size", "M", 32), "entries[0].points[0].size.M"),
    (_set("entries", 0, "points", 0, "size", "M", 65), "entries[0].points[0].size.M"),
    (_set("entries", 0, "points", 0, "size", "N", 6144), "entries[0].points[0].size"),
    (_set("entries", 0, "points", 0, "size", "M", 64), "entries[0].points[1].size"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "path"), WRONG, ids=[f"{i}-{path}" for i, (_, path) in enumerate(WRONG)])
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_b2_a_wrong_value_is_refused_with_its_dotted_path(change, path):
    for read in (parse, all_asked):
        with pytest.raises(TableError) as caught:
            read(_changed(change))
        assert caught.value.path == path
        assert str(caught.value).endswith(f"(at {path})")
        assert len(str(caught.value)) < 400


WRONG_OPTIONAL = [
    (_set("kind", "searched"), "kind"),
    (_set("kind", "recorded"), "kind"),
    (_set("kind", None), "kind"),
    (_set("kinds", "declared"), ""),
    (_set("slopes", 0.25), "slopes"),
    (_set("slopes", None), "slopes"),
    (_set("slopes", {"inside": [0] * 2}), "slopes"),
    (_set("slopes", {"inside": [0] * 2, "outside": [0] * 2, "far": [0] * 2}), "slopes"),
    (_set("slopes", {"inside": [0], "outside": [0] * 2}), "slopes.inside"),
    (_set("slopes", {"inside": [0] * 2, "outside": [0] * 3}), "slopes.outside"),
    (_set("slopes", {"inside": [True] * 2, "outside": [0] * 2}), "slopes.inside[0]"),
    (_set("slopes", {"inside": [0] * 2, "outside": [0, "1"]}), "slopes.outside[1]"),
    (_set("slopes", {"inside": [0] * 2, "outside": [0, 10.5]}), "slopes.outside[1]"),
    (_set("portfolio", 1, "kernel", "../x"), "portfolio[1].kernel"),
    (_set("portfolio", 1, "kernel", None), "portfolio[1].kernel"),
    (_set("entries", 0, "disturbed", None), "entries[0].disturbed"),
    (_set("entries", 0, "disturbed", ""), "entries[0].disturbed"),
    (_set("entries", 0, "disturbed", "x" * 201), "entries[0].disturbed"),
    (_set("entries", 0, "disturbed", "[2J"), "entries[0].disturbed"),
    (_set("entries", 0, "states", {}), "entries[0].states"),
    (_set("entries", 0, "states", []), "entries[0].states"),
    (_set("entries", 0, "states", "a b", {}), "entries[0].states"),
    (_set("entries", 0, "states", {f"s{n}": {"mean_us": 1.0, "default_us": 1.0} for n in range(9)}),
     "entries[0].states"),
    (_set("entries", 0, "states", "cool", "us", 1.0), "entries[0].states.cool"),
    (_set("entries", 0, "states", "cool", {"mean_us": 1.0}), "entries[0].states.cool"),
    (_set("entries", 0, "states", "cool", "mean_us", 0), "entries[0].states.cool.mean_us"),
    (_set("entries", 0, "states", "cool", "default_us", True), "entries[0].states.cool.default_us"),
    (_set("entries", 0, "points", 0, "states", None), "entries[0].points[0].states"),
    (_set("entries", 0, "points", 0, "states", "cool", [1.0]), "entries[0].points[0].states.cool"),
    (_set("entries", 0, "points", 0, "states", "cool", 0, -1), "entries[0].points[0].states.cool[0]"),
    (_set("entries", 0, "points", 0, "disturbed", "x"), "entries[0].points[0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "path"), WRONG_OPTIONAL, ids=[f"{i}-{path}" for i, (_, path) in enumerate(WRONG_OPTIONAL)]
)
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_b2_a_wrong_optional_value_is_refused_with_its_path(change, path):
    for read in (parse, all_asked):
        with pytest.raises(TableError) as caught:
            read(_changed(change, WITH_STATES))
        assert caught.value.path == path


@pytest.mark.parametrize("key", list(json.loads(TEXT)))
def test_every_key_is_needed(key):
    document = json.loads(TEXT)
    del document[key]
    with pytest.raises(TableError, match=key):
        parse(json.dumps(document))


@pytest.mark.parametrize("key", list(json.loads(TEXT)["entries"][0]))
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_every_key_of_an_entry_is_needed(key):
    text = _changed(lambda document: document["entries"][0].pop(key))
    for read in (parse, all_asked):
        with pytest.raises(TableError, match=rf"the key '{key}' is missing \(at entries\[0\]\)"):
            read(text)


@pytest.mark.parametrize("schema", [0, -1, "1", 1.0, True, None, [1]])
def test_b2_a_schema_that_is_no_version_is_refused(schema):
    with pytest.raises(TableError, match=r"at schema\)") as caught:
        parse(_changed(_set("schema", schema)))
    assert not isinstance(caught.value, NewerSchemaError)


def test_a_table_of_a_later_release_is_told_apart_whatever_else_it_holds():
    with pytest.raises(NewerSchemaError, match="schema is 3, this release reads 2; upgrade"):
        parse('{"schema": 3, "kernels": ["another", "layout"]}')


def test_a_table_of_an_earlier_release_is_refused_by_its_schema_with_what_to_do():
    with pytest.raises(TableError, match=r"an earlier release.*is 1, this release reads 2; tune") as caught:
        parse(_changed(_set("schema", 1)))
    assert not isinstance(caught.value, NewerSchemaError)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "true", "{}"])
def test_json_that_is_no_table_is_refused(text):
    with pytest.raises(TableError):
        parse(text)


@settings(max_examples=300)
@given(
    st.integers(0, len(TEXT) - 1),
    st.integers(0, 40),
    st.sampled_from(["", "0", '"', "}", "\0", "\\", ",", "1e9"]),
)
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_b2_damage_anywhere_is_refused_or_still_a_table(start, length, patch):
    damaged = TEXT[:start] + patch + TEXT[start + length :]
    try:
        table = parse(damaged)
    except AotTuneError as error:
        refused = type(error)
        assert issubclass(refused, TableError)
        with pytest.raises(TableError):
            all_asked(damaged)
        return
    assert parse(dump(table)).kernel == table.kernel
    assert all_asked(damaged) == table


def test_an_entry_is_parsed_when_more_than_its_winner_is_read(monkeypatch):
    data, parsed = dump(TABLE), []
    monkeypatch.setattr(reader, "loads", lambda data: parsed.append(data) or loads(data))
    table = parse_as_asked(data, "file")
    assert [(entry.bucket, entry.config, entry.evidence) for entry in table.entries] == [
        (entry.bucket, entry.config, entry.evidence) for entry in TABLE.entries
    ]
    assert all(entry.is_timed() for entry in table.entries)
    assert not [text for text in parsed if b"points" in text]
    parsed.clear()
    assert table.entries[1].points == TABLE.entries[1].points
    assert table.entries[1] == TABLE.entries[1]
    assert [text.count(b'"points"') for text in parsed] == [1]


def test_an_entry_may_be_read_from_any_side_and_is_an_entry_throughout():
    readings = (
        lambda entry: entry.points == TABLE.entries[0].points,
        lambda entry: entry.disturbed is None,
        UnreadEntry.is_sound,
        UnreadEntry.is_timed,
        lambda entry: dataclasses.replace(entry, regret=0.5).points == TABLE.entries[0].points,
        lambda entry: entry == TABLE.entries[0] and TABLE.entries[0] == entry,
    )
    for reading in readings:
        entry = parse_as_asked(dump(TABLE), "file").entries[0]
        assert type(entry) is UnreadEntry
        assert isinstance(entry, Entry)
        assert reading(entry)
        assert reading(entry), "for a second thread"
    assert type(dataclasses.replace(entry)) is Entry


def test_an_entry_whose_parser_asks_for_it_again_is_read_all_the_same():
    # As where an audit hook prints the objects that it is shown.
    def figures():
        nested.append(str(entry)) if not nested else None
        return {
            name: getattr(whole, name)
            for name in ("mean_us", "error_margin_us", "default_us", "regret", "points")
        }

    whole, nested = TABLE.entries[0], []
    entry = UnreadEntry(whole.bucket, whole.config, True, figures)
    assert entry.points == whole.points
    assert nested
    assert entry == whole


def test_an_entry_without_a_time_at_a_point_is_read_as_it_is_asked():
    first, *others = TABLE.entries
    columns = len(TABLE.portfolio) + 1
    timeless = tuple(Point(size=point.size, us=(None,) * columns) for point in first.points)
    for points in ((), timeless):
        entries = (dataclasses.replace(first, points=points), *others)
        table = parse_as_asked(dump(dataclasses.replace(TABLE, entries=entries)), "file")
        assert type(table.entries[0]) is UnreadEntry
        assert [entry.is_timed() for entry in table.entries] == [False] + [True] * len(others)


def test_slopes_of_another_rule_are_refused_with_the_number_that_is_read():
    eight = {"inside": [0.0] * 8, "outside": [0.0, 0.0]}
    with pytest.raises(TableError, match=r"expected 2 inside slopes, got 8 \(at slopes.inside\)"):
        all_asked(_changed(lambda document: document.update(slopes=eight)))


def test_a_table_without_entries_is_read_however_its_lines_are_broken():
    head, _, _ = TEXT.partition('  "entries": [')
    for entries in ("[]", "[\n  ]", "[\n\n  ]"):
        assert all_asked(f'{head}  "entries": {entries}\n}}\n').entries == ()


def test_b2_a_table_of_too_many_values_is_refused_before_an_entry_is_read(monkeypatch):
    data = dump(TABLE)
    assert all_asked(data) == TABLE
    monkeypatch.setattr("aot_tune.tables.strict_json.MOST_VALUES", 100)
    with pytest.raises(TableError, match="more than 100 values"):
        parse_as_asked(data, "file")


def test_b2_malformed_figures_are_one_warning_and_an_error_of_their_entries_alone():
    data = dump(TABLE).replace(b'"us": [', b'"us": [-', 1)
    data = data[::-1].replace(b'"us": ['[::-1], b'"us": [-'[::-1], 1)[::-1]
    table = parse_as_asked(data, "file")
    with pytest.warns(TableWarning, match=r"file: .*entries\[0\].points\[0\].us\[0\].*: restore") as seen:
        sound = [[entry.is_sound() for entry in table.entries] for _ in range(2)]
    assert sound == [[False, True, False]] * 2
    assert len(seen) == 1
    with pytest.raises(TableError, match="file"):
        _ = table.entries[2].mean_us


def test_b2_an_entry_that_is_no_json_is_told_with_its_place_in_the_file():
    data = dump(TABLE).replace(b'"us": [', b'"us": ,[', 1)
    with pytest.raises(TableError, match="not JSON") as whole:
        parse(data)
    with pytest.warns(TableWarning, match=re.escape(f"{whole.value.problem} (at entries[0])")):
        assert not parse_as_asked(data, "file").entries[0].is_sound()


def test_b2_every_truncation_is_refused():
    for end in range(len(TEXT.rstrip())):
        with pytest.raises(TableError):
            parse(TEXT[:end])


def test_whole_microseconds_may_lack_their_point():
    assert parse(_changed(_set("entries", 0, "mean_us", 23))).entries[0].mean_us == 23.0


def test_a_table_of_225_entries_is_read_in_milliseconds():
    edges = [4 << (i % 14) for i in range(225)]
    entries = tuple(
        dataclasses.replace(
            small_entry(m),
            bucket=Problem({"dtype": "bfloat16", "M": m, "N": 1024 + i}),
            config=LARGE,
            points=tuple(
                Point(size={"M": size}, us=tuple(10.0 + size / 7 + column for column in range(9)))
                for size in sorted({m, m - 1, m * 3 // 4 + 1, m * 5 // 8 + 1})
            ),
        )
        for i, m in enumerate(edges)
    )
    portfolio = tuple(Config(constants={"tile_m": 16 * n}, hints={"occupancy": 2}) for n in range(1, 9))
    text = dump(dataclasses.replace(TABLE, portfolio=portfolio, entries=entries))

    def seconds(read) -> float:
        started = time.process_time()
        read(text)
        return time.process_time() - started

    assert min(seconds(parse) for _ in range(15)) < 0.1  # CPU time, some 12 ms
    # Some 2 ms, which an import waits for.
    assert min(seconds(lambda text: parse_as_asked(text, "file")) for _ in range(15)) < 0.02


def test_threads_that_read_an_entry_at_the_same_time_have_the_same_points():
    """What is prepared of a point is kept by its identity."""
    first, both = parse_as_asked(dump(TABLE), "file").entries[0], threading.Barrier(2)
    read = vars(first)["_figures"]

    def together():
        values = read()
        both.wait(10)
        return values

    vars(first)["_figures"] = together
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda place: first.points, range(2))
    assert one is other
    assert first.points is one


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_table_like_the_shipped_ones_may_have_as_many_entries_as_a_table_may_have(path):
    data = path.read_bytes()
    values = data.count(b"{") + data.count(b"[") + data.count(b",")
    entries = data.count(b'{"bucket"')
    assert values / entries * MOST_ENTRIES < MOST_VALUES
    assert len(data) / entries * MOST_ENTRIES < MOST_BYTES
