"""Judge the times of a kernel: ratios, shares of the roofline, demands held or missed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aot_tune.tables.table import geometric_mean
from aot_tune.values.problem import Problem, Value, problem_option

TUNED, DEFAULT, COPY, READ, FLOOR = "tuned", "default", "copy", "torch.sum", "reading alone"
"""Names of the contenders that are not rivals: the tables' config, the declared default, a copy that moves as
many bytes as the kernel, a sum that reads as many, and the reading of the tuned config alone."""

NOISE = 0.03
"""Fraction by which two medians of the same call differ now and then: a smaller loss counts as a tie."""

LARGE_BYTES = 64 << 20
"""Bytes from which a shape runs long enough to be bounded by its roofline."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Times of one declared shape."""

    problem: Mapping[str, Value]
    """Sizes and dtypes of the problem."""

    config: str
    """Tuned config as text."""

    bytes: float
    """Bytes that the kernel must read and write."""

    flops: float
    """Operations that the kernel must do on the matrix units."""

    roofline_us: float
    """Microseconds of moving the bytes or of the operations at the ceilings, the longer time."""

    us: Mapping[str, float]
    """Contender to its median time in microseconds. A default that is the tuned config has the same time."""

    failed: Mapping[str, str] = field(default_factory=dict)
    """Contender to the reason why it has no time."""

    def __str__(self) -> str:
        return problem_option(Problem(self.problem))

    def ahead(self, of: Sequence[str]) -> float | None:
        """Return the time of the fastest contender among `of` over the tuned one's; above 1 is faster."""
        others = [self.us[name] for name in of if name in self.us]
        return min(others) / self.us[TUNED] if others and TUNED in self.us else None


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A demand on a kernel against other contenders."""

    text: str
    """Demand as text."""

    over: tuple[str, ...]
    """Contenders. Of several the fastest on each shape counts."""

    mean: float | None = None
    """Least geometric mean of their time divided by the tuned config's time."""

    worst: float | None = None
    """Least value of this ratio on any shape."""

    where: Callable[[Shape], bool] = lambda shape: True
    """Function that selects the shapes of the demand."""


NEVER_SLOWER = Demand(text="never slower than its default beyond noise", over=(DEFAULT,), worst=1 - NOISE)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on a demand."""

    demand: str
    held: bool | None
    """Whether the demand is met; None where no shape that it concerns was timed."""

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
    """Judge some timed shapes by a demand."""
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
    """Format a kernel's figures: ratios to each contender, shares of the roofline, and failures.

    Args:
        shapes: The shapes that were timed.
        rivals: The contenders that are other implementations.
    """
    texts = []
    against = {"its default": (DEFAULT,), **({"the best of them": tuple(rivals)} if len(rivals) > 1 else {})}
    against.update({name: (name,) for name in (*rivals, COPY, READ, FLOOR)})
    for name, over in against.items():
        ratios = {str(shape): ratio for shape, ratio in _ratios(shapes, over)}
        if ratios:
            worst = min(ratios, key=lambda at: ratios[at])
            texts.append(
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
        texts.append(
            f"   of its roofline, from 64 MiB  {100 * geometric_mean(shares.values()):5.1f} %   "
            f"worst {100 * shares[worst]:.1f} % at {worst}"
        )
    texts += [f"   no time of {name}: {why}" for name, why in _failures(shapes).items()]
    return texts


def _failures(shapes: Sequence[Shape]) -> dict[str, str]:
    """Return the first reason why a contender has no time, with the number of shapes without one."""
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    for shape in shapes:
        for name, why in shape.failed.items():
            first.setdefault(name, f"{why} ({shape})")
            count[name] = count.get(name, 0) + 1
    return {name: f"{count[name]} shapes, first {why}" for name, why in first.items()}
