"""What the real backend asks of cuTile, without a GPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from aot_tune.tables.states import State
from aot_tune.tuner.measure.worker import gpu
from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.measure.worker.clock import EventRound
from aot_tune.tuner.measure.worker.gpu import WARM_LAUNCHES, GpuBackend
from aot_tune.values.config import Config


def test_the_cache_is_filled_by_reading_after_the_arguments_are_renewed_and_before_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    trial = Trial(config=Config(constants={"tile": 64}))
    backend: Any = GpuBackend.__new__(GpuBackend)
    case = SimpleNamespace(
        prepare=lambda: done.append("poisoned"), renew=lambda: done.append("renewed"), args=()
    )
    backend._cases = [case]
    backend._round = SimpleNamespace(flush=lambda: done.append("read"))
    backend._launches = Counter({trial.config: WARM_LAUNCHES})
    backend._stream = 0
    monkeypatch.setattr(backend, "_kernel", lambda trial: "kernel")
    monkeypatch.setattr(backend, "_arguments", lambda config, case: ("arguments",))

    def search(configs: Any, stream: int, grid: Any, kernel: Any, args: Any, **options: Any) -> Any:
        assert options["flush_l2"] is False, "what cuTile writes would go to memory while the kernel runs"
        for _ in range(2):
            assert args(configs[0]) == ("arguments",)
            done.append("launched")
        return SimpleNamespace(best=SimpleNamespace(mean_us=5.0, error_margin_us=0.1, num_samples=2))

    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", search)
    assert backend.time(trial).mean_us == 5.0
    assert done == ["poisoned", *["renewed", "read", "launched"] * 2]


@pytest.mark.parametrize("state", get_args(State))
def test_each_state_is_made_before_the_launch_that_is_timed(
    monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def query(self) -> bool:
            return False  # the GPU has not come to it: no row is queued again

        def elapsed_time(self, end: Event) -> float:
            return 0.005

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(gpu, "ct_launch", lambda stream, grid, kernel, args: done.append(f"launch {args[0]}"))
    timed = EventRound.__new__(EventRound)
    timed._fills = 1
    timed._buffer = SimpleNamespace(sum=lambda: done.append("read"), fill_=lambda _: done.append("written"))  # type: ignore[assignment]
    backend: Any = GpuBackend.__new__(GpuBackend)
    backend._cases = [
        SimpleNamespace(
            renew=lambda seed=seed: done.append(f"renewed {seed}"),
            prepare=lambda seed=seed: done.append(f"poisoned {seed}"),
            check=lambda seed=seed: done.append(f"compared {seed}"),
            args=(seed,),
        )
        for seed in (0, 1)
    ]
    backend._round, backend._stream = timed, 0
    monkeypatch.setattr(backend, "_kernel", lambda trial: "kernel")
    monkeypatch.setattr(backend, "_grid", lambda config: (1,))
    monkeypatch.setattr(backend, "_arguments", lambda config, case: case.args)
    assert backend.sample(Trial(config=Config(constants={"tile": 64})), state) == pytest.approx(5.0)
    last = ["event", "launch 0", "event", "waited"]
    if state == "tight":
        row = ["renewed 0", "launch 0", "renewed 1", "launch 1", "renewed 0"]
        assert done == ["read", *row, *last], "nothing between the launches but what renews their arguments"
    else:
        assert done == ["renewed 0", state, *last]
    done.clear()
    backend.prepare()
    assert done == ["poisoned 0", "poisoned 1"]
    assert backend.check() is None
    assert done[3:] == ["compared 0", *(["compared 1"] if state == "tight" else [])], "all that it wrote"
