"""The committed judgements of the model: what they decide, and when they no longer hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from aot_tune import tuner
from aot_tune.declare.declaration import Work
from aot_tune.kernels import TUNABLES
from aot_tune.tables.table import geometric_mean
from aot_tune.tuner.plan import judged
from aot_tune.tuner.plan.judged import FILE, Judgement, judged_hash, judgement
from aot_tune.values.arch import Arch
from tests.judge_model import FAR, parsed, together
from tests.support import samples
from tests.support.samples import scale_table, with_entry, write

SM90 = Arch.parse("sm90")
LINES = {line.kernel: line for line in map(parsed, FILE.read_text().splitlines())}

LEAVES_THE_DEFAULT = {
    "fused_add_rms_norm",
    "gate_up_swiglu",
    "layer_norm",
    "linear",
    "matmul",
    "matmul_fp8",
    "rope",
    "softmax",
}
"""The kernels whose predictions may leave the default: a golden of the committed decisions."""


def test_the_committed_lines_decide_which_kernels_may_leave_the_default() -> None:
    assert set(LINES) <= {tunable.name for tunable in TUNABLES}
    assert {name for name, line in LINES.items() if line.gate is not None} == LEAVES_THE_DEFAULT
    assert LINES["attention"].time > 1.05


def test_every_committed_line_holds() -> None:
    stale = [tunable.name for tunable in TUNABLES if tunable.name in LINES and judgement(tunable) is None]
    assert not stale, f"python -m tests.judge_model {' '.join(stale)}"


def test_judged_by_the_other_half_of_the_shapes_the_predictions_win() -> None:
    time, far = together(LINES.values())
    assert time <= 0.99
    assert far <= 0.01
    assert FAR == 0.10
    text = " ".join((Path(tuner.__path__[0]) / "README.md").read_text().split())
    unjudged = geometric_mean(line.time for line in LINES.values() for _ in range(line.sizes))
    assert f"{sum(line.sizes for line in LINES.values()):,} sizes" in text
    assert f"take {time:.3f} of the defaults' time and are more than 10 % slower at {100 * far:.1f} %" in text
    alone = f"without the judgement it is {unjudged:.3f}, and on `attention` {LINES['attention'].time:.2f}"
    assert alone in text


JUDGED = Judgement(
    kernel="scale",
    arch="sm90",
    device="NVIDIA H200",
    gate=0.1,
    sizes=200,
    leaves=50,
    time=0.912,
    behind=0.045,
    worst=1.31,
    apart_time=0.92,
    apart_far=0.01,
    hash="",
)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the line of the sample, whose table lies in the sample's folder."""
    tunable = dataclasses.replace(samples.scale, tables=tmp_path / "tables")
    monkeypatch.setattr(samples, "scale", tunable)
    write(tmp_path / "tables", scale_table())
    path = tmp_path / "judged.jsonl"
    monkeypatch.setattr(judged, "FILE", path)
    fresh = dataclasses.replace(JUDGED, hash=judged_hash(tunable, SM90))
    path.write_text(json.dumps(dataclasses.asdict(fresh)) + "\n")
    return path


def test_a_line_holds_until_the_table_the_kernel_or_the_model_changes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judgement(samples.scale) is not None
    write(tmp_path / "tables", with_entry(scale_table(), 1, mean_us=9.0))
    assert judgement(samples.scale) is None
    write(tmp_path / "tables", scale_table())
    assert judgement(samples.scale) is not None
    other = dataclasses.replace(samples.scale, grid_fn=lambda config, device, problem: (1,))
    assert judgement(other) is None
    assert judgement(dataclasses.replace(samples.scale, work=lambda config, problem: Work())) is None
    monkeypatch.setattr(judged, "_model_code", lambda: b"another model")
    assert judgement(samples.scale) is None


def test_without_a_line_or_a_table_nothing_is_judged(lines: Path, tmp_path: Path) -> None:
    assert judgement(dataclasses.replace(samples.scale, name="other")) is None
    (tmp_path / "tables" / "sm90" / "scale.json").unlink()
    assert judgement(samples.scale) is None
    lines.write_text("")
    assert judgement(samples.scale) is None


def test_comments_and_docstrings_of_the_model_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []
    for text in (
        'X = 1.0\n"""A cost."""\n',
        "X = 1.0  # cycles\n",
        "X = 2.0\n",
    ):
        monkeypatch.setattr(judged.inspect, "getsource", lambda part, text=text: text)
        codes.append(judged._model_code.__wrapped__())
    assert codes[0] == codes[1] != codes[2]


def test_a_judgement_says_what_the_choices_cost_and_whether_they_are_used() -> None:
    assert str(JUDGED) == (
        "0.912 of the default's time, slower at 4% of 200 sizes, at worst 31% (sm90, NVIDIA H200)"
    )
    loses = dataclasses.replace(JUDGED, gate=None, time=1.095)
    assert str(loses).startswith("1.095 of the default's time")
    assert str(loses).endswith("(sm90, NVIDIA H200): not used")
    never = dataclasses.replace(JUDGED, gate=None, leaves=0)
    assert str(never) == "leaves the default at none of 200 sizes (sm90, NVIDIA H200): the default stays"
