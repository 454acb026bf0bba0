"""Recorded results: their files, their provenance, and when they are out of date. The figures are made up."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from aot_tune.bench import records
from aot_tune.bench.records import Record, Stamp
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.kernels import TUNABLES
from aot_tune.nvidia.nvml import Gpu
from tests.support.bench_records import MADE
from tests.support.samples import SM90

MOST_BYTES = 512 << 10


def record(kernel: str = "rope", **figures: object) -> Record:
    """A record of the present state of a shipped kernel."""
    return Record(
        made_with=MADE, kernels={kernel: records.present("sm90")[kernel]}, figures=figures or {"us": 1.5}
    )


def test_what_is_added_is_read_back_by_its_device(tmp_path: Path) -> None:
    other = replace(record(), made_with=replace(MADE, device="NVIDIA H100 80GB HBM3"))
    path = records.add(tmp_path, "launch", "launch", record())
    assert path == tmp_path / "nvidia-h200" / "launch.json"
    records.add(tmp_path, "launch", "launch", other)
    found = records.read(tmp_path, "launch")
    assert found["NVIDIA H200"] == {"launch": record()}
    assert found["NVIDIA H100 80GB HBM3"] == {"launch": other}
    assert records.read(tmp_path, "serving") == {}


def test_a_record_replaces_its_namesake_and_leaves_the_others(tmp_path: Path) -> None:
    for name, us in (("rope", 1.0), ("softmax", 2.0), ("rope", 3.0)):
        records.add(tmp_path, "kernels", name, record(us=us))
    found = records.read(tmp_path, "kernels")["NVIDIA H200"]
    assert {name: one.figures["us"] for name, one in found.items()} == {"rope": 3.0, "softmax": 2.0}


def test_processes_that_record_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    names = [f"kernel{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: records.add(tmp_path, "kernels", name, record(us=1.0)), names))
    assert set(records.read(tmp_path, "kernels")["NVIDIA H200"]) == set(names)
    assert [path.name for path in (tmp_path / "nvidia-h200").iterdir()] == ["kernels.json"]


@pytest.mark.parametrize("field", ["source_hash", "portfolio"])
def test_a_record_of_another_source_or_portfolio_is_out_of_date(field: str) -> None:
    now = records.present("sm90")["rope"]
    assert not records.out_of_date(record())
    assert records.out_of_date(replace(record(), kernels={"rope": replace(now, **{field: "0" * 12})}))


def test_a_record_of_a_kernel_that_is_gone_is_out_of_date() -> None:
    gone = Stamp(source_hash="0" * 16, portfolio="0" * 12)
    assert records.out_of_date(replace(record(), kernels={"softmix": gone}))


def test_every_kernel_has_a_hash_of_its_own_tables_portfolio() -> None:
    portfolios = [stamp.portfolio for stamp in records.present("sm90").values()]
    assert len(set(portfolios)) == len(portfolios) == len(TUNABLES)
    assert "" not in portfolios
    assert records.present("sm80")["rope"].portfolio == ""


def test_numbers_are_rounded_and_each_shape_has_a_line() -> None:
    shapes = [{"problem": {"M": size}, "us": {"tuned": 1.23456789}} for size in (1, 2)]
    text = records.dump({"rope": {"shapes": shapes, "rate": 4203948571.3, "none": 0.0, "held": True}})
    assert json.loads(text)["rope"]["rate"] == 4203900000
    assert json.loads(text)["rope"]["held"] is True
    assert text.count("\n      {") == 2
    assert '"us": {"tuned": 1.2346}' in text
    assert text.endswith("}\n")


def test_a_file_that_is_not_one_of_results_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200" / "launch.json"
    path.parent.mkdir()
    for text in ("{", "[]", '{"launch": {"figures": {}}}', '{"launch": 3}'):
        path.write_text(text)
        with pytest.raises(AotTuneError, match=r"launch\.json is not a file of bench results"):
            records.read(tmp_path, "launch")


def test_the_command_is_kept_without_the_places_it_wrote_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0")
    monkeypatch.setattr(records, "visible_gpus", lambda: (gpu,))
    monkeypatch.setattr(records, "driver_version", lambda: "580.1")
    made = records.made_with(
        ["launch", "--results", "/a/folder", "--record", "--out=/b/file", "--out", "c", "--journal", "d"]
    )
    assert made.command == "aot-tune bench launch --record"
    assert (made.device, made.arch, made.driver) == ("NVIDIA H200", "sm90", "580.1")
    assert made.torch.startswith("2.")


def test_without_a_gpu_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "visible_gpus", lambda: None)
    with pytest.raises(UsageError, match="--record needs a GPU"):
        records.made_with([])


# The committed results --------------------------------------------------------------------------


def test_the_committed_results_are_as_written_and_small() -> None:
    files = [path for path in records.RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    for path in files:
        assert path.suffix == ".json", path
        assert path.read_text() == records.dump(json.loads(path.read_bytes())), path
        devices = {one["made_with"]["device"] for one in json.loads(path.read_bytes()).values()}
        assert {records.folder_name(device) for device in devices} == {path.parent.name}, path


def test_the_committed_kernels_have_few_shapes_each() -> None:
    for recorded in records.read(records.RESULTS, "kernels").values():
        for kernel, one in recorded.items():
            assert 0 < len(one.figures["shapes"]) <= records.MOST_SHAPES, kernel
            assert list(one.kernels) == [kernel]
