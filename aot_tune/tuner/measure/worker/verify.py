"""Make launch arguments, restore them before each launch, compare them after it. Launches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.declare.comparison import bits, chunks, compare, poison
from aot_tune.declare.declaration import Close, Declaration
from aot_tune.declare.reference import closes_of
from aot_tune.errors import DeclarationError
from aot_tune.values.problem import Problem
from aot_tune.values.text import described


@dataclass
class Case:
    """The launch arguments of one seed, their values before a launch and those expected after it."""

    tunable: Declaration
    """The kernel's declaration."""

    seed: int
    """The seed of the arguments; it also selects the poison."""

    args: tuple[Any, ...]
    """The launch arguments. They are always the same objects, because strides and alignment are part of a
    kernel's signature."""

    expected: Mapping[str, Close]
    """The expected value of each mutated argument, by name."""

    saved: Mapping[str, torch.Tensor]
    """Copies of the tensors that the kernel reads, by name. Those of in-place arguments restore them; the
    others show whether the kernel changed an argument that is not declared as mutated."""

    @classmethod
    def make(cls, tunable: Declaration, problem: Problem, device: torch.device, seed: int) -> Case:
        """Make the arguments and compute their reference.

        Raises:
            DeclarationError: `make_args` or `reference` raises, or does not return what the declaration says.
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
        """Restore in-place arguments and zero reset ones, as every launch must find them."""
        for name in self.tunable.inplace:
            self.tensor(name).copy_(self.saved[name])
        for name in self.tunable.reset:
            self.tensor(name).zero_()

    def prepare(self) -> None:
        """`renew`, and poison the outputs, before a launch that is checked."""
        self.renew()
        for name in self.tunable.outputs:
            poison(self.tensor(name), self.seed)

    def check(self) -> str | None:
        """Compare after a launch on prepared arguments; return what is wrong, or None.

        Raises:
            DeclarationError: The kernel changed an argument that the declaration does not name.
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
        """The first of the named arguments whose bits differ from the saved ones, or None."""
        for name in names:
            if not torch.equal(bits(self.tensor(name)), bits(self.saved[name])):
                return name
        return None


def _called(tunable: Declaration, function: str, *arguments: Any) -> Any:
    """Call a function of the declaration; any error but running out of memory is a `DeclarationError`."""
    asked = getattr(tunable, function)
    try:
        return asked(*arguments)
    except (torch.OutOfMemoryError, DeclarationError):
        raise
    except Exception as error:
        raise DeclarationError(f"{tunable.name}: {function} raises {described(error, asked)}") from error


def _references(
    tunable: Declaration, named: Mapping[str, torch.Tensor], args: Sequence[Any]
) -> Mapping[str, Close]:
    found = closes_of(tunable, _called(tunable, "reference", *args), named)
    for name, close in found.items():
        if any(bool(part.isnan().any()) for part in chunks(close.value)):
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
