"""Remark on what a declaration says and probably does not mean. Imports torch, needs no GPU.

A remark refuses nothing: what it names may be meant. What is certainly wrong is in `mistakes` and
`argument_mistakes`. The author's functions are called with other sizes and scalars than the typical ones;
where they cannot take those, nothing is remarked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aot_tune.declare.argument_mistakes import one_of_each_kernel, shares
from aot_tune.declare.comparison import bits
from aot_tune.declare.kernel_source.accesses import accesses
from aot_tune.declare.kernel_source.block_counts import MOST_CALLS, BlockCounts, NotCountedError, count_blocks
from aot_tune.nvidia import cutile
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.bucket import Pow2, classes_of, edge
from aot_tune.values.device import Device
from aot_tune.values.parts import flat
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration, Work
    from aot_tune.values.config import Config

_SMALLEST_EDGE = 16
"""Sizes are tried in a bucket of at least this edge, because smaller ones hold too few different sizes."""

_EIGHTHS = (8, 7, 6, 5)
"""The sizes that are tried inside one bucket, in eighths of its edge."""

_FEW = 2
"""A constant with at most this many values inside a bucket is a flag, and does not follow the size."""

_MOST_CPU_BYTES = 1 << 24
"""Arguments of at most this many bytes are made on the CPU to compare their values."""

_FACTOR = 4.0
"""Bytes that all blocks store and that the written arguments hold agree within this factor."""

_LEAST_STORED = 0.6
"""The part of the outputs' bytes that all blocks store, at least. It is not 1: of the few blocks that are
followed a third less may have a tile than of all."""

_MOST_CALLS = 10_000
"""Calls of cuTile's functions in the blocks that are followed for remarks, at most: about 0.1 s."""

_MOST_LOADS = 2.0
"""One block loads at most this many times the bytes of all arguments, as in a kernel of two passes."""


def declaration_remarks(tunable: Declaration, arch: Arch) -> list[str]:
    """What a declaration without mistakes probably does not mean, each a sentence with the ways out."""
    found: list[str] = []
    for remarks in (
        _compiled_in(tunable, arch),
        _copies_of_strided(tunable, arch),
        _accesses_unlike_the_names(tunable, arch),
        _unseeded(tunable),
        _archs_without_configs(tunable, arch),
        _lent_kernels(tunable, arch),
        _work_unlike_the_arguments(tunable, arch),
        _unlike_the_code(tunable, arch),
    ):
        found += [f"{tunable.name}: {text}" for text in remarks]
    return list(dict.fromkeys(found))


# What is compiled in ----------------------------------------------------------------------------------------


