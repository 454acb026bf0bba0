"""aot_tune.declare.checks and .mistakes: each mistake is refused, and the error says what to write."""

from __future__ import annotations

import itertools
import re
import sys
import time
import types
from pathlib import Path

import cuda.tile as ct
import pytest
import torch

from aot_tune import inputs
from aot_tune.declare.checks import check_calls, check_fields, declaration_problems
from aot_tune.declare.declaration import Close, Work
from aot_tune.errors import DeclarationError, TableWarning
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

SM90, SM100 = Arch.parse("sm90"), Arch.parse("sm100")


@ct.kernel
def scale_kernel(x, out, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    """Double a matrix."""
    tile = ct.load(x, (ct.bid(0), ct.bid(1)), (tile_m, tile_n))
    ct.store(out, (ct.bid(0), ct.bid(1)), tile * 2)


@ct.kernel
def scaled_kernel(x, out, factor, tile_m: ct.Constant[int]):
    """Multiply a matrix by a number."""
    ct.store(out, (ct.bid(0), 0), ct.load(x, (ct.bid(0), 0), (tile_m, 16)) * factor)


def _sm_count() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _config(tile_m: int, tile_n: int = 64, **hints: object) -> Config:
    return Config(constants={"tile_m": tile_m, "tile_n": tile_n}, hints=hints)


SPACE = [_config(m, n, num_ctas=c) for m in (32, 64) for n in (64, 128) for c in (1, 2)]


@pytest.fixture(autouse=True)
def _unattached(monkeypatch):
    """Declarations here are looked at and never launched: none reads tables or asks for GPUs."""
    dispatch = types.ModuleType("aot_tune.serve.launch.dispatch")
    dispatch.attach = lambda tunable: None
    monkeypatch.setitem(sys.modules, "aot_tune.serve.launch.dispatch", dispatch)


def declared(**changes: object) -> Tunable:
    """A right declaration, but for the changes."""
    fields = {
        "name": "scale",
        "package": "tests",
        "kernel": scale_kernel,
        "axes": {"M": Pow2(), "N": Exact()},
        "problem": lambda x, out: {"dtype": x.dtype, "M": x.shape[0], "N": x.shape[1]},
        "search_space": lambda arch, problem: SPACE,
        "default": lambda arch, problem: SPACE[0],
        "grid_fn": lambda config, device, problem: (problem["M"] // config["tile_m"] + 1, 1),
        "args_fn": lambda config, x, out: (x, out, config["tile_m"], config["tile_n"]),
        "make_args": lambda problem, device, seed: (
            inputs.randn((problem["M"], problem["N"]), problem["dtype"], device, seed),
            inputs.empty((problem["M"], problem["N"]), problem["dtype"], device),
        ),
        "reference": lambda x, out: Close(value=x.double() * 2, rtol=0, atol=0),
        "outputs": ("out",),
        "typical": [{"dtype": ["bfloat16", "float16"], "M": [1, 64], "N": 128}],
    }
    return Tunable(**{**fields, **changes})


def test_a_right_declaration_is_taken_and_has_nothing_wrong_anywhere():
    tunable = declared()
    assert declaration_problems(tunable, SM90) == []
    assert declaration_problems(tunable, SM100) == []


def test_checking_takes_milliseconds():
    tunable = declared()

    def seconds() -> float:
        started = time.process_time()
        check_fields(tunable)
        check_calls(tunable)
        return time.process_time() - started

    assert min(seconds() for _ in range(10)) < 0.01  # CPU time, under 1 ms: an import checks dozens


def _raise(error: Exception):
    raise error


def test_one_list_is_a_search_space_and_its_first_the_default():
    tunable = declared(search_space=SPACE, default=None)
    assert declaration_problems(tunable, SM100) == []
    problem = tunable.typical_problems[0]
    assert tunable.space(SM90, problem) == tuple(SPACE)
    assert tunable.default_config(SM90, problem) == SPACE[0]
    by_arch = declared(search_space=lambda arch, problem: SPACE[:: 1 if arch == SM90 else -1], default=None)
    assert by_arch.default_config(SM100, problem) == SPACE[-1]


def test_a_reference_in_plain_torch_needs_no_tolerances():
    for reference in (lambda x, out: x * 2, lambda x, out: {"out": x * 2}):
        assert declaration_problems(declared(reference=reference), SM90) == []


TURNS = itertools.cycle(SPACE[:2])

MISTAKES = {
    # name: (changes, what the error must say)
    "a path as a name": ({"name": "../x"}, "lower-case name"),
    "no package": ({"package": None}, "package=__package__"),
    "an empty package": ({"package": ""}, "package=__package__"),
    "a script as a package": ({"package": "my-lib"}, "package=__package__"),
    "a text as a folder": ({"tables": "tuned"}, r"tables is 'tuned'; write Path\('tuned'\)"),
    "a distribution that is no text": ({"distribution": 3}, "name that pip installs"),
    "a plain function": ({"kernel": lambda x: x}, "decorated with @ct.kernel"),
    "no kernel": ({"kernel": {}}, "kernel is an empty dict; write each kernel with a name"),
    "a kernel of several that is none": (
        {"kernel": {"one": scale_kernel, "two": len}},
        r"kernel\['two'\] is <built-in function len>; pass the function decorated with @ct.kernel",
    ),
    "a kernel's name with capitals": (
        {"kernel": {"One": scale_kernel}},
        "name 'One'; write lower-case letters",
    ),
    "two kernels of one function": (
        {"kernel": {"one": scale_kernel, "two": scale_kernel}},
        r"kernel\['one'\] and \['two'\] are both called scale_kernel",
    ),
    "configs that name no kernel": (
        {"kernel": {"one": scale_kernel, "two": scaled_kernel}},
        "tile_m=32 tile_n=64 num_ctas=1 is for no kernel; write kernel='one' or kernel='two' in it",
    ),
    "a config that names a kernel of one": (
        {"search_space": [Config(kernel="one", constants={"tile_m": 32, "tile_n": 64})], "default": None},
        "names a kernel, and there is one alone; leave kernel= out",
    ),
    "constants of another kernel": (
        {
            "kernel": {"one": scale_kernel, "two": scaled_kernel},
            "search_space": [Config(kernel="two", constants={"tile_m": 32, "tile_n": 64})],
            "default": None,
        },
        "has the constants tile_m, tile_n; the kernel's ct.Constant parameters are tile_m: use their names",
    ),
    "a dependent launch that is no bool": (
        {"programmatic_dependent_launch": 1},
        "programmatic_dependent_launch is 1; write True or False",
    ),
    "a hint by target that cuTile refuses": (
        {"search_space": [_config(32, num_ctas=ct.ByTarget(sm_90=3, default=3))], "default": None},
        "hint num_ctas is 3; cuTile takes 1, 2, 4",
    ),
    "no axes": ({"axes": {}}, r"axes=\{'M': Pow2\(\)"),
    "axes as a list": (
        {"axes": ["rows", "cols"]},
        r"axes is a list; write a dict: axes=\{'rows': Pow2\(\), …\}",
    ),
    "axes of None": ({"axes": None}, r"axes is None; write a dict: axes=\{'M': Pow2\(\), …\}"),
    "an axis's class": ({"axes": {"M": Pow2, "N": Exact()}}, r"axes\['M'\] is .*write Pow2\(\) or Exact\(\)"),
    "an axis named as a method": ({"axes": {"size": Pow2()}}, "'size', which is a method of Problem"),
    "an axis that is no name": ({"axes": {"M N": Pow2()}}, "Python name"),
    "no function": ({"grid_fn": (1, 1)}, r"grid_fn is \(1, 1\); write a function"),
    "a rule of other arguments": (
        {"legal": lambda config, problem: True},
        r"legal is called with \(config, arch, problem\) and takes \(config, problem\); take these",
    ),
    "tiles of other arguments": (
        {"tiles": lambda problem: 1},
        r"tiles is called with \(config, problem\) and takes \(problem\)",
    ),
    "batch axes as a text": ({"batch_axes": "M"}, r"batch_axes is 'M'; write a tuple of axes"),
    "a batch axis that is no axis": ({"batch_axes": ("rows",)}, r"batch_axes names 'rows'; .* Pow2\(\): M"),
    "a batch axis that is Exact": ({"batch_axes": ("N",)}, r"batch_axes names 'N'; .* Pow2\(\): M"),
    "invariant without a batch": (
        {"invariant": lambda config, problem: True},
        "batch_axes is empty; name the axes there",
    ),
    "an invariant that returns nothing": (
        {"batch_axes": ("M",), "invariant": lambda config, problem: None},
        "invariant for the default, .* returned None; return True where a row keeps its bits, and the reason",
    ),
    "an invariant without a reason": (
        {"batch_axes": ("M",), "invariant": lambda config, problem: ""},
        "invariant for the default, .* returned ''; return True where a row keeps its bits, and the reason",
    ),
    "an invariant that raises": (
        {"batch_axes": ("M",), "invariant": lambda config, problem: 1 // 0},
        "invariant for the default, .* raised ZeroDivisionError",
    ),
    "tiles that is no function": ({"tiles": 8}, "tiles is 8; write a function"),
    "a problem of anything": ({"problem": lambda *args: {}}, r"problem\(\) takes \*args; write out"),
    "a keyword": ({"problem": lambda x, out, *, eps: {}}, r"problem\(\) takes eps; write out"),
    "outputs as a text": ({"outputs": "out"}, r"write outputs=\('out',\)"),
    "an unknown output": ({"outputs": ("y",)}, r"outputs names 'y'.*it takes x, out"),
    "nothing written": ({"outputs": ()}, "no argument is written; name the arguments"),
    "an argument named twice": ({"inplace": ("out",)}, "'out' is named twice"),
    "no typical problem": ({"typical": []}, "typical is empty"),
    "an empty list for all": (
        {"search_space": []},
        "search_space is empty for .* return at least the default",
    ),
    "a search space as a text": ({"search_space": "all"}, "search_space is 'all'; write a function"),
    "a generator": ({"typical": ({"M": m} for m in (1, 2))}, "typical is .*generator.*; write a list"),
    "a problem as a list": ({"typical": [["M", 1]]}, r"typical\[0\] is .*write a dict"),
    "no value": (
        {"typical": [{"dtype": "bfloat16", "M": [], "N": 1}]},
        r"typical\[0\]\['M'\] lists no value",
    ),
    "a float size": (
        {"typical": [{"dtype": "bfloat16", "M": 1.5, "N": 1}]},
        r"typical\[0\]: a problem's M is 1.5",
    ),
    "a missing axis": ({"typical": [{"dtype": "bfloat16", "M": 1}]}, "lacks the axis N; add it"),
    "a size of 0": ({"typical": [{"M": 0, "N": 1}]}, "M=0; write a size of 1 or more"),
    "a true for a size": ({"typical": [{"M": True, "N": 1}]}, "M=True; write a size"),
    "a size that is no axis": (
        {"typical": [{"M": 1, "N": 1, "K": 2}]},
        r"the size K, which is not an axis; add 'K': Exact\(\)",
    ),
    "an axis that problem does not return": (
        {"problem": lambda x, out: {"dtype": x.dtype, "M": x.shape[0] * 2 + x.numel()}},
        "does not return the axis N: it returns dtype, M; add 'N' there, or remove it from axes",
    ),
    "a problem that is no dict": (
        {"problem": lambda x, out: (x.shape[0], x.shape[1])},
        r"problem\(\) returned a tuple; return a dict",
    ),
    "an empty space": (
        {"search_space": lambda arch, problem: []},
        "search_space is empty .* at least the default",
    ),
    "no space": (
        {"search_space": lambda arch, problem: None},
        r"search_space\(.*\) returned None; return a list of Config",
    ),
    "a space as a generator": (
        {"search_space": lambda arch, problem: (config for config in SPACE)},
        r"search_space\(.*\) returned a generator; return a list of Config",
    ),
    "a space as a set": (
        {"search_space": lambda arch, problem: set(SPACE)},
        r"search_space\(.*\) returned a set, whose order is not fixed; return a list of Config",
    ),
    "a default of texts": (
        {"default": lambda arch, problem: _config("32", num_ctas=1)},
        "which search_space lacks: tile_m is 32 there, of type int, and '32' in the default, of type str",
    ),
    "a default of floats": (
        {"default": lambda arch, problem: _config(32, 64.0, num_ctas=1)},
        "which search_space lacks: tile_n is 64 there, of type int, and 64.0 in the default, of type float",
    ),
    "a space that raises": (
        {"search_space": lambda arch, problem: _raise(KeyError("h"))},
        "search_space.* KeyError",
    ),
    "a space of a million": (
        {"search_space": lambda arch, problem: SPACE[:1] * 10**6},
        r"search_space\(.*\) returned 1000000 configs; return at most 100000",
    ),
    "a random default": (
        {"default": lambda arch, problem: next(TURNS)},
        "when called again; return the same config",
    ),
    "a space twice over": (
        {"search_space": lambda arch, problem: SPACE * 2},
        "tile_m=32 .* twice; list it once",
    ),
    "a space of dicts": ({"search_space": lambda arch, problem: [{"tile_m": 1}]}, "return Config"),
    "a default outside": (
        {"default": lambda arch, problem: _config(256)},
        "tile_m=256 .* which search_space lacks",
    ),
    "a default that raises": ({"default": lambda arch, problem: _raise(ValueError("no"))}, "ValueError: no"),
    "a default that is none": ({"default": lambda arch, problem: None}, "returned None; return Config"),
    "an unknown constant": (
        {"default": lambda a, p: Config(constants={"tile_k": 1}), "search_space": lambda a, p: [Config()]},
        "constants tile_k; the kernel's ct.Constant parameters are tile_m, tile_n: use their names",
    ),
    "a constant left out": (
        {"search_space": lambda arch, problem: [*SPACE, Config(constants={"tile_m": 32})]},
        "the constants tile_m, the default has tile_m, tile_n; name the same ones in all",
    ),
    "a hint cuTile lacks": (
        {"search_space": lambda arch, problem: [_config(32, warps=4)]},
        "not a compiler hint",
    ),
    "a default not allowed": (
        {"legal": lambda c, a, p: "too large"},
        "legal .* returned 'too large'; return True",
    ),
    "a rule without return": ({"legal": lambda c, a, p: None}, "legal .* returned None; return True"),
    "a default that does not fit": (
        {"fits": lambda c, d, p: "too few multiprocessors"},
        "fits .* returned 'too few multiprocessors'; return True",
    ),
    "a grid of floats": (
        {"grid_fn": lambda c, d, p: (p["M"] / 2,)},
        r"grid_fn .* returned \(0.5,\); return a tuple",
    ),
    "a grid of 4": ({"grid_fn": lambda c, d, p: (1, 1, 1, 1)}, "one to three block counts"),
    "a grid of 0": ({"grid_fn": lambda c, d, p: (0,)}, r"returned \(0,\)"),
    "a grid that asks for a GPU": (
        {"grid_fn": lambda c, d, p: (torch.cuda.get_device_properties("cuda:99").multi_processor_count,)},
        "grid_fn .* raised .*: grid_fn asks this machine's GPU .*use device.sm_count",
    ),
    "a grid that raises": ({"grid_fn": lambda c, d, p: (c["tile_k"],)}, "grid_fn .* raised KeyError"),
    "work with a wrong keyword": (
        {"work": lambda c, p: Work(loads_bytes=1)},
        r"work .* raised TypeError: .*'loads_bytes'(\. Did you mean .*\?)? \(.*test_checks.py, line \d+\)",
    ),
    "work as a dict": (
        {"work": lambda c, p: {"steps": 1}},
        r"work .* returned \{'steps': 1\}; return Work\(steps=",
    ),
    "work of no number": (
        {"work": lambda c, p: Work(flops=float("nan"))},
        "Work has flops=nan; write a finite number of 0 or more",
    ),
    "no tiles": ({"tiles": lambda c, p: 0}, "tiles .* returned 0; return a number of blocks"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_at_construction_and_told_what_to_write(name):
    changes, told = MISTAKES[name]
    with pytest.raises(DeclarationError, match=told) as caught:
        declared(**changes)
    assert len(str(caught.value)) < 600
    nameless = name in ("a path as a name", "a hint cuTile lacks")
    assert str(caught.value).startswith("scale: ") or nameless


@pytest.mark.parametrize(
    "problem",
    [
        lambda x, out: dict(zip(("dtype", "M", "N"), (x.dtype, *x.shape), strict=True)),
        lambda x, out: (lambda m, n: {"dtype": x.dtype, "M": m, "N": n})(*x.shape),
        lambda x, out: {"dtype": x.dtype, "M": len(x), "N": x.size(-1)},
        lambda x, out: {"dtype": x.dtype, "M": x.shape[0], "N": x.shape[1]} if x.dim() == 2 else {},
        lambda x, out: {"dtype": x.dtype, "M": x.shape[0], "N": max(x.shape[1], 1)},
        lambda x, out: {"dtype": x.dtype} | dict(zip("MN", x.shape, strict=True)),
        lambda x, out: {"dtype": x.dtype, **_first_base(x)},
    ],
)
def test_a_problem_that_needs_its_tensors_is_taken_and_told_on_tensors_without_storage(problem):
    assert declaration_problems(declared(problem=problem), SM90) == []


def _first_base(x) -> dict[str, int]:
    tensor = x
    while tensor._base is not None:  # ends for tensors; there is always one more of a stand-in
        tensor = tensor._base
    return {"M": x.shape[0], "N": x.shape[1]}


def test_a_script_may_name_its_folder_of_tables_instead_of_a_package():
    assert declared(package="", tables=Path("tuned_configs")).tables == Path("tuned_configs")


def test_a_constant_that_no_config_names_is_left_to_args_fn():
    space = [Config(constants={"tile_m": m}) for m in (32, 64)]
    declared(
        search_space=lambda arch, problem: space,
        default=lambda arch, problem: space[0],
        grid_fn=lambda config, device, problem: (1,),
    )


def test_a_kernel_for_one_arch_alone_is_taken():
    for only in (Arch.parse("sm80"), Arch.parse("sm121")):
        declared(search_space=lambda arch, problem, only=only: SPACE if arch == only else [])
        declared(search_space=lambda arch, problem, only=only: {only: SPACE}[arch])


def test_declaring_evaluates_no_second_problem_and_makes_no_arguments():
    asked = []

    def search_space(arch, problem):
        asked.append(problem)
        return SPACE

    declared(
        search_space=search_space, make_args=lambda problem, device, seed: _raise(AssertionError("made"))
    )
    assert set(asked) == {Problem({"dtype": "bfloat16", "M": 1, "N": 128})}


# Before a sweep ---------------------------------------------------------------------------------------------


def _only(problem: Problem, large: object, small: object) -> object:
    return large if problem["M"] == 64 else small


def test_a_package_that_does_not_exist_is_told_before_a_sweep():
    with pytest.warns(TableWarning, match="its own tables are not read"):
        tunable = declared(package="nowhere.at_all")
    [told] = declaration_problems(tunable, SM90)
    assert told.startswith("scale: package is 'nowhere.at_all', and there is no package 'nowhere' here")
    assert "write package=__package__, or tables=Path(" in told


def test_constants_that_args_fn_bounds_are_taken_for_no_others():
    square = [_config(m, m, num_ctas=c) for m in (64, 128) for c in (1, 2)]
    tunable = declared(
        search_space=lambda arch, problem: square,
        default=lambda arch, problem: square[0],
        args_fn=lambda config, x, out: (x, out, min(config["tile_m"], 16), config["tile_n"]),
    )
    assert declaration_problems(tunable, SM90) == []


@ct.kernel
def grow_kernel(x, out, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    """Add a matrix to another."""
    old = ct.load(out, (ct.bid(0), ct.bid(1)), (tile_m, tile_n))
    ct.store(out, (ct.bid(0), ct.bid(1)), old + ct.load(x, (ct.bid(0), ct.bid(1)), (tile_m, tile_n)))


def test_an_output_that_must_be_named_is_told_alone():
    [told] = declaration_problems(declared(kernel=grow_kernel, outputs=None), SM90)
    assert told.startswith("scale: the kernel loads out and stores to it; name it in inplace")


def _of_x(x, out):
    return {"x": x * 2}


def test_an_argument_that_is_only_loaded_is_told_with_the_output_in_its_place():
    told = declaration_problems(declared(outputs=("x",), reference=_of_x), SM90)
    asked = "which outputs, inplace and reset do not name; write outputs=('out',)"
    assert told == [f"scale: the kernel stores to out, {asked}"]


def _views(problem, device, seed):
    x = inputs.randn((problem["M"], problem["N"]), problem["dtype"], device, seed)
    return x, x.view(x.shape)


@pytest.mark.parametrize(
    "changes",
    [
        {"make_args": _views},  # out is x
        {"args_fn": lambda config, x, out: (out, x, config["tile_m"], config["tile_n"])},  # a confusion
        {"kernel": grow_kernel},  # out is loaded too: a remark
    ],
)
def test_what_may_be_meant_of_an_argument_that_is_only_loaded_is_no_mistake(changes):
    assert declaration_problems(declared(outputs=("x",), reference=_of_x, **changes), SM90) == []


DEEP = {
    "outputs that are all absent": (
        {"make_args": lambda problem, device, seed: (inputs.empty((1, 128), "bfloat16", device), None)},
        SM90,
        "make_args made out None, so that the kernel would write nothing",
    ),
    "a list of what is no tensor": (
        {"make_args": lambda problem, device, seed: (inputs.empty((1, 128), "bfloat16", device), [3])},
        SM90,
        "out is written by the kernel; make_args made it a list, not a tensor",
    ),
    "another kernel's arguments": (
        {
            "kernel": {"one": scale_kernel, "two": scaled_kernel},
            "search_space": [
                Config(kernel="one", constants={"tile_m": 32, "tile_n": 64}),
                Config(kernel="two", constants={"tile_m": 32}),
            ],
            "default": None,
            "args_fn": lambda config, x, out: (x, out, *config.constants.values()),
        },
        SM90,
        "args_fn returned 3 values; return a tuple of what the kernel takes: x, out, factor, tile_m",
    ),
    "an empty space later": (
        {"search_space": lambda arch, problem: _only(problem, [], SPACE)},
        SM90,
        "M=64 .*is empty",
    ),
    "no space later": (
        {"search_space": lambda arch, problem: _only(problem, None, SPACE)},
        SM90,
        r"search_space\(sm90, .*M=64.*\) returned None; return a list of Config",
    ),
    "a default outside later": (
        {"default": lambda arch, problem: _only(problem, _config(8), SPACE[0])},
        SM90,
        "M=64.*which search_space lacks",
    ),
    "a default that is not legal later": (
        {"legal": lambda config, arch, problem: _only(problem, "no", True)},
        SM90,
        "legal .*returned 'no'",
    ),
    "an arch that raises": (
        {"search_space": lambda arch, problem: {SM90: SPACE}[arch]},
        SM100,
        "search_space.* raised KeyError",
    ),
    "a later problem without an axis": (
        {"typical": [{"dtype": "bfloat16", "M": 1, "N": 2}, {"dtype": "bfloat16", "N": 2}]},
        SM90,
        "lacks the axis M",
    ),
    "arguments that need a GPU": (
        {"make_args": lambda problem, device, seed: (torch.zeros(1, device="meta").item(),)},
        SM90,
        "on device 'meta'",
    ),
    "a device in the problem": (
        {"problem": lambda x, out: {"dtype": x.dtype, "device": str(x.device), "M": len(x), "N": x.shape[1]}},
        SM90,
        r"^scale: problem\(\) returns the device as device; leave it out: there is a table for each arch",
    ),
    "a dtype by another library's name": (
        {"typical": [{"dtype": "bf16", "M": 1, "N": 8}]},
        SM90,
        r"torch has no dtype called 'bf16'; write 'bfloat16' .*; correct it \(and|correct it$",
    ),
    "arguments in a list": (
        {"make_args": lambda problem, device, seed: [1, 2]},
        SM90,
        "make_args returned a list; return a tuple of x, out",
    ),
    "too many arguments": (
        {"make_args": lambda problem, device, seed: (1, 2, 3)},
        SM90,
        "make_args returned 3 values; return a tuple of x, out",
    ),
    "another problem": (
        {"problem": lambda x, out: {"dtype": x.dtype, "M": x.shape[1], "N": x.shape[0]}},
        SM90,
        "is dtype=bfloat16 M=128",
    ),
    "an axis that problem does not return for some tensors": (
        {"problem": lambda x, out: {"M": x.shape[0], **({"N": 128} if x.dim() == 3 else {})}},
        SM90,
        "does not return the axis N: of the arguments made for .* it returns M=1; add 'N' there",
    ),
    "too few kernel arguments": (
        {"args_fn": lambda config, x, out: (x, out)},
        SM90,
        "args_fn returned 2 values; .* x, out, tile_m, tile_n",
    ),
    "no kernel arguments": ({"args_fn": lambda config, x, out: None}, SM90, "args_fn returned a NoneType"),
    "too few arguments": (
        {"make_args": lambda problem, device, seed: (1,)},
        SM90,
        "make_args returned 1 value; return a tuple of x, out",
    ),
    "kernel arguments that raise": (
        {"args_fn": lambda config, x, out: (x, out, config["tilee"], 1)},
        SM90,
        r"^scale: args_fn for the default, .* raised KeyError: 'tilee' \(.*test_checks.py, line \d+\) ",
    ),
    "a problem that raises": (
        {"problem": lambda x, out: {"dtype": x.dtype, "M": x.shape[2], "N": len(x)}},
        SM90,
        r"^scale: problem\(\) of the arguments made for .* raised IndexError: .*test_checks.py, line \d+",
    ),
    "a text for a constant": (
        {"args_fn": lambda config, x, out: (x, out, str(config["tile_m"]), config["tile_n"])},
        SM90,
        "^scale: args_fn for the default, .*: kernel argument tile_m, a constant, is '32', a str; pass",
    ),
    "nothing for an array": (
        {"args_fn": lambda config, x, out: (None, out, config["tile_m"], config["tile_n"])},
        SM90,
        "^scale: args_fn for the default, .*: kernel argument x is a NoneType; pass a tensor",
    ),
    "a clone of what is written": (
        {"args_fn": lambda config, x, out: (x, out.clone(), config["tile_m"], config["tile_n"])},
        SM90,
        "^scale: args_fn hands on no tensor that shares the memory of out, .* or a view of it, no clone",
    ),
    "constants in another order": (
        {"args_fn": lambda config, x, out: (x, out, config["tile_n"], config["tile_m"])},
        SM90,
        "^scale: args_fn hands on the config's tile_m where the kernel takes tile_n; .*x, out, tile_m",
    ),
    "a constant where a scalar belongs": (
        {
            "kernel": scaled_kernel,
            "search_space": lambda arch, problem: [Config(constants={"tile_m": m}) for m in (32, 64)],
            "default": lambda arch, problem: Config(constants={"tile_m": 32}),
            "grid_fn": lambda config, device, problem: (1,),
            "args_fn": lambda config, x, out: (x, out, config["tile_m"], 2),
        },
        SM90,
        "^scale: args_fn hands on the config's tile_m where the kernel takes factor;",
    ),
    "a grid by the GPU that is here": (
        {"grid_fn": lambda config, device, problem: (_sm_count() if problem["M"] > 10**6 else 1,)},
        SM90,
        r"grid_fn asks this machine's GPU \(get_device_properties\).*use device.sm_count of what it is given",
    ),
    "arguments by the GPU that is here": (
        {
            "args_fn": lambda config, x, out: (
                *(x, out, config["tile_m"]),
                _sm_count() if config["tile_m"] > 10**6 else config["tile_n"],
            )
        },
        SM90,
        r"args_fn asks this machine's GPU .*use device.sm_count of what it is given; give it a keyword-only",
    ),
    "a space by the GPU that is here": (
        {
            "search_space": lambda arch, problem: (
                SPACE if problem["M"] < 10**6 or torch.cuda.get_device_capability() > (9, 0) else []
            )
        },
        SM90,
        r"search_space asks this machine's GPU \(get_device_capability\).*use arch of what it is given",
    ),
    "an output that is no tensor": (
        {
            "make_args": lambda problem, device, seed: (
                torch.empty(problem["M"], problem["N"], dtype=torch.bfloat16, device=device),
                3,
            ),
            "typical": [{"dtype": "bfloat16", "M": 1, "N": 8}],
        },
        SM90,
        "made it a int, not a tensor; make one, or take it out of outputs, inplace and reset",
    ),
    "one cluster size on sm100": (
        {"search_space": lambda arch, problem: [c for c in SPACE if c.hints["num_ctas"] == 1]},
        SM100,
        "num_ctas 2",
    ),
    "one tile size on sm100": (
        {"search_space": lambda arch, problem: [c for c in SPACE if c["tile_m"] == 32]},
        SM100,
        "have tile_m=32; search",
    ),
    "one tile size that legal leaves": (
        {"legal": lambda config, arch, problem: config["tile_n"] == 64},
        SM100,
        "have tile_n=64; search",
    ),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_mistake_beyond_the_first_problem_is_found_before_a_sweep(name):
    changes, arch, told = DEEP[name]
    found = declaration_problems(declared(**changes), arch)
    assert any(re.search(told, text) for text in found), found
    assert all(text.startswith("scale: ") for text in found)


WRONG_REFERENCES = {
    # name: (reference, what the error must say)
    "a name that is no output": (
        lambda x, out: {"output": _close(x * 2)},
        "reference returns a dict of output; return a Close or a tensor, or a dict of one for each of out",
    ),
    "an argument that is no output": (
        lambda x, out: {"out": _close(x * 2), "x": _close(x)},
        "reference returns a dict of out, x; return a Close or a tensor, or a dict of one for each of out",
    ),
    "an empty dict": (lambda x, out: {}, "reference returns an empty dict; return a Close or a tensor, or"),
    "nothing": (lambda x, out: None, "reference returns a NoneType; return a Close or a tensor, or"),
    "a tuple": (lambda x, out: (x * 2,), "reference returns a tuple; return a Close or a tensor, or"),
    "a dict of numbers": (
        lambda x, out: {"out": 2.0},
        "reference gives out a float; write a tensor, or Close",
    ),
    "a tensor of another shape": (lambda x, out: x[0] * 2, r"gives out the shape \(128,\), the argument has"),
    "a number to equal": (
        lambda x, out: _close(2.0),
        "reference gives out a float as its value; return a tensor",
    ),
    "another shape": (lambda x, out: _close(x[:1, :1]), r"gives out the shape \(1, 1\), the argument has"),
    "too few parameters": (
        lambda x: _close(x * 2),
        r"reference raised TypeError: .*takes 1 positional argument but 2 were given \(.*, line \d+\) for x",
    ),
    "a misspelt method": (
        lambda x, out: _close(x.dubble()),
        r"AttributeError: 'Tensor' object has no attribute 'dubble' \(.*test_checks.py, line \d+\)",
    ),
    "shapes that do not fit": (
        lambda x, out: _close(x @ x),
        r"reference raised RuntimeError: .*\(.*test_checks.py, line \d+\)",
    ),
    "a negative tolerance": (
        lambda x, out: Close(value=x * 2, rtol=-1, atol=0),
        "reference raised DeclarationError: Close has rtol=-1; write a finite number of 0 or more",
    ),
    "an infinite tolerance": (
        lambda x, out: Close(value=x * 2, rtol=0, atol=float("inf")),
        "reference gives out atol=inf; give a finite number",
    ),
    "a tolerance that is no number": (
        lambda x, out: Close(value=x * 2, rtol=float("nan"), atol=0),
        "reference gives out rtol=nan; give a finite number",
    ),
}


def _close(value: object) -> Close:
    return Close(value=value, rtol=0, atol=0)


@pytest.mark.parametrize("name", WRONG_REFERENCES)
def test_a_wrong_reference_is_found_before_a_sweep(name):
    reference, told = WRONG_REFERENCES[name]
    tunable = declared(reference=reference, typical=[{"dtype": "bfloat16", "M": 64, "N": 128}])
    (found,) = declaration_problems(tunable, SM90)
    assert re.search(told, found), found


def test_the_line_of_a_mistake_is_that_of_the_authors_file():
    line = sys._getframe().f_lineno + 3

    def reference(x, out):
        return _close(torch.matmul(x, x))

    (found,) = declaration_problems(
        declared(reference=reference, typical=[{"dtype": "bfloat16", "M": 64, "N": 128}]), SM90
    )
    assert f"({__file__}, line {line})" in found


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[0, 0].item(),
        lambda x: x.tolist(),
        lambda x: range(x[0, 0].int()),
        lambda x: bool((x > 0).all()),
        lambda x: x.cpu(),
        lambda x: x.cuda(),
        lambda x: x.float().numpy(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x + torch.ones(x.shape),
        lambda x: torch.ones(1, device="cuda"),
        lambda x: torch.Generator(x.device),
        lambda x: torch.cuda.get_device_properties(0),
        lambda x: _raise(AssertionError("a GPU's tensor")),
        lambda x: _raise(ModuleNotFoundError("flash_attn")),
        lambda x: _raise(ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")),
    ],
)
def test_a_reference_that_looks_at_values_or_needs_a_gpu_is_left_to_the_sweep(look):
    def reference(x, out):
        look(x)
        return Close(value=x.double() * 2, rtol=0, atol=0)

    assert declaration_problems(declared(reference=reference), SM90) == []


@pytest.mark.parametrize("bound", [-1, -0.1, -float("inf"), None, "0", True])
def test_a_tolerance_that_is_no_bound_is_refused(bound):
    for name in ("rtol", "atol"):
        with pytest.raises(DeclarationError, match=f"Close has {name}={bound!r}; write a finite number of 0"):
            Close(**{"value": torch.ones(1), "rtol": 0, "atol": 0, name: bound})


@pytest.mark.parametrize("name", ["flops", "load_bytes", "store_bytes"])
@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), "1", None])
def test_work_of_an_impossible_amount_is_refused(name, amount):
    with pytest.raises(DeclarationError, match=f"Work has {name}={amount!r}; write a finite number of 0"):
        Work(**{name: amount})


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None])
def test_work_of_an_impossible_number_of_steps_is_refused(steps):
    with pytest.raises(DeclarationError, match=f"Work has steps={steps!r}; write an int of 1 or more"):
        Work(steps=steps)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"args_fn": lambda config, x, out: (x,)}, "args_fn returned 1"),
        ({"reference": lambda x, out: _close(x[0])}, r"reference gives out the shape \(8,\)"),
        (
            {"problem": lambda x, out: {"M": x.shape[0], **({} if x.dim() == 2 else {"N": 1})}},
            "does not return the axis N: of the arguments made for dtype=bfloat16 M=1 N=8 it",
        ),
        (
            {"make_args": lambda problem, device, seed: _raise(ValueError(f"M={problem.M} on {device}"))},
            r"make_args\(dtype=bfloat16 M=1 N=8\) on device 'meta' raised ValueError: M=1 on meta",
        ),
    ],
)
def test_a_mistake_that_many_problems_share_is_told_once_with_the_first_and_how_many_more(changes, told):
    typical = [{"dtype": ["bfloat16", "float16"], "M": list(range(1, 60)), "N": 8}]
    (found,) = declaration_problems(declared(**changes, typical=typical), SM90)
    assert re.search(told, found), found
    assert found.endswith("and for 117 more problems)")
    assert found.count("dtype=bfloat16 M=1 N=8") == 1
    (alone,) = declaration_problems(declared(**changes, typical=[{**typical[0], "M": 1}]), SM90)
    assert alone.endswith("and for 1 more problem)")


def test_a_space_of_hints_alone_or_for_sm90_need_not_hold_clusters():
    occupancies = [_config(32, occupancy=count) for count in (1, 2, 4)]
    alone = declared(
        search_space=lambda arch, problem: occupancies, default=lambda arch, problem: occupancies[0]
    )
    assert declaration_problems(alone, SM100) == []
    narrow = declared(search_space=lambda arch, problem: SPACE[:1] if arch == SM90 else SPACE)
    assert declaration_problems(narrow, SM90) == []
