"""The cache folder: things made once from a corpus, shared by all ranks and all later runs. Standard library only.

An entry is a file or a folder whose name carries a hash of everything it was made from, so it is never
updated: it is there and whole, or it is not there. It is made aside and renamed, under a lock, so that any
number of processes may ask for it at once and one of them makes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.errors import DataError


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
    """The path of cache entry ``name``; where it is missing, ``make(path)`` writes it first.

    make: writes the file or folder at the path it is given, which is a temporary one; what it raises is
        passed on and leaves nothing behind.
    Raises DataError where the cache folder cannot be written.
    """
    target = cache_folder() / name
    if target.exists():
        return target
    with _writable(target), _locked(target):
        if not target.exists():
            _make_aside(target, make)
    return target


def _make_aside(target: Path, make: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made = scratch / target.name
        make(made)
        os.replace(made, target)
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
