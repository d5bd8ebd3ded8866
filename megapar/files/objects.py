"""Objects of a store by fsspec: requests, each tried again until the store answers.

503, a cut connection, a stall       again, after a pause that doubles
a success whose answer was lost      the next attempt finds what an earlier one has written, by its content
403, 404, 412                        the store's answer
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

from megapar.files.uri import masked

T = TypeVar("T")

BLOCK_BYTES = 64 << 20  # bytes of a part of an upload

NOT_IMPLEMENTED = 501
ATTEMPTS = 9
PAUSE_SECONDS = 0.2  # before the second attempt, doubled before each other one up to 10 s: 32 s of pauses in all
STALL_SECONDS = 20.0  # without a byte
_MOST_PAUSE_SECONDS = 10.0
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError)
_HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound")
_PASSING = ("RequestTimeout", "SlowDown", "IncompleteBody", "BadDigest", "ConditionalRequestConflict")


class ChangedError(OSError):
    """An object is not the one that a request was to replace."""


class ObjectHead(NamedTuple):
    """Size in bytes and ETag of an object, or what tells its versions apart in a store without ETags."""

    size: int
    etag: str


class Objects:
    """The objects of a store. Raises OSError, with what was asked for, if the store does not answer or refuses."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def head(self, key: str) -> ObjectHead:
        """Return size and ETag. Raises FileNotFoundError."""
        return tried(f"head of {key}", lambda: self._head(key))

    def _head(self, key: str) -> ObjectHead:
        found = self._fs.info(key)
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        return _head_of(found)

    def get(self, key: str, start: int = 0, end: int | None = None, etag: str = "") -> bytes:
        """Return the bytes from ``start`` to before ``end``. Raises FileNotFoundError.

        Raises ChangedError if an ETag is given and the object has another one; fsspec does not check.
        """

        def read() -> bytes:
            data = self._get(key, start, end, etag)
            if end is not None and len(data) != end - start:
                raise ConnectionError(f"{len(data)} of {end - start} bytes came")
            return data

        return tried(f"read of {key}", read)

    def _get(self, key: str, start: int, end: int | None, etag: str) -> bytes:
        return self._fs.cat_file(key, start=start, end=end)

    def put(self, key: str, content: bytes, *, new: bool = False) -> str:
        """Write an object and return its ETag. Raises FileExistsError, with ``new``, if another one has the name."""
        return self._write(key, content, "*" if new else None)

    def exchange(self, key: str, content: bytes, etag: str) -> str:
        """Write an object over the one with this ETag, "" for none, and return its own.

        Raises ChangedError if there is another one; fsspec checks only whether there is one.
        """
        try:
            return self._write(key, content, etag or "*")
        except (FileExistsError, FileNotFoundError) as error:
            raise ChangedError(errno.EEXIST, "the store has another object of this name, or none", key) from error

    def _write(self, key: str, content: bytes, over: str | None) -> str:
        """Write an object. ``over``: the ETag that must be there, "*" for no object, None for either."""
        try:
            return tried(f"write of {key}", lambda: self._send(key, content, over))
        except (FileExistsError, ChangedError):
            with suppress(FileNotFoundError):
                if self.get(key) == content:  # an earlier attempt has written it, and its answer was lost
                    return self.head(key).etag
            raise

    def _send(self, key: str, content: bytes, over: str | None) -> str:
        self._fs.pipe_file(key, content, mode="create" if over == "*" else "overwrite")
        return "unknown"

    def list(self, folder: str) -> dict[str, ObjectHead | None]:
        """Return the objects directly below a folder by name, and folders with None."""
        try:
            found = tried(f"list of {folder}", lambda: self._fs.ls(folder, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entries = {entry["name"].strip("/"): entry for entry in found}
        entries.pop(folder.strip("/"), None)  # the folder itself, or an object in place of it
        return {
            name.rpartition("/")[2]: _head_of(entry) if entry["type"] == "file" else None
            for name, entry in entries.items()
        }

    def walk(self, folder: str) -> dict[str, int]:
        """Return the name, in the folder, of every object below it, with its size."""
        found = tried(f"list of {folder}", lambda: self._fs.find(folder, detail=True))
        inside = folder.strip("/")
        names = {name.strip("/").removeprefix(f"{inside}/"): entry for name, entry in found.items()}
        return {name: int(entry["size"]) for name, entry in names.items() if name != inside}

    def delete(self, keys: Iterable[str]) -> None:
        """Remove those of these objects that exist."""
        for key in keys:
            with suppress(FileNotFoundError):
                tried(f"removal of {key}", partial(self._fs.rm_file, key))

    def upload(self, key: str) -> Upload:
        """Begin an object of any size."""
        return Upload(key, tried(f"write of {key}", lambda: self._fs.open(key, "wb", block_size=BLOCK_BYTES)))

    def unfinished(self, folder: str) -> tuple[tuple[str, str], ...]:
        """Return (name in the folder, id) of the uploads below it that have not ended, where the store keeps them."""
        return ()

    def abort(self, key: str, upload: str) -> None:
        """End an upload and free its parts."""


class Upload:
    """An object that is being written, a block at a time, and exists from ``finish`` on."""

    def __init__(self, path: str, file: Any) -> None:
        self.path = path  # which the watchdog names if a write hangs
        self._file = file

    def write(self, data: memoryview) -> None:
        """Append all of these bytes."""
        self._file.write(data)

    def finish(self, *, durable: bool = True) -> None:
        """Close the object, which then appears. It is durable once the store has answered."""
        self._file.close()


def _head_of(entry: Any) -> ObjectHead:
    made = entry.get("created", "")  # in memory, where nothing else tells versions apart
    made = made.timestamp() if isinstance(made, datetime) else made
    return ObjectHead(int(entry["size"]), str(entry.get("ETag") or entry.get("etag") or made))


def tried(what: str, call: Callable[[], T], attempts: int | None = None) -> T:
    """Return what ``call`` does, which is repeated while the store does not answer. Raises OSError."""
    for number in count(1):
        try:
            return call()
        except (*_FINAL, ChangedError):
            raise
        except Exception as error:  # of fsspec, of a client of the store, or of the network
            if number >= (attempts or ATTEMPTS) or not _is_passing(error):
                text = masked(f"{what}: {type(error).__name__}: {error}")
                raise OSError(errno.EIO, f"{text} ({number} attempts)") from error
        seconds = min(PAUSE_SECONDS * 2 ** (number - 1), _MOST_PAUSE_SECONDS)
        time.sleep(seconds * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


def _is_passing(error: BaseException) -> bool:
    """Return True if the same request can succeed later."""
    if type(error).__name__ in _HOPELESS:
        return False
    status, code = status_of(error)
    passing = status is None or status >= 500 or status in (408, 409, 429) or code in _PASSING
    return passing and status != NOT_IMPLEMENTED


def status_of(error: BaseException | None) -> tuple[int | None, str]:
    """Return (HTTP status, code) of the answer that an error reports; (None, "") without an answer."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), str(response.get("Error", {}).get("Code"))
    if type(error).__module__.startswith("gcsfs."):
        code = getattr(error, "code", None)
        return code if isinstance(code, int) else None, ""
    return (None, "") if error is None or error.__cause__ is None else status_of(error.__cause__)
