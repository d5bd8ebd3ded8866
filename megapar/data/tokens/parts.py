"""Finished parts of work that may be killed: a folder that one run holds at a time, and the next one resumes from.

key             what is made here; locked by the run that makes it, its worker processes included
00000000.part   a part: ids of its documents | their lengths, int32 | their texts' hashes, uint64 |
                what it holds, JSON | bytes of the JSON, uint64
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megapar.core.checkpoint.durable import sync_folder
from megapar.data.text.bad_records import BadRecords
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

KEY = "key"
_END = struct.Struct("<Q")
_LOCK_SECONDS = 5.0  # the workers of a run that was killed end by themselves within this time


@dataclass(frozen=True)
class Done:
    """The result of one chunk, or of all together. bad: records left out. first_bad: messages of the first of them."""

    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: tuple[str, ...] = ()

    def __add__(self, other: Done) -> Done:
        first = (*self.first_bad, *other.first_bad)[: BadRecords.KEPT]
        return Done(self.documents + other.documents, self.tokens + other.tokens, self.bad + other.bad, first)


@contextmanager
def claimed(folder: Path, key: str) -> Iterator[None]:
    """Hold the folder; parts of another work are removed first.

    Raises DataError where another run holds it, and where there is something that is not ours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / KEY
    if not mark.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} holds other files, where finished parts are to be kept; move it, or choose a name")
    with open(mark, "a+", encoding="utf-8") as lock:
        _wait_for(lock.fileno(), folder)
        lock.seek(0)
        if lock.read() != key:
            for old in folder.iterdir():
                if old != mark:
                    old.unlink()
            sync_folder(folder)  # after a power failure, too, there is no part of other work beside this key
            lock.truncate(0)
            lock.write(key)
            lock.flush()
            os.fsync(lock.fileno())
        yield


def _wait_for(lock: int, folder: Path) -> None:
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise DataError(f"another run is working in {folder}; wait for it, or give another --output") from None
            time.sleep(0.1)


def claims(folder: Path, key: str) -> bool:
    """True if there is a folder and its parts are of this work."""
    mark = folder / KEY
    return mark.is_file() and mark.read_text(encoding="utf-8") == key


class PartWriter:
    """A part while it is written; it has its name when it is whole, and without ``finish`` nothing remains of it."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = _path(folder, number)
        self._aside = self._path.with_suffix(".unfinished")
        self._file = open(self._aside, "wb")  # noqa: SIM115
        self._lengths: list[bytes] = []
        self._hashes: list[bytes] = []

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, hashes: np.ndarray) -> None:
        """Documents. tokens: [T], all of them; lengths: [n], which sum up to T; hashes: [n] uint64."""
        self._file.write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
        self._lengths.append(lengths.astype("<i4").tobytes())
        self._hashes.append(hashes.astype("<u8").tobytes())

    def finish(self, done: Done) -> None:
        """Say what the part holds, and that it is whole."""
        said = json.dumps({**asdict(done), "bytes": self._file.tell()}).encode()
        self._file.write(b"".join((*self._lengths, *self._hashes, said, _END.pack(len(said)))))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self._path)


def finished(folder: Path, number: int) -> Done | None:
    """The result that a part holds; None while it is not whole, or where a crash of the machine has cut it."""
    try:
        with open(_path(folder, number), "rb") as file:
            said = _said(file)
    except FileNotFoundError:
        return None
    if said is None:
        return None
    del said["bytes"]
    return Done(**{**said, "first_bad": tuple(said["first_bad"])})


@contextmanager
def opened(folder: Path, number: int) -> Iterator[tuple[IO[bytes], np.ndarray, np.ndarray]]:
    """The file of a finished part, from which its ids are read next; [n] int32, the lengths of its documents; [n]
    uint64, the hashes of their texts.
    """
    import numpy as np

    with open(_path(folder, number), "rb") as file:
        said = _said(file)
        assert said is not None, f"part {number} is not finished"
        file.seek(said["bytes"])
        lengths = np.frombuffer(file.read(4 * said["documents"]), dtype="<i4")
        hashes = np.frombuffer(file.read(8 * said["documents"]), dtype="<u8")
        file.seek(0)
        yield file, lengths, hashes


def _said(file: IO[bytes]) -> dict[str, Any] | None:
    """The record at the end of a part; None where it does not fit the file."""
    size = os.fstat(file.fileno()).st_size
    if size < _END.size:
        return None
    file.seek(size - _END.size)
    (length,) = _END.unpack(file.read())
    if not 0 < length <= size - _END.size:
        return None
    file.seek(size - _END.size - length)
    try:
        said: dict[str, Any] = json.loads(file.read(length))
    except ValueError:
        return None
    return said if said["bytes"] + 12 * said["documents"] + length + _END.size == size else None


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.part"
