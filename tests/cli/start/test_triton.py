"""aot_tune.cli.start.triton: Triton configs become a search space, from their source alone."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support.begun import imported

KERNEL = "tests.support.example_kernels:persistent_kernel"
NAMES = "GROUP=GROUP_SIZE_M,TK=BLOCK_SIZE_K,TM=BLOCK_SIZE_M,TN=BLOCK_SIZE_N"
SOURCE = textwrap.dedent("""
    import no_such_triton as triton

    def tutorial():
        return [
            triton.Config({'BLOCK_SIZE_M': 128, 'BLOCK_SIZE_N': 256, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 8},
                          num_stages=3, num_warps=8),
            triton.Config({'BLOCK_SIZE_M': 64, 'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 32, 'GROUP_SIZE_M': 6},
                          num_stages=4, num_warps=4),
            triton.Config({'BLOCK_SIZE_M': 64, 'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 32, 'GROUP_SIZE_M': 6},
                          num_stages=5, num_warps=2),
            triton.Config({'BLOCK_SIZE_M': 48, 'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 32, 'GROUP_SIZE_M': 8}),
        ]

    LIST = [
        triton.Config({'BLOCK_SIZE_M': m, 'BLOCK_SIZE_N': n, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 8},
                      num_warps=w)
        for m in (64, 128) for n in [64, 128] for w in (4, 8)
    ]

    @triton.autotune(configs=LIST, key=['M'])
    @triton.jit
    def kernel(a):
        pass

    SIZES_M = (64, 128)
    TABLE = [(64, 32, 4), (32, 64, 8)]
    NAMED = [Config(dict(BLOCK_SIZE_M=m, BLOCK_SIZE_N=32, BLOCK_SIZE_K=64, GROUP_SIZE_M=8), num_stages=s)
             for m in SIZES_M for s in ([1] if is_hip() else [2, 3])]
    ROWS = [Config(kwargs={'BLOCK_SIZE_M': m, 'BLOCK_SIZE_N': n, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 8})
            for m, n, w in TABLE]

    if MANY:
        def conditional():
            return LIST

    def first():
        configs = [Config({'BLOCK_SIZE_M': 16, 'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 8})]
        return configs

    def second(hook=None):
        configs = [Config({'BLOCK_SIZE_M': 32, 'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 8},
                                 pre_hook=hook)]
        return configs

    def appended():
        configs = [Config({'BLOCK_SIZE_M': 16, 'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 8})]
        configs.append(Config({'BLOCK_SIZE_M': 64, 'BLOCK_SIZE_N': 32}))
        return configs

    SPREAD = [Config({**BASE, 'BLOCK_SIZE_M': 64})]
    TWICE = [Config({'BLOCK_SIZE_M': 64})]
    TWICE = [Config({'BLOCK_SIZE_M': 32})]

    def passed(configs):
        return configs

    @triton.autotune(list(filter(keep, second())), key=['M'])
    @triton.jit
    def positional(a):
        pass

    configs = LIST
    ODD = [triton.Config({'BLOCK_SIZE_M': m}) for m, n in (64, 128)]
    COMPUTED = [Config({'BLOCK_SIZE_M': size(64)})]
    MADE = [make(64)]
    SIZES = [triton.Config({'BLOCK_SIZE_M': size()})]
    CHOSEN = [triton.Config({'BLOCK_SIZE_M': m}) for m in (64, 128) if m > 64]
    LOOP = LOOP
    EMPTY = []
""")


def _new(place: Path | str, constants: str = NAMES) -> Result:
    return CliRunner().invoke(app, ["new", KERNEL, "--triton", str(place), "--constants", constants])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("name", "tiles", "note"),
    [
        ("tutorial", [(128, 256, 64, 8), (64, 32, 32, 6)], "4 Triton configs: 2 with different values"),
        ("tutorial", [(128, 256, 64, 8), (64, 32, 32, 6)], "so are 1 whose tiles are no powers of two"),
        ("LIST", [(m, n, 64, 8) for m in (64, 128) for n in (64, 128)], "8 Triton configs: 4 with"),
        ("kernel", [(m, n, 64, 8) for m in (64, 128) for n in (64, 128)], "warps and stages are left out"),
        ("json", [(16, 64, 128, 1)], "so are EVEN_K"),
        ("NAMED", [(64, 32, 64, 8), (128, 32, 64, 8)], "2 Triton configs: 2 with"),
        ("ROWS", [(64, 32, 64, 8), (32, 64, 64, 8)], "2 Triton configs: 2 with"),
        ("conditional", [(m, n, 64, 8) for m in (64, 128) for n in (64, 128)], "8 Triton configs: 4 with"),
        ("first", [(16, 32, 64, 8)], "1 Triton config: 1 with"),
        ("positional", [(32, 32, 64, 8)], "1 Triton config: 1 with"),
    ],
)
def test_tiles_are_the_search_space_in_the_kernels_names(
    name: str,
    tiles: list[tuple[int, ...]],
    note: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    moe = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    (tmp_path / "moe.json").write_text(json.dumps({"triton_version": "3", "1": {**moe, "EVEN_K": True}}))
    done = _new(tmp_path / "moe.json" if name == "json" else f"{source}:{name}")
    assert done.exit_code == 0, done.stderr
    assert note in done.stderr
    assert "search_space=blank" not in done.stdout
    assert '\n            constants={"TM": ' in done.stdout
    space = imported(done.stdout, tmp_path).search_space
    for arch, ctas in (("sm90", (1,)), ("sm100", (1, 2))):
        assert space(Arch.parse(arch), None) == [
            Config(
                constants=dict(zip(("TM", "TN", "TK", "GROUP"), row, strict=True)),
                hints={"occupancy": occupancy, "num_ctas": num_ctas},
            )
            for row in tiles
            for occupancy in (1, 2)
            for num_ctas in ctas
        ]


@pytest.mark.parametrize(
    ("name", "constants", "why"),
    [
        (
            ":MADE",
            NAMES,
            "is no list of literal configs: make(64); NAME is one of ",
        ),
        (":COMPUTED", NAMES, "is no list of literal configs: size(64)"),
        (":SIZES", NAMES, "is no list of literal configs: size()"),
        (":CHOSEN", NAMES, "is no list of literal configs: [triton.Config({'BLOCK_SIZE_M': m}) for m in"),
        (":LOOP", NAMES, "is no list of literal configs: LOOP"),
        (":ODD", NAMES, "is no list of literal configs: [triton.Config({'BLOCK_SIZE_M': m})"),
        (":TABLE", NAMES, "is no list of literal configs: [(64, 32, 4)"),
        (":appended", NAMES, "is no list of literal configs: configs"),
        (":SPREAD", NAMES, "is no list of literal configs: {**BASE,"),
        (":TWICE", NAMES, "write FILE.py:NAME of what is assigned once"),
        (":passed", NAMES, "is no list of literal configs: configs"),
        (":EMPTY", NAMES, "it has no config"),
        (
            "",
            NAMES,
            "NAME is one of tutorial, first, second, appended, LIST, NAMED, ROWS, SPREAD, ODD, COMPUTED",
        ),
        (":tutorial", "", "the kernel has no constant ''; write for example TM=BLOCK_TM"),
        (":tutorial", "TM=BLOCK_SIZE_M", "name the config's value of TN, TK too"),
        (":tutorial", NAMES.replace("SIZE_N", "SIZE_X"), "no whole number BLOCK_SIZE_X; it has BLOCK_SIZE_M"),
    ],
)
def test_what_is_no_list_of_literals_or_lacks_a_name_is_refused(
    name: str, constants: str, why: str, source: Path
) -> None:
    done = _new(f"{source}{name}", constants)
    assert (done.exit_code, why in done.stderr) == (2, True), done.stderr


def test_a_json_of_no_configs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    for text in ("[1]", "{", "{}"):
        path.write_text(text)
        assert _new(path).exit_code == 2
