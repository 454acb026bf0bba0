"""Messages between processes: what is sent arrives, and anything else meets one error alone."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.measure.worker.backend import Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.tuner.process import codec
from aot_tune.tuner.process.codec import MOST_BYTES, MessageError, decode, encode, message
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

CONFIG = Config(
    constants={"tile": 64, "fast": True, "scale": 1.0, "mode": "a\ud800é"}, hints={"occupancy": 2}
)
TIME = Measurement(config=CONFIG, mean_us=0.1 + 0.2, error_margin_us=1e-320, num_samples=5, disturbed="hot")


@message
@dataclass(frozen=True, kw_only=True)
class Sample:
    """A message of each sort of field."""

    number: int = 1
    share: float = 0.5
    on: bool = False
    word: Literal["a", "b"] = "a"
    names: tuple[str, ...] | None = None
    where: Path | None = None


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -1.5, "", "x" * 1000, [], [1, [2.0, None]], {}, {"a": {"b": []}}, Path("/a b/\udcff"),
        Arch(9, 0), CONFIG, Problem({"M": 16, "dtype": "bfloat16", "causal": True}),
        Config(constants={"tile": 64}, kernel="other"),
        Trial(config=CONFIG, cubin=Path("x.cubin"), launches=200), Trial(config=CONFIG),
        Running(config=CONFIG),
        Done(outcome=TIME, verify_s=0.25), Done(outcome=None),
        Done(outcome=Failure(config=CONFIG, stage="verify", message="nan")),
        Poisoned(config=CONFIG, stage="fault", message="an illegal access"),
        GpuState(sm_clock_mhz=1980, reasons=("power cap",), clocks_locked=False), GpuState(),
        Device.reference(Arch(9, 0)),
        CompileJob(key="k", module="m", name="n", signature="s", hints={"occupancy": 1}, arch=Arch(10, 0)),
        Sample(names=("a", "b"), where=Path("x")),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_sent_arrives(value: object) -> None:
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_tuple_arrives_as_a_list() -> None:
    assert decode(encode((1, (2, 3)))) == [1, [2, 3]]


def test_a_number_keeps_its_type_and_its_bits() -> None:
    assert [type(part) for part in decode(encode([1, 1.0, True]))] == [int, float, bool]
    arrived = decode(encode([math.inf, -math.inf, 0.1, 5e-324]))
    assert arrived == [math.inf, -math.inf, 0.1, 5e-324]
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    "value", [object(), b"bytes", {1: 2}, {"is": "Config"}, [lambda: None], {"a": {1, 2}}]
)
def test_what_cannot_be_sent_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(MessageError, match="cannot be sent"):
        encode(value)


def test_a_message_too_large_is_refused_on_both_sides() -> None:
    with pytest.raises(MessageError, match="can be sent"):
        encode("x" * MOST_BYTES)
    with pytest.raises(MessageError, match="are read"):
        decode(b"0" * (MOST_BYTES + 1))


SAMPLE = {
    "is": "Sample", "number": 1, "share": 0.5, "on": False, "word": "a", "names": None, "where": None,
}  # fmt: skip


def test_a_whole_number_serves_as_a_float() -> None:
    assert decode(json.dumps(SAMPLE | {"share": 1}).encode()) == Sample(share=1)


@pytest.mark.parametrize(
    "change",
    [
        {"number": True}, {"number": 1.0}, {"number": "1"}, {"number": None}, {"share": True}, {"share": "x"},
        {"on": 0}, {"word": "c"}, {"word": ["a"]}, {"names": "ab"}, {"names": [1]}, {"where": "x"},
        {"more": 1}, {"where": {"is": "Path", "path": 1}}, {"is": "NoSuch"}, {"is": ["Sample"]},
        {"is": "Config"},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_of_another_type_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="no message"):
        decode(json.dumps(SAMPLE | change).encode())


def test_a_field_that_lacks_is_refused() -> None:
    with pytest.raises(MessageError, match="Sample with the fields"):
        decode(json.dumps({name: part for name, part in SAMPLE.items() if name != "on"}).encode())


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "\xff", "[" * 100_000, "1" * 5000, '{"is": "Arch", "arch": "sm12345"}', "[1] 2",
        '{"is": "Config", "constants": [["a", 1e999]], "hints": [], "kernel": null}',
        '{"is": "Config", "constants": [], "hints": [["occupancy", 99]], "kernel": null}',
        '{"is": "Config", "constants": [["a", [1]]], "hints": [], "kernel": null}',
        '{"is": "Config", "constants": {"a": 1}, "hints": [], "kernel": null}',
        '{"is": "Config", "constants": [], "hints": [], "kernel": 1}',
        '{"is": "Problem", "values": [["M", 1.5]]}',
        '{"is": "Problem", "values": [["M"]]}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_message_meets_one_error(text: str) -> None:
    with pytest.raises(MessageError):
        decode(text.encode("latin-1"))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([*codec._messages, "Path", "Arch", "Config", "Problem", "sm90"]),
    lambda part: st.lists(part, max_size=4)
    | st.dictionaries(
        st.sampled_from(["is", "config", "outcome", "cubin", "constants", "hints", "values", "path", "arch"]),
        part,
        max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@given(data=st.binary(max_size=200) | PLAIN.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_meet_that_error(data: bytes) -> None:
    try:
        value = decode(data)
    except MessageError:
        return
    encode(value)


@given(data=st.data())
def test_a_changed_message_is_a_message_or_meets_that_error(data: st.DataObject) -> None:
    whole = bytearray(encode([Trial(config=CONFIG, cubin=Path("x")), Done(outcome=TIME), GpuState()]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        decode(bytes(whole))
