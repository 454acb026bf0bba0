"""Serving on a real GPU: captures, first launches from cubins, live searches, forks and threads."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot_tune import environment
from aot_tune.serve.runtime import runtime, with_tensors
from tests.support.samples import DEFAULT, scale
from tests.support.serving_children import answer, built, start

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("archives"))


@pytest.fixture
def run(archives: Path, tmp_path: Path) -> Run:
    places = iter(range(100))
    return lambda scenario, **variables: answer(
        start(archives, tmp_path / f"cache{next(places)}", scenario, **variables)
    )


def test_b9_hit_nearest_and_miss_are_captured_and_replay_right_and_what_is_not_loaded_is_refused(
    run: Run,
) -> None:
    """B9: with a search allowed, and no compiler; the refusal leaves the capture valid."""
    told = run("capture", **{environment.SEARCH_SECONDS: "100"})
    assert told["sources"] == ["own", "nearest", "far"]
    assert told["replays"] == [[True] * 3] * 2
    assert told["searched"] == []
    assert "aot_tune.prime(...)" in told["refused"]


def test_b9_a_miss_is_not_searched_while_another_thread_captures(run: Run) -> None:
    """B9: the other thread's graph stays whole; afterwards a miss is searched."""
    told = run("capture_elsewhere", **{environment.SEARCH_SECONDS: "100"})
    assert told["failures"] == []
    assert told["during"] == []
    assert len(told["after"]) == 1
    assert told["value"] == 2.0
    assert told["right"] == [True, True]


def test_first_launches_from_cubins_need_no_compiler(run: Run) -> None:
    """How long they take depends on the host: `aot-tune bench --serving` records it."""
    told = run("first_launches")
    print("ms:", told["ms"])
    assert all(told["right"])


def test_a_launch_that_names_its_config_asks_nothing_the_second_time(run: Run) -> None:
    told = run("given_config")
    assert told["right"]
    assert told["configs"] > 1
    assert told["asked"] == told["configs"]


def test_after_prime_the_first_launch_of_a_declared_shape_is_like_any(archives: Path, tmp_path: Path) -> None:
    # Five: what comes before cuTile takes 3 us, and moves by 0.4 us from process to process.
    told = [
        answer(start(archives, tmp_path, "after_prime", module="aot_tune.bench.children.serving"))
        for _ in range(5)
    ]
    assert [one["compiled"] for one in told] == [0] * 5
    for part in ("waited for", "the host's part", "before cuTile"):
        for name in ("rms_norm", "matmul", "rope"):
            ratios = [one[name][f"{part}: first / later"] for one in told]
            assert statistics.median(ratios) <= 1.1, (part, name, ratios)


def test_arrays_that_no_exact_cubin_fits_are_served_right_without_a_compiler(run: Run) -> None:
    told = run("odd_strides")
    assert told["right"]
    assert any("assumes nothing of strides" in one for one in told["told"])


def test_a_miss_over_prebuilt_cubins_takes_at_most_a_tenth_of_a_second(run: Run) -> None:
    told = run("live_search")
    assert told["sources"] == ["searched"] * 3
    assert all(told["right"])
    assert max(told["ms"]) <= 100.0


def test_b11_a_kernel_without_a_table_is_searched_in_a_child_and_its_winner_remembered(
    archives: Path, tmp_path: Path
) -> None:
    """B11: with a compiler, which the child needs."""
    told = [
        answer(start(archives, tmp_path, "untuned", **{environment.SEARCH_SECONDS: "100"})) for _ in range(2)
    ]
    assert [one["source"] for one in told] == ["searched", "cached"]
    assert all(one["right"] and one["searched"] == [] for one in told)


def test_b11_candidates_that_fault_hang_or_compute_wrong_results_do_the_server_no_harm(run: Run) -> None:
    """B11: the child dies or is killed, the default serves, and the bucket is not searched again."""
    told = run("broken", **{environment.SEARCH_SECONDS: "20"})
    assert told["right"] == [True, True]
    assert told["mode"] == 0
    assert told["seconds"][0] <= 25.0
    assert told["seconds"][1] <= 1.0


def test_children_forked_before_cuda_launch(run: Run) -> None:
    assert run("forked") == {"children": [0, 0, 0], "parent": True}


def test_many_threads_launch_and_resolve_at_once_one_of_them_fresh(run: Run) -> None:
    assert run("threads") == {"failures": [], "wrong": []}


def test_the_host_function_computes_right(run: Run) -> None:
    assert run("host_function")["off"] < 0.02


class InterfaceAlone:
    """An array that has no protocol but the older one, as numba's."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.filterwarnings("default")  # those of CuPy's import are not ours to mend
@pytest.mark.parametrize("wrapped", [lambda array: array, InterfaceAlone], ids=["dlpack", "interface"])
def test_cupy_s_arrays_are_launched_where_they_are(wrapped: Callable[[Any], Any]) -> None:
    cupy = pytest.importorskip("cupy")
    source = cupy.random.random((64, 1024), dtype=cupy.float32)
    for _ in range(2):  # the second is launched by the plan of the first
        target = cupy.zeros_like(source)
        scale.launch(wrapped(source), wrapped(target), config=DEFAULT)
        assert bool((target == source * 2).all())
    views = with_tensors((wrapped(source),), runtime())
    assert views[0].data_ptr() == source.data.ptr
