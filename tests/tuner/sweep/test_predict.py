"""Tables predicted without a GPU: the real compiler, the model, and what is never touched."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.choose.points import Estimator, pick
from aot_tune.declare.declaration import Work
from aot_tune.declare.discovery import FoundKernel, find_tunables
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.errors import TuneError
from aot_tune.kernels import TUNABLES
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.sass import Loop
from aot_tune.tables import reader, store, writer
from aot_tune.tables.fit import entry_complaints
from aot_tune.tables.table import Table
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, CompileResult
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.plan import candidates
from aot_tune.tuner.plan.candidates import DeviceKernel, SweepPlan, plan
from aot_tune.tuner.plan.judged import FILE, NOT_JUDGED, Judgement
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.tuner.sweep.predict import Predicted, predict, predict_kernel, predicted_part, predicted_table
from aot_tune.tuner.sweep.progress import (
    CandidateFailed,
    Compiling,
    Event,
    Note,
    PlainProgress,
    Started,
    closing_table,
)
from aot_tune.tuner.sweep.report import FIRST_LOOK_CANDIDATES, SweepRequest, SweptKernel
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.judge_model import parsed
from tests.support import samples

SM100 = Arch.parse("sm100")
MATMUL = FoundKernel(module="aot_tune.kernels", tunable=matmul_tunable)
GOOD = Resources(registers=128, stack_bytes=0, shared_bytes=100_000, threads=256)


class Silent(PlainProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.failures: list[tuple[Config, str]] = []
        self.notes: list[str] = []

    def show(self, event: Event) -> None:
        match event:
            case Started():
                self.begun = event
            case Compiling():
                self.done = (event.done, event.total, event.failures)
            case CandidateFailed():
                self.failures.append((event.failure.config, event.failure.message))
            case Note():
                self.notes.append(event.text)


def bucket(m: int, n: int = 4096, k: int = 4096) -> Problem:
    return Problem({"dtype": "bfloat16", "M": m, "N": n, "K": k})


def made_up(planned: SweepPlan, **failed: str) -> dict[str, CompileResult]:
    """A result for each job, equally good, but failed where the config's words hold a name of `failed`."""
    results: dict[str, CompileResult] = {}
    for each in planned.problems:
        for config, job in each.jobs.items():
            message = next((failed[word] for word in failed if word in str(config).replace("=", "_")), None)
            results[job.key] = (
                Compiled(
                    key=job.key,
                    path=Path("x"),
                    code=job.key,
                    resources=GOOD,
                    loop=None,
                    seconds=1.0,
                    cached=False,
                )
                if message is None
                else CompileFailure(key=job.key, message=message, seconds=1.0)
            )
    return results


@functools.cache
def two_buckets() -> tuple[SweepPlan, Table]:
    planned = plan(MATMUL, SM100, [bucket(64), bucket(4096)])
    results = made_up(planned)
    return planned, predicted_table(planned, results, predict(planned, results, Silent()).sweep)


def test_a_predicted_table_has_the_same_shape_as_a_measured_one_and_says_what_it_is() -> None:
    _, table = two_buckets()
    assert reader.parse(writer.dump(table)).entries[0].bucket == table.entries[0].bucket
    assert {entry.evidence for entry in table.entries} == {"predicted"}
    assert table.built_with.device_name == "NVIDIA B200"
    assert table.built_with.driver == ""
    assert table.source_hash == source_hash(matmul_tunable)
    for entry in table.entries:
        inside = [problem.size("M") for problem in sizes_inside(matmul_tunable.axes, entry.bucket)]
        assert [point.size["M"] for point in entry.points] == [*inside, entry.bucket.size("M")]
        assert list(entry_complaints(table, matmul_tunable, entry, own=False)) == []


def test_an_entry_leaves_the_default_only_for_a_predicted_tenth() -> None:
    _, table = two_buckets()
    for entry in table.entries:
        default = matmul_tunable.default_config(SM100, entry.bucket)
        times = [us for us in entry.points[-1].us if us is not None]
        if entry.config == default:
            assert entry.mean_us == entry.default_us
            assert min(times) > entry.default_us / 1.1
        else:
            assert entry.mean_us <= entry.default_us / 1.1


