"""Finished parts of encoding, in a folder that one run holds at a time and from which the next run resumes.

key             hash of the work; locked by the run and its worker processes
00000000.part   a part: ids of its documents | lengths of their sequences, int32 | their texts' hashes, uint64 |
                marks of the sequences, int8, if they are conversations | a record of its content, JSON |
                bytes of the JSON, uint64

The record has the CRC-32 of everything before it, so that a later run finds parts that a power failure cut or zeroed,
and encoding need not wait until each part is on the disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megapar.data.lazy_numpy import np
from megapar.data.text.chunks import BadRecords
from megapar.errors import DataError
from megapar.files.disk import sync

KEY = "key"
_SUFFIX = ".part"
_PART = re.compile(r"[0-9]{8,}\.(?:part|unfinished)")
_END = struct.Struct("<Q")
_BLOCK_BYTES = 1 << 20
_LOCK_SECONDS = 5.0  # the workers of a killed run exit by themselves within this time


@dataclass(frozen=True)
class Encoded:
    """Counts of encoded documents, of one chunk or of several.

    Attributes:
        bad: Number of broken records that were skipped.
        first_bad: Messages of the first of them.
    """

    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: tuple[str, ...] = ()

    def __add__(self, other: Encoded) -> Encoded:
        first = (*self.first_bad, *other.first_bad)[: BadRecords.KEPT]
        return Encoded(self.documents + other.documents, self.tokens + other.tokens, self.bad + other.bad, first)


@contextmanager
def claimed(folder: Path, key: str) -> Iterator[None]:
    """Hold the folder, cleared of other work's parts. Raises DataError if a run holds it or it has other files."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / KEY
    if not mark.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is for finished parts but contains other files; move it, or choose another --output")
    with open(mark, "a+", encoding="utf-8", errors="replace") as lock:
        _wait_for(lock.fileno(), folder)
        lock.seek(0)
        if lock.read() != key:
            _unlink_parts(folder)
            sync(folder)  # so that even after a power failure no part of other work is next to this key
            lock.truncate(0)
            lock.write(key)
            lock.flush()
            os.fsync(lock.fileno())
        yield


def remove_parts(folder: Path) -> None:
    """Remove the finished parts and their key, and the folder unless it contains other files."""
    _unlink_parts(folder)
    (folder / KEY).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _unlink_parts(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if _PART.fullmatch(path.name):
            path.unlink()


def _wait_for(lock: int, folder: Path) -> None:
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise DataError(f"another run is working in {folder}; wait for it, or pass another --output") from None
            time.sleep(0.1)


def claims(folder: Path, key: str) -> bool:
    """Return True if the folder exists and its parts are of this work."""
    mark = folder / KEY
    return mark.is_file() and mark.read_bytes() == key.encode()


class PartWriter:
    """Writes a part under a temporary name; ``finish`` renames it, and without ``finish`` it is removed."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = _path(folder, number)
        self._aside = self._path.with_suffix(".unfinished")
        self._file = open(self._aside, "wb")  # noqa: SIM115
        self._lengths: list[bytes] = []
        self._hashes: list[bytes] = []
        self._marks: list[bytes] = []
        self._sequences = self._crc = 0

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, hashes: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Add n documents of s sequences: ids ``tokens`` [T], ``lengths`` [s] with sum T, ``hashes`` [n] uint64.

        Without ``marks`` [s] int8 (see ``indexed.TARGETS``), each document is a sequence.
        """
        self._write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
        self._lengths.append(lengths.astype("<i4").tobytes())
        self._hashes.append(hashes.astype("<u8").tobytes())
        self._sequences += len(lengths)
        if marks is not None:
            self._marks.append(marks.astype("<i1").tobytes())

    def finish(self, done: Encoded) -> None:
        """Write the record of the part's content and rename the file."""
        size = self._file.tell()
        self._write(b"".join((*self._lengths, *self._hashes, *self._marks)))
        content = {"bytes": size, "sequences": self._sequences, "marked": bool(self._marks), "crc": self._crc}
        record = json.dumps({**asdict(done), **content}).encode()
        self._file.write(record + _END.pack(len(record)))
        self._file.close()
        os.replace(self._aside, self._path)

    def _write(self, content: bytes | memoryview) -> None:
        self._crc = zlib.crc32(content, self._crc)
        self._file.write(content)


def finished(folder: Path, number: int) -> Encoded | None:
    """Return the result of a part, which is read whole; None if it is not finished, or damaged by a power failure."""
    try:
        with open(_path(folder, number), "rb") as file:
            record = _record(file)
            if record is None or _crc(file, record["end"]) != record["crc"]:
                return None
    except FileNotFoundError:
        return None
    return Encoded(record["documents"], record["tokens"], record["bad"], tuple(record["first_bad"]))


def parts_in(folder: Path) -> int:
    """Return the number of parts that have their names, without reading them."""
    return len(list(folder.glob(f"*{_SUFFIX}")))


@contextmanager
def opened(folder: Path, number: int) -> Iterator[tuple[IO[bytes], np.ndarray, np.ndarray, np.ndarray | None]]:
    """Open a finished part; yield the file, positioned at its ids, and what ``PartWriter.add`` got with them.

    The lengths are [s] int32, the hashes of the documents' texts [n] uint64, the marks [s] int8, or None without them.
    """
    with open(_path(folder, number), "rb") as file:
        record = _record(file)
        assert record is not None, f"part {number} is not finished"
        file.seek(record["bytes"])
        lengths = np.frombuffer(file.read(4 * record["sequences"]), dtype="<i4")
        hashes = np.frombuffer(file.read(8 * record["documents"]), dtype="<u8")
        marks = np.frombuffer(file.read(record["sequences"]), dtype="<i1") if record["marked"] else None
        file.seek(0)
        yield file, lengths, hashes, marks


def _record(file: IO[bytes]) -> dict[str, Any] | None:
    """Return the record at the end of a part, with the ``end`` of the bytes of its CRC; None for any other file."""
    size = os.fstat(file.fileno()).st_size
    if size < _END.size:
        return None
    file.seek(size - _END.size)
    (length,) = _END.unpack(file.read())
    if not 0 < length <= size - _END.size:
        return None
    file.seek(size - _END.size - length)
    try:
        record: dict[str, Any] = json.loads(file.read(length))
    except ValueError:
        return None
    record = {"sequences": record["documents"], "marked": False, **record}  # absent in older parts
    end = record["bytes"] + (5 if record["marked"] else 4) * record["sequences"] + 8 * record["documents"]
    return {**record, "end": end} if end + length + _END.size == size else None


def _crc(file: IO[bytes], size: int) -> int:
    """Return the CRC-32 of the first bytes of a file."""
    file.seek(0)
    crc = 0
    while block := file.read(min(size, _BLOCK_BYTES)):
        crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{_SUFFIX}"
