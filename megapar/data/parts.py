"""Finished parts of a work that may be broken off: PREFIX.parts/, held by one run at a time, used by the next one.

key           what is made here; locked by the run that makes it, its worker processes included
00000000.bin, .idx, .json   a part; its .json comes last and says that it is whole
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megapar.data.source import BadRecords
from megapar.errors import DataError

KEY = "key"
_LOCK_SECONDS = 5.0  # the workers of a run that was killed end by themselves within this time


@dataclass(frozen=True)
class Done:
    """What one chunk gave, or all together. bad: records passed over; first_bad: what was wrong with the first."""

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
            lock.truncate(0)
            lock.write(key)
            lock.flush()
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
    """Whether the parts in the folder, if there is one, are of this work."""
    mark = folder / KEY
    return mark.is_file() and mark.read_text(encoding="utf-8") == key


def part(folder: Path, number: int) -> Path:
    """The prefix of a part's files."""
    return folder / f"{number:08d}"


def finished(folder: Path, number: int) -> Done | None:
    """What a part holds; None while it is not whole."""
    path = part(folder, number).with_suffix(".json")
    if not path.exists():
        return None
    facts = json.loads(path.read_text())
    return Done(**{**facts, "first_bad": tuple(facts["first_bad"])})


def finish(folder: Path, number: int, done: Done) -> None:
    """Say that a part is whole."""
    path = part(folder, number)
    aside = path.with_suffix(".unfinished")
    aside.write_text(json.dumps(asdict(done)))
    os.replace(aside, path.with_suffix(".json"))
