"""The archive of cubins: what is packed is read back, each part alone, and no damage gives a wrong byte."""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.cubins import archive
from aot_tune.cubins.archive import HEADER, MAGIC, SCHEMA, Archive
from aot_tune.cubins.origin import Origin
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.errors import ArchiveError
from aot_tune.values.arch import Arch

SM90 = Arch.parse("sm90")
HINTS = (("num_ctas", 1), ("occupancy", 2))
ORIGIN = Origin(
    source_hash="3f0c9a51d2e4b678",
    files={"lib.kernels": "ab" * 32},
    values={"lib.kernels:EPS": "'\"1e-6\\n'"},
    complete=True,
    cuda_tile="1.7.0",
    tileiras="13.4.92",
)


def noise(seed: int, size: int = 3000) -> bytes:
    return random.Random(seed).randbytes(size)


def cubins(kernel: str, *codes: bytes) -> KernelCubins:
    keyed = {(HINTS, f"{kernel}_Kt1_I{place}"): code for place, code in enumerate(codes)}
    return KernelCubins(kernel=kernel, symbol=f"{kernel}_kernel", origin=ORIGIN, cubins=keyed)


SAMPLE = [cubins("matmul", noise(1), noise(2), noise(1)), cubins("rope", noise(3))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cubins.aot"
    path.write_bytes(pack(SM90, SAMPLE))
    return path


def everything(path: Path) -> list[KernelCubins]:
    opened = Archive(path)
    return [
        KernelCubins.unpacked(name, section)
        for name in opened.kernels
        if (section := opened.section(name)) is not None
    ]


def test_what_was_packed_is_read_back(path: Path) -> None:
    assert Archive(path).arch == SM90
    assert everything(path) == SAMPLE
    section = Archive(path).section("matmul")
    assert section is not None
    assert section.cubin(HINTS, "matmul_Kt1_I1") == noise(2)
    assert section.has(HINTS, "matmul_Kt1_I1")


def test_another_kernel_signature_or_hint_has_no_cubin(path: Path) -> None:
    opened = Archive(path)
    assert opened.section("rms_norm") is None
    section = opened.section("matmul")
    assert section is not None
    assert section.cubin(HINTS, "matmul_Kt1_I9") is None
    assert section.cubin((("num_ctas", 2), ("occupancy", 2)), "matmul_Kt1_I0") is None
    assert not section.has((), "matmul_Kt1_I0")


@given(codes=st.lists(st.binary(min_size=1, max_size=60_000), min_size=1, max_size=5), shuffle=st.randoms())
def test_bytes_depend_on_the_content_and_not_on_its_order(
    tmp_path_factory: pytest.TempPathFactory, codes: list[bytes], shuffle: random.Random
) -> None:
    kernels = [cubins("b", *codes), cubins("a", codes[0])]
    data = pack(SM90, kernels)
    items = list(kernels[0].cubins.items())
    shuffle.shuffle(items)
    shuffled = KernelCubins(kernel="b", symbol="b_kernel", origin=ORIGIN, cubins=dict(items))
    assert pack(SM90, [kernels[1], shuffled]) == data
    path = tmp_path_factory.mktemp("archive") / "cubins.aot"
    path.write_bytes(data)
    assert everything(path) == [kernels[1], kernels[0]]


def test_a_kernel_without_cubins_is_packed_and_read_back(path: Path) -> None:
    path.write_bytes(pack(SM90, [cubins("matmul")]))
    assert everything(path) == [cubins("matmul")]


def test_equal_cubins_are_stored_once(path: Path) -> None:
    section = Archive(path).section("matmul")
    assert section is not None
    assert len(section.keys) == 3
    assert section.sizes()[0] == 2


def test_similar_cubins_share_a_dictionary(tmp_path: Path) -> None:
    alike = [noise(1)[:2990] + noise(seed, 10) for seed in range(8)]
    assert len(pack(SM90, [cubins("matmul", *alike)])) < 2 * 3000


def test_one_cubin_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cubins.aot"
    path.write_bytes(pack(SM90, [cubins("matmul", *map(noise, range(100))), cubins("rope", noise(100))]))
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    section = Archive(path).section("rope")
    assert section is not None
    assert sum(read) < 2000  # header, index and one section
    assert section.cubin(HINTS, "rope_Kt1_I0") == noise(100)
    assert sum(read) < 2000 + 3100
    assert path.stat().st_size > 300_000


# Faults: rows B1 and B2 of the fault list, for this kind of file --------------------------------------------


def test_a_cut_at_any_byte_is_an_error_and_never_a_wrong_cubin(path: Path) -> None:
    data = path.read_bytes()
    for length in [*range(0, 600, 7), *range(600, len(data), 97)]:
        path.write_bytes(data[:length])
        with pytest.raises(ArchiveError, match=r"cubins\.aot"):
            everything(path)


def test_a_flipped_bit_is_an_error_or_changes_nothing(path: Path) -> None:
    data = path.read_bytes()
    for place in range(0, len(data), 13):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            assert everything(path) == SAMPLE
        except ArchiveError:
            continue
        pytest.fail(f"a flipped bit in byte {place} was not seen")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "No such file"),
        (Path.mkdir, "it is a directory, not a file"),
        (_fifo, "it is a FIFO, not a file"),
        (Path.touch, "cut short"),
        (lambda path: path.write_bytes(bytes(4096)), "not an archive"),
        (lambda path: path.write_bytes(b'{"schema": 1}' * 100), "not an archive"),
    ],
)
def test_what_is_no_archive_is_an_error_at_once(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(path := tmp_path / "cubins.aot")
    with pytest.raises(ArchiveError, match=said):
        Archive(path)


def with_index(path: Path, index: bytes, body: bytes = b"", schema: int = SCHEMA) -> Path:
    path.write_bytes(HEADER.pack(MAGIC, schema, len(index), hashlib.sha256(index).digest()) + index + body)
    return path


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (b'{"arch":"sm90","kernels":{}', "not JSON"),
        (b'{"arch":"sm90","kernels":{},"kernels":{}}', "twice"),
        (b'{"arch":"sm90"}', "'kernels' is missing"),
        (b'{"arch":"sm90","kernels":{},"more":1}', "unknown"),
        (b'{"arch":"sm17","kernels":{}}', "sm17"),
        (b'{"arch":NaN,"kernels":{}}', "not JSON"),
        (b'{"arch":"sm90","kernels":[]}', "an object of kernels"),
        (b'{"arch":"sm90","kernels":{"matmul":[true,1,1,"00"]}}', "matmul: expected offset"),
        (b'{"arch":"sm90","kernels":{"matmul":[-1,1,1,"00"]}}', "matmul: expected offset"),
        (b'{"arch":"sm90","kernels":{"matmul":[0,1,1]}}', "matmul: expected offset"),
        (b'{"arch":"sm90","kernels":{"matmul":[0,1,999999999999999999999999999999,"00"]}}', "cubins.aot"),
        (b"[" * 100_000, "cubins.aot"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
    ],
)
def test_an_index_of_another_form_names_what_was_expected(tmp_path: Path, index: bytes, said: str) -> None:
    with pytest.raises(ArchiveError, match=said):
        Archive(with_index(tmp_path / "cubins.aot", index))


