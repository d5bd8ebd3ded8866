"""The cache folder: entries made once from a corpus or a tokenizer, shared by all ranks and later runs.

An entry is a file or a folder whose name contains a hash of everything it was made from, so it is never updated:
either it exists and is complete, or it is made again. Under a lock, one process makes it in a scratch folder and
renames it; any number of processes may need it at once.

    tokens/4f2a..                      a folder, with manifest.json in it
    hashes/91c0..                      a file
    hashes/.91c0...manifest            its manifest
    tokens/.4f2a...lock

A large entry is on disk before it has its name, so that a power failure leaves all of it or nothing. Opening an entry
compares its sizes with the manifest and, if it is small, its SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.core.status_line import Status, silent
from megapar.errors import DataError
from megapar.files.disk import put, rename
from megapar.files.manifest import FILE_NAME, Manifest

SMALL_BYTES = 4 << 20  # entries up to this size are hashed whenever they are opened

_FIRST_SECONDS, _POLL_SECONDS = 3.0, 0.05
_NOT_SYNCED_BYTES = 64 << 10  # a single file up to this size is cheaper to make again than to sync


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/megapar``, or ``~/.cache/megapar``; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megapar"


def hash_parts(*parts: str | bytes) -> str:
    """Return the first 32 hexadecimal digits of SHA-256 over the parts, each preceded by its length."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]


def make_once(name: str, make: Callable[[Path], None], status: Status = silent) -> Path:
    """Return the path of cache entry ``name``, after making it if it is missing or damaged.

    ``make(path)`` writes the file or folder to a temporary path; if it raises, nothing remains. An entry that is made
    again is reported by ``logging``. ``status`` hears of a wait for another process that makes it.
    Raises DataError if the cache folder cannot be written.
    """
    target = cache_folder() / name
    if _defect(target, name) is None:
        return target
    with _writable(target), _locked(target, status):
        defect = _defect(target, name)
        if defect:
            logging.getLogger(__name__).warning("the cache entry %s %s; it is made again", target, defect)
        if defect is not None:
            _make_aside(target, name, make)
    return target


def find_entry(name: str) -> Path | None:
    """Return the path of an entry if it is complete, else None."""
    target = cache_folder() / name
    return target if _defect(target, name) is None else None


def _defect(target: Path, name: str) -> str | None:
    """Return the defect of an entry, "" if it does not exist, or None if it is complete."""
    if not target.exists():
        return ""
    manifest = Manifest.read(_manifest_path(target, target.is_dir()))
    if manifest is None:
        return "has no manifest of its complete content"
    if manifest.name != name:
        return f"was made as {manifest.name:.200}"
    compare = manifest.wrong_content if manifest.bytes <= SMALL_BYTES else manifest.wrong_sizes
    try:
        return compare(target) or None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _manifest_path(target: Path, folder: bool) -> Path:
    return target / FILE_NAME if folder else target.with_name(f".{target.name}.manifest")


def _make_aside(target: Path, name: str, make: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made = scratch / target.name
        make(made)
        manifest = Manifest.of(name, made)
        folder = made.is_dir()
        if folder:
            (made / FILE_NAME).write_bytes(manifest.to_bytes())
        give_name = put if folder or manifest.bytes > _NOT_SYNCED_BYTES else rename
        give_name(made, target)
        if not folder:
            (scratch / FILE_NAME).write_bytes(manifest.to_bytes())
            give_name(scratch / FILE_NAME, _manifest_path(target, False))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _writable(target: Path) -> Iterator[None]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(cache_folder())):
            raise
        raise DataError(
            f"the cache entry {target} cannot be written ({error.strerror}); point XDG_CACHE_HOME at a folder that can"
        ) from error


@contextmanager
def _locked(target: Path, status: Status) -> Iterator[None]:
    """Hold the lock file of ``target``; the system releases it when its holder dies.

    Ranks of a node wait a little for the first one to take it, because that one says how far it is.
    """
    until = time.monotonic() + (_FIRST_SECONDS if int(os.environ.get("LOCAL_RANK") or 0) else 0.0)
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if target.exists() or time.monotonic() >= until:
                    break
                fcntl.flock(lock, fcntl.LOCK_UN)
            except BlockingIOError:
                until = 0.0
                status(f"waiting for the process that makes {target}", 0, 0, "")
            time.sleep(_POLL_SECONDS)
        yield


class Unread(Exception):
    """Raised if a value is not in the cache and its file, of ``bytes`` bytes, may not be read."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes are not read")
        self.bytes = size


def cached_value(path: Path, make: Callable[[], str], *kind: str, may_read: bool = True) -> str:
    """Return ``make()``, or the value in the cache for a file of this path, size and mtime.

    ``kind`` tells several values of one file apart. Raises Unread if the cache does not have the value and ``may_read``
    is False.
    """
    status = path.stat()
    name = f"hashes/{hash_parts(str(path.resolve()), str(status.st_size), str(status.st_mtime_ns), *kind)}"
    if not may_read and find_entry(name) is None:
        raise Unread(status.st_size)
    return make_once(name, lambda entry: _write(entry, make())).read_text(encoding="utf-8")


def _write(entry: Path, text: str) -> None:
    entry.write_text(text, encoding="utf-8")
