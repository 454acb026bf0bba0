"""Remark on probably unintended parts of a declaration. Imports torch, uses no GPU.

A remark refuses nothing: its subject may be intended. Certain mistakes are in `mistakes` and
`argument_mistakes`. The author's functions are called with other sizes and scalars than the typical ones;
where they cannot take them, nothing is remarked.
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
from aot_tune.declare.kernel_source.block_counts import MOST_CALLS, BlockCounts, NotCountedError, count_blocks
from aot_tune.declare.kernel_source.walk import facts_of
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
"""Least edge of a bucket in which sizes are tried; smaller buckets hold too few different sizes."""

_EIGHTHS = (8, 7, 6, 5)
"""Sizes that are tried inside a bucket, in eighths of its edge."""

_FEW = 2
"""Most values inside a bucket of a constant that is a flag, and does not follow the size."""

_MOST_CPU_BYTES = 1 << 24
"""Most bytes of arguments that are made on the CPU to compare their values."""

_FACTOR = 4.0
"""Factor within which the bytes that all blocks store agree with the written arguments' bytes."""

_LEAST_STORED = 0.6
"""Least part of the outputs' bytes that all blocks store. It is not 1: of the few blocks that are followed a
third less may have a tile than of all."""

_MOST_CALLS = 10_000
"""Most calls of cuTile's functions in the blocks that are followed for remarks: about 0.1 s."""

_MOST_LOADS = 2.0
"""Most times that one block loads the bytes of all arguments, as in a kernel of two passes."""


def declaration_remarks(tunable: Declaration, arch: Arch) -> list[str]:
    """List probably unintended parts of a declaration without mistakes, each with the remedies."""
    texts: list[str] = []
    for remarks in (
        _compiled_in(tunable, arch),
        _copies_of_strided(tunable, arch),
        _accesses_unlike_the_names(tunable, arch),
        _unseeded(tunable),
        _archs_without_configs(tunable, arch),
        _borrowed_kernels(tunable, arch),
        _work_unlike_the_arguments(tunable, arch),
        _unlike_the_code(tunable, arch),
    ):
        texts += [f"{tunable.name}: {text}" for text in remarks]
    return list(dict.fromkeys(texts))


# Compiled-in values -----------------------------------------------------------------------------------------


