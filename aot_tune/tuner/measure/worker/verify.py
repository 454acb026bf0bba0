"""Whether a kernel computes the right result: poison, restore, compare. Launches nothing.

Before a check the outputs hold a poison that no right result contains, another one for each seed: NaN bits,
then a huge finite number. So a kernel that writes nothing, or only a part, cannot pass by what an earlier one
left there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.declare.declaration import Close, Declaration
from aot_tune.declare.reference import closes_of
from aot_tune.errors import DeclarationError
from aot_tune.values.problem import Problem
from aot_tune.values.raised import told

CHUNK = 1 << 24
"""Elements compared at a time: a few 128 MiB temporaries, whatever the output's size."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISONS = {1: (0xFF, 0x7F), 2: (-1, 0x7F7F), 4: (-1, 0x7F7F7F7F), 8: (-1, 0x7F7F7F7F7F7F7F7F)}
"""By bytes an element. All bits set is NaN in every float dtype and -1 in ints; 0x7F bytes are 3.4e38 in
bfloat16 and float32, 1.4e306 in float64, NaN in float16 and fp8, 127 in int8."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaNs of one pattern are equal, and any strides are kept."""
    return tensor.view(_BITS[tensor.element_size()])


def poison(tensor: torch.Tensor, seed: int) -> None:
    """Overwrite a tensor with what no right result contains; odd seeds use another pattern than even ones."""
    if tensor.dtype == torch.bool:
        tensor.fill_(seed % 2 == 0)
        return
    memory = bits(tensor)
    memory.fill_(_POISONS[memory.element_size()][seed % 2])


def compare(name: str, output: torch.Tensor, expected: Close) -> str | None:
    """What of an output is further off than allowed; None when it is right everywhere.

    A NaN or infinity in the output is never close to a finite value; an infinity equals the same infinity.
    """
    right = expected.value
    exact = torch.float64 in (right.dtype, output.dtype) or not output.dtype.is_floating_point
    wide = torch.float64 if exact else torch.float32
    wrong = torch.zeros((), dtype=torch.int64, device=output.device)
    for part, right_part in zip(_chunks(output), _chunks(right), strict=True):
        wrong += _off(part.to(wide), right_part.to(wide), expected).sum()
    count = int(wrong)
    return None if count == 0 else _explained(name, output, expected, count, wide)


def _off(part: torch.Tensor, right: torch.Tensor, expected: Close) -> torch.Tensor:
    allowed = right.abs().mul_(expected.rtol).add_(expected.atol)
    close = (part - right).abs_() <= allowed  # false wherever either is NaN
    # An infinite right value makes `allowed` infinite and would admit anything finite.
    return torch.where(right.isinf(), part != right, ~close)


