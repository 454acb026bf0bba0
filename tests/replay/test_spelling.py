"""Configs of every form that libraries use, as text and told apart."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
from collections import OrderedDict
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import cuda.tile as ct
import pytest
import torch

from aot_tune.errors import UnspelledError
from aot_tune.replay.spelling import space_hash, spelled, text_of, texts_of


@dataclasses.dataclass(frozen=True)
class AsDataclass:
    TILE_M: int
    num_ctas: int = 1


class AsTuple(NamedTuple):
    TILE_M: int
    num_ctas: int = 1


class AsPlainClass:
    def __init__(self, tile_m: int) -> None:
        self.TILE_M = tile_m


class WithSlot(AsPlainClass):
    __slots__ = ("num_ctas",)


class WithSlots:
    __slots__ = ("__dict__", "num_ctas")


class AsNumber(int):
    """Holds its number outside its `__dict__`."""


class Kind(enum.Enum):
    FAST = 1


def test_each_form_is_spelled_with_its_type() -> None:
    here = "tests.replay.test_spelling"
    assert spelled(SimpleNamespace(b=1, a=None)) == {"SimpleNamespace": {"a": None, "b": 1}}
    assert spelled({"b": 1, "a": [1, 2.5]}) == {"dict": {"a": [1, 2.5], "b": 1}}
    assert spelled(AsDataclass(64)) == {f"{here}.AsDataclass": {"TILE_M": 64, "num_ctas": 1}}
    assert spelled(AsTuple(64)) == {f"{here}.AsTuple": {"TILE_M": 64, "num_ctas": 1}}
    assert spelled(AsPlainClass(64)) == {f"{here}.AsPlainClass": {"TILE_M": 64}}
    assert spelled(MappingProxyType({"b": 1, "a": 2})) == {"builtins.mappingproxy": {"a": 2, "b": 1}}
    assert spelled(OrderedDict(b=1, a=2)) == {"collections.OrderedDict": {"a": 2, "b": 1}}
    assert spelled((1, "x", True)) == {"tuple": [1, "x", True]}
    assert spelled(Kind.FAST) == {f"{here}.Kind": "FAST"}
    assert spelled({"hints": ct.ByTarget(sm_100=2, default=1)}) == {
        "dict": {"hints": {"cuda.tile._by_target.ByTarget": "ByTarget(sm_100=2, default=1)"}}
    }
    assert spelled(torch.float16) == {"torch.dtype": "torch.float16"}


def test_values_that_python_takes_for_equal_have_texts_of_their_own() -> None:
    values: list[Any] = [
        1,
        1.0,
        True,
        "1",
        (1,),
        [1],
        {"1": 1},
        SimpleNamespace(x=1),
        {"x": 1},
        None,
        0,
        -0.0,
        0.0,
    ]
    texts = [text_of(spelled(value)) for value in values]
    assert len(set(texts)) == len(values)


def test_the_order_of_names_does_not_count_and_that_of_configs_does() -> None:
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert text_of(spelled(one)) == text_of(spelled(other))
    assert space_hash(texts_of([1, 2]), {}) != space_hash(texts_of([2, 1]), {})
    assert space_hash(texts_of(["1,2"]), {}) != space_hash(texts_of(["1", "2"]), {})
    assert space_hash(texts_of([1]), {"num_ctas": 1}) != space_hash(texts_of([1]), {"num_ctas": 2})


def test_hints_by_config_count_where_neither_the_kernel_nor_the_config_has_them() -> None:
    own, texts = {"opt_level": 3}, texts_of([SimpleNamespace(TILE=16, occupancy=2), 32])
    plain = space_hash(texts, own)
    of_the_field = {"opt_level": 3, "occupancy": 2}
    assert space_hash(texts, own, [of_the_field, own]) == space_hash(texts, own, [own, None]) == plain
    further: list[tuple[dict[str, int] | None, dict[str, int]]] = [
        (of_the_field, of_the_field),
        ({"opt_level": 3, "occupancy": 4}, own),
        ({"occupancy": 2}, own),
        (None, {"opt_level": 3, "num_ctas": 2}),
        (own, {"opt_level": 3, "num_ctas": 2, "occupancy": 1}),
    ]
    assert len({plain, *(space_hash(texts, own, launched) for launched in further)}) == 6


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "a builtins.object cannot be spelled; use a SimpleNamespace"),
        ({1: 2}, "keys that are not texts"),
        (math.nan, "nan is not a finite number"),
        (2**63, "more than 64 bits"),
        ("x" * 9000, "characters, more than"),
        (torch.zeros(40).clone, "cannot be spelled"),
        (lambda: None, "a builtins.function cannot be spelled"),
        (type("Made", (), {"TILE_M": 64})(), "test_spelling.Made cannot be spelled"),  # its class holds it
        (AsPlainClass, "a builtins.type cannot be spelled"),
        (WithSlot(1), "test_spelling.WithSlot cannot be spelled"),
        (WithSlots(), "test_spelling.WithSlots cannot be spelled"),
        (AsNumber(1), "test_spelling.AsNumber cannot be spelled"),
        (threading.local(), "_thread._local cannot be spelled"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(value: object, said: str) -> None:
    with pytest.raises(UnspelledError, match="config 1 of 2: .*" + said.replace("(", "\\(")):
        texts_of([0, value])


def test_endless_nesting_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnspelledError, match="nested more than 8 deep"):
        spelled(endless)
