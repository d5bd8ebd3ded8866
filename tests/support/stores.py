"""Stores for tests: a disk, one in memory, which has names but neither folders nor links nor times, and object stores.

``MemoryStore`` counts the bytes that are read from it, and keeps a file that was begun and not finished to itself. It
belongs to one process.
"""

from __future__ import annotations

import errno
import io
import uuid
from collections.abc import Callable
from pathlib import Path, PurePath, PurePosixPath

import pytest

from megapar.files import location
from megapar.files.bucket import BucketStore
from megapar.files.disk import BEAT
from megapar.files.location import Location, at


class MemoryStore:
    """Files in memory, by name.

    Attributes:
        files: Name -> content.
        held: Names of the records that are locked.
        num_read: Bytes that were read.
    """

    def __init__(self) -> None:
        self.files: dict[PurePath, bytes] = {}
        self.held: set[PurePath] = set()
        self.num_read = 0

    def read(self, path: PurePath) -> io.RawIOBase:
        """Open a file."""
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return MemoryFile(self, self.files[path])

    def write(self, path: PurePath) -> MemoryWriting:
        """Begin a file."""
        self._refuse_taken(path)
        return MemoryWriting(self, path)

    def list(self, folder: PurePath) -> dict[str, int | None]:
        """Return the files in a folder, and the folders that names imply."""
        found: dict[str, int | None] = {}
        for path, content in tuple(self.files.items()):
            if folder in path.parents:
                rest = path.relative_to(folder).parts
                found[rest[0]] = len(content) if len(rest) == 1 else None
        return found

    def walk(self, folder: PurePath) -> dict[str, int]:
        """Return the name, in the folder, of every file below it, with its size."""
        return {str(path.relative_to(folder)): len(self.files[path]) for path in self._below(folder)}

    def folder(self, path: PurePath) -> PurePath:
        """Return where the files of a folder are."""
        return path

    def publish(self, made: PurePath, path: PurePath, *, replace: bool = False) -> None:
        """Give a file, or everything in a folder, another name."""
        moved = self._below(made)
        if not moved:
            raise FileNotFoundError(errno.ENOENT, "nothing to publish", str(made))
        if (made in self.files) != (path in self.files) and self._below(path):
            raise FileExistsError(errno.EEXIST, "of another kind", str(path))
        if not replace:
            self._refuse_taken(path)
        self.remove(path)
        for old in moved:
            self.files[path / old.relative_to(made)] = self.files.pop(old)

    def remove(self, path: PurePath) -> None:
        """Remove a file or everything in a folder."""
        for old in self._below(path):
            del self.files[old]

    def lock(self, path: PurePath, record: Callable[[bool], bytes]) -> MemoryLock | None:
        """Create a record, if there is none."""
        if path in self.files:
            return None
        self.files[path] = record(True)
        self.held.add(path)
        return MemoryLock(self, path)

    def is_locked(self, path: PurePath) -> bool:
        """Return True if it has not been released."""
        return path in self.held

    def uri(self, path: PurePath) -> str:
        """Return the name."""
        return str(path)

    def _below(self, path: PurePath) -> tuple[PurePath, ...]:
        return tuple(name for name in tuple(self.files) if name == path or path in name.parents)

    def _refuse_taken(self, path: PurePath) -> None:
        if self._below(path):
            raise FileExistsError(errno.EEXIST, "the name is taken", str(path))


class MemoryFile(io.RawIOBase):
    """An open file of a ``MemoryStore``."""

    def __init__(self, store: MemoryStore, content: bytes) -> None:
        self._store = store
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        return self._content.seek(offset, whence)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read a range, and count it."""
        count = self._content.readinto(buffer)
        self._store.num_read += count
        return count


class MemoryWriting:
    """A file of a ``MemoryStore`` that is being written."""

    def __init__(self, store: MemoryStore, path: PurePath) -> None:
        self._store = store
        self._path = path
        self._content = bytearray()

    def write(self, data: memoryview) -> None:
        """Append all of these bytes."""
        self._content += data

    def finish(self, *, durable: bool = True) -> None:
        """Give the file its name."""
        self._store.files[self._path] = bytes(self._content)


class MemoryLock:
    """A record of a ``MemoryStore`` that is held."""

    def __init__(self, store: MemoryStore, path: PurePath) -> None:
        self._store = store
        self._path = path

    def renew(self, content: bytes) -> None:
        """Write the heartbeat."""
        self._store.files[self._path.with_suffix(BEAT)] = content

    def release(self) -> None:
        """Let go of the record."""
        self._store.held.discard(self._path)


def in_memory() -> Location:
    """Return an empty folder of a new store in memory."""
    return Location(MemoryStore(), PurePosixPath("store"))


def put(location: Location, content: bytes) -> None:
    """Make the content of a file this one, whatever it was."""
    location.remove()
    file = location.write()
    file.write(memoryview(content))
    file.finish()


def names(folder: Location) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(folder.list())


def in_objects() -> Location:
    """Return an empty folder of an object store in memory."""
    return at(f"memory://{uuid.uuid4().hex}/store")


@pytest.fixture(params=["disk", "memory", "objects", pytest.param("s3", marks=pytest.mark.table)])
def store_root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Return an empty folder of each store; of a real server, which tests/files has in the suite, by ``-m table``."""
    if request.param == "s3":
        return request.getfixturevalue("bucket")
    return {"disk": lambda: at(tmp_path), "memory": in_memory, "objects": in_objects}[request.param]()


@pytest.fixture(params=["disk", "memory", "objects"])
def any_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every path that a run takes for a location be one on disk, in memory or in objects. Return which."""
    if request.param != "disk":
        store = MemoryStore() if request.param == "memory" else BucketStore("memory")
        monkeypatch.setattr(location, "DiskStore", type("NoDisk", (), {"__new__": lambda cls: store}))
    return str(request.param)


def copied(folder: Path, target: Location) -> None:
    """Copy a folder of a disk, with everything in it, into a store."""
    for path in folder.rglob("*"):
        if path.is_file():
            place = target
            for part in path.relative_to(folder).parts:
                place /= part
            put(place, path.read_bytes())
