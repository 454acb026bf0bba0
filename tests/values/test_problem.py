"""aot_tune.values.problem: sizes and classes of one call."""

from __future__ import annotations

import copy
import enum
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.errors import DeclarationError
from aot_tune.values.problem import Problem

PROBLEMS = st.dictionaries(
    st.sampled_from(["M", "N", "K", "dtype", "causal"]), st.integers() | st.text(max_size=5) | st.booleans()
).map(Problem)


@given(PROBLEMS)
def test_a_problem_is_a_key_that_survives_pickle_and_copy(problem):
    for twin in (pickle.loads(pickle.dumps(problem)), copy.deepcopy(problem), Problem(problem)):
        assert {problem: "found"}[twin] == "found"
        assert list(twin.items()) == list(problem.items())


@given(PROBLEMS)
def test_the_order_of_writing_does_not_make_another_problem(problem):
    backwards = Problem(dict(reversed(list(problem.items()))))
    assert backwards == problem
    assert hash(backwards) == hash(problem)


def test_a_size_is_read_as_item_and_as_attribute():
    problem = Problem({"dtype": "float16", "M": 3})
    assert problem["M"] == problem.M == problem.size("M") == 3
    with pytest.raises(AttributeError, match="this problem has no N; it has dtype M"):
        _ = problem.N


def test_a_torch_dtype_is_kept_by_its_name():
    assert Problem({"dtype": torch.bfloat16}) == Problem({"dtype": "bfloat16"})
    assert Problem({"dtype": torch.float8_e4m3fn})["dtype"] == "float8_e4m3fn"


def test_subclasses_of_int_and_str_are_kept_as_plain_values():
    class Size(enum.IntEnum):
        SMALL = 16

    class Kind(str, enum.Enum):
        CAUSAL = "causal"

    problem = Problem({"M": Size.SMALL, "kind": Kind.CAUSAL})
    assert [type(value) for value in problem.values()] == [int, str]
    assert str(problem) == "M=16 kind=causal"


@pytest.mark.parametrize("value", [1.5, None, (1, 2), [16], torch.zeros(1), object()])
def test_what_is_no_size_and_no_class_is_refused_by_its_name(value):
    with pytest.raises(DeclarationError, match=r"a problem's M is .* return an int size"):
        Problem({"M": value})


def test_a_problem_is_frozen():
    problem = Problem({"M": 1})
    with pytest.raises(AttributeError, match="frozen; use replaced"):
        problem.M = 2
    assert problem.replaced(M=2) == Problem({"M": 2})
    assert problem == Problem({"M": 1})
