"""The cache folder: things made once from a corpus, shared by all ranks and all later runs. Standard library only.

An entry is a file or a folder whose name carries a hash of everything it was made from, so it is never
updated: it is there and whole, or it is made again. It is made in a scratch folder and renamed, under a lock, so
that any number of processes may need it at once and one of them makes it.

    tokens/4f2a..                      a folder, with manifest.json in it
    hashes/91c0..                      a file
    hashes/.91c0...manifest            its manifest
    tokens/.4f2a...checked             under which boots of machines the entry's bytes were hashed, and its times then
    tokens/.4f2a...lock

Whoever opens an entry compares sizes with the manifest, and SHA-256 where the entry is small, where it was
written to since it was last hashed, and once after every boot: a power failure may have taken what was in it.
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

from megapar.core.checkpoint.durable import put, rename
from megapar.core.checkpoint.manifest import FILE_NAME, Manifest
from megapar.core.health.process import boot_id
from megapar.errors import DataError

SMALL_BYTES = 4 << 20
"""Entries up to this size are hashed whenever they are opened."""

_NOT_SYNCED_BYTES = 64 << 10  # of a single file, which costs less to make again than to bring to disk
_MOST_BOOTS = 1000  # of machines that share the folder


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/megapar``, or ``~/.cache/megapar``; not necessarily there yet."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megapar"


def digest(*parts: str | bytes) -> str:
    """The first 32 hexadecimal digits of SHA-256 over the parts, each preceded by its length."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The path of cache entry ``name``; where it is missing or damaged, ``make(path)`` writes it first.

    make: writes the file or folder at the path it is given, which is a temporary one; what it raises is
        passed on and leaves nothing.
    Raises DataError where the cache folder cannot be written. An entry that is made again is reported by ``logging``.
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
        if _problem(target, name, remember=False) is not None:  # a cache that can only be read is hashed every time
            raise
    return target


def known(name: str) -> Path | None:
    """The path of an entry that is there and whole, as far as is known without reading a large one."""
    target = cache_folder() / name
    return target if _whole(target, name) else None


def _whole(target: Path, name: str) -> bool:
    """True if the entry fits its manifest, by bytes that were hashed under this boot."""
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
    """The defect of an entry, by all of its bytes; "" where it is not there, None where it is whole."""
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
    """The entry's manifest, and what is wrong with what can be seen without reading its files."""
    if not target.exists():
        return None, ""
    manifest = Manifest.read(_manifest_path(target, target.is_dir()))
    if manifest is None:
        return None, "has no manifest that says what it held when it was whole"
    if manifest.name != name:
        return manifest, f"was made as {manifest.name:.200}"
    try:
        return manifest, manifest.wrong_sizes(target)
    except OSError as error:
        return manifest, f"cannot be read ({error.strerror})"


def _manifest_path(target: Path, folder: bool) -> Path:
    return target / FILE_NAME if folder else target.with_name(f".{target.name}.manifest")


def _mark(target: Path) -> dict[str, Any]:
    """The boots under which the entry was hashed, and the times of change of its files then; empty without a record."""
    try:
        found = json.loads(target.with_name(f".{target.name}.checked").read_bytes())
        if isinstance(found, dict) and isinstance(found.get("boots"), list):
            return {"boots": found["boots"], "times": found.get("times")}
    except (OSError, ValueError, RecursionError):
        pass
    return {"boots": [], "times": None}


def _remember(target: Path, times: list[list[Any]]) -> None:
    """Record that the entry was hashed under this boot. Machines that share the folder have one each."""
    mark = _mark(target)
    boots = mark["boots"] if mark["times"] == times else []
    text = json.dumps({"boots": [*boots, boot_id()][-_MOST_BOOTS:], "times": times})
    aside = target.with_name(f".{target.name}.checked.unfinished")
    with suppress(OSError):  # then the next one hashes again
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
    """Hold the lock beside ``target``; the system lets go of it when its holder dies."""
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
