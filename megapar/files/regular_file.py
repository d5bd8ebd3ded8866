"""Reading of small untrusted files: only regular ones, up to a size limit.

The caller never blocks on a pipe, never reads an endless device, and needs no memory for a file that is too large.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import IO, Any

SMALL = 1 << 24
"""Maximum bytes of a file of settings; one that also lists the tokens of a vocabulary still needs less."""


INDEX_BYTES = 1 << 28  # maximum bytes of an index with a line for every tensor of a model


HEAD_BYTES = 1 << 13
PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


class UnfitFileError(OSError):
    """A file is refused because of its type or size. An OSError, so that callers treat it as unreadable."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError if it cannot be read or is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise UnfitFileError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Python allocates as many bytes as a read requests, so request only the file's size. Raises OSError if the file
    cannot be read, is not a regular file, is larger, or grows while it is read.
    """
    with open_regular(path) as file:
        return read_open(file, limit, path)


def read_open(file: IO[bytes], limit: int, path: object) -> bytes:
    """Read an open file as ``read_regular`` does. ``path`` is its name in errors."""
    size = file.seek(0, os.SEEK_END)
    if size > limit:
        raise UnfitFileError(errno.EFBIG, _too_large(size, limit), str(path))
    file.seek(0)
    return _up_to(file.read(size + 1), size, path)


def read_given(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a file that a user named, even a pipe such as ``<(...)``. Raises OSError if it is above ``limit`` bytes."""
    with Path(path).open("rb") as file:
        return _up_to(file.read(limit + 1), limit, path)


def read_regular_text(path: str | os.PathLike[str], limit: int = SMALL) -> str:
    """Read a regular file as UTF-8. Raises OSError, or UnicodeDecodeError, which is a ValueError."""
    return text_of(read_regular(path, limit))


def read_json(path: str | os.PathLike[str], limit: int = SMALL) -> dict[str, Any]:
    """Read a regular file with a JSON object. Raises OSError, or ValueError for any other content."""
    return json_object(read_regular(path, limit))


def json_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for any other content."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it does not contain a JSON object")
    return value


def text_of(content: bytes) -> str:
    """Decode UTF-8 with universal newlines, as Python reads text files. Raises UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()


def _up_to(content: bytes, limit: int, path: object) -> bytes:
    if len(content) > limit:
        raise UnfitFileError(errno.EFBIG, _too_large(None, limit), str(path))
    return content


def _too_large(size: int | None, limit: int) -> str:
    actual = "it is longer" if size is None else f"it has {size:,} bytes"
    return f"{actual}, and at most {limit:,} bytes are read"


def not_itself(path: Path | str) -> str:
    """Return what a file is in place of its content, and the remedy, as a predicate; "" for others. Raises OSError."""
    with open_regular(path) as file:
        return not_this(file.read(HEAD_BYTES))


def not_this(head: bytes) -> str:
    """Return the same, given the file's first bytes."""
    if head.startswith(b"version https://git-lfs.github.com/spec/v1\n"):
        size = re.search(rb"\nsize ([0-9]{1,18})\n", head)
        shown = f" ({int(size[1]):,} bytes)" if size else ""
        fix = "run `git lfs pull`, or download it with `hf download`"
        return f"is a Git LFS pointer, not the file itself{shown}: {fix}"
    if PAGE.match(head):
        return "is a web page, not the file itself: download it again, and look at the page for the reason"
    return "" if head else "is empty: download or write it again"
