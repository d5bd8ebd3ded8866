"""Text in object stores, read where it lies: ranges in blocks, all of one version of an object.

A run reads the objects that it began with. One that was replaced since then is refused, by its ETag in every request of
S3, and by a look at its head when a reader has ended, because other stores have no such condition.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import TypeAlias, TypeVar

from megapar.errors import DataError
from megapar.files.bucket import BucketFile, BucketStore
from megapar.files.location import Location, at
from megapar.files.objects import ObjectHead

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class DataObject:
    """An object, where it lies, as it was when the run began."""

    location: Location
    head: ObjectHead

    def __str__(self) -> str:
        return str(self.location)

    @contextmanager
    def opened(self, last: int | None = None) -> Iterator[io.BufferedReader[BucketFile]]:
        """Open it for reading in growing blocks, up to byte ``last`` (None: the end).

        With ``last`` 0 only its beginning is looked at, and a later reader finds a change. Raises DataError, also in
        place of an error of the reader, if the store has another object of its name now.
        """
        try:
            file = BucketFile(store_of(self.location).objects, str(self.location.path), *self.head, last)
            with io.BufferedReader(file, _BLOCK_BYTES) as buffered:
                yield buffered
            if last != 0:
                self.refuse_changed()
        except (DataError, OSError) as error:
            with suppress(OSError):
                self.refuse_changed()
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self}: cannot be read: {error}") from error

    def refuse_changed(self) -> None:
        """Raise DataError if the store has another object of its name, or none; OSError if it does not answer."""
        now = find(self.location)
        etags = {one.head.etag.strip('"') for one in (self, now) if one}  # some answers have quotes and some have none
        if now is None or now.head.size != self.head.size or len(etags) > 1:
            raise DataError(
                f"{self}: it was replaced or removed while the run read it; start again, and give new data a new name"
            )


DataFile: TypeAlias = Path | DataObject
"""A file with data: on a disk, or an object."""

Found: TypeAlias = DataObject | tuple[DataObject, ...]

_AT_ONCE = 32  # connections of the client of S3
T = TypeVar("T")
U = TypeVar("U")

BEGAN: dict[str, Found] = {}  # what a run of this process has found at URIs when it began


def name_of(file: DataFile) -> PurePath:
    """Return the name of a file as a path, for its suffixes."""
    return file if isinstance(file, Path) else file.location.path


def size_of(file: DataFile) -> int:
    """Return the bytes of a file. Raises OSError."""
    return file.stat().st_size if isinstance(file, Path) else file.head.size


def store_of(place: Location) -> BucketStore:
    """Return the store of objects that a place is in."""
    assert isinstance(place.store, BucketStore), f"{place} is on a disk"
    return place.store


def find(place: Location) -> DataObject | None:
    """Return the object of this name, or None. Raises OSError."""
    head = store_of(place).head(place.path)
    return DataObject(place, head) if head else None


def objects_in(folder: Location) -> tuple[DataObject, ...]:
    """Return the objects in a folder, by name. Raises OSError."""
    lies = Location(folder.store, store_of(folder).folder(folder.path))
    found = store_of(folder).objects.list(str(lies.path))
    return tuple(DataObject(lies / name, head) for name, head in sorted(found.items()) if head is not None)


def at_once(ask: Callable[[T], U], items: Iterable[T]) -> tuple[U, ...]:
    """Return what ``ask`` returns for each item, in order; a store is asked about several at the same time."""
    rest = iter(items)
    first = [ask(item) for item in islice(rest, 1)]  # alone: it connects the client
    with ThreadPoolExecutor(_AT_ONCE, "megapar-ask") as pool:
        return (*first, *pool.map(ask, rest))


def found_at(uri: str) -> Found:
    """Return the object that a URI names, or those in the folder. Raises DataError."""
    try:
        found = find(at(uri)) or objects_in(at(uri))
    except OSError as error:
        raise DataError(f"{uri}: cannot be read: {error}") from error
    if not found:
        raise DataError(f"{uri}: there is no such object, and no folder with objects")
    return found
