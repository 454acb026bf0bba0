"""Judge the model on measured tables: ``python -m tests.judge_model [KERNEL...]``.

At each size of a kernel's measured table the model chooses among the table's configs and the default, as a
prediction for another arch does, and the measured times say what the choice costs. A prediction leaves the
default only where the model promises `PREDICTED_GAIN`, and only for kernels whose choices win (`gate`). The
command writes a line for each kernel into `aot_tune/tuner/plan/judged.jsonl`. Run it after tables, a kernel
or the model have changed; without new cubins it takes half a minute, else about six minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune.choose.points import PREDICTED_GAIN
from aot_tune.declare.discovery import OWN_KERNELS, FoundKernel, find_tunables
from aot_tune.tables import files, store
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Table, geometric_mean
from aot_tune.tuner.choose.times import TIE
from aot_tune.tuner.compile.job import CompileResult
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, SweepPlan, plan_only
from aot_tune.tuner.plan.judged import FILE, Judgement, judged_hash
from aot_tune.tuner.plan.shortlist import shortlist
from aot_tune.tuner.sweep.predict import times_at
from aot_tune.tuner.sweep.resources import CUBINS
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config

ARCH = Arch.parse("sm90")
"""The arch whose tables are measured."""

MOST_BEHIND = 0.06
"""Largest fraction of the sizes at which the choices may be slower than the default, beyond the tie band."""

FAR = 0.10
"""A choice that is slower than the default by more than this fraction is far behind."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The model's choice at one size."""

    shape: tuple[object, ...]
    """The size's values except on Pow2 axes: halves of the shapes are judged apart."""

    ratio: float
    """The choice's measured time / the default's, in their worst states."""

    leaves: bool
    """Whether the choice is not the default."""


def choices(kernel: FoundKernel, table: Table, folder: Path = CUBINS) -> list[Chosen]:
    """The model's choice at each size of a measured table at which the default has a time."""
    device = DeviceKernel(kernel, table.arch)
    plans = tuple(plan_only(device, entry.bucket, table.portfolio) for entry in table.entries)
    planned = SweepPlan(kernel=device, problems=plans)
    compiled = _compiled(planned, folder)
    pairs = zip(table.entries, plans, strict=True)
    return [chosen for entry, plan in pairs for chosen in _chosen(planned, plan, compiled, table, entry)]


def _compiled(planned: SweepPlan, folder: Path) -> Mapping[str, CompileResult]:
    results: dict[str, CompileResult] = {}
    with CompilePool(usable_cores(), folder=folder) as pool:
        for job in planned.jobs:
            pool.submit(job)
        while pool.unfinished:
            results |= {result.key: result for result in pool.poll(1.0)}
    return results


def _chosen(
    planned: SweepPlan,
    plan: ProblemPlan,
    compiled: Mapping[str, CompileResult],
    table: Table,
    entry: Entry,
) -> Iterable[Chosen]:
    tunable = planned.kernel.tunable
    left = shortlist(planned.kernel, plan, compiled, exhaustive=True).configs
    for point in entry.points:
        problem = entry.bucket.replaced(**point.size)
        default = tunable.default_config(table.arch, problem)
        columns = zip((*table.portfolio, default), in_worst_state(point).us, strict=True)
        measured = {config: us for config, us in columns if us is not None}
        if default not in measured:
            continue
        times = times_at(planned, plan, problem, [config for config in left if config in measured], compiled)
        best = _pick({config: time.mean_us for config, time in times.items()}, default)
        yield Chosen(
            shape=tuple(value for name, value in problem.items() if name not in point.size),
            ratio=measured[best] / measured[default],
            leaves=best != default,
        )


def _pick(predicted_us: Mapping[Config, float], default: Config) -> Config:
    """The model's choice: the default unless another promises `PREDICTED_GAIN`."""
    best = min(predicted_us, key=lambda config: predicted_us[config], default=default)
    if default not in predicted_us or predicted_us[default] < predicted_us[best] * (1 + PREDICTED_GAIN):
        return default
    return best


def gate(ratios: Sequence[float]) -> float | None:
    """The least gain with which a prediction may leave the default; None where the choices do not win."""
    wins = geometric_mean(ratios) < 1.0 and _share(ratios, TIE) <= MOST_BEHIND
    return PREDICTED_GAIN if wins else None


def _share(ratios: Sequence[float], beyond: float) -> float:
    return sum(ratio > 1 + beyond for ratio in ratios) / max(len(ratios), 1)


def apart(chosen: Sequence[Chosen]) -> list[float]:
    """The ratio at each size where each half of the shapes takes the gate of the other half."""
    shapes = sorted({each.shape for each in chosen}, key=str)
    halves = [[each.ratio for each in chosen if each.shape in shapes[half::2]] for half in (0, 1)]
    return [
        ratio if gate(other) is not None else 1.0 for own, other in (halves, halves[::-1]) for ratio in own
    ]


def judgement(kernel: FoundKernel, table: Table, chosen: Sequence[Chosen]) -> Judgement:
    """The line of a kernel. The default stays where the choices lose once halves are judged apart."""
    ratios, ratios_apart = [each.ratio for each in chosen], apart(chosen)
    return Judgement(
        kernel=table.kernel,
        arch=str(table.arch),
        device=table.built_with.device_name,
        gate=gate(ratios) if geometric_mean(ratios_apart) <= 1.0 else None,
        sizes=len(ratios),
        leaves=sum(each.leaves for each in chosen),
        time=round(geometric_mean(ratios), 3),
        behind=round(_share(ratios, TIE), 3),
        worst=round(max(ratios, default=1.0), 2),
        apart_time=round(geometric_mean(ratios_apart), 4),
        apart_far=round(_share(ratios_apart, FAR), 4),
        hash=judged_hash(kernel.tunable, table.arch) or "",
    )


def judged(kernel: FoundKernel, folder: Path = CUBINS) -> Judgement:
    """The line of a shipped kernel, made anew."""
    path = store.table_path(store.package_folder(kernel.tunable), ARCH, kernel.tunable.name)
    table = store.read_table(path)
    return judgement(kernel, table, choices(kernel, table, folder))


def main(names: Sequence[str]) -> None:
    """Judge the named kernels, or all, and write their lines; print each line, and all kernels together."""
    kernels = find_tunables([OWN_KERNELS])
    lines = {line.kernel: line for line in map(parsed, FILE.read_text().splitlines())}
    for name in names or sorted(kernels):
        lines[name] = judged(kernels[name])
        print(f"{name}: {lines[name]}")
    shown = [json.dumps(dataclasses.asdict(lines[name])) for name in sorted(lines) if name in kernels]
    files.write_atomic(FILE, "".join(f"{line}\n" for line in shown).encode())
    time, far = together(lines.values())
    print(f"halves of the shapes judged apart: {time:.4f} of the default's time, {far:.2%} far behind")


def parsed(line: str) -> Judgement:
    """A judgement from its line."""
    return Judgement(**json.loads(line))


def together(lines: Iterable[Judgement]) -> tuple[float, float]:
    """`apart_time` and `apart_far` over the sizes of several kernels."""
    weighed = [(line.sizes, line) for line in lines]
    total = sum(sizes for sizes, _ in weighed)
    time = geometric_mean(line.apart_time for sizes, line in weighed for _ in range(sizes))
    return time, sum(sizes * line.apart_far for sizes, line in weighed) / total


if __name__ == "__main__":
    main(sys.argv[1:])
