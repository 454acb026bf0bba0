"""Tasks on several GPUs, each scripted: what is called, what a later run goes on with, what is merged."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aot_tune import environment
from aot_tune.bench.children import library
from aot_tune.bench.children.operations import OPERATIONS, Call, Operation
from aot_tune.bench.libraries import __main__ as command
from aot_tune.bench.libraries import runs
from aot_tune.bench.libraries.runs import Run, Task, joined, tasks
from aot_tune.bench.libraries.sites import HELD_OUT, MODELS, SITES, label, shapes_of
from aot_tune.errors import TableError
from aot_tune.nvidia.nvml import Gpu
from aot_tune.replay.files import read_recorded
from aot_tune.replay.table import Library
from tests.support.children.library_on_the_stand_in import SMALL
from tests.support.recorded_tables import TABLE, entry, problem, with_entries, write

MODEL = "deepseek-v3-tp8"
WANTED = [Task("bmm", MODEL), Task("softmax", MODEL)]


class Scripted(Run):
    """Ends `most` calls of a task in each process, and writes a table for each task."""

    def __init__(self, out: Path, most: int = 100, gpus: tuple[str, ...] = ("0", "1")) -> None:
        super().__init__(out, gpus, 60.0)
        self.most = most
        self.started: list[Task] = []
        self.both = threading.Barrier(len(gpus))

    def _one(self, task: Task, gpu: int) -> None:
        if task not in self.started:
            self.both.wait(30)  # both GPUs are busy
        self.started.append(task)
        left = [label(shape) for shape in shapes_of(*task)][len(self.ended(task)) :]
        with self._lines(task).open("a") as lines:
            lines.writelines(f"{name}\n" for name in left[: self.most])
        write(self._out / "work" / f"gpu{gpu}", with_entries(entry(problem=problem(1024 << gpu))))


def test_a_task_of_each_site_and_model_that_has_shapes() -> None:
    every = tasks(list(SITES), list(MODELS))
    assert Task("decode_mla", MODEL) in every
    assert Task("decode_paged", MODEL) not in every
    assert [task.model for task in every] == sorted((t.model for t in every), key=list(MODELS).index)


def test_gpus_share_tasks_and_their_tables_are_merged(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.record(WANTED)
    assert sorted(run.started) == WANTED
    assert [len(run.ended(task)) for task in WANTED] == [task.shapes for task in WANTED]
    (path,) = (tmp_path / "tables" / "sm90").iterdir()
    assert [one.problem for one in read_recorded(path).entries] == [problem(1024), problem(2048)]


def test_a_later_run_goes_on_and_a_task_that_ends_too_often_is_left(tmp_path: Path) -> None:
    first = Scripted(tmp_path, most=1)
    first.record(WANTED)
    assert len(first.started) == 2 * runs.MOST_STARTS
    assert [len(first.ended(task)) for task in WANTED] == [runs.MOST_STARTS] * 2
    second = Scripted(tmp_path)
    second.record(WANTED)
    assert sorted(second.started) == WANTED
    third = Scripted(tmp_path)
    third.record(WANTED)
    assert third.started == []


def test_a_shape_that_is_new_is_called_although_as_many_calls_ended(tmp_path: Path) -> None:
    task = Task("softmax", MODEL)
    run = Scripted(tmp_path, gpus=("0",))
    run._lines(task).write_text("".join(f"{rows}x7\n" for rows in range(task.shapes)))
    assert run.ended(task) == []
    run.record([task])
    assert run.started == [task]
    assert len(run.ended(task)) == task.shapes


def test_several_processes_of_a_gpu_record_into_its_folder_on_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str, set[int]]] = []
    all_four = threading.Barrier(4)

    class Ended:
        returncode = 0

        def __init__(self, command: list[str], *, env: dict[str, str], preexec_fn: Any, **_: object) -> None:
            mine: list[set[int]] = []
            with lock:
                monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: mine.append(cores))
                preexec_fn()
            started.append(
                (env["CUDA_VISIBLE_DEVICES"], Path(command[command.index("--out") + 1]).name, *mine)
            )
            all_four.wait(30)

        def wait(self, seconds: float) -> None:
            pass

    lock = threading.Lock()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(runs.subprocess, "Popen", Ended)
    monkeypatch.setattr(runs, "MOST_STARTS", 1)
    models = list(MODELS)[:4]
    Run(tmp_path, ["A", "B"], 60.0, processes=2).record([Task("matmul", model) for model in models])
    assert sorted((gpu, folder) for gpu, folder, _ in started) == [("A", "gpu0")] * 2 + [("B", "gpu1")] * 2
    assert sorted(core for *_, cores in started for core in cores) == list(range(8))


def test_nothing_begins_after_the_limit(tmp_path: Path) -> None:
    run = Scripted(tmp_path, gpus=("0",))
    run._deadline = 0.0
    run.record(WANTED)
    assert run.started == []


def test_a_model_that_is_held_out_is_replayed_with_the_tables_and_a_miss_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], str | None]] = []

    class Ended:
        returncode = 0

        def __init__(self, command: list[str], *, env: dict[str, str], **_: object) -> None:
            started.append((command, env.get(environment.ON_MISS)))

        def wait(self, seconds: float) -> None:
            pass

    monkeypatch.setattr(runs.subprocess, "Popen", Ended)
    monkeypatch.setattr(runs, "MOST_STARTS", 1)
    Run(tmp_path, ["0"], 60.0).record([Task("softmax", MODEL), Task("softmax", "kimi-k2-tp8")])
    (recorded, unset), (replayed, on_miss) = started
    assert (recorded[3:6], unset) == (["record", "--package", "tilegym"], None)
    assert (replayed[3:6], on_miss) == (["run", "--tables", str(tmp_path / "tables")], "error")
    assert "kimi-k2-tp8" in HELD_OUT


def test_a_model_that_is_held_out_is_called_anew_each_time(tmp_path: Path) -> None:
    wanted = [Task("softmax", "kimi-k2-tp8")]
    for _ in range(2):
        run = Scripted(tmp_path, gpus=("0",))
        run.record(wanted)
        assert run.started == wanted


def test_a_call_that_breaks_the_cuda_context_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[str] = []

    def make(library: object, *shape: int) -> Call:
        return lambda: broken.extend(["an illegal memory access"] * (shape == (2, 8)))

    def synchronize() -> None:
        if broken:
            raise RuntimeError(broken[0])

    monkeypatch.setitem(OPERATIONS, "softmax", Operation("json", make))
    monkeypatch.setattr(library, "shapes_of", lambda site, model: ((1, 8), (2, 8), (4, 8)))
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    words = ["softmax", MODEL, str(tmp_path / "lines")]
    with pytest.raises(RuntimeError, match="illegal"):
        library.main(words)
    assert (tmp_path / "lines").read_text().splitlines() == ["1x8", "failed\t2x8"]
    broken.clear()
    library.main(words)
    assert (tmp_path / "lines").read_text().splitlines() == ["1x8", "failed\t2x8", "4x8"]


def test_a_folder_of_another_gpu_s_tables_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "work" / "gpu0", TABLE)
    gpu = Gpu(index=0, name="NVIDIA H100", arch=TABLE.arch, uuid="GPU-0")
    monkeypatch.setattr(command, "visible_gpus", lambda: (gpu,))
    monkeypatch.setattr(command, "driver_version", lambda: TABLE.built_with.driver)
    assert command.main(["--out", str(tmp_path)]) == 2
    assert "was recorded on NVIDIA H200 with driver 580.159.04" in capsys.readouterr().err


def test_a_folder_of_another_release_s_tables_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "work" / "gpu0", TABLE)
    gpu = Gpu(index=0, name=TABLE.built_with.device_name, arch=TABLE.arch, uuid="GPU-0")
    monkeypatch.setattr(command, "visible_gpus", lambda: (gpu,))
    monkeypatch.setattr(command, "driver_version", lambda: TABLE.built_with.driver)
    library = TABLE.library
    folder = tmp_path / f"{library.name}-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library.name}\nVersion: 9.9\n")
    monkeypatch.setattr(command.fetched, "FOLDER", tmp_path)
    assert command.main(["--out", str(tmp_path)]) == 2
    assert f"was recorded with {library.name} {library.version}, not 9.9" in capsys.readouterr().err


def test_the_command_counts_calls_by_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu(index=0, name="NVIDIA H200", arch=TABLE.arch, uuid="GPU-0")
    monkeypatch.setattr(command, "visible_gpus", lambda: (gpu,))
    monkeypatch.setattr(command, "driver_version", lambda: TABLE.built_with.driver)
    monkeypatch.setattr(command, "Run", lambda out, gpus, limit_s, processes: Scripted(out, gpus=tuple(gpus)))
    words = ["--out", str(tmp_path), "--site", "softmax", "--site", "rope", "--model", MODEL]
    assert command.main(words) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["softmax", "9", "9", "0"]
    lines = tmp_path / "work" / f"softmax.{MODEL}.txt"
    lines.write_text(lines.read_text().replace("256x256\n", "failed\t256x256\n"))
    assert command.main(words) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == ["softmax", "9", "9", "1"]


def test_tables_of_one_kernel_are_joined_where_conditions_are_the_same() -> None:
    other = dataclasses.replace(with_entries(entry(problem=problem(64)), entry(mean_us=1.0)), launched=())
    together = joined(TABLE, other)
    assert together.entries == (*TABLE.entries, other.entries[0])  # the first's entry of a problem stays
    with pytest.raises(TableError, match="different conditions"):
        joined(TABLE, dataclasses.replace(other, library=Library(name="mylib", version="1.3")))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not (runs.fetched.FOLDER / "flashinfer").is_dir(), reason="FlashInfer is not fetched")
def test_flashinfer_s_prefill_and_decode_are_recorded_by_two_processes_of_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stand-in driver, compiling for real."""
    monkeypatch.setattr(runs, "shapes_of", lambda site, model: SMALL[site])
    wanted = [Task("prefill_ragged", "llama-3.1-8b"), Task("decode_mla", MODEL)]
    run = Run(tmp_path, ("0",), 900.0, processes=2, child="tests.support.children.library_on_the_stand_in")
    run.record(wanted)
    logs = "".join(path.read_text() for path in (tmp_path / "work").glob("*.log"))
    assert [run.ended(task) for task in wanted] == [["1x128x8x2x64"], ["2x16x2x16", "1x16x2x16"]], logs
    tables = {path.name: read_recorded(path) for path in (tmp_path / "tables" / "sm90").iterdir()}
    entries = {name.split(".")[-2]: len(table.entries) for name, table in tables.items()}
    assert entries["_prefill_attention_ragged_lpt_kernel"] == 1
    assert entries["_decode_mla_kv_paged_kernel"] == 2
    assert {table.library.version for table in tables.values()} == {runs.fetched.VERSION}
    assert not list((tmp_path / "work").glob("journals/*/cubins"))


def test_the_command_names_what_is_wrong_and_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "visible_gpus", lambda: None)
    assert command.main(["--site", "matmull"]) == 2
    assert "no site is called matmull; there is mm_bf16" in capsys.readouterr().err
    assert command.main(["--site", "matmul"]) == 1
    assert "no GPU here" in capsys.readouterr().err
