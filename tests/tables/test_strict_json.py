"""aot_tune.tables.strict_json: JSON with one meaning, in bounded time and memory (FAULTS B2)."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.errors import TableError
from aot_tune.tables.strict_json import (
    MOST_BYTES,
    MOST_VALUES,
    as_number,
    check_keys,
    check_text,
    expected,
    loads,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.sampled_from(["", "a", 'q"', "\\", ": ", '":', "é"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", 'k"', '":', "\\"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_all_json_without_equal_keys_is_read_as_it_is(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert loads(text) == value
    assert loads(text.encode()) == value


@given(VALUES, st.sampled_from(["a", 'k"', '":', "\\", "é"]), st.sampled_from(["", " ", "\n\t"]))
def test_b2_equal_keys_are_found_at_any_place_and_spacing(value, key, space):
    name = json.dumps(key)
    pairs = f"{name}{space}:{json.dumps(value)},{name}{space}:1"
    with pytest.raises(TableError, match="twice"):
        loads(f'{{"outer":[{{{pairs}}}]}}')


def test_b2_a_key_written_once_plainly_and_once_escaped_is_there_twice():
    with pytest.raises(TableError, match="'a' appears twice"):
        loads('{"a": 1, "\\u0061": 2}')


HOSTILE = {
    "empty": (b"", "the file is empty"),
    "blank": (b" \n\t ", "the file is empty"),
    "NULs": (b"\0" * 4096, "not JSON"),
    "conflict markers": (b'{"a": 1,\n<<<<<<< HEAD\n"b": 2}', "conflict markers"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "git lfs pull"),
    "cut short": (b'{"schema": 1, "kern', "not JSON"),
    "text after it": (b"{} {}", "not JSON"),
    "a BOM": (b"\xef\xbb\xbf{}", "byte order mark"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not JSON"),
    "Latin-1": (b'{"a": "\xe9"}', "not JSON"),
    "NaN": (b'{"a": NaN}', "not JSON"),
    "Infinity": (b'{"a": -Infinity}', "not JSON"),
    "1e999": (b'{"a": 1e999}', "not JSON"),
    "a comment": (b'{"a": 1} // one', "not JSON"),
    "a trailing comma": (b'{"a": 1,}', "not JSON"),
    "single quotes": (b"{'a': 1}", "not JSON"),
    "a lone surrogate, escaped": (b'{"a": "\\ud800"}', "not JSON"),
    "a lone surrogate, encoded": (b'{"a": "\xed\xa0\x80"}', "not JSON"),
    "a raw control character": (b'{"a": "\x01"}', "not JSON"),
    "equal keys": (b'{"a": 1, "a": 1}', "the key 'a' appears twice"),
    "10^5 levels of lists": (b"[" * 10**5 + b"]" * 10**5, "not JSON|more than"),
    "10^5 levels of objects": (b'{"a":' * 10**5 + b"1" + b"}" * 10**5, "not JSON"),
    "10^5 open brackets": (b"[" * 10**5, "not JSON"),
    "a number of 10^6 digits": (b"1" * 10**6, "not JSON"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_b2_text_that_is_no_plain_json_is_refused_at_once(name):
    data, told = HOSTILE[name]
    started = time.process_time()
    with pytest.raises(TableError, match=told) as caught:
        loads(data)
    assert time.process_time() - started < 1  # CPU time: what is hostile is not read to the end
    assert len(str(caught.value)) < 400


def test_b2_depth_that_only_the_slow_path_meets_is_an_error_and_no_crash():
    data = b"[" * 900 + b'"\\n"' + b"]" * 900
    with contextlib.suppress(TableError):
        assert loads(data)


def test_b2_a_lone_surrogate_in_a_str_is_refused():
    with pytest.raises(TableError, match="not UTF-8"):
        loads('{"a": "\ud800"}')


@pytest.mark.process
@pytest.mark.parametrize(
    "build",
    [
        "b'[' + b'{},' * 5_500_000 + b'{}]'",
        "b'[\"a' + b'\",\"a' * 3_000_000 + b'\"]'",
        "b'[' + b'1e300,' * 2_700_000 + b'1]'",
        "b'{' + b','.join(b'\"%07d\":1' % i for i in range(1_300_000)) + b'}'",
        "b'1' * (1 << 27)",
        "b'[' * (1 << 24)",
        "b'\"' + b'x' * ((1 << 24) - 2) + b'\"'",
    ],
)
def test_b2_the_largest_documents_take_bounded_memory_and_time(build):
    """In a child that may have 200 MB more than the document itself, and 10 s of CPU time: some take one."""
    child = f"""
import resource, time
from aot_tune.errors import TableError
from aot_tune.tables.strict_json import loads
data = {build}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
try:
    loads(data)
except TableError:
    pass
print(time.process_time() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 10
    assert megabytes < 200


def test_b2_a_gigabyte_is_refused_without_being_looked_at():
    data = bytes(1 << 30)  # zero pages, which cost nothing until they are read
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TableError, match=f"1073741824 bytes; a document has at most {MOST_BYTES}"):
        loads(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_document_of_as_many_values_as_are_allowed_is_read():
    most = "[" + ",".join(["0"] * MOST_VALUES) + "]"
    assert len(loads(most)) == MOST_VALUES
    with pytest.raises(TableError, match="more than"):
        loads(most[:-1] + ",0]")


def test_a_true_is_no_number():
    assert as_number(3, "x") == 3.0
    for wrong in (True, "3", None, -1, float("nan"), float("inf")):
        with pytest.raises(TableError, match=r"at x\)"):
            as_number(wrong, "x")
    with pytest.raises(TableError, match="above 0"):
        as_number(0, "x", zero=False)


def test_a_missing_key_is_told_before_an_unknown_one():
    check_keys({"b": 1, "a": 2}, "place", ("a", "b"))
    with pytest.raises(TableError, match=r"the key 'a' is missing \(at place\)"):
        check_keys({"c": 1, "b": 1}, "place", ("a", "b"))
    with pytest.raises(TableError, match=r"the key 'c' is unknown; expected a, b \(at place\)"):
        check_keys({"a": 1, "b": 1, "c": 1}, "place", ("a", "b"))


@pytest.mark.parametrize("text", ["a\x1b[31m", "a\n", "x" * 201, "\ud800", "\u202e", 3, None])
def test_a_text_that_could_garble_a_terminal_is_refused(text):
    with pytest.raises(TableError, match="printable"):
        check_text(text, "built_with.driver")


@pytest.mark.parametrize(
    ("value", "got"),
    [(True, "bool True"), (None, "null"), ([1], "a list"), ({}, "an object"), ("x" * 999, "str 'xxx")],
)
def test_an_error_names_the_place_the_kind_and_a_short_value(value, got):
    with pytest.raises(TableError) as caught:
        expected("an int", value, "entries[3].config.hints.num_ctas")
    assert f"expected an int, got {got}" in str(caught.value)
    assert str(caught.value).endswith("(at entries[3].config.hints.num_ctas)")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("depth", [254, 255, 300, 1000, 1024, 1025, 5000])
@pytest.mark.parametrize("around", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_b2_what_is_nested_too_deeply_to_be_written_is_refused(depth: int, around: tuple[str, str]) -> None:
    text = around[0] * depth + "1" + around[1] * depth
    if depth == 254:
        loads(text)
        return
    with pytest.raises(TableError):
        loads(text)