def _chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor in slices of at most `CHUNK` elements along its first dimension."""
    if tensor.dim() == 0:
        return [tensor]
    rows = max(1, CHUNK // max(1, tensor[0].numel() if len(tensor) else 1))
    return list(torch.split(tensor, rows))


def _explained(name: str, output: torch.Tensor, expected: Close, count: int, wide: torch.dtype) -> str:
    """The count, and the first element that is off."""
    first, offset = "", 0
    for part, right in zip(_chunks(output), _chunks(expected.value), strict=True):
        off = _off(part.to(wide), right.to(wide), expected)
        if bool(off.any()):
            place = off.nonzero()[0]
            at = tuple(int(i) for i in place)
            got, want = part[at].item(), right[at].item()
            where = (at[0] + offset, *at[1:]) if at else ()
            first = f"{name}{list(where) if where else ''} is {got:.6g} and should be {want:.6g}"
            break
        offset += len(part) if part.dim() else 0
    return (
        f"{name}: {count} of {output.numel()} elements are wrong, first {first} "
        f"(rtol {expected.rtol:g}, atol {expected.atol:g})"
    )


@dataclass
class Case:
    """One seed's launch arguments, what they must become, and how they were."""

    tunable: Declaration
    """The declaration."""

    seed: int
    """What they were made of; it selects the poison."""

    args: tuple[Any, ...]
    """The launch arguments, always these objects: strides and alignment are part of a kernel's signature."""

    expected: Mapping[str, Close]
    """By mutated argument."""

    saved: Mapping[str, torch.Tensor]
    """Copies of the tensors that are read: restored from (in place), or compared with (not declared as
    mutated)."""

    @classmethod
    def make(cls, tunable: Declaration, problem: Problem, device: torch.device, seed: int) -> Case:
        """Make the arguments and compute their reference.

        Raises:
            DeclarationError: `make_args` or `reference` raises or returns something else than declared.
        """
        args = tuple(_called(tunable, "make_args", problem, device, seed))
        names = tunable.parameters
        if len(args) != len(names):
            raise DeclarationError(
                f"{tunable.name}: make_args returns {len(args)} arguments and launch takes {len(names)} "
                f"({', '.join(names)}); return one for each"
            )
        named = {name: arg for name, arg in zip(names, args, strict=True) if isinstance(arg, torch.Tensor)}
        for name in tunable.mutated:
            if name not in named:
                raise DeclarationError(
                    f"{tunable.name}: make_args returns no tensor for {name}, which is mutated"
                )
        for name in tunable.reset:
            named[name].zero_()
        written = (*tunable.outputs, *tunable.reset)
        saved = {name: tensor.clone() for name, tensor in named.items() if name not in written}
        expected = _references(tunable, named, args)
        case = cls(tunable=tunable, seed=seed, args=args, expected=expected, saved=saved)
        changed = case.changed((*saved,))
        if changed:
            raise DeclarationError(
                f"{tunable.name}: reference changes its argument {changed}; compute on a copy"
            )
        return case

    def tensor(self, name: str) -> torch.Tensor:
        """The argument called `name`."""
        tensor = self.args[self.tunable.parameters.index(name)]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def renew(self) -> None:
        """As a launch must find them: in-place arguments restored, reset ones zeroed. Before every trial."""
        for name in self.tunable.inplace:
            self.tensor(name).copy_(self.saved[name])
        for name in self.tunable.reset:
            self.tensor(name).zero_()

    def prepare(self) -> None:
        """`renew`, and poison the outputs. Before a check."""
        self.renew()
        for name in self.tunable.outputs:
            poison(self.tensor(name), self.seed)

    def check(self) -> str | None:
        """What is wrong after a launch on prepared arguments; None when all is right.

        Raises:
            DeclarationError: An argument changed that the declaration does not name.
        """
        changed = self.changed([name for name in self.saved if name not in self.tunable.inplace])
        if changed:
            kept = self.tensor(changed)
            kept.copy_(self.saved[changed])
            raise DeclarationError(
                f"{self.tunable.name}: the kernel changes its argument {changed}, which the declaration does "
                f"not name; add {changed!r} to outputs, inplace or reset. If it should not be changed, the "
                "kernel writes out of bounds: repair it, or refuse the config in legal()"
            )
        for name, expected in self.expected.items():
            wrong = compare(name, self.tensor(name), expected)
            if wrong:
                return f"{wrong}, seed {self.seed}"
        return None

    def changed(self, names: Sequence[str]) -> str | None:
        """The first of the named arguments whose bits are not those saved."""
        for name in names:
            if not torch.equal(bits(self.tensor(name)), bits(self.saved[name])):
                return name
        return None


def _called(tunable: Declaration, function: str, *arguments: Any) -> Any:
    """Call a function of the declaration; only running out of memory passes as it is."""
    asked = getattr(tunable, function)
    try:
        return asked(*arguments)
    except (torch.OutOfMemoryError, DeclarationError):
        raise
    except Exception as error:
        raise DeclarationError(f"{tunable.name}: {function} raises {told(error, asked)}") from error


def _references(
    tunable: Declaration, named: Mapping[str, torch.Tensor], args: Sequence[Any]
) -> Mapping[str, Close]:
    found = closes_of(tunable, _called(tunable, "reference", *args), named)
    for name, close in found.items():
        if any(bool(part.isnan().any()) for part in _chunks(close.value)):
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} a NaN; make_args must lead to numbers"
            )
        if close.value.device != named[name].device:
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} on {close.value.device}, the argument is on "
                f"{named[name].device}; compute it there"
            )
        if close.value.numel() and close.value.data_ptr() == named[name].data_ptr():
            raise DeclarationError(
                f"{tunable.name}: reference returns the argument {name} itself; compute on a copy"
            )
    return found
