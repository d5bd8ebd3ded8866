"""Small files that come from elsewhere, read whole: plain ones only, and no more of them than a limit.

A pipe is not waited for, a device that never ends is not read, and a file that is too large takes no memory.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import IO

SMALL = 1 << 24
"""Bytes: no file of settings, not even one that lists a vocabulary's tokens beside them, needs more."""


INDEX_BYTES = 1 << 28
"""Of a list with a line for every tensor of a model."""


class UnfitFileError(OSError):
    """A file that is not read because of what it is. It is an OSError, as where it could not be read."""


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A plain file to read from. Raises OSError where it cannot be read or is none."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise UnfitFileError(errno.EINVAL, f"it is {kind}, where a plain file is needed", str(path))


def read_regular(path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """The content of a plain file of at most ``limit`` bytes.

    Raises OSError where it cannot be read, is no plain file, has more bytes, or grows meanwhile. Python makes room
    for as many bytes as a read asks for, so it asks for the file's own size.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UnfitFileError(errno.EFBIG, _too_large(size, limit), str(path))
        return _up_to(file.read(size + 1), size, path)


def read_given(path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """The same of a path that a person has given to be read once, which may be a pipe, as a shell makes of ``<(...)``.

    Raises OSError where it cannot be read or has more than ``limit`` bytes.
    """
    with Path(path).open("rb") as file:
        return _up_to(file.read(limit + 1), limit, path)


def read_regular_text(path: str | os.PathLike[str], limit: int = SMALL) -> str:
    """``read_regular``, as UTF-8. Raises OSError; UnicodeDecodeError, which is a ValueError."""
    return text_of(read_regular(path, limit))


def text_of(content: bytes) -> str:
    """UTF-8 with its ends of lines as one character, as Python reads text files. Raises UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()


def _up_to(content: bytes, limit: int, path: str | os.PathLike[str]) -> bytes:
    if len(content) > limit:
        raise UnfitFileError(errno.EFBIG, _too_large(None, limit), str(path))
    return content


def _too_large(size: int | None, limit: int) -> str:
    had = "it goes on" if size is None else f"it has {size:,} bytes"
    return f"{had}, where at most {limit:,} bytes are read"
