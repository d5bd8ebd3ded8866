"""Files that ``--data-path`` may name: their kinds by name, and reading of compressed ones.

Standard library only, except that Zstandard needs pyarrow below Python 3.14.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from megapar.errors import DataError
from megapar.files.record import JSONL

GZIP, ZSTANDARD = ".gz", ".zst"
COMPRESSED = (GZIP, ZSTANDARD)
TEXT = (".txt", ".text", ".md")
PARQUET = ".parquet"
INDEXED = (".bin", ".idx")
MOST_TOLD = 8  # files in a message
_ABOUT_DATA = ("readme", "license", "licence", "notice", "citation", "changelog", "contributing")
_ARCHIVE = "an archive: unpack it, and pass the folder"
_NUMBERS = "numbers, not text"
_OFFICE = "an office document: extract its text to a .txt or .jsonl file"


def _others() -> Mapping[str, str]:
    table = {
        ".csv": "a table: convert it to a parquet file, {convert}",
        ".tsv": "a table: convert it to a parquet file, {convert}",
        **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _ARCHIVE),
        **dict.fromkeys((".bz2", ".xz", ".lz4", ".br", ".lzma"), "compressed in an unsupported way: use gzip or zstd"),
        **dict.fromkeys((".pdf", ".doc", ".docx", ".xls", ".xlsx", ".odt", ".epub"), _OFFICE),
        **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".pkl", ".h5", ".safetensors"), _NUMBERS),
        ".arrow": "a file of a datasets folder: pass the folder with --data-source hf --hf-dataset",
    }
    return MappingProxyType(table)


NO_TEXT = _others()
"""Content of the files that are not read as text, by suffix, and the alternative."""


def bare_name(name: str) -> str:
    """Return only the letters and digits of a data set's name: caches write case, dots and slashes differently."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_compressed(path: Path) -> bool:
    """Return True if the file's name is that of a gzip or Zstandard file."""
    return path.suffix.lower() in COMPRESSED


def kind_of(path: Path) -> str:
    """Return the suffix of a file's content, ``.jsonl`` for ``a.jsonl`` and ``a.JSONL.gz``; "" without a suffix."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def refusal_of(path: Path) -> str:
    """Return the reason why a file is not read as text, and the alternative, as half a sentence; "" if it is read."""
    kind = kind_of(path)
    if is_compressed(path) and kind in (PARQUET, *INDEXED):
        return f"a compressed {kind} file, which is not supported: unpack it"
    separator = r", sep='\t'" if kind == ".tsv" else ""
    command = f"datasets.Dataset.from_csv('{path}'{separator}).to_parquet('{path.with_suffix(PARQUET)}')"
    convert = f'python -c "import datasets; {command}", and name its text column with --text-field'
    return NO_TEXT.get(kind, "").format(convert=convert)


class Listing(NamedTuple):
    """Entries of a folder, sorted by name.

    Attributes:
        taken: Files that are read.
        skipped: (name, reason) of the other entries.
    """

    taken: tuple[Path, ...]
    skipped: tuple[tuple[str, str], ...]


def listing(folder: Path) -> Listing:
    """List a folder: text, JSONL and parquet files, of known kinds or without a suffix, are read.

    Hidden entries are neither read nor listed as skipped.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    reasons = [(path, _skipped(path)) for path in entries]
    taken = tuple(path for path, reason in reasons if not reason)
    return Listing(taken, tuple((path.name, reason) for path, reason in reasons if reason))


def nothing_read(folder: Path) -> str:
    """Describe a folder without readable files: its content, and the kinds that are read."""
    skipped = listing(folder).skipped[:MOST_TOLD]
    content = f"only {', '.join(f'{name} ({reason})' for name, reason in skipped)}" if skipped else "no files"
    return f"the folder contains {content}; text, JSONL and parquet files are read"


def _skipped(path: Path) -> str:
    kind = kind_of(path)
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "not a regular file"
    if path.name.lower().split(".")[0] in _ABOUT_DATA and kind not in (*JSONL, PARQUET):
        return "about the data"
    if path.stat().st_size == 0:
        return "empty"
    if kind in INDEXED:
        return "indexed tokens, which are named by their prefix"
    if kind in NO_TEXT or refusal_of(path):
        return NO_TEXT.get(kind, "").partition(":")[0] or "compressed"
    return "" if kind in ("", *TEXT, *JSONL, PARQUET) else f"of unknown kind {kind}"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for sequential reading, decompressing it on the fly; memory does not grow with its size.

    Raises DataError, also while reading, if a compressed file is damaged or cannot be read on this machine.
    """
    kind = path.suffix.lower()
    reader = {GZIP: _gzip, ZSTANDARD: _zstandard}.get(kind)
    if reader is None:
        with open(path, "rb") as plain:
            yield plain
        return
    name = "gzip" if kind == GZIP else "Zstandard"
    stream, broken = reader(path)
    try:
        with stream:
            yield stream
    except broken as error:
        raise DataError(f"{path}: not a readable {name} file ({error}); it is truncated, or not {name}") from error


def first_line(path: Path, longest: int) -> tuple[int, bytes]:
    """Return (number, bytes) of the first line that is not blank; number 0 if there is none.

    At most ``longest`` bytes are read; a longer line, or that much white space, is returned as ``longest`` bytes.
    """
    with opened(path) as file:
        left, number = longest, 0
        while left > 0 and (line := file.readline(longest)):
            number, left = number + 1, left - len(line)
            if line.strip():
                return number, line
        return (0, b"") if left > 0 else (number, b" " * longest)


_Opened = tuple[Any, tuple[type[BaseException], ...]]


def _gzip(path: Path) -> _Opened:
    return gzip.open(path, "rb"), (gzip.BadGzipFile, EOFError, zlib.error)


def _zstandard(path: Path) -> _Opened:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.open(path, "rb"), (zstd.ZstdError, EOFError)
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path}: Zstandard files need the package pyarrow here (pip install pyarrow); or unpack it: zstd -d {path}"
        ) from error
    stream = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream, 1 << 18), (pyarrow.ArrowException, OSError)
