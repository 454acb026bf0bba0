"""What makes a process one of several."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from aot_tune import environment
from aot_tune.errors import UsageError
from aot_tune.serve.rank import is_rank, rank_in_words


@pytest.mark.parametrize("name", [*environment.LAUNCHERS, environment.RANKED])
@pytest.mark.parametrize(
    ("value", "ranked"), [("2", True), (" 8 ", True), ("1", False), ("0", False), ("", False)]
)
def test_b10_a_world_size_above_one_makes_a_rank(
    name: str, value: str, ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: told by the environment."""
    monkeypatch.setenv(name, value)
    assert is_rank() is ranked


@pytest.mark.parametrize("name", environment.LAUNCHERS)
def test_b20_our_variable_decides_alone_and_a_sentence_says_which_did(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    assert str(rank_in_words()).startswith(
        f"this process is a rank by {name}=2, and searches nothing: set AOT"
    )
    monkeypatch.setenv(environment.RANKED, "1")
    assert (is_rank(), rank_in_words()) == (False, None)
    monkeypatch.setitem(sys.modules, "torch.distributed", _world(2))
    assert not is_rank()
    monkeypatch.setenv(environment.RANKED, "4")
    monkeypatch.setenv(name, "1")
    assert is_rank()
    monkeypatch.delenv(environment.RANKED)
    assert "a rank by a torch.distributed world of 2, and" in str(rank_in_words())


def _world(size: int, initialised: bool = True) -> Any:
    return types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: initialised, get_world_size=lambda: size
    )


@pytest.mark.parametrize("value", ["x", "-1", "²"])
def test_b10_a_world_size_that_is_no_number_is_refused_where_the_variable_is_ours(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: told by the environment."""
    monkeypatch.setenv("WORLD_SIZE", value)
    assert is_rank() is False
    monkeypatch.setenv(environment.RANKED, value)
    with pytest.raises(UsageError, match=f"AOT_TUNE_RANKED='{value}': write the world size, a whole number"):
        is_rank()


@pytest.mark.parametrize(
    ("initialised", "size", "ranked"), [(True, 2, True), (True, 1, False), (False, 2, False)]
)
def test_b10_torch_distributed_tells_once_it_is_initialised(
    initialised: bool, size: int, ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: told by torch."""
    monkeypatch.setitem(sys.modules, "torch.distributed", _world(size, initialised))
    assert is_rank() is ranked


def test_a_half_imported_torch_distributed_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", types.ModuleType("torch.distributed"))
    assert is_rank() is False


@pytest.mark.process
def test_asking_does_not_import_torch() -> None:
    code = "import sys; from aot_tune.serve.rank import is_rank; is_rank(); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
