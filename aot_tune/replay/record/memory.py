"""Save, restore and compare the contents of a launch's tensors, so that a search changes none.

A tensor without contents (on the device "meta") is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.declare.comparison import bits, chunks, poison
from aot_tune.declare.kernel_source.walk import facts_of
from aot_tune.nvidia import cutile

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
"""Largest difference of two configs' outputs, as a fraction of the largest expected value. Configs add in
other orders, and float32 products may run in tf32. Narrower floating-point types have `NARROW`."""

NARROW = 0.13
"""Tolerance of eight-bit and narrower floating-point types: two steps of their three mantissa bits."""

MOST_PARTS = 32
"""Most parts that a sum is split into. A sum without one of them is beyond the tolerance of most dtypes."""

Places = tuple[int, ...]
"""Place of a tensor in a launch's arguments: its position, followed by positions in lists."""


def tensors_of(args: Sequence[Any]) -> dict[Places, torch.Tensor]:
    """Return all tensors with contents among arguments and in lists, by place."""
    return dict(_tensors(args, ()))


def _tensors(args: Sequence[Any], above: Places) -> Iterator[tuple[Places, torch.Tensor]]:
    for at, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            if not arg.is_meta:
                yield (*above, at), arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg, (*above, at))


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Parameters that a kernel may store to, by position; all where its source cannot be read."""

    written: frozenset[int]
    """Parameters that are stored to, that an atomic operation changes, or that unreadable code gets."""

    fresh: frozenset[int]
    """Of these, parameters that are stored to before anything is read: their former contents are unused."""


def stores_of(kernel: Any) -> Stores:
    """Return what a ``@ct.kernel`` may store to, by its source."""
    names, found = [name for name, _ in cutile.parameters(kernel)], facts_of(kernel)
    written = found.stored | found.added | found.escaped
    fresh = found.stored - found.loaded_first - found.added - found.escaped
    return Stores(
        written=frozenset(at for at, name in enumerate(names) if name in written),
        fresh=frozenset(at for at, name in enumerate(names) if name in fresh),
    )


class Memory:
    """Contents of a launch's tensors: before the search, and as the first config leaves them.

    What the kernel stores to is compared, whether or not the first config changes it. Before each launch, a
    tensor whose former contents are unused is poisoned, so that a config cannot pass with what another wrote.

    Args:
        args: The arguments, with the contents from before the search.
        stores: What the kernel may store to.
    """

    def __init__(self, args: Sequence[Any], stores: Stores) -> None:
        self._stores = stores
        self._before = {place: _copy(tensor) for place, tensor in tensors_of(args).items()}
        self._after: dict[Places, torch.Tensor] | None = None
        self.in_parts: set[str] = set()
        """Parameters to which a config stored another number of parts of the same sums than the first one."""

    @property
    def is_observed(self) -> bool:
        """Whether the results of the first config are known."""
        return self._after is not None

    @property
    def compared(self) -> tuple[Places, ...]:
        """Return the places of the tensors that are compared."""
        return tuple(self._after or ())

    def restore(self, args: Sequence[Any]) -> None:
        """Copy the contents from before the search back.

        A tensor whose shape varies with the config is left as `args_fn` made it.
        """
        for place, tensor in tensors_of(args).items():
            held = self._before.get(place)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                continue
            # Not every argument can be written to, such as an expanded view.
            if self.is_observed or not _same(held, tensor.to(held.device)):
                tensor.copy_(held)

    def prepare(self, args: Sequence[Any]) -> None:
        """Restore the contents for a launch, and poison what no launch may read."""
        self.restore(args)
        for tensor in self._fresh(args).values():
            poison(tensor.detach(), 0)

    def _fresh(self, args: Sequence[Any]) -> dict[Places, torch.Tensor]:
        """Return the tensors to poison: none that shares memory with another, or within itself."""
        tensors = tensors_of(args)
        shared = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        return {
            place: tensor
            for place, tensor in tensors.items()
            if place[0] in self._stores.fresh
            and (self._after is None or place in self._after)
            and shared[tensor.untyped_storage().data_ptr()] == 1
            and 0 not in tensor.stride()
        }

    def observe(self, args: Sequence[Any]) -> None:
        """Keep the results of the first config: other configs have to compute them too.

        A poisoned tensor of floats that still holds the poison is none, such as scratch memory of others.
        """
        tensors, poisoned = tensors_of(args), self._fresh(args)
        self._after = {}
        for place, held in self._before.items():
            tensor = tensors.get(place)
            if tensor is None:
                continue
            if place in poisoned:
                is_result = not tensor.is_floating_point() or not _is_poison(tensor)
            else:
                is_result = place[0] in self._stores.written or not _same(held, tensor.to(held.device))
            if is_result:
                self._after[place] = _copy(tensor)
            elif place in poisoned:
                tensor.copy_(held)
        self._before = {place: self._before[place] for place in self._after}

    def difference(self, args: Sequence[Any], names: Sequence[str]) -> str | None:
        """Return how a config's results differ from the first config's, in words; None where they do not.

        Parts of sums, such as those of a product that is split along K, do not differ if they add up.

        Args:
            args: The arguments after the launch.
            names: The kernel's parameters.
        """
        tensors, poisoned = tensors_of(args), self._fresh(args)
        for place, expected in (self._after or {}).items():
            tensor = tensors.get(place)
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                continue
            off = distance(tensor, expected)
            if off > tolerance(expected.dtype):
                if place in poisoned and add_up_alike(tensor, expected):
                    self.in_parts.add(names[place[0]])
                    continue
                return (
                    f"{names[place[0]]} differs from the first config's by {off:.3g} of its largest value; "
                    f"at most {tolerance(expected.dtype):g} is allowed for {expected.dtype}"
                )
        return None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().to("cpu", copy=True)


def _is_poison(tensor: torch.Tensor) -> bool:
    return bool(_poisoned(tensor).all())


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Return for each element whether it holds the poison."""
    element = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
    poison(element, 0)
    return bits(tensor) == bits(element)


