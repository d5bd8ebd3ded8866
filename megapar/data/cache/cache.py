"""The cache folder: entries made once from a corpus, shared by all ranks and later runs.

An entry is a file or a folder whose name contains a hash of everything it was made from, so it is never updated:
either it exists and is complete, or it is made again. Under a lock, one process makes it in a scratch folder and
renames it; any number of processes may need it at once.

    tokens/4f2a..                      a folder, with manifest.json in it
    hashes/91c0..                      a file
    hashes/.91c0...manifest            its manifest
    tokens/.4f2a...checked             the boots of machines under which the entry was hashed, and its mtimes then
    tokens/.4f2a...lock

Opening an entry compares its sizes with the manifest. SHA-256 is compared as well if the entry is small, if it has
changed since it was last hashed, and once after every boot, because a power failure may have lost its content.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megapar.errors import DataError
from megapar.files.disk import put, rename
from megapar.files.manifest import FILE_NAME, Manifest
from megapar.files.regular_file import read_json
from megapar.health.stop.process import boot_id

SMALL_BYTES = 4 << 20
"""Entries up to this size are hashed whenever they are opened."""

_NOT_SYNCED_BYTES = 64 << 10  # a single file up to this size is cheaper to make again than to sync
_MOST_BOOTS = 1000  # boots that are recorded, of all machines that share the folder


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/megapar``, or ``~/.cache/megapar``; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megapar"


def hash_parts(*parts: str | bytes) -> str:
    """Return the first 32 hexadecimal digits of SHA-256 over the parts, each preceded by its length."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of cache entry ``name``, after making it if it is missing or damaged.

    ``make(path)`` writes the file or folder to a temporary path; if it raises, nothing remains. An entry that is made
    again is reported by ``logging``. Raises DataError if the cache folder cannot be written.
    """
    target = cache_folder() / name
    if _whole(target, name):
        return target
    try:
        with _writable(target), _locked(target):
            problem = _problem(target, name, remember=True)
            if problem is not None:
                if problem:
                    logging.getLogger(__name__).warning("the cache entry %s %s; it is made again", target, problem)
                _make_aside(target, name, make)
    except DataError:
        if _problem(target, name, remember=False) is not None:  # a read-only cache is hashed every time
            raise
    return target


def known(name: str) -> Path | None:
    """Return the path of an entry if it is known to be complete without reading a large entry, else None."""
    target = cache_folder() / name
    return target if _whole(target, name) else None


def _whole(target: Path, name: str) -> bool:
    """Return True if the entry matches its manifest, and its bytes were hashed since this machine booted."""
    manifest, problem = _by_sizes(target, name)
    if manifest is None or problem:
        return False
    with suppress(OSError):
        if manifest.bytes <= SMALL_BYTES:
            return not manifest.wrong_content(target)
        mark = _mark(target)
        return boot_id() in mark["boots"] and mark["times"] == manifest.changed_at(target)
    return False


def _problem(target: Path, name: str, *, remember: bool) -> str | None:
    """Check all bytes of an entry; return its defect, "" if it does not exist, or None if it is complete."""
    manifest, problem = _by_sizes(target, name)
    if manifest is None or problem:
        return problem
    if _whole(target, name):
        return None
    with suppress(OSError):
        times = manifest.changed_at(target)
        problem = manifest.wrong_content(target)
        if not problem and remember:
            _remember(target, times)
        return problem or None
    return "cannot be read"


def _by_sizes(target: Path, name: str) -> tuple[Manifest | None, str]:
    """Return the entry's manifest, and a defect that shows without reading its files, or ""."""
    if not target.exists():
        return None, ""
    manifest = Manifest.read(_manifest_path(target, target.is_dir()))
    if manifest is None:
        return None, "has no manifest of its complete content"
    if manifest.name != name:
        return manifest, f"was made as {manifest.name:.200}"
    try:
        return manifest, manifest.wrong_sizes(target)
    except OSError as error:
        return manifest, f"cannot be read ({error.strerror})"


def _manifest_path(target: Path, folder: bool) -> Path:
    return target / FILE_NAME if folder else target.with_name(f".{target.name}.manifest")


def _mark(target: Path) -> dict[str, Any]:
    """Return the boots under which the entry was hashed, and the mtimes of its files then; empty without a record."""
    try:
        record = read_json(target.with_name(f".{target.name}.checked"))
        if isinstance(record.get("boots"), list):
            return {"boots": record["boots"], "times": record.get("times")}
    except (OSError, ValueError):
        pass
    return {"boots": [], "times": None}


def _remember(target: Path, times: list[list[Any]]) -> None:
    """Record that the entry was hashed under this boot, next to the boots of other machines that share the folder."""
    mark = _mark(target)
    boots = mark["boots"] if mark["times"] == times else []
    text = json.dumps({"boots": [*boots, boot_id()][-_MOST_BOOTS:], "times": times})
    aside = target.with_name(f".{target.name}.checked.unfinished")
    with suppress(OSError):  # without the record, the entry is hashed again
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target.with_name(f".{target.name}.checked"))


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
        if manifest.bytes > SMALL_BYTES:
            _remember(target, manifest.changed_at(target))
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
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock file of ``target``; the system releases it when its holder dies."""
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
