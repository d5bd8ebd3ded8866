"""Any bytes as an index: accepted whole, or refused by DataError, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megapar.data.tokens.indexed import HEADER, MAGIC, IndexedDataset
from megapar.errors import DataError

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
