"""The head of Megatron's indexed token files, and ids at a sample of places: what shows a wrong or broken file.

Standard library only. The format is written down in data/tokens/indexed.py, which reads the whole of it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megapar.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: Mapping[int, str] = MappingProxyType(
    {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
)
TOKEN_DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")
SAMPLES = 32  # places that are looked at
SAMPLE_TOKENS = 1024
_ITEMS = {"uint8": "B", "int8": "b", "int16": "h", "uint16": "H", "int32": "i", "int64": "q", "float64": "d"}
_ITEMS["float32"] = "f"


class Head(NamedTuple):
    """dtype: of an element. sequences: in the file. documents: indices of documents, one more than there are.

    modes: whether each sequence has one.
    """

    dtype: str
    sequences: int
    documents: int
    modes: bool

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return array(_ITEMS[self.dtype]).itemsize


def read_head(index: Path, data: Path) -> Head:
    """The head of an .idx file that fits its length and that of its .bin file. Raises DataError with both numbers."""
    with index.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise DataError(
                f"{index}: {len(head)} bytes, where the header alone has {HEADER.size}; the file is cut off"
            )
        magic, version, code, sequences, documents = HEADER.unpack(head)
        if magic != MAGIC:
            raise DataError(f"{index}: begins with {magic!r}, not {MAGIC!r}; it is no Megatron index")
        if version != VERSION:
            raise DataError(f"{index}: version {version} of the format, where {VERSION} is read")
        if code not in DTYPE_CODES:
            raise DataError(f"{index}: dtype code {code}, not one of {', '.join(map(str, DTYPE_CODES))}")
        if documents < 1:
            raise DataError(f"{index}: no document indices, where even an empty corpus has one")
        wanted, have = HEADER.size + 12 * sequences + 8 * documents, index.stat().st_size
        if have not in (wanted, wanted + sequences):
            raise DataError(
                f"{index}: {have} bytes, where {sequences} sequences and {documents} document indices take "
                f"{wanted} ({wanted + sequences} with modes); the file is cut off or not an index"
            )
        found = Head(DTYPE_CODES[code], sequences, documents, have > wanted)
        length = pointer = 0
        if sequences:
            file.seek(HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
            (pointer,) = struct.unpack("<q", file.read(8))
    implied, size = pointer + length * found.item, data.stat().st_size
    if size != implied:
        raise DataError(
            f"{data}: {size} bytes, where {index.name} implies {implied} ({sequences} "
            f"sequences of {found.dtype}); the file is cut off, or belongs to another index"
        )
    if size % found.item:
        raise DataError(f"{data}: {size} bytes are no whole number of {found.dtype} of {found.item} bytes")
    return found


def check_corpus(prefix: str, vocab_size: int | None) -> None:
    """Refuse a pair of files that cannot be trained on: empty, of no ids, or with ids outside of the vocabulary.

    vocab_size: None where it is not known. Raises DataError, OSError.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    head = read_head(index, data)
    if data.stat().st_size == 0:
        raise DataError(f"{data}: the corpus holds no tokens")
    check_dtype(data, head.dtype)
    if vocab_size is None:
        return
    for place, found in _sampled(data, head):
        if not 0 <= found < vocab_size:
            raise bad_id(data, place, found, vocab_size)


def check_dtype(data: Path, dtype: str) -> None:
    """Raise DataError for elements that cannot be ids."""
    if dtype not in TOKEN_DTYPES:
        raise DataError(f"{data}: holds {dtype}, and token ids are {', '.join(TOKEN_DTYPES)}")


def bad_id(data: Path, place: int, found: int, vocab_size: int) -> DataError:
    """An id that no row of the embedding is for."""
    return DataError(
        f"{data}: token {place} is {found}, where the vocabulary has ids 0 to "
        f"{vocab_size - 1}; the file was made with another tokenizer, or --vocab-size is too small"
    )


def places(count: int, most: int) -> list[int]:
    """At most ``most`` numbers spread over range(count), both ends among them."""
    if count <= most:
        return list(range(max(0, count)))
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


def _sampled(data: Path, head: Head) -> Iterator[tuple[int, int]]:
    """(place, id) of runs of tokens spread over the file."""
    count = data.stat().st_size // head.item
    with data.open("rb") as file:
        for start in places(count, SAMPLES):
            file.seek(start * head.item)
            run = array(_ITEMS[head.dtype])
            run.frombytes(file.read(min(SAMPLE_TOKENS, count - start) * head.item))
            if sys.byteorder == "big":
                run.byteswap()
            yield from enumerate(run, start)
