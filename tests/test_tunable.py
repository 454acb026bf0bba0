"""What keeps a launch is pickled and copied: a declaration by its place, its methods with it."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import aot_tune.kernels
from tests.support.operators import HOSTS
from tests.support.samples import scale


class Model(torch.nn.Module):
    """What a model would keep: functions, declarations and their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = [getattr(aot_tune.kernels, name) for name in HOSTS]
        for tunable in (*aot_tune.kernels.TUNABLES, scale):
            self.kept += [tunable, tunable.launch, tunable.config_for]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_functions_declarations_and_launches_are_pickled_by_their_names(protocol: int) -> None:
    model = Model()
    twin = pickle.loads(pickle.dumps(model, protocol))
    assert twin.kept == model.kept
    assert twin.kept[-3] is scale
    assert len(pickle.dumps(scale.launch, protocol)) < 300


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_declaration_is_the_declaration_also_where_nothing_else_finds_it(duplicate: Any) -> None:
    alone = dataclasses.replace(scale)
    assert duplicate(alone) is alone
    assert duplicate([alone.launch]) == [alone.launch]
    assert duplicate(Model()).kept == Model().kept


def test_a_declaration_that_no_module_holds_by_its_name_is_not_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = dataclasses.replace(scale)
    with pytest.raises(pickle.PicklingError, match="scale is found in no module by its name; pickle"):
        pickle.dumps(alone)
    monkeypatch.setattr("tests.support.samples.FIRST", alone, raising=False)
    monkeypatch.setattr("tests.support.samples.LATER", [dataclasses.replace(scale)], raising=False)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(alone.launch)


def _check(model: Model, saved: Path) -> None:
    own = Model().kept
    assert model.kept == own
    assert torch.load(saved, weights_only=False).kept == own


@pytest.mark.process
def test_a_spawned_process_and_a_saved_model_have_their_own(tmp_path: Path) -> None:
    model, saved = Model(), tmp_path / "model.pt"
    torch.save(model, saved)
    child = multiprocessing.get_context("spawn").Process(target=_check, args=(model, saved))
    child.start()
    child.join(120)
    assert child.exitcode == 0