def add_up_alike(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results are different numbers of parts of the same sums.

    The parts of each are stored one after another along a dimension of a tensor that was poisoned. A split-K
    kernel does so in a workspace that serves all of its configs: a later launch adds the chosen config's.
    """
    ours, theirs = _stored(tensor), _stored(expected.to(tensor.device))
    if ours is None or theirs is None:
        return False
    most, pairs = tolerance(expected.dtype), list(zip(ours.shape, theirs.shape, strict=True))
    for dim, (size, other) in enumerate(pairs):
        if dim and size == other:
            continue
        expected_sums = list(_sums(theirs, dim, most))
        for mine, sums in _sums(ours, dim, most):
            if any(mine != n and _equal_but_zeros(sums, wanted, most) for n, wanted in expected_sums):
                return True
    return False


def _stored(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what was stored to, in float32 or wider; None where it does not begin at the first element."""
    if tensor.dim() * tensor.numel() == 0 or not tensor.is_floating_point() or tensor.element_size() == 1:
        return None
    stored = ~_poisoned(tensor)
    along = (stored.movedim(dim, 0).reshape(size, -1).any(1) for dim, size in enumerate(tensor.shape))
    box = tuple(slice(int(places.sum())) for places in along)
    if not bool(stored.any()) or not bool(stored[box].all()):
        return None
    return tensor[box].to(torch.promote_types(tensor.dtype, torch.float32))


def _sums(stored: torch.Tensor, dim: int, most: float) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each number of equal parts that a dimension may consist of, with the sum over the parts.

    Sums that are the same without one of the parts, within the tolerance `most`, prove nothing: zeros that a
    config fails to store would be such a part.
    """
    for number in range(1, MOST_PARTS + 1):
        if stored.shape[dim] % number == 0:
            parts = stored.reshape(*stored.shape[:dim], number, -1, *stored.shape[dim + 1 :]).movedim(dim, 0)
            sums = parts.sum(0)
            largest = parts.abs().amax(tuple(range(1, parts.dim())))
            if bool((largest > most * sums.abs().max()).all()):
                yield number, sums


def _equal_but_zeros(sums: torch.Tensor, expected: torch.Tensor, most: float) -> bool:
    """Whether sums are equal, and all else of the larger zeros: each part may end in a whole tile."""
    common = tuple(slice(min(pair)) for pair in zip(sums.shape, expected.shape, strict=True))
    if any(whole.count_nonzero() != whole[common].count_nonzero() for whole in (sums, expected)):
        return False
    return distance(sums[common], expected[common]) <= most


def _same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(tensor), bits(expected)) if tensor.numel() else True


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of a dtype; 0 for whole numbers, which must be equal."""
    return TOLERANCES.get(dtype, NARROW) if dtype.is_floating_point else 0.0


def distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference / the largest expected value; infinite where NaNs or infinities do."""
    if _same(tensor, expected.to(tensor.device)):
        return 0.0
    if not expected.dtype.is_floating_point:
        return float("inf")
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    largest = most = 0.0
    for part, expected_part in zip(chunks(tensor), chunks(expected.to(tensor.device)), strict=True):
        got, want = part.to(wide), expected_part.to(wide)
        finite, same = want.isfinite(), (got == want) | (got.isnan() & want.isnan())
        if bool((~(finite & got.isfinite()) & ~same).any()):  # NaN or an infinity of either sign on one side
            return float("inf")
        largest = max(largest, float(torch.where(finite, want.abs(), 0.0).max()))
        most = max(most, float(torch.where(finite, (got - want).abs(), 0.0).max()))
    return most / largest if largest else (float("inf") if most else 0.0)