def _compiled_in(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Constants that follow a Pow2 axis or a scalar of the launch."""
    for problem in _one_of_each_class(tunable):
        for axis in (name for name, kind in tunable.axes.items() if isinstance(kind, Pow2)):
            size = max(edge(problem.size(axis)), _SMALLEST_EDGE)
            others = [problem.replaced(**{axis: size * eighth // 8}) for eighth in _EIGHTHS]
            seen = [(other[axis], _constants(tunable, arch, other)) for other in others]
            for constant, ((one, this), (two, that)) in _following(seen):
                yield (
                    f"{constant}, a ct.Constant, follows the Pow2 axis {axis}: args_fn hands on {this} for "
                    f"{axis}={one} and {that} for {axis}={two}. So each size compiles at its first launch, "
                    "and an archive serves the declared sizes alone; take ct.Constant away from "
                    f"{constant}, so that it is passed at launch, or declare {axis!r}: Exact()"
                )
        yield from _compiled_scalars(tunable, arch, problem)
        yield from _compiled_device(tunable, arch, problem)


def _compiled_scalars(tunable: Declaration, arch: Arch, problem: Problem) -> Iterator[str]:
    args = _made(tunable, problem)
    for place, name in enumerate(tunable.parameters if args else ()):
        assert args is not None
        seen = []
        for value in _other_scalars(args[place]):
            changed = (*args[:place], value, *args[place + 1 :])
            seen.append((value, _constants(tunable, arch, problem, changed)))
        few = 1 if isinstance(args[place], bool) else _FEW
        for constant, ((one, this), (two, that)) in _following(seen, few):
            yield (
                f"{constant}, a ct.Constant, follows the launch argument {name}, which problem() does not "
                f"return: args_fn hands on {this} for {name}={one} and {that} for {name}={two}. So each "
                "value compiles at its first launch, and an archive serves the value of make_args alone; "
                f"take ct.Constant away from {constant}, so that it is passed at launch, or return {name} "
                "from problem(), a size as an Exact() axis"
            )


def _compiled_device(tunable: Declaration, arch: Arch, problem: Problem) -> Iterator[str]:
    args, device = _made(tunable, problem), Device.reference(arch)
    if args is None or not tunable.takes_device:
        return
    smaller = replace(device, sm_count=device.sm_count // 2 + 1)
    here, there = (_passed(tunable, arch, problem, args, device=one) for one in (device, smaller))
    for constant, one in here.items() if here and there else ():
        other = there[constant] if there else one
        if constant in tunable.constant_names and one != other:
            yield (
                f"{constant}, a ct.Constant, follows the device: args_fn hands on {one} on {device.name} and "
                f"{other} with {smaller.sm_count} multiprocessors. So an archive serves devices with as many "
                f"as {device.name} alone, and others compile at their first launch; take ct.Constant away "
                f"from {constant}, or let the kernel ask ct.num_blocks"
            )


def _other_scalars(value: object) -> tuple[object, ...]:
    """A scalar of the launch and two other values of its type; nothing for any other argument."""
    if isinstance(value, bool):
        return (value, not value)
    if isinstance(value, int):
        return (value, value + 1, value + 2)
    if isinstance(value, float):
        return (value, value * 2 + 1, value * 4 + 3)
    return ()


def _constants(
    tunable: Declaration, arch: Arch, problem: Problem, args: tuple[Any, ...] | None = None
) -> Mapping[str, object] | None:
    """What arrives at the kernel's constants for a problem, under the default; None where that is unknown."""
    args = args if args is not None else _made(tunable, problem)
    passed = _passed(tunable, arch, problem, args) if args is not None else None
    if args is None or passed is None or _tried(lambda: tunable.problem_of(*args)) != problem:
        return None
    constants = tunable.constants_of(tunable.default_config(arch, problem).kernel)
    return {name: value for name, value in passed.items() if name in constants}


_Seen = tuple[object, object]
"""A size or scalar, and what arrived at a constant for it."""


def _following(
    seen: Sequence[tuple[object, Mapping[str, object] | None]], few: int = _FEW
) -> Iterator[tuple[str, tuple[_Seen, _Seen]]]:
    """The constants that take more than a `few` values, each with the first two values that differ."""
    known = [(value, constants) for value, constants in seen if constants is not None]
    for constant in known[0][1] if known else ():
        first: dict[object, object] = {}
        for value, constants in known:
            first.setdefault(constants[constant], value)
        if len(first) > few:
            (this, one), (that, two) = itertools.islice(first.items(), 2)
            yield constant, ((one, this), (two, that))


# What the kernel writes -------------------------------------------------------------------------------------


def _copies_of_strided(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Mutated arguments of which args_fn makes a copy where they are not contiguous."""
    for problem in _one_of_each_class(tunable):
        args = _made(tunable, problem)
        for place, name in enumerate(tunable.parameters if args else ()):
            assert args is not None
            tensors = [one for one in flat([args[place]]) if isinstance(one, torch.Tensor)]
            if name not in tunable.mutated or max((n for one in tensors for n in one.shape), default=1) == 1:
                continue
            apart = [_strided(one) for one in tensors]
            strided = apart if isinstance(args[place], list | tuple) else apart[0]
            passed = _passed(tunable, arch, problem, (*args[:place], strided, *args[place + 1 :]))
            if passed is not None and not all(any(map(shares(one), passed.values())) for one in apart):
                yield (
                    f"args_fn hands on a copy of {name} where it is not contiguous, so a launch would leave "
                    "the caller's tensor as it was; hand it on as it is or as a view (x.view, not x.reshape "
                    "or x.contiguous), or refuse such a tensor before the launch"
                )


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without storage of the same shape, whose elements are twice as far apart."""
    strides = [2 * stride for stride in tensor.stride()]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _accesses_unlike_the_names(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Arguments that a kernel's source loads, adds to or stores to, unlike what the declaration says."""
    problem = tunable.typical_problems[0]
    args = _made(tunable, problem)
    for config in one_of_each_kernel(tunable, arch, problem, tunable.default_config(arch, problem)):
        passed = _passed(tunable, arch, problem, args, config) if args is not None else None
        if args is not None and passed is not None:
            yield from _accesses_of(tunable, config, args, passed)


def _accesses_of(
    tunable: Declaration, config: Config, args: tuple[Any, ...], passed: Mapping[str, Any]
) -> Iterator[str]:
    """The same of one kernel, which a config is for."""
    found = accesses(tunable.kernel_of(config))
    named = dict(zip(tunable.parameters, args, strict=True))
    written = found.stored | found.added
    unnamed = {}
    for parameter in sorted(written):
        owners = [name for name, arg in named.items() if shares(arg)(passed.get(parameter))]
        if owners and not any(name in tunable.mutated for name in owners):
            unnamed[parameter] = owners[0]
    for name in tunable.outputs or ():
        parameters = [parameter for parameter, value in passed.items() if shares(named[name])(value)]
        for parameter in parameters:
            if parameter in found.added:
                yield (
                    f"the kernel adds to {parameter}, where {name} of outputs arrives; "
                    "a sweep poisons outputs before a check: name it in reset, or in inplace where what it "
                    "held before the launch counts"
                )
            elif parameter in found.loaded_first and unnamed and not written & set(parameters):
                stored, owner = next(iter(unnamed.items()))
                yield (
                    f"args_fn hands on {name} of outputs for {parameter}, which the kernel only loads, and "
                    f"{owner} for {stored}, to which it stores; return them in the order of the kernel's "
                    "parameters"
                )
                return
            elif parameter in found.loaded_first:
                yield (
                    f"the kernel loads {parameter}, where {name} of outputs arrives, before it stores to it; "
                    "a sweep poisons outputs before a check: name it in inplace"
                )
    for parameter, owner in unnamed.items():
        yield (
            f"the kernel stores to {parameter}, where the argument {owner} arrives, which neither "
            "outputs, inplace nor reset names; name it in one of them"
        )


# What make_args makes ---------------------------------------------------------------------------------------


def _unseeded(tunable: Declaration) -> Iterator[str]:
    """Arguments whose values differ from call to call with one seed."""
    sizes = (
        (_bytes(args), problem) for problem in tunable.typical_problems if (args := _made(tunable, problem))
    )
    size, problem = min(sizes, key=lambda one: one[0], default=(0, None))
    if problem is None or size > _MOST_CPU_BYTES:
        return
    first, again = _made(tunable, problem, "cpu"), _made(tunable, problem, "cpu")
    if first is None or again is None:
        return
    for name, one, other in zip(tunable.parameters, first, again, strict=True):
        if name in tunable.output_names or name in tunable.reset:
            continue  # their content is arbitrary
        if not _equal(one, other):
            yield (
                f"make_args gave {name} other values when it was called again with the same seed, so a sweep "
                "cannot be repeated; make it with aot_tune.inputs, or give a torch.Generator the seed"
            )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and (one.is_complex() or torch.equal(bits(one), bits(other)))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return bool(one == other)
    except Exception:
        return True  # an array, or a dict of tensors, has no equality as a whole: nothing shows a difference


def _bytes(args: Iterable[object]) -> int:
    """Bytes of all tensors, a storage that several share once."""
    members = flat(list(args))
    tensors = {one.untyped_storage()._cdata: one for one in members if isinstance(one, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# Other archs, and the model ---------------------------------------------------------------------------------


def _archs_without_configs(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Archs on which no config may run, though some may on the arch that was asked for."""
    problem = tunable.typical_problems[0]
    others = [other for other in KNOWN_ARCHS if other != arch]
    empty = [other for other in others if not _tried(partial(tunable.space, other, problem))]
    if empty:
        yield (
            f"search_space is empty or raises on {' '.join(map(str, empty))}, so nothing can be launched "
            "there; return at least the default, on every arch"
        )


def _lent_kernels(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Kernels that a problem's search space leaves out, and that `legal` takes for it all the same."""
    if len(tunable.kernels) == 1:
        return
    spaces = {problem: tunable.space(arch, problem) for problem in tunable.typical_problems}
    first = {config.kernel: (config, problem) for problem, space in spaces.items() for config in space}
    for problem, space in spaces.items():
        for kernel, (config, other) in first.items():
            lent = kernel not in {one.kernel for one in space}
            if lent and _tried(partial(tunable.refusal, config, arch, problem)) is None:
                yield (
                    f"kernel {kernel} is in the search space of {other} and not of {problem}, yet legal "
                    f"takes its config {config} for that too: a problem that was not tuned takes a near "
                    "one's config; refuse it in legal, or list it for both"
                )
                return


def _work_unlike_the_arguments(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Figures of `work` that cannot be those of one step and one block, as the arguments' bytes show."""
    if tunable.work is None:
        return
    weighed = [found for problem in tunable.typical_problems if (found := _weighed(tunable, arch, problem))]
    for one in weighed:
        # Blocks of a small problem are partly empty: of their loads too, as much as of their stores.
        padding = max(1.0, one.tiles * one.work.store_bytes / max(one.written, 1))
        if one.work.steps * one.work.load_bytes > _MOST_LOADS * one.held * padding:
            yield (
                f"work({one.problem}, {one.config}) says that one block loads "
                f"{one.work.steps * one.work.load_bytes:,.0f} bytes, {counted(one.work.steps, 'step')} of "
                f"load_bytes={one.work.load_bytes:,.0f}; all arguments together hold {one.held:,}. "
                "load_bytes and flops are those of one step, not of the whole block"
            )
            break
    # Of a small result most blocks store a part only: the largest one shows what a whole block stores.
    for one in sorted(weighed, key=lambda one: one.written)[-1:]:
        stored = one.tiles * one.work.store_bytes
        if one.work.store_bytes and not one.written / _FACTOR <= stored <= one.written * _FACTOR:
            yield (
                f"work({one.problem}, {one.config}) says that {counted(one.tiles, 'block')} together store "
                f"{stored:,.0f} bytes; the arguments that the kernel writes hold {one.written:,}. "
                "store_bytes is what one block stores in all its steps together"
                + ("" if tunable.tiles else "; where it loops over tiles, declare tiles")
            )


def uncounted(tunable: Declaration, arch: Arch) -> str | None:
    """Why the default's code cannot be followed on the first typical problem; None where it can."""
    try:
        _followed(tunable, arch, tunable.typical_problems[0])
    except NotCountedError as error:
        return str(error)
    return None


def _followed(
    tunable: Declaration, arch: Arch, problem: Problem, most_calls: int = MOST_CALLS
) -> tuple[tuple[Any, ...], tuple[int, ...], BlockCounts] | None:
    """A launch's arguments and grid under the default, and what its blocks do; None where there is none.

    Raises:
        NotCountedError: Its code cannot be followed.
    """
    args, config = _made(tunable, problem), tunable.default_config(arch, problem)
    passed = args and _passed(tunable, arch, problem, args)
    grid = _tried(partial(tunable.grid, config, Device.reference(arch), problem))
    if not args or not passed or not grid:
        return None
    return args, grid, count_blocks(tunable.kernel_of(config), tuple(passed.values()), grid, most_calls)


def _unlike_the_code(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """What the blocks of `grid_fn` leave unwritten, and figures of `work` that are not those of the code.

    A small problem and one of middle size are followed, where a few blocks of them can be.
    """
    by_size = sorted(tunable.typical_problems, key=lambda one: (_bytes(_made(tunable, one) or ()), str(one)))
    for problem in dict.fromkeys((by_size[0], by_size[len(by_size) // 2])):
        try:
            followed = _followed(tunable, arch, problem, _MOST_CALLS)
        except NotCountedError:
            return
        if followed is None:
            return
        args, grid, counts = followed
        config = tunable.default_config(arch, problem)
        blocks = math.prod(grid)
        if unread := [axis for axis, size in enumerate(grid) if size > 1 and axis not in counts.axes]:
            yield (
                f"grid_fn({config}, {problem}) has {grid[unread[0]]} blocks along axis {unread[0]}, and the "
                f"kernel never asks for ct.bid({unread[0]}) there: those blocks repeat each other"
            )
        named = dict(zip(tunable.parameters, args, strict=True))
        wanted, stored = _bytes(named[name] for name in tunable.output_names), counts.store_bytes * blocks
        if stored < _LEAST_STORED * wanted:
            yield (
                f"the {counted(blocks, 'block')} of grid_fn({config}, {problem}) store {stored:,.0f} bytes "
                f"in all, and the outputs hold {wanted:,}: grid_fn leaves out blocks, or args_fn hands on a "
                "tile or a size at the place of another"
            )
        if tunable.work is None or not counts.flops:
            continue  # of other kernels the arguments' bytes tell
        work = tunable.work(config, problem)
        tiles = tunable.tiles(config, problem) if tunable.tiles else blocks
        for name, said, done, unit in (
            ("flops", work.flops, counts.flops, "operations of matrix products, a multiply-add being two"),
            ("load_bytes", work.load_bytes, counts.load_bytes, "bytes loaded"),
        ):
            said, done = work.steps * said, done * blocks / tiles
            if max(said, done) > _FACTOR * min(said, done):
                yield (
                    f"work({problem}, {config}) says {said:,.0f} {unit}, for one block: "
                    f"{counted(work.steps, 'step')} of {name}={said / work.steps:,.0f}; the kernel's code "
                    f"does {done:,.0f}. {name} is that of one step; without work it is counted for products"
                )
                return


class _Weighed(NamedTuple):
    """What `work` says of a typical problem under the default, and what its arguments hold."""

    problem: Problem
    config: Config
    work: Work
    tiles: int
    held: int
    """Bytes of all tensors."""
    written: int
    """Bytes of the mutated ones."""


def _weighed(tunable: Declaration, arch: Arch, problem: Problem) -> _Weighed | None:
    args = _made(tunable, problem)
    config = tunable.default_config(arch, problem)
    tiles = tunable.tiles(config, problem) if tunable.tiles else _blocks(tunable, arch, config, problem)
    if args is None or tunable.work is None or tiles is None:
        return None
    named = dict(zip(tunable.parameters, args, strict=True))
    return _Weighed(
        problem=problem,
        config=config,
        work=tunable.work(config, problem),
        tiles=tiles,
        held=_bytes(args),
        written=_bytes(named[name] for name in tunable.mutated),
    )


def _blocks(tunable: Declaration, arch: Arch, config: Config, problem: Problem) -> int | None:
    grid = _tried(partial(tunable.grid, config, Device.reference(arch), problem))
    return math.prod(grid) if grid else None


# Calling the author's functions -----------------------------------------------------------------------------


def _one_of_each_class(tunable: Declaration) -> Iterable[Problem]:
    """The last typical problem of each class of dtypes, strings and bools: the largest, as authors list."""
    return {classes_of(tunable.axes, problem): problem for problem in tunable.typical_problems}.values()


def _made(tunable: Declaration, problem: Problem, device: str = "meta") -> tuple[Any, ...] | None:
    """The arguments of a problem, by default without storage; None where there are none."""
    args = _tried(lambda: tunable.make_args(problem, torch.device(device), 0))
    return args if isinstance(args, tuple) and len(args) == len(tunable.parameters) else None


def _passed(
    tunable: Declaration,
    arch: Arch,
    problem: Problem,
    args: tuple[Any, ...],
    config: Config | None = None,
    device: Device | None = None,
) -> dict[str, Any] | None:
    """What args_fn hands to each of the kernel's parameters, or None where it cannot.

    That is under the default, on the arch's reference device, where nothing else is given.
    """
    chosen = config or tunable.default_config(arch, problem)
    args_fn = tunable.args_fn_on(device or Device.reference(arch))
    passed = _tried(lambda: args_fn(chosen, *args))
    names = [name for name, _ in cutile.parameters(tunable.kernel_of(chosen))]
    if not isinstance(passed, tuple) or len(passed) != len(names):
        return None
    return dict(zip(names, passed, strict=True))


def _tried(function: Callable[[], Any]) -> Any:
    """What a function returns; None where it raises, since the author's code need not take every value."""
    try:
        return function()
    except Exception:
        return None