def _compiled_in(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield constants that follow a Pow2 axis or a scalar of the launch."""
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
    on_device = _passed(tunable, arch, problem, args, device=device)
    on_smaller = _passed(tunable, arch, problem, args, device=smaller)
    for constant, value in on_device.items() if on_device and on_smaller else ():
        other = on_smaller[constant] if on_smaller else value
        if constant in tunable.constant_names and value != other:
            yield (
                f"{constant}, a ct.Constant, follows the device: args_fn hands on {value} on {device.name} "
                f"and {other} with {smaller.sm_count} multiprocessors. So an archive serves devices with as "
                f"many as {device.name} alone, and others compile at their first launch; take ct.Constant "
                f"away from {constant}, or let the kernel ask ct.num_blocks"
            )


def _other_scalars(value: object) -> tuple[object, ...]:
    """Return a scalar of the launch and two other values of its type; nothing for other arguments."""
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
    """Return the values of the kernel's constants for a problem, by the default; None where unknown."""
    args = args if args is not None else _made(tunable, problem)
    passed = _passed(tunable, arch, problem, args) if args is not None else None
    if args is None or passed is None or _tried(lambda: tunable.problem_of(*args)) != problem:
        return None
    constants = tunable.constants_of(tunable.default_config(arch, problem).kernel)
    return {name: value for name, value in passed.items() if name in constants}


_Seen = tuple[object, object]
"""Size or scalar, and the value of a constant for it."""


def _following(
    seen: Sequence[tuple[object, Mapping[str, object] | None]], few: int = _FEW
) -> Iterator[tuple[str, tuple[_Seen, _Seen]]]:
    """Yield the constants with more than a `few` values, each with the first two that differ."""
    known = [(value, constants) for value, constants in seen if constants is not None]
    for constant in known[0][1] if known else ():
        first: dict[object, object] = {}
        for value, constants in known:
            first.setdefault(constants[constant], value)
        if len(first) > few:
            (this, one), (that, two) = itertools.islice(first.items(), 2)
            yield constant, ((one, this), (two, that))


# Written arguments ------------------------------------------------------------------------------------------


def _copies_of_strided(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield mutated arguments that args_fn copies where they are not contiguous."""
    for problem in _one_of_each_class(tunable):
        args = _made(tunable, problem)
        for place, name in enumerate(tunable.parameters if args else ()):
            assert args is not None
            tensors = [member for member in flat([args[place]]) if isinstance(member, torch.Tensor)]
            largest = max((size for tensor in tensors for size in tensor.shape), default=1)
            if name not in tunable.mutated or largest == 1:
                continue
            apart = [_strided(tensor) for tensor in tensors]
            strided = apart if isinstance(args[place], list | tuple) else apart[0]
            passed = _passed(tunable, arch, problem, (*args[:place], strided, *args[place + 1 :]))
            if passed is not None and not all(any(map(shares(part), passed.values())) for part in apart):
                yield (
                    f"args_fn hands on a copy of {name} where it is not contiguous, so a launch would leave "
                    "the caller's tensor as it was; hand it on as it is or as a view (x.view, not x.reshape "
                    "or x.contiguous), or refuse such a tensor before the launch"
                )


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without storage of equal shape, whose elements are twice as far apart."""
    strides = [2 * stride for stride in tensor.stride()]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _accesses_unlike_the_names(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield arguments that a kernel's source accesses in another way than the declaration states."""
    problem = tunable.typical_problems[0]
    args = _made(tunable, problem)
    for config in one_of_each_kernel(tunable, arch, problem, tunable.default_config(arch, problem)):
        passed = _passed(tunable, arch, problem, args, config) if args is not None else None
        if args is not None and passed is not None:
            yield from _accesses_of(tunable, config, args, passed)


def _accesses_of(
    tunable: Declaration, config: Config, args: tuple[Any, ...], passed: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the remarks of `_accesses_unlike_the_names` on the kernel of a config."""
    found = facts_of(tunable.kernel_of(config))
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


# Results of make_args ---------------------------------------------------------------------------------------


def _unseeded(tunable: Declaration) -> Iterator[str]:
    """Yield arguments whose values differ from call to call with one seed."""
    sizes = (
        (_bytes(args), problem) for problem in tunable.typical_problems if (args := _made(tunable, problem))
    )
    size, problem = min(sizes, key=lambda pair: pair[0], default=(0, None))
    if problem is None or size > _MOST_CPU_BYTES:
        return
    first, again = _made(tunable, problem, "cpu"), _made(tunable, problem, "cpu")
    if first is None or again is None:
        return
    for name, value, repeated in zip(tunable.parameters, first, again, strict=True):
        if name in tunable.output_names or name in tunable.reset:
            continue  # their content is arbitrary
        if not _equal(value, repeated):
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
        return True  # an array, or a dict of tensors, has no equality as a whole: no difference is visible


def _bytes(args: Iterable[object]) -> int:
    """Return the bytes of all tensors; a storage that several share counts once."""
    members = flat(list(args))
    tensors = {
        member.untyped_storage()._cdata: member for member in members if isinstance(member, torch.Tensor)
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# Other archs, and the model ---------------------------------------------------------------------------------


def _archs_without_configs(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield archs on which no config may run, though some may on the given arch."""
    problem = tunable.typical_problems[0]
    others = [other for other in KNOWN_ARCHS if other != arch]
    empty = [other for other in others if not _tried(partial(tunable.space, other, problem))]
    if empty:
        yield (
            f"search_space is empty or raises on {' '.join(map(str, empty))}, so nothing can be launched "
            "there; return at least the default, on every arch"
        )


def _borrowed_kernels(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield kernels that a problem's search space leaves out, but `legal` accepts for the problem."""
    if len(tunable.kernels) == 1:
        return
    spaces = {problem: tunable.space(arch, problem) for problem in tunable.typical_problems}
    first = {config.kernel: (config, problem) for problem, space in spaces.items() for config in space}
    for problem, space in spaces.items():
        for kernel, (config, other) in first.items():
            borrowed = kernel not in {candidate.kernel for candidate in space}
            if borrowed and _tried(partial(tunable.refusal, config, arch, problem)) is None:
                yield (
                    f"kernel {kernel} is in the search space of {other} and not of {problem}, yet legal "
                    f"takes its config {config} for that too: a problem that was not tuned takes a near "
                    "one's config; refuse it in legal, or list it for both"
                )
                return


def _work_unlike_the_arguments(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield figures of `work` that contradict the arguments' bytes, for one step and one block."""
    if tunable.work is None:
        return
    weighed = [
        figures for problem in tunable.typical_problems if (figures := _weighed(tunable, arch, problem))
    ]
    for figures in weighed:
        # Blocks of a small problem are partly empty: their loads as much as their stores.
        padding = max(1.0, figures.tiles * figures.work.store_bytes / max(figures.written, 1))
        loaded = figures.work.steps * figures.work.load_bytes
        if loaded > _MOST_LOADS * figures.held * padding:
            yield (
                f"work({figures.problem}, {figures.config}) says that one block loads {loaded:,.0f} bytes, "
                f"{counted(figures.work.steps, 'step')} of load_bytes={figures.work.load_bytes:,.0f}; all "
                f"arguments together hold {figures.held:,}. "
                "load_bytes and flops are those of one step, not of the whole block"
            )
            break
    # Most blocks of a small result store only a part: the largest result shows the stores of a whole block.
    for figures in sorted(weighed, key=lambda figures: figures.written)[-1:]:
        stored, written = figures.tiles * figures.work.store_bytes, figures.written
        if figures.work.store_bytes and not written / _FACTOR <= stored <= written * _FACTOR:
            yield (
                f"work({figures.problem}, {figures.config}) says that {counted(figures.tiles, 'block')} "
                f"together store {stored:,.0f} bytes; the arguments that the kernel writes hold {written:,}. "
                "store_bytes is what one block stores in all its steps together"
                + ("" if tunable.tiles else "; where it loops over tiles, declare tiles")
            )


def uncounted(tunable: Declaration, arch: Arch) -> str | None:
    """Return why the default's code cannot be followed on the first typical problem; None where it can."""
    try:
        _followed(tunable, arch, tunable.typical_problems[0])
    except NotCountedError as error:
        return str(error)
    return None


def _followed(
    tunable: Declaration, arch: Arch, problem: Problem, most_calls: int = MOST_CALLS
) -> tuple[tuple[Any, ...], tuple[int, ...], BlockCounts] | None:
    """Return a launch's arguments and grid by the default, and its blocks' counts; None without a launch.

    Raises:
        NotCountedError: The kernel's code cannot be followed.
    """
    args, config = _made(tunable, problem), tunable.default_config(arch, problem)
    passed = args and _passed(tunable, arch, problem, args)
    grid = _tried(partial(tunable.grid, config, Device.reference(arch), problem))
    if not args or not passed or not grid:
        return None
    return args, grid, count_blocks(tunable.kernel_of(config), tuple(passed.values()), grid, most_calls)


def _unlike_the_code(tunable: Declaration, arch: Arch) -> Iterator[str]:
    """Yield bytes that the blocks of `grid_fn` leave unwritten, and figures of `work` unlike the code's.

    A small problem and one of middle size are followed, where a few of their blocks can be.
    """
    by_size = sorted(
        tunable.typical_problems,
        key=lambda problem: (_bytes(_made(tunable, problem) or ()), str(problem)),
    )
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
            continue  # for other kernels the arguments' bytes are compared
        work = tunable.work(config, problem)
        tiles = tunable.tiles(config, problem) if tunable.tiles else blocks
        for name, per_step, per_block, unit in (
            ("flops", work.flops, counts.flops, "operations of matrix products, a multiply-add being two"),
            ("load_bytes", work.load_bytes, counts.load_bytes, "bytes loaded"),
        ):
            stated, done = work.steps * per_step, per_block * blocks / tiles
            if max(stated, done) > _FACTOR * min(stated, done):
                yield (
                    f"work({problem}, {config}) says {stated:,.0f} {unit}, for one block: "
                    f"{counted(work.steps, 'step')} of {name}={stated / work.steps:,.0f}; the kernel's code "
                    f"does {done:,.0f}. {name} is that of one step; without work it is counted for products"
                )
                return


class _Weighed(NamedTuple):
    """Figures of `work` for a typical problem by the default, and its arguments' bytes."""

    problem: Problem
    config: Config
    work: Work
    tiles: int
    held: int
    """Bytes of all tensors."""
    written: int
    """Bytes of the mutated tensors."""


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
    """Return the last typical problem of each class (dtypes, strings, bools): usually the largest."""
    return {classes_of(tunable.axes, problem): problem for problem in tunable.typical_problems}.values()


def _made(tunable: Declaration, problem: Problem, device: str = "meta") -> tuple[Any, ...] | None:
    """Return the arguments of a problem, by default without storage; None where they cannot be made."""
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
    """Return the argument of each of the kernel's parameters by args_fn; None where it raises.

    Without other arguments, for the default on the arch's reference device.
    """
    chosen = config or tunable.default_config(arch, problem)
    args_fn = tunable.args_fn_on(device or Device.reference(arch))
    passed = _tried(lambda: args_fn(chosen, *args))
    names = [name for name, _ in cutile.parameters(tunable.kernel_of(chosen))]
    if not isinstance(passed, tuple) or len(passed) != len(names):
        return None
    return dict(zip(names, passed, strict=True))


def _tried(function: Callable[[], Any]) -> Any:
    """Return a function's result; None where it raises, since the author's code need not take every value."""
    try:
        return function()
    except Exception:
        return None
