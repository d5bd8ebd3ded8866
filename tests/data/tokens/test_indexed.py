"""Megatron's indexed files: the bytes of the published format, both ways, and a named error for each damage."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megapar.data.tokens.indexed import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    IndexedDataset,
    IndexedDatasetBuilder,
    is_indexed,
    smallest_dtype,
)
from megapar.errors import DataError
from tests.support.token_files import write_tokens

# Written by hand from the format's description: uint16; sequences [5 6 7] [] [8] [9 10]; documents 0-1, none, 2-3.
FIXTURE_IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, two zeros
    "0100000000000000 08"  # version 1, uint16
    "0400000000000000 0400000000000000"  # 4 sequences, 3 documents + 1
    "03000000 00000000 01000000 02000000"  # lengths
    "0000000000000000 0600000000000000 0600000000000000 0800000000000000"  # pointers
    "0000000000000000 0200000000000000 0200000000000000 0400000000000000"  # documents
)
FIXTURE_BIN = bytes.fromhex("0500 0600 0700 0800 0900 0a00")


def _fixture(folder: Path) -> str:
    prefix = str(folder / "corpus")
    Path(prefix + ".idx").write_bytes(FIXTURE_IDX)
    Path(prefix + ".bin").write_bytes(FIXTURE_BIN)
    return prefix


def test_hand_made_bytes_are_read(tmp_path: Path) -> None:
    dataset = IndexedDataset(_fixture(tmp_path))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 7], [], [8], [9, 10]]
    assert dataset[-1].tolist() == [9, 10]
    assert dataset.document_indices.tolist() == [0, 2, 2, 4]
    assert dataset.documents == 3
    assert [dataset.document_start(d) for d in range(4)] == [0, 3, 3, 6]
    assert dataset.dtype == np.uint16
    assert dataset.modes is None
    with pytest.raises(IndexError):
        dataset[4]
    assert dataset.verify(11) == (3, 4, 6, 10)


def test_the_same_bytes_are_written(tmp_path: Path) -> None:
    prefix = tmp_path / "made"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_item([5, 6, 7])
        builder.add_item(np.array([], dtype=np.int64))
        builder.end_document()
        builder.end_document()
        builder.add_item(np.array([8], dtype=np.int64))
        builder.add_item([9, 10])
        builder.end_document()
        builder.finalize()
    assert (tmp_path / "made.idx").read_bytes() == FIXTURE_IDX
    assert (tmp_path / "made.bin").read_bytes() == FIXTURE_BIN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.bin", "made.idx"]


def test_modes_stand_at_the_end(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "modes", "int32", multimodal=True) as builder:
        builder.add_item([1, 2], mode=3)
        builder.add_item([4], mode=1)
        builder.end_document()
        builder.finalize()
    assert (tmp_path / "modes.idx").read_bytes()[-2:] == b"\x03\x01"
    dataset = IndexedDataset(tmp_path / "modes.idx")
    assert dataset.modes.tolist() == [3, 1]


@pytest.mark.parametrize(("code", "dtype"), DTYPE_CODES.items())
def test_every_dtype(tmp_path: Path, code: int, dtype: str) -> None:
    with IndexedDatasetBuilder(tmp_path / dtype, dtype) as builder:
        for item in ([1, 2, 3], [100]):
            builder.add_item(np.array(item, dtype=dtype))
            builder.end_document()
        builder.finalize()
    index = (tmp_path / f"{dtype}.idx").read_bytes()
    item = np.dtype(dtype).itemsize
    assert index[17] == code
    assert index[34:] == struct.pack("<2i2q3q", 3, 1, 0, 3 * item, 0, 1, 2)
    assert [row.tolist() for row in map(IndexedDataset(tmp_path / dtype).__getitem__, range(2))] == [[1, 2, 3], [100]]


def test_documents_at_once_and_copied_files_give_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 60000, size=int(n)) for n in rng.integers(0, 40, size=50)]
    write_tokens(tmp_path / "one", documents)
    for name, part in (("a", documents[:20]), ("b", documents[20:])):
        with IndexedDatasetBuilder(tmp_path / name, "uint16") as builder:
            builder.add_documents(np.concatenate(part), np.array([len(ids) for ids in part]))
            builder.finalize()
    with IndexedDatasetBuilder(tmp_path / "both", "uint16") as builder:
        for name in "ab":
            with open(tmp_path / f"{name}.bin", "rb") as ids:
                builder.copy_documents(ids, IndexedDataset(tmp_path / name).lengths)
        builder.finalize()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"both{suffix}").read_bytes()


def test_offsets_beyond_two_gigabytes(tmp_path: Path) -> None:
    """A sparse file: 3 sequences, the last one behind byte 2^33."""
    lengths = [2**30, 2**30, 2**30, 3]
    pointers = [4 * 2**30 * i for i in range(4)]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 4, 5) + struct.pack("<4i4q5q", *lengths, *pointers, *range(5))
    (tmp_path / "big.idx").write_bytes(index)
    with open(tmp_path / "big.bin", "wb") as data:
        data.seek(pointers[3])
        data.write(struct.pack("<3i", 7, 8, 9))
    dataset = IndexedDataset(tmp_path / "big")
    assert dataset[3].tolist() == [7, 8, 9]
    assert dataset.document_start(3) == 3 * 2**30
    assert len(dataset.tokens) == 3 * 2**30 + 3
    assert (tmp_path / "big.bin").stat().st_blocks * 512 < 2**20


def test_an_empty_corpus_opens(tmp_path: Path) -> None:
    write_tokens(tmp_path / "none", [])
    dataset = IndexedDataset(tmp_path / "none")
    assert (len(dataset), dataset.documents, dataset.verify(5).tokens) == (0, 0, 0)


def _with(offset: int, piece: bytes) -> bytes:
    return FIXTURE_IDX[:offset] + piece + FIXTURE_IDX[offset + len(piece) :]


@pytest.mark.parametrize(
    ("index", "data", "message"),
    [
        (b"{}", FIXTURE_BIN, r"corpus.idx: 2 bytes, where the header alone has 34"),
        (_with(0, b"TNTIDX"), FIXTURE_BIN, r"corpus.idx: begins with b'TNTIDX.*it is not a Megatron index"),
        (_with(9, b"\x02"), FIXTURE_BIN, r"corpus.idx: version 2 of the format; only version 1 is supported"),
        (_with(17, b"\x09"), FIXTURE_BIN, r"corpus.idx: dtype code 9, not one of 1, 2"),
        (_with(26, b"\0"), FIXTURE_BIN, r"corpus.idx: no document indices"),
        (FIXTURE_IDX[:-8], FIXTURE_BIN, r"corpus.idx: 106 bytes, where 4 sequences and 4 document indices take 114"),
        (_with(18, b"\x05"), FIXTURE_BIN, r"corpus.idx: 114 bytes, where 5 sequences"),
        (FIXTURE_IDX, FIXTURE_BIN[:-2], r"corpus.bin: 10 bytes, where corpus.idx implies 12"),
        (FIXTURE_IDX, FIXTURE_BIN + b"\0\0", r"corpus.bin: 14 bytes, where corpus.idx implies 12"),
        (
            _with(17, b"\x04"),
            FIXTURE_BIN,
            r"corpus.bin: 12 bytes, where corpus.idx implies 16 \(4 sequences of int32\)",
        ),
        (_with(58, b"\x04"), FIXTURE_BIN, r"corpus.idx: sequence 1 begins at byte 4 .* end at byte 6"),
        (_with(34, b"\xff\xff\xff\xff"), FIXTURE_BIN, r"corpus.idx: sequence 1 begins at byte 6"),
        (_with(82, b"\x01"), FIXTURE_BIN, r"documents are sequences 1 to 4, but the file has 0 to 4"),
        (_with(106, b"\x03"), FIXTURE_BIN, r"documents are sequences 0 to 3, but the file has 0 to 4"),
        (_with(90, b"\x03"), FIXTURE_BIN, r"document 1 begins at sequence 3 and ends before it, at 2"),
    ],
)
def test_damage_is_named(tmp_path: Path, index: bytes, data: bytes, message: str) -> None:
    (tmp_path / "corpus.idx").write_bytes(index)
    (tmp_path / "corpus.bin").write_bytes(data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "corpus")


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    dataset = IndexedDataset(_fixture(tmp_path))
    dataset.check_ids(11)
    with pytest.raises(DataError, match=r"corpus.bin: token 5 is 10, but the vocabulary has ids 0 to 9"):
        dataset.check_ids(10)
    with pytest.raises(DataError, match=r"token 4 is 9"):
        dataset.verify(9)
    with IndexedDatasetBuilder(tmp_path / "floats", "float32") as builder:
        builder.finalize()
    with pytest.raises(DataError, match="contains float32"):
        IndexedDataset(tmp_path / "floats").check_ids(10)


def test_a_full_check_sees_what_a_sample_misses(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "many", "uint16") as builder:
        tokens = np.zeros(300_000, dtype=np.uint16)
        tokens[140_000] = 9
        builder.add_documents(tokens, np.full(100_000, 3))
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "many")
    dataset.check_ids(9)
    with pytest.raises(DataError, match="token 140000 is 9"):
        dataset.verify(9)
    index = bytearray((tmp_path / "many.idx").read_bytes())
    index[34 + 4 * 40_001] = 2
    (tmp_path / "many.idx").write_bytes(index)
    with pytest.raises(DataError, match="sequence 40002 begins at byte 240012"):
        IndexedDataset(tmp_path / "many").verify()


def test_nothing_is_left_behind_by_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="do not fit uint16"),
        IndexedDatasetBuilder(tmp_path / "x", "uint16") as builder,
    ):
        builder.add_item([1, 70_000])
    builder = IndexedDatasetBuilder(tmp_path / "x", "uint16")
    builder.add_item([1])
    with pytest.raises(DataError, match="1 sequences follow the last"):
        builder.finalize()
    builder.close()
    with pytest.raises(DataError, match="complex64 has no code"):
        IndexedDatasetBuilder(tmp_path / "x", "complex64")
    assert list(tmp_path.iterdir()) == []


def test_what_an_indexed_path_is(tmp_path: Path) -> None:
    prefix = _fixture(tmp_path)
    assert all(map(is_indexed, (prefix, prefix + ".bin", prefix + ".idx", "elsewhere.bin")))
    assert not is_indexed(tmp_path / "other")
    assert smallest_dtype(65499) == "uint16"
    assert smallest_dtype(65500) == "int32"
    with pytest.raises(DataError, match=r"other.idx: no such file"):
        IndexedDataset(tmp_path / "other")


MAX_MEMORY = 8 << 20
COUNTS = st.one_of(st.integers(0, 4), st.sampled_from([2**31, 2**60, 2**63, 2**64 - 1]))
PLACES = st.one_of(st.integers(-2, 9), st.sampled_from([2**62, 2**63 - 1, -(2**63)]))
LENGTHS = st.one_of(st.integers(-2, 5), st.sampled_from([2**31 - 1, -(2**31)]))


@st.composite
def indices(draw: st.DrawFn) -> bytes:
    """Headers and bodies that agree often enough to come far."""
    sequences = draw(st.integers(0, 4))
    lengths = draw(st.lists(LENGTHS, min_size=sequences, max_size=sequences))
    width = draw(st.sampled_from([1, 2, 4, 8]))
    right = [width * sum(lengths[:i]) for i in range(sequences)]
    pointers = [draw(st.one_of(st.just(place), PLACES)) for place in right]
    documents = draw(st.lists(PLACES, max_size=4))
    documents = [0, *documents, sequences] if draw(st.booleans()) else documents
    header = HEADER.pack(
        draw(st.sampled_from([MAGIC] * 9 + [b"MMIDIDX\0\1"])),
        draw(st.sampled_from([1] * 9 + [0, 2**64 - 1])),
        draw(st.sampled_from([{1: 1, 2: 8, 4: 4, 8: 5}[width]] * 5 + [0, 2, 3, 6, 7, 9, 255])),
        draw(st.sampled_from([sequences] * 4 + [draw(COUNTS)])),
        draw(st.sampled_from([len(documents)] * 4 + [draw(COUNTS)])),
    )
    body = struct.pack(f"<{sequences}i", *lengths)
    body += b"".join(struct.pack("<q", max(-(2**63), min(2**63 - 1, place))) for place in (*pointers, *documents))
    content = header + body + b"\0" * draw(st.sampled_from([0, 0, 0, sequences, 1]))
    return content[: draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.one_of(indices(), st.binary(max_size=80)), data=st.binary(max_size=40))
@example(index=HEADER.pack(MAGIC, 1, 8, 2**60, 2**60), data=b"")
@example(index=HEADER.pack(MAGIC, 1, 8, 0, 2**61) + b"\0" * 64, data=b"")
@example(index=HEADER.pack(MAGIC, 1, 6, 1, 1) + struct.pack("<iqq", 0, 2, 0), data=b"\0\0")
def test_any_index_is_whole_or_refused(tmp_path: Path, index: bytes, data: bytes) -> None:
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(data)
    with _bounded_memory():
        found = _opened(tmp_path / "a")
        if isinstance(found, str):
            assert str(tmp_path / "a") in found
            return
        rows = [found[number].tolist() for number in range(len(found))]
        assert [len(row) for row in rows] == found.lengths.tolist()
        assert sum(map(len, rows)) == len(found.tokens) == len(data) // found.dtype.itemsize
        starts = [found.document_start(document) for document in range(found.documents + 1)]
        assert starts == sorted(starts)


def _opened(prefix: Path) -> IndexedDataset | str:
    """The dataset, every entry and token of it checked, or why not."""
    try:
        dataset = IndexedDataset(prefix)
        dataset.verify()
        dataset.check_ids(50)
    except DataError as error:
        return str(error)
    return dataset


@contextmanager
def _bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()


def test_an_index_of_exabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    """A sparse pair whose pointers say that the data has 8 exabytes, and one whose counts would take as much."""
    lengths, pointers = [2**31 - 1, 3], [0, 2**63 - 8]
    header = HEADER.pack(MAGIC, 1, 5, 2, 2)
    (tmp_path / "a.idx").write_bytes(header + struct.pack("<2i2q2q", *lengths, *pointers, 0, 2))
    with open(tmp_path / "a.bin", "wb") as data:
        data.truncate(1 << 40)
    with open(tmp_path / "b.idx", "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, 5, 2**60, 2))
        index.truncate(1 << 40)
    (tmp_path / "b.bin").write_bytes(b"")
    with _bounded_memory():
        with pytest.raises(DataError, match=f"a.bin: {2**40} bytes, where a.idx implies {2**63 + 16}"):
            IndexedDataset(tmp_path / "a")
        with pytest.raises(DataError, match=f"b.idx: {2**40} bytes, where {2**60} sequences"):
            IndexedDataset(tmp_path / "b")
