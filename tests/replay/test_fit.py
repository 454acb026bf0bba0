"""The kernel of a recorded table, and whether the table is of it."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest

from aot_tune.errors import UsageError
from aot_tune.nvidia import cutile
from aot_tune.replay.fit import hash_now, kernel_of, misfit, recorded_code, why_local
from aot_tune.replay.table import Library
from tests.support import tuned_once
from tests.support.recorded_launches import MODULE, SM90, table
from tests.support.tuned_once import scale_kernel


def test_a_kernel_is_found_by_module_and_function() -> None:
    assert kernel_of(MODULE, "scale_kernel") is scale_kernel


def test_of_several_kernels_the_function_s_namesake_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: scale_kernel.replace_hints(occupancy=2) for name in ("aaa", "zzz")}
    for name, kernel in others.items():
        monkeypatch.setattr(tuned_once, name, kernel, raising=False)
    assert kernel_of(MODULE, "scale_kernel") is scale_kernel
    monkeypatch.delattr(tuned_once, "scale_kernel")
    assert kernel_of(MODULE, "scale_kernel") is others["aaa"]


def test_a_compiling_process_finds_the_kernel_without_its_decorators_hints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hinted = scale_kernel.replace_hints(num_ctas=2)
    monkeypatch.setattr(tuned_once, "scale_kernel", hinted)
    code = recorded_code(hinted)
    assert (code.name, code.module) == (f"{MODULE}.scale_kernel", MODULE)
    module, _, function = code.finder.partition(":")
    found = getattr(import_module(module), function)(code.module, code.name, None)
    assert cutile.default_hints(found) == {}
    assert cutile.python_function(found) is cutile.python_function(hinted)


def test_where_there_is_none_it_says_so() -> None:
    with pytest.raises(UsageError, match=f"no global of {MODULE} is a ct.kernel of the function tuned"):
        kernel_of(MODULE, "tuned")
    with pytest.raises(UsageError, match="there is no module 'not_there'"):
        kernel_of("not_there", "kernel")
    assert why_local(table(kernel="make.<locals>.kernel")) is not None


def test_a_table_fits_its_kernel_library_and_arch_alone() -> None:
    now = hash_now(scale_kernel)
    assert misfit(table(), scale_kernel, SM90, now) is None
    assert misfit(table(), scale_kernel, dataclasses.replace(SM90, major=10), now) == "it is for sm90"
    other = table(library=Library(name="pytest", version="0.1"))
    assert "recorded with pytest 0.1" in str(misfit(other, scale_kernel, SM90, now))
    assert "changed since it was recorded" in str(misfit(table(), scale_kernel, SM90, "0" * 16))
    assert "cannot be hashed" in str(misfit(table(), scale_kernel, SM90, ""))
