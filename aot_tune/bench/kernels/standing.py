"""What the times of a kernel amount to: ratios, shares of the roofline, demands held or missed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aot_tune.tables.table import geometric_mean
from aot_tune.values.problem import Problem, Value, problem_option

TUNED, DEFAULT, COPY, READ, FLOOR = "tuned", "default", "copy", "torch.sum", "reading alone"
"""Contenders beside the rivals: the tables' config, the declared default, a copy that moves as many bytes, a
sum that reads as many, and the tuned config's own reading."""

NOISE = 0.03
"""Two medians of one and the same thing differ by this fraction now and then: a tie is no loss."""

LARGE_BYTES = 64 << 20
"""From here on a shape is long enough for the roofline to be what bounds it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One declared shape, timed."""

    problem: Mapping[str, Value]
    """Its sizes and dtypes."""

    config: str
    """The tuned config."""

    bytes: float
    """What it must read and write."""

    flops: float
    """Operations that it must do on the matrix units."""

    roofline_us: float
    """What these take at the ceilings of the run, the longer of the two."""

    us: Mapping[str, float]
    """Contender to its median, microseconds. A default that is the tuned config has the same time."""

    failed: Mapping[str, str] = field(default_factory=dict)
    """Contender to why it has no time."""

    def __str__(self) -> str:
        return problem_option(Problem(self.problem))

    def ahead(self, of: Sequence[str]) -> float | None:
        """The time of the fastest contender among `of` over the tuned one's; above 1 is faster."""
        others = [self.us[name] for name in of if name in self.us]
        return min(others) / self.us[TUNED] if others and TUNED in self.us else None


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a kernel must reach against other contenders."""

    text: str
    """In words."""

    over: tuple[str, ...]
    """The contenders; of several the fastest on each shape counts."""

    mean: float | None = None
    """Least geometric mean of their time over the tuned one's."""

    worst: float | None = None
    """Least of it on any shape."""

    where: Callable[[Shape], bool] = lambda shape: True
    """The shapes it is asked of."""


NEVER_SLOWER = Demand(text="never slower than its default beyond noise", over=(DEFAULT,), worst=1 - NOISE)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a demand is met."""

    demand: str
    held: bool | None
    """None where no shape was timed that tells."""

    mean: float | None = None
    worst: float | None = None
    worst_at: str = ""
    shapes: int = 0

    def __str__(self) -> str:
        if self.held is None:
            return f"not measured: {self.demand}"
        figures = f"geometric mean {self.mean:.3f}, worst {self.worst:.3f} at {self.worst_at}"
        return f"{'held' if self.held else 'MISSED'}: {self.demand} ({figures}; {self.shapes} shapes)"


def verdict(demand: Demand, shapes: Sequence[Shape]) -> Verdict:
    """Hold some timed shapes against a demand."""
    ratios = {str(shape): ratio for shape, ratio in _ratios(shapes, demand.over) if demand.where(shape)}
    if not ratios:
        return Verdict(demand=demand.text, held=None)
    mean, at = geometric_mean(ratios.values()), min(ratios, key=lambda name: ratios[name])
    held = mean >= (demand.mean or 0.0) and ratios[at] >= (demand.worst or 0.0)
    return Verdict(
        demand=demand.text, held=held, mean=mean, worst=ratios[at], worst_at=at, shapes=len(ratios)
    )


def _ratios(shapes: Sequence[Shape], over: Sequence[str]) -> Iterator[tuple[Shape, float]]:
    for shape in shapes:
        ratio = shape.ahead(over)
        if ratio is not None:
            yield shape, ratio


def lines(shapes: Sequence[Shape], rivals: Sequence[str]) -> list[str]:
    """A kernel's figures for people: over each contender, of its roofline, and what has no time.

    Args:
        shapes: Those timed.
        rivals: The contenders that are other implementations.
    """
    told = []
    against = {"its default": (DEFAULT,), **({"the best of them": tuple(rivals)} if len(rivals) > 1 else {})}
    against.update({name: (name,) for name in (*rivals, COPY, READ, FLOOR)})
    for name, over in against.items():
        ratios = {str(shape): ratio for shape, ratio in _ratios(shapes, over)}
        if ratios:
            worst = min(ratios, key=lambda at: ratios[at])
            told.append(
                f"   over {name:24s} {geometric_mean(ratios.values()):6.3f}x   "
                f"worst {ratios[worst]:.3f}x at {worst}"
            )
    shares = {
        str(shape): shape.roofline_us / shape.us[TUNED]
        for shape in shapes
        if shape.bytes >= LARGE_BYTES and TUNED in shape.us
    }
    if shares:
        worst = min(shares, key=lambda at: shares[at])
        told.append(
            f"   of its roofline, from 64 MiB  {100 * geometric_mean(shares.values()):5.1f} %   "
            f"worst {100 * shares[worst]:.1f} % at {worst}"
        )
    told += [f"   no time of {name}: {why}" for name, why in _failures(shapes).items()]
    return told


def _failures(shapes: Sequence[Shape]) -> dict[str, str]:
    """Contender to the first reason why it has no time, and on how many shapes."""
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    for shape in shapes:
        for name, why in shape.failed.items():
            first.setdefault(name, f"{why} ({shape})")
            count[name] = count.get(name, 0) + 1
    return {name: f"{count[name]} shapes, first {why}" for name, why in first.items()}
