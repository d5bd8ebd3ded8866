"""Stores: where checkpoints and exports lie. A disk is one, a bucket another (``files.bucket``).

Checkpoints use nothing of a store but the verbs of a location, so nothing in them follows from times of files, links or
a working directory. A store without folders has those that the names of its files imply.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeAlias

from megapar.files.bucket import BucketFile, BucketLock, BucketStore
from megapar.files.disk import DiskLock, DiskStore, DiskWriting, sync_tree
from megapar.files.objects import Upload
from megapar.files.regular_file import SMALL, UnfitFileError, json_object, read_open
from megapar.files.uri import DISK, SCHEMES, split_uri

_BLOCK = 1 << 20


Store: TypeAlias = "DiskStore | BucketStore"
Writing: TypeAlias = "DiskWriting | Upload"
Lock: TypeAlias = "DiskLock | BucketLock"


@dataclass(frozen=True)
class Location:
    """A name in a store, with the verbs of the store; they raise OSError if it cannot be reached or refuses."""

    store: Store
    path: PurePath

    def __truediv__(self, name: str) -> Location:
        return Location(self.store, self.path / name)

    def __str__(self) -> str:
        return str(self.path) if isinstance(self.store, DiskStore) else self.store.uri(self.path)

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.path.name

    @property
    def parent(self) -> Location:
        """The folder that contains it."""
        return Location(self.store, self.path.parent)

    def with_name(self, name: str) -> Location:
        """Return another name in the same folder."""
        return Location(self.store, self.path.with_name(name))

    def read(self) -> io.RawIOBase:
        """Open a file; ``seek`` and ``readinto`` read a range, and no other bytes. Raises FileNotFoundError."""
        return self.store.read(self.path)

    def write(self) -> Writing:
        """Begin a new file, which is complete when it is finished. Raises FileExistsError if there is one."""
        return self.store.write(self.path)

    def list(self) -> dict[str, int | None]:
        """Return the name of each file in a folder with its size, and of all else with None; {} without a folder."""
        return self.store.list(self.path)

    def publish(self, final: Location, *, replace: bool = False) -> None:
        """Give a complete file or folder its final name in one step that survives a power failure.

        Raises FileExistsError if the name is taken, other than by an empty folder; with ``replace``, a file or folder
        of that name is removed. After a failure, a folder has its old name.
        """
        self.store.publish(self.path, final.path, replace=replace)

    def publish_beside(self, stem: str, suffix: str = "") -> Location:
        """Give it a name in the same folder, with the first unused number if that is taken. Return where it is now."""
        for number in count(1):
            final = self.with_name(f"{stem}-{number}{suffix}" if number > 1 else f"{stem}{suffix}")
            with suppress(FileExistsError):
                self.publish(final)
                break
        return final

    def remove(self) -> None:
        """Remove a file, or a folder with everything in it, if it exists."""
        self.store.remove(self.path)

    def lock(self, record: Callable[[bool], bytes]) -> Lock | None:
        """Create and hold a file that only one process can create, and return None if another has.

        ``record`` returns its content, given whether ``is_locked`` will tell whether the holder is alive.
        """
        return self.store.lock(self.path, record)

    def is_locked(self) -> bool:
        """Return False if the process that holds a record is known to have released it."""
        return self.store.is_locked(self.path)

    def local_path(self) -> Path | None:
        """Return the path for libraries that read and write files themselves; None if the store is not a disk."""
        return Path(self.path) if isinstance(self.store, DiskStore) else None

    def free_bytes(self) -> int | None:
        """Return the number of bytes that can still be written there, or None if there is no limit."""
        return self.store.free_bytes(self.path) if isinstance(self.store, DiskStore) else None

    def exists(self) -> bool:
        """Return True if there is such a file or folder. In a store without folders, every folder exists."""
        path = self.local_path()
        return path is None or path.exists()

    def is_file(self) -> bool:
        """Return True if it is a file. Raises OSError if that cannot be found out."""
        try:
            self.read().close()
        except (FileNotFoundError, NotADirectoryError, UnfitFileError):
            return False
        return True

    def glob(self, pattern: str) -> Iterator[Location]:
        """Yield the files and folders in it whose names match, as ``Path.glob``; an unreadable folder has none."""
        first, _, rest = pattern.partition("/")
        try:
            names = sorted(self.list())
        except OSError:
            return
        for name in names:
            if fnmatchcase(name, first):
                yield from (self / name).glob(rest) if rest else (self / name,)

    def resolve(self) -> Location:
        """Return the same location by a name without links; a name that no file can have, as it is."""
        path = self.local_path()
        with suppress(ValueError):  # a zero byte; ``Path.resolve`` would also raise for a link to itself
            return self if path is None else Location(self.store, Path(os.path.realpath(path)))
        return self

    def head(self, most: int) -> bytes:
        """Return the first bytes of a file, at most this many. Raises OSError."""
        with io.BufferedReader(self.read()) as file:
            return file.read(most)

    def sha256(self) -> str:
        """Return the SHA-256 of a file in hexadecimal. Raises OSError."""
        state = hashlib.sha256()
        for block in self.blocks():
            state.update(block)
        return state.hexdigest()

    def blocks(self) -> Iterator[memoryview | bytes]:
        """Yield the content of a file from its start to its end; a block is overwritten by the next one."""
        with self.read() as file:
            if isinstance(file, BucketFile):
                yield from file.blocks()
                return
            block = bytearray(_BLOCK)
            while got := file.readinto(block):
                yield memoryview(block)[:got]

    def content(self, limit: int = SMALL) -> bytes:
        """Return the content of a file of at most ``limit`` bytes. Raises OSError, also for a larger one."""
        with io.BufferedReader(self.read()) as file:
            return read_open(file, limit, self)

    def json(self, limit: int = SMALL) -> dict[str, Any]:
        """Return the JSON object in a file. Raises OSError, or ValueError for any other content."""
        return json_object(self.content(limit))


Place: TypeAlias = "str | os.PathLike[str] | Location"
"""What a function accepts that needs a location: a path on a disk, or the URI of another store as a text."""


def at(place: Place) -> Location:
    """Return a location as it is, and a path or a URI as the location of that name on disk or in another store."""
    if isinstance(place, Location):
        return place
    parts = split_uri(place) if isinstance(place, str) else None
    if parts is not None and parts[0] in SCHEMES:
        return Location(BucketStore(parts[0]), PurePosixPath(parts[1]))
    return Location(DiskStore(), Path(str(place).removeprefix(DISK)))


def same_place(first: Place | None, second: Place | None) -> bool:
    """Return True if two names are of one location, also through links or from a working directory. None is none."""
    return first is not None and second is not None and at(first).resolve() == at(second).resolve()


def copy(source: Place, target: Location) -> None:
    """Write a file with the content of another one, in place of an existing one."""
    target.remove()
    copied = target.write()
    for block in at(source).blocks():
        copied.write(memoryview(block))
    copied.finish()


def replace(path: Location, content: bytes) -> None:
    """Write a small file that nothing depends on, in place of an existing one."""
    path.remove()
    file = path.write()
    file.write(memoryview(content))
    file.finish(durable=False)


@contextmanager
def written_locally(folder: Location) -> Iterator[Path]:
    """Yield a folder for a library that writes files itself. They are in ``folder``, durable, at the end."""
    path = folder.local_path()
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        sync_tree(path)
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)
        for file in sorted(path for path in Path(place).rglob("*") if path.is_file()):
            copy(file, folder / file.relative_to(place).as_posix())


@contextmanager
def read_locally(folder: Location, *, below: bool = False) -> Iterator[Path]:
    """Yield a folder with the files of ``folder`` for a library that reads paths; ``below``: and of its subfolders."""
    path = folder.local_path()
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place, folder.name)
        copied.mkdir()
        names = [name for name, size in folder.list().items() if size is not None]
        if below and not isinstance(folder.store, DiskStore):
            names = list(folder.store.walk(folder.path))
            folder = Location(folder.store, folder.store.folder(folder.path))
        for name in names:
            copy(folder / name, at(copied / name))
        yield copied