def test_sizes_inside_a_bucket_keep_the_default_too_unless_a_tenth_is_promised() -> None:
    _, table = two_buckets()
    for entry in table.entries:
        for point in entry.points[:-1]:
            problem = entry.bucket.replaced(**point.size)
            default = matmul_tunable.default_config(SM100, problem)
            default_at = partial(matmul_tunable.default_config, SM100)
            estimator = Estimator(table, matmul_tunable.tiles, default_at)
            chosen = pick(entry, estimator, default, problem, lambda config: True)
            assert chosen is not None
            if chosen.config != default:
                us = dict(zip(table.portfolio, point.us[:-1], strict=True))[chosen.config]
                assert us is not None
                assert point.us[-1] is not None
                assert us <= point.us[-1] / 1.1


def test_what_does_not_compile_wins_nowhere_and_is_told_once() -> None:
    planned = plan(MATMUL, SM100, [bucket(2048), bucket(4096)])
    best = predict(planned, made_up(planned), Silent()).sweep.problems
    assert any(config["tile_m"] == 256 for config in best[bucket(4096)].candidates)
    results = made_up(planned, tile_m_256="the compiler was killed by SIGSEGV")
    progress = Silent()
    predicted = predict(planned, results, progress)
    table = predicted_table(planned, results, predicted.sweep)
    assert all(config["tile_m"] != 256 for config in table.portfolio)
    told = [config for config, _ in progress.failures]
    assert all(config["tile_m"] == 256 for config in told)
    assert len(told) == len(set(told)) > 0
    assert set(predicted.failures) == {bucket(2048), bucket(4096)}


def test_a_bucket_whose_default_does_not_compile_gets_no_entry() -> None:
    planned = plan(MATMUL, SM100, [bucket(64), bucket(4096)])
    results = made_up(planned)
    few = planned.problems[0]
    results[few.jobs[few.default].key] = CompileFailure(
        key=few.jobs[few.default].key, message="crashed", seconds=1.0
    )
    table = predicted_table(planned, results, predict(planned, results, Silent()).sweep)
    assert [entry.bucket for entry in table.entries] == [bucket(4096)]


def test_where_no_model_ranks_the_space_the_default_is_kept_and_all_are_compiled() -> None:
    planned = plan(FoundKernel(module=samples.MODULE, tunable=samples.scale), SM100, samples.scale.buckets)
    assert len(planned.jobs) > len({each.jobs[each.default].key for each in planned.problems})
    results = made_up(planned)
    table = predicted_table(planned, results, predict(planned, results, Silent()).sweep)
    assert {entry.config for entry in table.entries} == {samples.DEFAULT}
    assert all(entry.mean_us == entry.default_us > 0 for entry in table.entries)


# The whole, with the real compiler --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def feed(cubins: Path) -> Iterator[CompileFeed]:
    with CompileFeed(lambda: CompilePool(2, 60.0, cubins)) as feed:
        yield feed


def request(out: Path, *problems: Problem, **values: object) -> SweepRequest:
    found = FoundKernel(module=samples.MODULE, tunable=samples.scale)
    chosen = {"scale": problems} if problems else {}
    fields = {"kernels": (found,), "arch": SM100, "out": out, "problems": chosen, **values}
    return SweepRequest(**fields)  # type: ignore[arg-type]


@pytest.mark.process
def test_a_kernel_is_compiled_for_real_and_its_table_written(tmp_path: Path, feed: CompileFeed) -> None:
    asked, progress = request(tmp_path), Silent()
    report = predict_kernel(asked, asked.kernels[0], feed, progress)
    path = tmp_path / "sm100" / "scale.json"
    assert (report.path, report.evidence, report.problems, report.failures) == (path, "predicted", 3, 0)
    assert report.refusals == ()
    assert report.device_name == Device.reference(SM100).name == "NVIDIA B200"
    table = store.read_table(path)
    assert [entry.bucket for entry in table.entries] == list(samples.scale.buckets)
    done, total, failed = progress.done
    assert done == total > 0
    assert failed == 0
    before = path.read_bytes()
    again = predict_kernel(asked, asked.kernels[0], feed, Silent())
    assert again.changed == 0
    assert path.read_bytes() == before


def _product_without_work(tmp_path: Path) -> tuple[SweptKernel, Silent, int]:
    """Predict matmul with two configs and no `work`: the report, what was said, and how much was compiled."""
    problem = bucket(64)
    default = matmul_tunable.default_config(SM100, problem)
    other = next(c for c in matmul_tunable.candidates(SM100, problem) if c.constants != default.constants)
    tunable = dataclasses.replace(
        matmul_tunable, work=None, search_space=[default, other], default=None, typical=[dict(problem)]
    )
    found, progress = dataclasses.replace(MATMUL, tunable=tunable), Silent()
    planned = plan(found, SM100, [problem])
    loop = Loop(instructions=60, tensor_ops=8, selects=0, local_accesses=0, waits=0, pipelined=True)
    results = {
        key: dataclasses.replace(result, loop=loop)
        for key, result in made_up(planned).items()
        if isinstance(result, Compiled)
    }
    asked: list[CompileJob] = []
    feed: Any = SimpleNamespace(
        counts=lambda kernel: (0, 0, 0),
        submit=asked.extend,
        wait=lambda keys, report: {k: results[k] for k in keys},
    )
    return predict_kernel(request(tmp_path, kernels=(found,)), found, feed, progress), progress, len(asked)


