"""Object stores: no folders, no renames, and a listing that may be old. A folder gets a name by an object that says so.

    iter_0000100.tmp-4f2a-e3/shard-00000.safetensors     files lie where they were written
    iter_0000100.tmp-4f2a-e3/.published                  the names that they may have since then
    iter_0000100.manifest                                {"folder": "iter_0000100.tmp-4f2a-e3", "files": {name: bytes}}

The manifest is written last, in one request, on the condition that there is none. Readers of ``iter_0000100/...``
follow it; a folder without one is what it is, such as one that was copied from a disk. Renaming writes another
manifest, and removal takes the manifest first. Nothing that a manifest names is removed because a listing does not have
the manifest.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath, PurePosixPath
from typing import Any

from megapar.files.disk import BEAT
from megapar.files.objects import NOT_IMPLEMENTED, ChangedError, ObjectHead, Objects, Upload, status_of
from megapar.files.regular_file import json_object
from megapar.files.uri import PACKAGES

MANIFEST = ".manifest"
PUBLISHED = ".published"
_READ_BYTES = 16 << 20
_FEW_BYTES = 1 << 16
_READ_AHEAD = 3  # ranges, of a file that is read from its start to its end


def objects_of(scheme: str) -> Objects:
    """Return the objects of a scheme. A process that was forked asks for its own: clients keep threads."""
    return _objects_of(scheme, os.getpid())


@lru_cache
def _objects_of(scheme: str, process: int) -> Objects:
    if scheme == "s3":
        from megapar.files.s3_objects import S3Objects

        return S3Objects()
    import fsspec

    arguments = {"use_listings_cache": False} if scheme in PACKAGES else {}
    return Objects(fsspec.filesystem(scheme, **arguments))


@dataclass(frozen=True)
class BucketStore:
    """The buckets of a scheme as a store, with the verbs of ``files.location.Location``."""

    scheme: str

    @property
    def objects(self) -> Objects:
        """The objects of its buckets, in this process."""
        return objects_of(self.scheme)

    def uri(self, path: PurePath) -> str:
        """Return what a user calls it."""
        return f"{self.scheme}://{path}"

    def read(self, path: PurePath) -> BucketFile:
        """Open a file, in the folder that a manifest names if it is not where its name says."""
        for key in self._places(path):
            with suppress(FileNotFoundError):
                return BucketFile(self.objects, key, self.objects.head(key).size)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.uri(path))

    def head(self, path: PurePath) -> ObjectHead | None:
        """Return size and ETag of the object of this name, or None."""
        with suppress(FileNotFoundError):
            return self.objects.head(str(path))
        return None

    def _places(self, path: PurePath) -> Iterator[str]:
        yield str(path)
        if (folder := self.folder(path.parent)) != path.parent:
            yield str(folder / path.name)

    def write(self, path: PurePath) -> Upload:
        """Begin a new file, which appears when it is finished."""
        if self.head(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.uri(path))
        return self.objects.upload(str(path))

    def list(self, folder: PurePath) -> dict[str, int | None]:
        """Return what lies in a folder, under published names alone."""
        found = self.objects.list(str(folder))
        if not found:
            manifest = self._manifest(folder)
            return {name: size for name, size in manifest["files"].items() if "/" not in name} if manifest else {}
        published = {name: head.etag for name, head in found.items() if head is not None and name.endswith(MANIFEST)}
        hidden = {PUBLISHED, *published}
        for name, etag in published.items():
            with suppress(OSError):  # a damaged one: a reader of the folder reports it
                hidden.add(_manifest_of(self.scheme, str(folder / name), etag)["folder"])
        names = {name: None if head is None else head.size for name, head in found.items() if name not in hidden}
        return {**names, **{name.removesuffix(MANIFEST): None for name in published}}

    def walk(self, folder: PurePath) -> dict[str, int]:
        """Return the name, in the folder, of every object below it, with its size. Raises OSError for other names."""
        found = {name: size for name, size in self.objects.walk(str(folder)).items() if name != PUBLISHED}
        found = found or dict((self._manifest(folder) or {"files": {}})["files"])
        for name in found:  # they become paths on this machine
            if name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
                raise OSError(errno.EINVAL, f"{name!r} is not a name in a folder", self.uri(folder))
        return found

    def publish(self, made: PurePath, path: PurePath, *, replace: bool = False) -> None:
        """Write the manifest of a folder under its final name, or move a file there. Neither is seen in part."""
        if made.parent != path.parent:
            raise OSError(errno.EXDEV, "the two names are in different folders", self.uri(path))
        manifest, replaced = self._manifest(made), self._manifest(path)
        if manifest is None and self.head(made):
            self._publish_file(made, path, replace=replace)
            return
        manifest = manifest or {"folder": made.name, "files": self.objects.walk(str(made))}
        if not manifest["files"]:
            raise FileNotFoundError(errno.ENOENT, "nothing to publish", self.uri(made))
        below = self.objects.walk(str(path))
        if self.head(path) or ((below or replaced) and not replace):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.uri(path))
        names = json.dumps({"names": [path.name, made.name]}).encode()
        self.objects.put(str(path.with_name(manifest["folder"]) / PUBLISHED), names)
        self.objects.delete(str(path / name) for name in below)
        content = json.dumps(manifest, indent=1).encode()
        self.objects.put(f"{path}{MANIFEST}", content, new=replaced is None)
        if replaced is not None and replaced["folder"] != manifest["folder"]:
            self._delete_folder(path.with_name(replaced["folder"]))
        if made.name != manifest["folder"]:
            self.objects.delete([f"{made}{MANIFEST}"])

    def _publish_file(self, made: PurePath, path: PurePath, *, replace: bool) -> None:
        taken = self._manifest(path) is not None or self.objects.list(str(path))
        if taken or (not replace and self.head(path)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.uri(path))
        self.objects.put(str(path), self.objects.get(str(made)), new=not replace)  # such files are small
        self.objects.delete([str(made)])

    def folder(self, path: PurePath) -> PurePath:
        """Return where the files of a folder lie."""
        manifest = self._manifest(path)
        return path.with_name(manifest["folder"]) if manifest else path

    def remove(self, path: PurePath) -> None:
        """Remove a file, or a folder with everything in it; first the manifest that names it."""
        manifest = self._manifest(path)
        if manifest is not None:
            self.objects.delete([f"{path}{MANIFEST}"])
        folder = path.with_name(manifest["folder"]) if manifest else path
        if not self._is_named(folder):
            self._delete_folder(folder, manifest["files"] if manifest else ())
            self.objects.delete(self._places(path))

    def _is_named(self, folder: PurePath) -> bool:
        """Return True if a manifest names this folder, or may: a listing that lacks the manifest proves nothing."""
        try:
            names = json_object(self.objects.get(str(folder / PUBLISHED)))["names"]
            manifests = [self._manifest(folder.with_name(str(name))) for name in names]
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError):
            return True
        return any(manifest is not None and manifest["folder"] == folder.name for manifest in manifests)

    def _delete_folder(self, folder: PurePath, known: Iterable[str] = ()) -> None:
        """Remove what lies below a folder, and what is known to: the record of its names last."""
        self.end_uploads(folder, lambda name: True)
        names = {*self.objects.walk(str(folder)), *known}
        self.objects.delete(str(folder / name) for name in sorted(names, key=lambda name: name == PUBLISHED))

    def end_uploads(self, folder: PurePath, belongs: Callable[[str], bool]) -> None:
        """End the uploads below a folder that were begun and not finished, of the names in it that belong."""
        for name, upload in self.objects.unfinished(str(folder)):
            if belongs(name.partition("/")[0]):
                self.objects.abort(str(folder / name), upload)

    def lock(self, path: PurePath, record: Callable[[bool], bytes]) -> BucketLock | None:
        """Create a record, on the condition that there is none. A store that does not look is asked before."""
        if self.head(path):
            return None
        try:
            self.objects.put(str(path), record(False), new=True)
        except FileExistsError:
            return None
        return BucketLock(self.objects, str(path.with_suffix(BEAT)))

    def is_locked(self, path: PurePath) -> bool:
        """Return True: the store knows no processes."""
        return True

    def excludes(self, path: PurePath) -> bool:
        """Return True if requests have conditions, and of two processes that create a file only one succeeds.

        Some stores ignore the condition, and those of gs:// through fsspec have none for heartbeats.
        """
        if self.scheme == "gs":
            return False
        try:
            self.objects.put(str(path), b"first", new=True)
            self.objects.put(str(path), b"second", new=True)
        except FileExistsError:
            return True
        except OSError as error:
            if status_of(error)[0] != NOT_IMPLEMENTED:
                raise
        finally:
            self.objects.delete([str(path)])
        return False

    def _manifest(self, path: PurePath) -> dict[str, Any] | None:
        if len(path.parts) < 2:
            return None  # a bucket
        key = f"{path}{MANIFEST}"
        try:
            return _parsed(self.objects.get(key), key)
        except FileNotFoundError:
            return None


@lru_cache(4096)
def _manifest_of(scheme: str, key: str, etag: str) -> dict[str, Any]:
    """Return a manifest of which a listing has the ETag."""
    return _parsed(objects_of(scheme).get(key), key)


def _parsed(content: bytes, key: str) -> dict[str, Any]:
    """Return a manifest. Raises OSError for other content: what it names is not known."""
    try:
        manifest = json_object(content)
        names = {str(name): int(size) for name, size in manifest["files"].items()}
        if PurePosixPath(manifest["folder"]).name != manifest["folder"]:
            raise ValueError("its folder is elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(errno.EIO, f"the manifest is damaged: {error}", key) from error
    return {"folder": manifest["folder"], "files": names}


class BucketFile(io.RawIOBase):
    """An object that is open for reading. A read is one request for a range, see ``Objects.get`` for its ETag.

    Ranges grow from a few bytes, and end at ``last``, where a reader will probably stop.
    """

    def __init__(self, objects: Objects, key: str, size: int, etag: str = "", last: int | None = None) -> None:
        self._objects = objects
        self._key = key
        self._size = size
        self._etag = etag
        self._last = size if last is None else last
        self._few = _FEW_BYTES
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read a range."""
        most = self._last - self._position
        if most <= 0:
            most, self._few = self._few, self._few * 2
        end = min(self._position + min(len(buffer), most), self._size)
        if end <= self._position:
            return 0
        data = self._objects.get(self._key, self._position, end, self._etag)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def blocks(self) -> Iterator[bytes]:
        """Yield the whole content, of which the next ranges are fetched while one is used."""
        with ThreadPoolExecutor(_READ_AHEAD, "megapar-read") as pool:
            ahead: deque[Future[bytes]] = deque()
            for start in range(0, self._size, _READ_BYTES):
                ahead.append(pool.submit(self._objects.get, self._key, start, min(start + _READ_BYTES, self._size)))
                if len(ahead) > _READ_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()


class BucketLock:
    """A record that this process has created, and its heartbeat, which replaces only its own last one."""

    def __init__(self, objects: Objects, beat: str) -> None:
        self._objects = objects
        self._beat = beat
        self._etag = ""
        self._unanswered: list[bytes] = []  # what was sent since then, and may have been written

    def renew(self, content: bytes) -> None:
        """Write the heartbeat. Raises ChangedError if another process has written it since."""
        sent, self._unanswered = self._unanswered, [*self._unanswered, content]
        try:
            self._etag = self._objects.exchange(self._beat, content, self._etag)
        except ChangedError:
            etag = self._objects.head(self._beat).etag if sent else ""
            if not sent or self._objects.get(self._beat, etag=etag) not in sent:
                raise
            self._etag = self._objects.exchange(self._beat, content, etag)
        self._unanswered.clear()

    def release(self) -> None:
        """Let go of the record."""
