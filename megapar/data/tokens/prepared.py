"""PREFIX.hashes: the texts' hashes of an indexed file's documents, by which they are split as the text itself would be.

Little endian, without gaps; written by ``megapar data prepare`` beside PREFIX.bin and PREFIX.idx:

    offset  bytes  what
    0       8      magic "MPHASHES"
    8       8      version, uint64: 1
    16      8      D, uint64: documents
    24      32     SHA-256 of the PREFIX.idx that it belongs to
    56      8 D    of each document the first 8 bytes of its text's SHA-256, uint64
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapar.core.checkpoint.manifest import sha256_of
from megapar.data.tokens.remembered import remembered
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

MAGIC, VERSION = b"MPHASHES", 1
HEADER = struct.Struct("<8sQQ32s")
SUFFIX = ".hashes"


def hashes_path(path: str | os.PathLike[str]) -> Path:
    """The file of hashes of an indexed corpus, which may be named with ``.bin`` or ``.idx``."""
    text = os.fspath(path)
    return Path((text[:-4] if text.endswith((".bin", ".idx")) else text) + SUFFIX)


def index_hash(prefix: str, *, may_read: bool = True) -> str:
    """SHA-256 of PREFIX.idx, in hexadecimal; remembered."""
    index = Path(f"{prefix}.idx")
    return remembered(index, lambda: sha256_of(index), may_read=may_read)


def hashes_of(texts: Sequence[str]) -> np.ndarray:
    """[n] uint64: the hashes that ``split.place_of`` turns into places."""
    import numpy as np

    return np.frombuffer(b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts), dtype="<u8")


class HashesWriter:
    """Writes PREFIX.hashes, which has its name once ``finish`` was called; without it nothing remains."""

    def __init__(self, prefix: str) -> None:
        self._path = hashes_path(prefix)
        self._aside = Path(f"{self._path}.unfinished")
        self._file = open(self._aside, "wb")  # noqa: SIM115
        self._file.write(bytes(HEADER.size))

    def __enter__(self) -> HashesWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, hashes: np.ndarray) -> None:
        """Append the hashes of the documents that follow."""
        self._file.write(hashes.astype("<u8", copy=False).tobytes())

    def finish(self, index: Path) -> None:
        """Record the index they belong to, which may not have its name yet, and bring them to disk."""
        documents = (self._file.tell() - HEADER.size) // 8
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, documents, bytes.fromhex(sha256_of(index))))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._aside, self._path)


def read_hashes(prefix: str, documents: int) -> np.ndarray | None:
    """[D] uint64, memory-mapped; None where the corpus has none.

    Raises DataError for a file that is damaged or of another index.
    """
    import numpy as np

    path = hashes_path(prefix)
    if not path.exists():
        return None
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    fix = "prepare the corpus again, or remove the file to have documents split by their numbers"
    if len(head) < HEADER.size or head[:8] != MAGIC:
        raise DataError(f"{path} is not a file of hashes; {fix}")
    _, version, count, index = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format, where {VERSION} is read")
    if index.hex() != index_hash(prefix) or count != documents:
        raise DataError(f"{path} belongs to another index than {prefix}.idx, with {count} documents; {fix}")
    size = path.stat().st_size
    if size != HEADER.size + 8 * count:
        raise DataError(f"{path} has {size} bytes, where {count} documents take {HEADER.size + 8 * count}; {fix}")
    return np.memmap(path, dtype="<u8", mode="r", offset=HEADER.size, shape=(count,))