def test_another_schema_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"schema 2, expected 1"):
        Archive(with_index(tmp_path / "cubins.aot", b'{"arch":"sm90","kernels":{}}', schema=2))


def test_a_part_that_unpacks_to_more_than_it_says_is_cut_off(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(200_000_000), 9)
    place = [0, len(bomb), 100, hashlib.sha256(bytes(100)).hexdigest()]
    index = orjson.dumps({"arch": "sm90", "kernels": {"matmul": place}})
    opened = Archive(with_index(tmp_path / "cubins.aot", index, bomb))
    with pytest.raises(ArchiveError, match="its SHA-256 is not the stated one"):
        opened.section("matmul")


def test_a_part_that_says_it_is_huge_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = orjson.dumps({"arch": "sm90", "kernels": {"matmul": [0, 10, 1 << 30, "00"]}})
    opened = Archive(with_index(tmp_path / "cubins.aot", index, bytes(10)))
    monkeypatch.setattr(archive, "_read", lambda *a: pytest.fail("it was read"))
    with pytest.raises(ArchiveError, match="at most 16777216 are read"):
        opened.section("matmul")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("symbol", 1),
        ("source_hash", None),
        ("files", ["x"]),
        ("values", {"m:X": 1}),
        ("hints", [{"occupancy": True}]),
        ("hints", 5),
        ("blocks", [[0, 0, 0]]),
        ("cubins", [[0, "matmul_Kt1", 7]]),
        ("cubins", [[0, "matmul_Kt1"]]),
        ("cubins", [[-1, "matmul_Kt1", 0]]),
    ],
)
def test_a_section_of_another_form_is_an_error(tmp_path: Path, name: str, value: object) -> None:
    section = {
        "symbol": "s", "source_hash": "0", "files": {}, "values": {}, "complete": True, "cuda_tile": "1.7.0",
        "tileiras": "13.4", "hints": [{}], "blocks": [[0, 0, 0, "00"]], "cubins": [],
    }  # fmt: skip
    for expected, told in ((True, section), (False, {**section, name: value})):
        data = orjson.dumps(told)
        stored = zlib.compress(data)
        index = {
            "arch": "sm90",
            "kernels": {"m": [0, len(stored), len(data), hashlib.sha256(data).hexdigest()]},
        }
        opened = Archive(with_index(tmp_path / "cubins.aot", orjson.dumps(index), stored))
        if expected:
            assert opened.section("m") is not None
        else:
            with pytest.raises(ArchiveError, match=" of m"):
                opened.section("m")


def test_a_file_that_is_replaced_between_index_and_cubin_gives_no_wrong_cubin(path: Path) -> None:
    section = Archive(path).section("matmul")
    assert section is not None
    path.write_bytes(pack(SM90, [cubins("matmul", *map(noise, range(10, 20)))]))
    for key in section.keys:
        with pytest.raises(ArchiveError):
            section.cubin(*key)
