"""aot_tune.cli.start.layout: code on one line where it fits, else with its last bracket open."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aot_tune.cli.start.layout import (
    WIDTH,
    Bracket,
    Text,
    call,
    flat,
    function,
    in_dict,
    in_tuple,
    laid_out,
    product,
)
from aot_tune.cli.start.new import begin


def test_what_fits_stays_on_one_line() -> None:
    code = call("f", "x", in_tuple(["1"]), in_dict([("a", "b")]))
    assert laid_out(code, 0) == flat(code) == 'f(x, (1,), {"a": b})'


def test_of_what_does_not_fit_the_last_bracket_is_opened() -> None:
    names = [f"name_{number}" for number in range(14)]
    lines = laid_out(function(["x"], in_tuple(names)), 0).splitlines()
    assert lines == ["lambda x: (", *(f"    {name}," for name in names), ")"]


def test_factors_texts_and_comprehensions_have_lines_of_their_own() -> None:
    factors = [f"factor_{number}" * 3 for number in range(4)]
    assert laid_out(in_tuple(["1", product(factors)]), 0).splitlines()[2:6] == [
        f"    {factors[0]}", *(f"    * {one}" for one in factors[1:3]), f"    * {factors[3]},",
    ]  # fmt: skip
    broken = laid_out(call("f", Text("word " * 40), "x"), 0).splitlines()
    assert (
        "".join(line.strip().strip('"') for line in broken[1:-2]).rstrip(",").rstrip('"')
        == ("word " * 40).strip()
    )
    loop = Bracket("[", ("x" * 60, f"for x in {'y' * 60}"), "]", separator="")
    assert laid_out(loop, 0).splitlines() == ["[", f"    {'x' * 60}", f"    for x in {'y' * 60}", "]"]
    assert (product(["a"]), product([])) == ("a", "1")


@pytest.mark.process
@pytest.mark.parametrize("kernel", ["scale_rows", "persistent", "attention"])
def test_a_begun_module_is_laid_out_as_the_formatter_leaves_it(kernel: str) -> None:
    text = begin(f"tests.support.example_kernels:{kernel}_kernel").text
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDTH}", "-"],
        input=text, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert text == formatted