def test_a_product_without_work_is_ranked_by_what_its_code_does(tmp_path: Path) -> None:
    report, progress, compiled = _product_without_work(tmp_path)
    assert report.worth == NOT_JUDGED
    assert compiled == 2
    [note] = progress.notes
    assert "ranked by the multiplications, loads and stores of a few blocks of each" in note
    [entry] = store.read_table(tmp_path / "sm100" / "matmul.json").entries
    problem, kernel = bucket(64), DeviceKernel(MATMUL, SM100)
    for config in (entry.config, matmul_tunable.default_config(SM100, problem)):
        by_hand = kernel.launched(problem, config).work
        assert kernel.counted(problem, config).work == by_hand, "the work that the kernel declares"


def test_a_product_whose_code_cannot_be_followed_is_said_not_to_be_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(candidates.count_blocks, most_calls=10)
    monkeypatch.setattr(candidates, "count_blocks", few)
    report, progress, compiled = _product_without_work(tmp_path)
    assert (report.leaves, report.worth) == (0, "not ranked: the default stays")
    assert report.worth in closing_table([report])[1]
    assert compiled == 2
    [note] = progress.notes
    assert "could not be counted by following the kernel's code: the blocks call" in note
    [entry] = store.read_table(tmp_path / "sm100" / "matmul.json").entries
    assert entry.config == matmul_tunable.default_config(SM100, bucket(64))


LOSES = Judgement(
    kernel="matmul",
    arch="sm90",
    device="NVIDIA H200",
    gate=None,
    sizes=185,
    leaves=145,
    time=1.095,
    behind=0.78,
    worst=1.34,
    apart_time=1.0,
    apart_far=0.0,
    hash="0" * 16,
)


def test_where_the_model_loses_on_the_measured_table_the_default_stays_and_alone_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aot_tune.tuner.sweep.predict.judgement", lambda tunable: LOSES)
    report, progress, compiled = _product_without_work(tmp_path)
    assert compiled == 1
    assert (report.leaves, report.speedup, report.worth) == (0, 1.0, str(LOSES))
    assert progress.notes == []
    assert closing_table([report])[1].endswith(": not used")
    [entry] = store.read_table(tmp_path / "sm100" / "matmul.json").entries
    assert entry.config == matmul_tunable.default_config(SM100, bucket(64))


def test_without_work_what_moves_the_same_in_fewer_waves_is_ranked_first() -> None:
    """The sample loads and stores every element once; its default has 64 times more blocks than it needs."""
    problem = samples.scale.buckets[-1].replaced(M=65536)
    planned = plan(FoundKernel(module=samples.MODULE, tunable=samples.scale), SM100, [problem])
    results = made_up(planned)
    times = predict(planned, results, Silent()).sweep.problems[problem].candidates
    assert set(times) == set(planned.problems[0].candidates)
    assert next(iter(times)).constants != samples.DEFAULT.constants
    assert times[samples.DEFAULT].mean_us > 1.1 * next(iter(times.values())).mean_us


@pytest.mark.process
def test_a_partial_selection_keeps_the_entries_predicted_before(tmp_path: Path, feed: CompileFeed) -> None:
    first, second = samples.scale.buckets[:2]
    for one in (first, second):
        asked = request(tmp_path, one)
        predict_kernel(asked, asked.kernels[0], feed, Silent())
    table = store.read_table(tmp_path / "sm100" / "scale.json")
    assert [entry.bucket for entry in table.entries] == [first, second]


@pytest.mark.process
def test_a_whole_prediction_counts_and_names_the_entries_that_it_removes(
    tmp_path: Path, feed: CompileFeed
) -> None:
    undeclared = samples.scale.buckets[0].replaced(N=2048)
    asked, part, progress = request(tmp_path), request(tmp_path, undeclared), Silent()
    predict_kernel(asked, asked.kernels[0], feed, Silent())
    predict_kernel(part, part.kernels[0], feed, Silent())
    assert predict_kernel(asked, asked.kernels[0], feed, progress).changed == 1
    derived, said = progress.notes
    assert derived.startswith("scale: work is not declared; candidates are ranked by the multiplications")
    assert said.startswith(f"{undeclared}: its entry is removed")


