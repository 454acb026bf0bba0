"""Make launch arguments, restore them before each launch, compare them after it. Launches nothing.

The expected values and the saved copies lie in the same memory as the arguments, where a kernel that writes
out of bounds reaches them unseen. So a digest of each is kept on the host, and `Case.damage` compares it: a
change is detected after the config that caused it. Reading them once per config costs less than one of its
verifications, which reads them as well: 0.3 ms per GiB on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aot_tune.declare.comparison import chunks, compare, poison, same_bits, words
from aot_tune.declare.declaration import Close, Declaration
from aot_tune.declare.reference import closes_of
from aot_tune.errors import ArgumentsError, DeclarationError
from aot_tune.values.parts import named_parts, part_names
from aot_tune.values.problem import Problem
from aot_tune.values.text import described


@dataclass
class Case:
    """The launch arguments of one seed, with their values before and the expected values after a launch."""

    tunable: Declaration
    """The kernel's declaration."""

    seed: int
    """The seed of the arguments; it also selects the poison."""

    args: tuple[Any, ...]
    """The launch arguments: always the same objects, because a kernel's signature includes strides and
    alignment."""

    expected: Mapping[str, Close]
    """The expected value of each mutated argument by name; members of a list are named ``xs[0]``."""

    saved: Mapping[str, torch.Tensor]
    """Copies of the tensors that the kernel reads, by such names. Copies of in-place arguments restore them;
    the other copies show whether the kernel changed an argument that is not declared as mutated."""

    digests: Mapping[str, int] = field(init=False)
    """Digests of `expected` and `saved` at their creation, by a description of each tensor."""

    def __post_init__(self) -> None:
        names = self.tunable.parameters
        self._named = dict(zip(names, self.args, strict=True))
        self._parts = named_parts(names, self.args)
        self.digests = self._digests()

    @classmethod
    def make(cls, tunable: Declaration, problem: Problem, device: torch.device, seed: int) -> Case:
        """Make the arguments and compute their reference.

        Raises:
            ArgumentsError: `make_args` or `reference` raises.
            DeclarationError: A result of one of them contradicts the declaration.
        """
        args = tuple(_called(tunable, "make_args", problem, device, seed))
        names = tunable.parameters
        if len(args) != len(names):
            raise DeclarationError(
                f"{tunable.name}: make_args returns {len(args)} arguments and launch takes {len(names)} "
                f"({', '.join(names)}); return one for each"
            )
        named = dict(zip(names, args, strict=True))
        parts = named_parts(names, args)
        for name in part_names(tunable.mutated, named):
            if not isinstance(parts[name], torch.Tensor):
                raise DeclarationError(
                    f"{tunable.name}: make_args returns no tensor for {name}, which is mutated"
                )
        for name in part_names(tunable.reset, named):
            parts[name].zero_()
        written = part_names((*tunable.output_names, *tunable.reset), named)
        tensors = {name: value for name, value in parts.items() if isinstance(value, torch.Tensor)}
        saved = {name: tensor.clone() for name, tensor in tensors.items() if name not in written}
        expected = _references(tunable, named, tensors)
        case = cls(tunable=tunable, seed=seed, args=args, expected=expected, saved=saved)
        changed = case.changed((*saved,))
        if changed:
            raise DeclarationError(
                f"{tunable.name}: reference changes its argument {changed}; compute on a copy"
            )
        return case

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of an argument, or of a list's member, by its name."""
        tensor = self._parts[name]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def renew(self) -> None:
        """Restore in-place arguments and zero reset arguments before a launch."""
        for name in self._names(self.tunable.inplace):
            self.tensor(name).copy_(self.saved[name])
        for name in self._names(self.tunable.reset):
            self.tensor(name).zero_()

    def prepare(self) -> None:
        """`renew`, and poison the outputs, before a launch that is checked."""
        self.renew()
        for name in self._names(self.tunable.output_names):
            poison(self.tensor(name), self.seed)

    def check(self) -> str | None:
        """Compare after a launch on prepared arguments; return what is wrong, or None.

        Raises:
            DeclarationError: The kernel changed an argument that the declaration does not name.
        """
        changed = self.changed(self._unchanging())
        if changed:
            damaged = self._damaged()
            if damaged:  # perhaps the saved copy changed and the argument did not
                return damaged
            self.tensor(changed).copy_(self.saved[changed])
            argument = changed.partition("[")[0]
            raise DeclarationError(
                f"{self.tunable.name}: the kernel changes its argument {changed}, which the declaration does "
                f"not name; add {argument!r} to outputs, inplace or reset. If it should not be changed, the "
                "kernel writes out of bounds: repair it, or refuse the config in legal()"
            )
        for name, expected in self.expected.items():
            wrong = compare(name, self.tensor(name), expected)
            if wrong:
                return f"{wrong}, seed {self.seed}"
        return None

    def results(self) -> dict[str, torch.Tensor]:
        """Return copies of a launch's outputs, for `repeated`."""
        return {name: self.tensor(name).clone() for name in self._names(self.tunable.mutated)}

    def repeated(self, results: Mapping[str, torch.Tensor]) -> str | None:
        """Compare a further launch with the results of a correct one; return what is wrong, or None.

        Compares with the reference, which takes longer, only where bits differ.
        """
        if all(same_bits(self.tensor(name), right) for name, right in results.items()):
            return None
        return self.check()

    def damage(self) -> str | None:
        """Describe a forbidden change of expected values, saved copies or inputs; None without any."""
        changed = self._damaged()
        if changed:
            return changed
        name = self.changed(self._unchanging())
        return None if name is None else f"its argument {name} changed, seed {self.seed}"

    def _damaged(self) -> str | None:
        for what, digest in self._digests().items():
            if digest != self.digests[what]:
                return f"{what} changed, seed {self.seed}"
        return None

    def _digests(self) -> dict[str, int]:
        tensors = {f"the expected {name}": close.value for name, close in self.expected.items()}
        tensors |= {f"the saved copy of {name}": tensor for name, tensor in self.saved.items()}
        return dict(zip(tensors, digests(tensors.values()), strict=True))

    def _unchanging(self) -> list[str]:
        restored = self._names(self.tunable.inplace)
        return [name for name in self.saved if name not in restored]

    def _names(self, arguments: Sequence[str]) -> list[str]:
        """Return the names of some arguments' tensors, without absent arguments."""
        return part_names(arguments, self._named)

    def changed(self, names: Sequence[str]) -> str | None:
        """Return the first named argument whose bits differ from its saved copy, or None."""
        for name in names:
            if not same_bits(self.tensor(name), self.saved[name]):
                return name
        return None


# Digests and references -------------------------------------------------------------------------------------


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sum of each tensor's bits as integers, modulo 2**64."""
    sums = [_sum_of_bits(tensor) for tensor in tensors]  # all queued before the first is read
    return [int(total) for total in sums]


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum as a tensor of one element; allocates a temporary of at most one chunk."""
    return torch.stack([part.sum(dtype=torch.int64) for part in chunks(words(tensor))]).sum()


def _called(tunable: Declaration, function: str, *arguments: Any) -> Any:
    """Call a function of the declaration; errors other than out of memory become an `ArgumentsError`."""
    declared = getattr(tunable, function)
    try:
        return declared(*arguments)
    except (torch.OutOfMemoryError, DeclarationError):
        raise
    except Exception as error:
        raise ArgumentsError(f"{tunable.name}: {function} raises {described(error, declared)}") from error


def _references(
    tunable: Declaration, args: Mapping[str, Any], named: Mapping[str, torch.Tensor]
) -> Mapping[str, Close]:
    references = closes_of(tunable, _called(tunable, "reference", *args.values()), args)
    for name, close in references.items():
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
    return references
