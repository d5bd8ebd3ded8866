"""PREFIX.hashes: the hashes of the texts of an indexed file, so that it is split exactly as the text would be.

Little endian, without gaps; written by ``megapar data prepare`` next to PREFIX.bin and PREFIX.idx:

    offset  bytes  what
    0       8      magic "MPHASHES"
    8       8      version, uint64: 1
    16      8      D, uint64: documents
    24      32     SHA-256 of the PREFIX.idx that it belongs to
    56      8 D    the first 8 bytes of the SHA-256 of each document's text, uint64

PREFIX.chat, of conversations: a JSON object with the hash of the index, and what encoded them (``ChatSettings.facts``).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapar.data.cache import cached_value
from megapar.data.lazy_numpy import np
from megapar.data.tokens.indexed import without_suffix
from megapar.errors import DataError
from megapar.files.disk import write_file
from megapar.files.location import at
from megapar.files.regular_file import open_regular, read_json

MAGIC, VERSION = b"MPHASHES", 1
HEADER = struct.Struct("<8sQQ32s")
SUFFIX, CHAT = ".hashes", ".chat"


def hashes_path(path: str | os.PathLike[str]) -> Path:
    """Return the file of hashes of an indexed corpus, given by its prefix or one of its files."""
    return Path(without_suffix(path) + SUFFIX)


def index_hash(prefix: str, *, may_read: bool = True) -> str:
    """Return the SHA-256 of PREFIX.idx in hexadecimal, remembered in the cache."""
    index = Path(f"{prefix}.idx")
    return cached_value(index, lambda: at(index).sha256(), may_read=may_read)


def hashes_of(texts: Sequence[str]) -> np.ndarray:
    """Return [n] uint64, a hash of each text; divided by 2**64 it is ``split.place_of`` of the text."""
    return np.frombuffer(b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts), dtype="<u8")


def check_chat(prefix: str, facts: Mapping[str, str | None]) -> str:
    """Return a note if PREFIX.chat is missing, or if only its day differs from ``facts``; else "".

    Raises DataError if the file is damaged, or if it has other facts or another index.
    """
    path = Path(prefix + CHAT)
    if not path.exists():
        return f"{path} is missing, so what encoded the conversations is not compared with the run's template and flags"
    try:
        there, here = read_json(path), {"index": index_hash(prefix), **facts}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); prepare the conversations again") from error
    others = [name for name in here if there.get(name) != here[name]]
    changes = ", ".join(f"{name} {there.get(name)}, where the run has {here[name]}" for name in others)
    if set(others) - {"day"}:
        fix = "pass the --tokenizer-model, --chat-template and --sft-turns of these, or prepare them again"
        raise DataError(f"{path}: the conversations were encoded with {changes}; {fix}")
    return f"{path}: the conversations were encoded with {changes}" if others else ""


class HashesWriter:
    """Writes PREFIX.hashes under a temporary name; ``finish`` renames it, and without ``finish`` it is removed."""

    def __init__(self, prefix: str) -> None:
        self._path, self._chat = hashes_path(prefix), Path(prefix + CHAT)
        self._aside = Path(f"{self._path}.unfinished")
        self._file = open(self._aside, "wb")  # noqa: SIM115
        self._file.write(bytes(HEADER.size))

    def __enter__(self) -> HashesWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, hashes: np.ndarray) -> None:
        """Append the hashes of the next documents."""
        self._file.write(hashes.astype("<u8", copy=False).tobytes())

    def finish(self, index: Path, facts: Mapping[str, str | None] | None = None) -> None:
        """Record the index that the hashes belong to, which may still have a temporary name, and sync the file.

        facts: What encoded conversations, for PREFIX.chat.
        """
        if facts is not None:
            write_file(self._chat, json.dumps({"index": at(index).sha256(), **facts}, indent=1).encode())
        documents = (self._file.tell() - HEADER.size) // 8
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, documents, bytes.fromhex(at(index).sha256())))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._aside, self._path)


def read_hashes(prefix: str, documents: int) -> np.memmap | None:
    """Map a corpus's hashes, [D] uint64; None if it has no file. Raises DataError for damage or another index."""
    path = hashes_path(prefix)
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            head = file.read(HEADER.size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    fix = "prepare the corpus again, or remove the file to split documents by their numbers"
    if len(head) < HEADER.size or head[:8] != MAGIC:
        raise DataError(f"{path} is not a file of hashes; {fix}")
    _, version, count, index = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format, but only {VERSION} can be read")
    if index.hex() != index_hash(prefix) or count != documents:
        raise DataError(f"{path} belongs to another index than {prefix}.idx, with {count} documents; {fix}")
    size = path.stat().st_size
    if size != HEADER.size + 8 * count:
        raise DataError(f"{path} has {size} bytes, but {count} documents take {HEADER.size + 8 * count}; {fix}")
    return np.memmap(path, dtype="<u8", mode="r", offset=HEADER.size, shape=(count,))