@pytest.mark.process
def test_two_selections_predicted_at_once_lose_no_entry(tmp_path: Path, feed: CompileFeed) -> None:
    first, second = samples.scale.buckets[:2]

    class Meanwhile(Silent):
        """Another prediction runs from end to end after this one has read the table there was."""

        def show(self, event: Event) -> None:
            if isinstance(event, Started):
                asked = request(tmp_path, second)
                predict_kernel(asked, asked.kernels[0], feed, Silent())

    asked = request(tmp_path, first)
    report = predict_kernel(asked, asked.kernels[0], feed, Meanwhile())
    table = store.read_table(tmp_path / "sm100" / "scale.json")
    assert [entry.bucket for entry in table.entries] == [first, second]
    assert report.changed == 1


@pytest.mark.process
def test_a_prediction_of_other_code_that_came_meanwhile_stays(tmp_path: Path, feed: CompileFeed) -> None:
    asked = request(tmp_path)
    predict_kernel(asked, asked.kernels[0], feed, Silent())
    path = tmp_path / "sm100" / "scale.json"
    other = writer.dump(dataclasses.replace(store.read_table(path), source_hash="0" * 16))

    class Meanwhile(Silent):
        def show(self, event: Event) -> None:
            if isinstance(event, Started):
                path.write_bytes(other)

    asked = request(tmp_path, samples.scale.buckets[0])
    with pytest.raises(TuneError, match=r"replaced meanwhile.*the source's hash was 0000000000000000"):
        predict_kernel(asked, asked.kernels[0], feed, Meanwhile())
    assert path.read_bytes() == other


def test_a_measured_table_is_never_replaced(tmp_path: Path, feed: CompileFeed) -> None:
    path = samples.write(tmp_path, samples.scale_table(SM100))
    before = path.read_bytes()
    asked = request(tmp_path)
    with pytest.raises(TuneError, match="holds measured entries, which predictions never replace"):
        predict_kernel(asked, asked.kernels[0], feed, Silent())
    assert path.read_bytes() == before


@pytest.mark.process
def test_a_prediction_of_another_arch_is_never_replaced(tmp_path: Path, feed: CompileFeed) -> None:
    asked = request(tmp_path)
    predict_kernel(asked, asked.kernels[0], feed, Silent())
    path = tmp_path / "sm100" / "scale.json"
    path.write_bytes(
        writer.dump(dataclasses.replace(store.read_table(path), arch=Arch.parse("sm89"))),
    )
    before, progress = path.read_bytes(), Silent()
    with pytest.raises(TuneError, match=r"scale on sm89; move it to sm89/scale\.json, or remove it"):
        predict_kernel(asked, asked.kernels[0], feed, progress)
    assert path.read_bytes() == before
    assert not hasattr(progress, "begun"), "it began to compile"


