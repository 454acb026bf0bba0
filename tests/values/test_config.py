"""aot_tune.values.config: one candidate of a search space."""

from __future__ import annotations

import copy
import enum
import pickle

import cuda.tile as ct
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.errors import DeclarationError
from aot_tune.values.config import HINTS, Config

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.booleans() | st.integers(-5, 300) | FLOATS | st.sampled_from(["", "a", "row", "1"])
CONSTANTS = st.dictionaries(st.sampled_from(["tile_m", "tile_n", "group", "causal", "mode"]), VALUES)
SOME_HINTS = st.fixed_dictionaries({}, optional={name: st.sampled_from(of) for name, of in HINTS.items()})
CONFIGS = st.builds(lambda constants, hints: Config(constants=constants, hints=hints), CONSTANTS, SOME_HINTS)


@given(CONFIGS)
def test_equality_and_hash_ignore_the_order_of_writing(config):
    backwards = Config(
        constants=dict(reversed(config.constants.items())), hints=dict(reversed(config.hints.items()))
    )
    assert backwards == config
    assert hash(backwards) == hash(config)
    assert list(backwards.hints) == list(config.hints)


@given(CONFIGS, CONFIGS)
def test_configs_are_equal_exactly_when_they_print_the_same_values(one, other):
    same = sorted(map(repr, one.constants.items())) == sorted(map(repr, other.constants.items()))
    assert (one == other) == (same and dict(one.hints) == dict(other.hints))


@given(CONFIGS)
def test_a_config_survives_pickle_and_copy(config):
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_values_that_python_calls_equal_are_different_constants():
    values = (True, 1, 1.0, "1", False, 0, 0.0, -0.0, "", "0", "0.0")
    assert len({Config(constants={"flag": value}) for value in values}) == len(values)


def test_an_enum_is_kept_as_its_plain_value():
    class Layout(enum.IntEnum):
        ROW = 3

    constant = Config(constants={"layout": Layout.ROW})["layout"]
    assert (constant, type(constant)) == (3, int)


def test_a_config_is_frozen():
    config = Config(constants={"tile_m": 64}, hints={"occupancy": 1})
    with pytest.raises(AttributeError, match="frozen"):
        config.hints = {}
    with pytest.raises(TypeError):
        config.constants["tile_m"] = 32


def test_a_config_does_not_follow_the_dict_it_was_made_of():
    constants = {"tile_m": 64}
    config = Config(constants=constants)
    constants["tile_m"] = 32
    assert config["tile_m"] == 64


@pytest.mark.parametrize(
    ("hints", "told"),
    [
        ({"occupancy": 0}, "cuTile takes 1 to 32"),
        ({"occupancy": 33}, "1 to 32"),
        ({"occupancy": True}, "True"),
        ({"occupancy": 2.0}, "2.0"),
        ({"num_ctas": 3}, "1, 2, 4, 8, 16"),
        ({"opt_level": 4}, "0, 1, 2, 3"),
        ({"warps": 4}, "num_ctas occupancy num_worker_warps opt_level"),
    ],
)
def test_a_hint_that_cutile_would_refuse_is_refused_with_those_it_takes(hints, told):
    with pytest.raises(DeclarationError, match=told):
        Config(hints=hints)


@pytest.mark.parametrize("value", [None, [64], (1, 2), 1j, b"x", float("nan"), float("inf")])
def test_a_constant_that_no_document_can_hold_is_refused(value):
    with pytest.raises(DeclarationError, match="constant tile_m is"):
        Config(constants={"tile_m": value})


def test_constants_take_the_order_of_the_kernels_parameters():
    config = Config(constants={"tile_n": 1, "tile_m": 2}).with_constant_order(("tile_m", "tile_n"))
    assert list(config.constants) == ["tile_m", "tile_n"]
    assert str(config) == "tile_m=2 tile_n=1"


def test_a_hint_by_target_is_kept_for_the_declaration_to_resolve():
    by_target = ct.ByTarget(sm_100=2, default=1)
    config = Config(constants={"tile": 16}, hints={"num_ctas": by_target, "occupancy": 2})
    assert config.by_target
    assert config.hints["num_ctas"] == by_target
    assert str(config) == "tile=16 num_ctas=ByTarget(sm_100=2, default=1) occupancy=2"
    same = Config(
        constants={"tile": 16}, hints={"occupancy": 2, "num_ctas": ct.ByTarget(sm_100=2, default=1)}
    )
    assert {config, same} == {config}
    assert config != Config(constants={"tile": 16}, hints={"num_ctas": 1, "occupancy": 2})
    assert not Config(hints={"num_ctas": 1}).by_target
