"""Header of Megatron's indexed token files, and a sample of token ids, which reveal a wrong or damaged file.

data/tokens/indexed.py documents the format and reads all of it.
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
from megapar.files.regular_file import not_itself

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: Mapping[int, str] = MappingProxyType(
    {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
)
TOKEN_DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")
SAMPLES = 32  # positions that are checked
SAMPLE_TOKENS = 1024
_ITEMS = {"uint8": "B", "int8": "b", "int16": "h", "uint16": "H", "int32": "i", "int64": "q", "float64": "d"}
_ITEMS["float32"] = "f"


class Head(NamedTuple):
    """Header of an index.

    Attributes:
        documents: Number of document indices, one more than there are documents.
        modes: The index has a mode for each sequence.
    """

    dtype: str
    sequences: int
    documents: int
    modes: bool

    @property
    def item(self) -> int:
        """Bytes per element."""
        return array(_ITEMS[self.dtype]).itemsize


def read_head(index: Path, data: Path) -> Head:
    """Read the header of an .idx file and check it against the sizes of both files. Raises DataError on a mismatch."""
    for path in (index, data):
        if path.stat().st_size and (other := not_itself(path)):
            raise DataError(f"{path} {other}")
    with index.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise DataError(
                f"{index}: {len(head)} bytes, where the header alone has {HEADER.size}; the file is truncated"
            )
        magic, version, code, sequences, documents = HEADER.unpack(head)
        if magic != MAGIC:
            raise DataError(f"{index}: begins with {magic!r}, not {MAGIC!r}; it is not a Megatron index")
        if version != VERSION:
            raise DataError(f"{index}: version {version} of the format; only version {VERSION} is supported")
        if code not in DTYPE_CODES:
            raise DataError(f"{index}: dtype code {code}, not one of {', '.join(map(str, DTYPE_CODES))}")
        if documents < 1:
            raise DataError(f"{index}: no document indices, but even an empty corpus has one")
        wanted, have = HEADER.size + 12 * sequences + 8 * documents, index.stat().st_size
        if have not in (wanted, wanted + sequences):
            raise DataError(
                f"{index}: {have} bytes, where {sequences} sequences and {documents} document indices take "
                f"{wanted} ({wanted + sequences} with modes); the file is truncated or not an index"
            )
        result = Head(DTYPE_CODES[code], sequences, documents, have > wanted)
        length = pointer = 0
        if sequences:
            file.seek(HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
            (pointer,) = struct.unpack("<q", file.read(8))
    implied, size = pointer + length * result.item, data.stat().st_size
    if size != implied:
        raise DataError(
            f"{data}: {size} bytes, where {index.name} implies {implied} ({sequences} "
            f"sequences of {result.dtype}); the file is truncated, or belongs to another index"
        )
    if size % result.item:
        raise DataError(f"{data}: {size} bytes are not a multiple of {result.item}, the size of {result.dtype}")
    return result


def check_corpus(prefix: str, vocab_size: int | None) -> None:
    """Check that a pair of files can be trained on: not empty, of an integer type, with ids inside the vocabulary.

    ``vocab_size`` is None if it is unknown. Raises DataError, OSError.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    head = read_head(index, data)
    if data.stat().st_size == 0:
        raise DataError(f"{data}: the corpus contains no tokens")
    check_dtype(data, head.dtype)
    if vocab_size is None:
        return
    for position, token in _sampled(data, head):
        if not 0 <= token < vocab_size:
            raise bad_id(data, position, token, vocab_size)


def check_dtype(data: Path, dtype: str) -> None:
    """Raise DataError if elements of this type cannot be token ids."""
    if dtype not in TOKEN_DTYPES:
        raise DataError(f"{data}: contains {dtype}, but token ids are {', '.join(TOKEN_DTYPES)}")


def bad_id(data: Path, place: int, found: int, vocab_size: int) -> DataError:
    """Return the error for a token id outside the vocabulary."""
    return DataError(
        f"{data}: token {place} is {found}, but the vocabulary has ids 0 to {vocab_size - 1}; the file was written "
        "with another tokenizer, or --vocab-size is too small"
    )


def places(count: int, most: int) -> list[int]:
    """Return at most ``most`` numbers spread over range(count), including both ends."""
    if count <= most:
        return list(range(max(0, count)))
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


def _sampled(data: Path, head: Head) -> Iterator[tuple[int, int]]:
    """Yield (position, id) of runs of tokens spread over the file."""
    count = data.stat().st_size // head.item
    with data.open("rb") as file:
        for start in places(count, SAMPLES):
            file.seek(start * head.item)
            run = array(_ITEMS[head.dtype])
            run.frombytes(file.read(min(SAMPLE_TOKENS, count - start) * head.item))
            if sys.byteorder == "big":
                run.byteswap()
            yield from enumerate(run, start)
