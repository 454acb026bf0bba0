"""Choose the candidates to measure, by the compiler's report and the model's ranking. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileResult
from aot_tune.tuner.outcome import Failure
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan
from aot_tune.tuner.plan.model import predict_us, residency, spills
from aot_tune.tuner.plan.sizes import spread
from aot_tune.values.config import Config

MOST_CANDIDATES = 30
"""Most candidates measured on one problem, default and incumbent included, unless all are requested."""

BEST_BY_MODEL = 20
"""Number of measured candidates from the top of the model's ranking. On 27 matmul problems of an H200 the
model's best 8 of 96 were 0.3 % slower than the fastest, at worst 3 %."""


@dataclass(frozen=True, kw_only=True)
class Shortlist:
    """The configs to measure on one problem, and the reasons for leaving out the other candidates."""

    configs: tuple[Config, ...]
    """The configs to measure: the default, the incumbent, then the model's best in its order."""

    twins: Mapping[Config, Config]
    """Maps a config to the config with the same launch that is measured for both."""

    failures: tuple[Failure, ...]
    """The candidates that the compiler refuses, that do not fit or that spill."""

    predicted_us: Mapping[Config, float]
    """The model's time of every other candidate, microseconds, fastest first; empty where the model cannot
    rank the space."""


def shortlist(
    kernel: DeviceKernel,
    plan: ProblemPlan,
    compiled: Mapping[str, CompileResult],
    *,
    exhaustive: bool = False,
) -> Shortlist:
    """Choose the configs to measure on a problem.

    1. Configs that the compiler refused, that do not fit the device or that spill are left out. A spilling
       config stays when it is the default or the incumbent, or when no other config is left.
    2. Of configs with the same machine code and launch only one is measured: the default, the incumbent, or
       otherwise the config with the fewest and smallest hints.
    3. The default, the incumbent and the model's best are kept.

    Args:
        kernel: The kernel on its arch and device.
        plan: The problem and its candidates.
        compiled: Job key to result, for all the problem's jobs.
        exhaustive: Whether to keep all configs that pass steps 1 and 2.
    """
    failures, left = _judged(kernel, plan, compiled)
    twins = _twins(kernel, plan, left, compiled)
    single = [config for config in left if config not in twins]
    predicted = predictions(kernel, plan, single, compiled)
    ranked = sorted(single, key=lambda config: predicted[config]) if predicted else single
    first = [twins.get(config, config) for config in (plan.default, plan.incumbent) if config in left]
    if exhaustive:
        best: Sequence[Config] = ranked
    elif predicted:
        best = ranked[:BEST_BY_MODEL]
    else:
        best = spread(ranked, MOST_CANDIDATES)
    chosen = tuple(dict.fromkeys([*first, *best]))
    return Shortlist(
        configs=chosen if exhaustive else chosen[:MOST_CANDIDATES],
        twins=twins,
        failures=failures,
        predicted_us={config: predicted[config] for config in ranked} if predicted else {},
    )


def is_ranked(kernel: DeviceKernel, plan: ProblemPlan) -> bool:
    """Return whether the model can rank this space.

    The model compares tiles, not configs that differ only in hints.
    """
    return kernel.tunable.work is not None and len({_constants(config) for config in plan.candidates}) > 1


def lacks_work(kernel: DeviceKernel, plan: ProblemPlan) -> bool:
    """Return whether the model could rank this space if the kernel had `work`."""
    return kernel.tunable.work is None and len({_constants(config) for config in plan.candidates}) > 1


def multiplies(plan: ProblemPlan, compiled: Mapping[str, CompileResult]) -> bool:
    """Return whether any code multiplies matrices in a loop; its blocks then share operands."""
    results = (compiled.get(job.key) for job in plan.jobs.values())
    return any(result.loop is not None for result in results if isinstance(result, Compiled))


def predictions(
    kernel: DeviceKernel, plan: ProblemPlan, configs: Sequence[Config], compiled: Mapping[str, CompileResult]
) -> dict[Config, float]:
    """Return the model's time of each config, microseconds; empty where the model cannot rank the space.

    The time of a config whose job is not in `compiled` is predicted only from its tiles.
    """
    if not is_ranked(kernel, plan):
        return {}
    times = {}
    for config in configs:
        result = compiled.get(plan.jobs[config].key)
        known = result if isinstance(result, Compiled) else None
        times[config] = predict_us(
            kernel.launched(plan.problem, config),
            kernel.device,
            known.resources if known else None,
            known.loop if known else None,
        )
    return times


def _judged(
    kernel: DeviceKernel, plan: ProblemPlan, compiled: Mapping[str, CompileResult]
) -> tuple[tuple[Failure, ...], list[Config]]:
    """Return the failures by the compiler's report, and the other candidates in the plan's order."""
    failures: list[Failure] = []
    clean: list[Config] = []
    spilling: list[Config] = []
    for config in plan.candidates:
        result = compiled[plan.jobs[config].key]
        if isinstance(result, CompileFailure):
            failures.append(Failure(config=config, stage="compile", message=result.message))
        elif residency(kernel.device, result.resources) == 0:
            failures.append(Failure(config=config, stage="resources", message=_too_large(result)))
        elif spills(result.resources, result.loop):
            spilling.append(config)
        else:
            clean.append(config)
    kept = set(spilling if not clean else ()) | {plan.default, plan.incumbent}
    for config in spilling:
        if config not in kept:
            result = compiled[plan.jobs[config].key]
            assert isinstance(result, Compiled)
            message = f"registers spill to a stack of {result.resources.stack_bytes} bytes a thread"
            failures.append(Failure(config=config, stage="resources", message=message))
    left = kept.intersection(spilling) | set(clean)
    return tuple(failures), [config for config in plan.candidates if config in left]


def _too_large(result: Compiled) -> str:
    needs = result.resources
    return (
        f"a block needs {needs.shared_bytes} bytes of shared memory and {needs.registers} registers for each "
        f"of {needs.threads} threads: it does not fit a multiprocessor"
    )


def _twins(
    kernel: DeviceKernel, plan: ProblemPlan, configs: Sequence[Config], compiled: Mapping[str, CompileResult]
) -> dict[Config, Config]:
    """Map each config to the config with the same launch that is measured for both."""
    groups: dict[Hashable, list[Config]] = {}
    for config in configs:
        result = compiled[plan.jobs[config].key]
        assert isinstance(result, Compiled)
        groups.setdefault((result.code, kernel.launch_key(plan.problem, config)), []).append(config)
    rank = _simplicity(plan)
    twins: dict[Config, Config] = {}
    for group in groups.values():
        leader = min(group, key=rank)
        twins.update({config: leader for config in group if config is not leader})
    return twins


def _simplicity(plan: ProblemPlan) -> Callable[[Config], tuple[object, ...]]:
    """Return a sort key: the smallest config is measured for its twins; the plan's order breaks ties."""
    place = {config: at for at, config in enumerate(plan.candidates)}

    def rank(config: Config) -> tuple[object, ...]:
        return (
            config != plan.default,
            config != plan.incumbent,
            len(config.hints),
            sum(config.hints.values()),
            place[config],
        )

    return rank


def _constants(config: Config) -> Hashable:
    return config.kernel, frozenset(config.constants.items())
