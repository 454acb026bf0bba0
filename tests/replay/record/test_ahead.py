"""Configs compiled, and launched in a child process, before the library's process runs them.

The compiling children are real; what launches is scripted, but for the tests on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch

from aot_tune.declare.fingerprint.hashing import kernel_hash
from aot_tune.errors import NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer import places, searches
from aot_tune.replay.answer.install import install, uninstall
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.document import parse
from aot_tune.replay.record import ahead as module
from aot_tune.replay.record.ahead import Ahead
from aot_tune.replay.record.recorder import Recorder
from aot_tune.replay.spelling import spelled, text_of
from tests.support.driver import Driver, FakeTensor
from tests.support.samples import SM90
from tests.support.tuned_once import SPACE, hints_of, scale_kernel, tuned

pytestmark = pytest.mark.process

Start = Callable[[str], Ahead]
X, OUT = torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)
ALL = range(len(SPACE))
LARGEST = [at for at in ALL if SPACE[at].TILE == 64]


@pytest.fixture
def start(driver: Driver, tmp_path: Path) -> Iterator[Start]:
    made: list[Ahead] = []

    def started(launcher: str) -> Ahead:
        named = f"tests.support.children.launchers:{launcher}"
        made.append(Ahead(0, tmp_path / "cubins", launcher=named))
        return made[-1]

    yield started
    for one in made:
        one.close()


def call(**changes: Any) -> SearchCall:
    values: dict[str, Any] = {
        "space": SPACE,
        "stream": 0,
        "grid_fn": lambda config: (-(-64 // config.TILE), 1, 1),
        "kernel": scale_kernel,
        "args_fn": lambda config: (X, OUT, 64, 2.0, config.TILE),
        "hints_fn": hints_of,
        "options": {},
    }
    return SearchCall(**{**values, **changes})


def tried(ahead: Ahead, places: Any = ALL, **changes: Any) -> dict[int, module.Tried]:
    digest, _ = kernel_hash(scale_kernel)
    return ahead.tried(call(**changes), scale_kernel, digest, SM90, places)


def killed(found: dict[int, module.Tried]) -> dict[int, str]:
    return {at: one.passed_over for at, one in found.items() if one.passed_over}


def test_a_config_that_ends_the_child_is_told_and_the_others_have_cubins(start: Start) -> None:
    found = tried(start("Launcher"))
    assert sorted(found) == list(ALL)
    said = "it ended the process that tried it first: CUDA error: an illegal memory access was encountered"
    assert killed(found) == dict.fromkeys(LARGEST, said)
    for one in found.values():
        assert one.cubin.symbol.encode() + b"\0" in one.cubin.code


def test_a_config_that_hangs_is_killed_after_a_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH_SECONDS", 0.5)
    found = tried(start("Hangs"), places=[0, LARGEST[0]])
    said = "it had not ended after 0.5 s in a process that tried it first"
    assert killed(found) == {LARGEST[0]: said}


@pytest.mark.parametrize("launcher", ["Refuses", "Interrupted"])
def test_a_refusal_or_interruption_of_the_child_says_nothing_of_the_config(
    launcher: str, start: Start
) -> None:
    found = tried(start(launcher), places=[0, LARGEST[0]])
    assert sorted(found) == [0, LARGEST[0]]
    assert killed(found) == {}


def test_what_was_compiled_before_is_not_compiled_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, submitted = start("Refuses"), []
    digest, _ = kernel_hash(scale_kernel)
    tiles = {16: 16, 32: 48, 64: 16}  # 48 does not compile
    wrong = call(args_fn=lambda config: (X, OUT, 64, 2.0, tiles[config.TILE]))
    ahead.compile(wrong, scale_kernel, digest, SM90, ALL)
    monkeypatch.setattr(module.CompilePool, "submit", lambda self, job: submitted.append(job))
    for _ in range(2):
        found = ahead.tried(wrong, scale_kernel, digest, SM90, ALL)
        assert sorted(found) == [at for at in ALL if SPACE[at].TILE != 32]
    assert submitted == []


def test_a_config_that_does_not_compile_is_left_to_the_search(start: Start) -> None:
    tiles = {16: 16, 32: 48, 64: 16}  # no power of two
    found = tried(start("Refuses"), args_fn=lambda config: (X, OUT, 64, 2.0, tiles[config.TILE]))
    assert sorted(found) == [at for at in ALL if SPACE[at].TILE != 32]


def test_a_config_that_compiles_longer_than_the_library_allows_is_passed_over(start: Start) -> None:
    with ct.compiler_timeout(0.01):
        found = tried(start("Refuses"), places=[0])
    assert killed(found) == {0: "it does not compile within 0.01 s"}
    assert found[0].cubin is None


def test_other_code_elsewhere_and_a_child_that_does_not_start_are_told(start: Start) -> None:
    with pytest.raises(
        NotRecordableError, match=r"another process that imports .* gets other code of scale_kernel"
    ):
        tried(start("OtherCode"), places=[0])
    with pytest.raises(NotRecordableError, match="no CUDA-capable device is detected"):
        tried(start("NoGpu"), places=[0])


def test_a_kernel_that_nobody_can_import_is_told(start: Start) -> None:
    @ct.kernel
    def local_kernel(x: Any) -> None:
        ct.store(x, (0,), ct.zeros((16,), x.dtype))

    with pytest.raises(NotRecordableError, match=r"no other process can import .*local_kernel"):
        start("Launcher").tried(call(kernel=local_kernel), local_kernel, "", SM90, [0])


def test_recording_passes_over_it_and_launches_the_others_from_their_cubins(
    start: Start, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in driver's tensors are no tensors of torch; the scripted child reads the last argument alone.
    monkeypatch.setattr(module, "described", lambda args, contents: [{"value": args[-1]}])
    driver.elapsed_ms = lambda symbol: 0.01 if "_I64" in symbol else 0.05  # the fastest must not win
    asked = []
    own = cutile._own_compile()
    monkeypatch.setattr(cutile, "_own_compile", lambda: lambda *args: asked.append(args) or own(*args))
    recorder = Recorder(
        out=tmp_path / "tables",
        journals=tmp_path / "journals",
        ahead=lambda index, cubins: start("Launcher"),
    )
    install(tables=tmp_path / "tables")
    places.record_with(recorder)
    try:
        result = tuned(FakeTensor((64,), torch.float16), FakeTensor((64,), torch.float16))
    finally:
        recorder.end()
        places.record_with(None)
        uninstall()
        searches.forget()
    assert asked == []
    assert result.best.config.TILE != 64
    assert [one[0] for one in result.failures] == [SPACE[at] for at in LARGEST]
    assert not any("_I64" in launch.symbol for launch in driver.launches)
    (path,) = (tmp_path / "tables" / "sm90").glob("*.json")
    (entry,) = parse(path.read_bytes()).entries
    assert entry.text == text_of(spelled(result.best.config))
    journal = next((tmp_path / "journals" / "sm90").glob("*.jsonl")).read_text()
    assert journal.count("it ended the process that tried it first") == len(LARGEST)