@pytest.mark.process
def test_a_packages_own_folder_is_refused(tmp_path: Path, feed: CompileFeed) -> None:
    tunable = dataclasses.replace(samples.scale, tables=tmp_path)
    asked = request(tmp_path)
    with pytest.raises(TuneError, match="name another folder with --out"):
        predict_kernel(asked, FoundKernel(module=samples.MODULE, tunable=tunable), feed, Silent())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_damaged_predicted_table_below_build_is_written_anew(
    tmp_path: Path, feed: CompileFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aot_tune.tuner.sweep.predict.PREDICTED_FOLDER", tmp_path)
    path = tmp_path / "sm100" / "scale.json"
    path.parent.mkdir()
    path.write_bytes(b"{")
    asked = request(tmp_path)
    predict_kernel(asked, asked.kernels[0], feed, Silent())
    assert len(store.read_table(path).entries) == 3


# A first look ---------------------------------------------------------------------------------------------


def _work(config: Config, problem: Problem) -> Work:
    loaded = 2.0 * int(config["tile_m"]) * int(config["tile_n"])
    return Work(load_bytes=loaded, store_bytes=loaded)


WIDE = FoundKernel(
    module=samples.MODULE,
    tunable=dataclasses.replace(
        samples.scale,
        work=_work,
        typical=[{"dtype": "bfloat16", "M": [2**k for k in range(19)], "N": 1024}],
    ),
)
"""The sample with 19 buckets, and a space that the model ranks."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[SweepPlan]:
    """What was predicted, plan after plan."""
    seen: list[SweepPlan] = []

    def predict_and_keep(planned: SweepPlan, *rest: object) -> Predicted:
        seen.append(planned)
        return predict(planned, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("aot_tune.tuner.sweep.predict.predict", predict_and_keep)
    return seen


def first_look(out: Path) -> SweepRequest:
    return SweepRequest(kernels=(WIDE,), arch=SM100, out=out, first_look=True)


@pytest.mark.process
def test_a_first_look_takes_fixed_counts_and_always_the_default(
    tmp_path: Path, feed: CompileFeed, plans: list[SweepPlan]
) -> None:
    report = predict_kernel(first_look(tmp_path), WIDE, feed, Silent())
    (looked,) = plans
    assert report.problems == len(looked.problems) == 10
    assert [each.problem["M"] for each in looked.problems] == [4**k for k in range(10)]
    for each in looked.problems:
        assert each.candidates[0] == each.default
        assert len(set(each.candidates)) == FIRST_LOOK_CANDIDATES == 4
        assert set(each.jobs) == set(each.candidates)
    assert [entry.bucket for entry in store.read_table(tmp_path / "sm100" / "scale.json").entries] == [
        each.problem for each in looked.problems
    ]


@pytest.mark.process
def test_a_first_look_writes_the_same_bytes_again_and_elsewhere(tmp_path: Path, feed: CompileFeed) -> None:
    written = []
    for folder in ("here", "here", "elsewhere"):
        predict_kernel(first_look(tmp_path / folder), WIDE, feed, Silent())
        written.append((tmp_path / folder / "sm100" / "scale.json").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.process
def test_everything_is_all_buckets_and_candidates_and_a_first_look_leaves_it(
    tmp_path: Path, feed: CompileFeed, plans: list[SweepPlan]
) -> None:
    everything = dataclasses.replace(first_look(tmp_path), first_look=False)
    predict_kernel(first_look(tmp_path), WIDE, feed, Silent())
    predict_kernel(everything, WIDE, feed, Silent())
    _, planned = plans
    assert [each.problem for each in planned.problems] == list(WIDE.tunable.buckets)
    for each in planned.problems:
        declared = WIDE.tunable.space(SM100, each.problem)
        assert set(each.candidates) == {
            c for c in declared if WIDE.tunable.refusal(c, SM100, each.problem) is None
        }
    path, progress = tmp_path / "sm100" / "scale.json", Silent()
    before = path.read_bytes()
    assert len(store.read_table(path).entries) == 19
    report = predict_kernel(first_look(tmp_path), WIDE, feed, progress)
    assert (report.path, report.problems, report.changed) == (path, 19, 0)
    assert path.read_bytes() == before
    (said,) = progress.notes
    assert said == f"{path} already predicts 19 buckets, more than a first look would: it stays"


@pytest.mark.process
def test_a_first_look_replaces_a_larger_table_of_other_code(tmp_path: Path, feed: CompileFeed) -> None:
    everything = dataclasses.replace(first_look(tmp_path), first_look=False)
    predict_kernel(everything, WIDE, feed, Silent())
    path = tmp_path / "sm100" / "scale.json"
    path.write_bytes(writer.dump(dataclasses.replace(store.read_table(path), source_hash="0" * 16)))
    predict_kernel(first_look(tmp_path), WIDE, feed, Silent())
    assert len(store.read_table(path).entries) == 10


@pytest.mark.parametrize("judged", [True, False])
def test_a_first_look_at_all_shipped_kernels_stays_small(judged: bool) -> None:
    kernels = tuple(find_tunables().values())
    lines = {line.kernel: line for line in map(parsed, FILE.read_text().splitlines())} if judged else {}
    looked = SweepRequest(kernels=kernels, arch=SM100, first_look=True)
    plans = [
        predicted_part(
            plan(found, SM100, looked.buckets(found)), lines.get(found.tunable.name), first_look=True
        )
        for found in kernels
    ]
    assert len(plans) == len(TUNABLES)
    for planned in plans:
        declared = planned.kernel.tunable.buckets
        assert len(planned.problems) == 10
        assert (planned.problems[0].problem, planned.problems[-1].problem) == (declared[0], declared[-1])
        assert all(each.default in each.candidates for each in planned.problems)
    # Each takes a core 0.5 to 1 s: 550 are ready in five minutes on two cores.
    assert 200 < sum(len(planned.jobs) for planned in plans) < 550
