"""Files that ``--data-path`` may name: what they hold, by their names, and how their bytes are read.

Standard library only, but for Zstandard below Python 3.14, which pyarrow reads.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from megapar.config.record import JSONL
from megapar.errors import DataError

GZIP, ZSTANDARD = ".gz", ".zst"
COMPRESSED = (GZIP, ZSTANDARD)
TEXT = (".txt", ".text", ".md")
PARQUET = ".parquet"
INDEXED = (".bin", ".idx")
MOST_TOLD = 8  # of a message
_ABOUT_DATA = ("readme", "license", "licence", "notice", "citation", "changelog", "contributing")
_ARCHIVE = "an archive: unpack it, and give the folder"
_NUMBERS = "numbers, where text is needed"
_OFFICE = "a document of an office program: write its text to a .txt or .jsonl file"


def _others() -> Mapping[str, str]:
    table = {
        ".csv": "a table: make a parquet file of it, {convert}",
        ".tsv": "a table: make a parquet file of it, {convert}",
        **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _ARCHIVE),
        **dict.fromkeys(
            (".bz2", ".xz", ".lz4", ".br", ".lzma"), "compressed in a way that is not read: use gzip or zstd"
        ),
        **dict.fromkeys((".pdf", ".doc", ".docx", ".xls", ".xlsx", ".odt", ".epub"), _OFFICE),
        **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".pkl", ".h5", ".safetensors"), _NUMBERS),
        ".arrow": "a file of datasets: give its folder by --data-source hf --hf-dataset",
    }
    return MappingProxyType(table)


NO_TEXT = _others()
"""What files of these kinds hold, and what to do instead of naming them."""


def is_compressed(path: Path) -> bool:
    """Whether a file is read through gzip or Zstandard, by its name."""
    return path.suffix.lower() in COMPRESSED


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, ``.jsonl`` of ``a.jsonl`` and of ``a.JSONL.gz``; "" without one."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def refusal_of(path: Path) -> str:
    """Why a file is not read as text, and what to do, as half a sentence; "" where it is read."""
    kind = kind_of(path)
    if is_compressed(path) and kind in (PARQUET, *INDEXED):
        return f"{kind} files are read as they are: unpack it"
    separator = r", sep='\t'" if kind == ".tsv" else ""
    command = f"datasets.Dataset.from_csv('{path}'{separator}).to_parquet('{path.with_suffix(PARQUET)}')"
    convert = f'python -c "import datasets; {command}", and name its column by --text-field'
    return NO_TEXT.get(kind, "").format(convert=convert)


class Listing(NamedTuple):
    """A folder's entries by name. taken: the files that are read. skipped: the others' names with the reason."""

    taken: tuple[Path, ...]
    skipped: tuple[tuple[str, str], ...]


def listing(folder: Path) -> Listing:
    """What is read of a folder: text, JSONL and parquet files, of known kinds or without a suffix.

    Hidden entries are neither read nor told.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    reasons = [(path, _skipped(path)) for path in entries]
    taken = tuple(path for path, reason in reasons if not reason)
    return Listing(taken, tuple((path.name, reason) for path, reason in reasons if reason))


def nothing_read(folder: Path) -> str:
    """Of a folder whose listing is empty: what it holds instead, and what would be read."""
    skipped = listing(folder).skipped[:MOST_TOLD]
    holds = f"only {', '.join(f'{name} ({reason})' for name, reason in skipped)}" if skipped else "no files"
    return f"the folder holds {holds}; it takes text, JSONL and parquet files"


def _skipped(path: Path) -> str:
    kind = kind_of(path)
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "no file"
    if path.name.lower().split(".")[0] in _ABOUT_DATA and kind not in (*JSONL, PARQUET):
        return "about the data"
    if path.stat().st_size == 0:
        return "empty"
    if kind in INDEXED:
        return "indexed tokens, which are given by their prefix"
    if kind in NO_TEXT or refusal_of(path):
        return NO_TEXT.get(kind, "").partition(":")[0] or "compressed"
    return "" if kind in ("", *TEXT, *JSONL, PARQUET) else f"of unknown kind {kind}"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes that a file holds, unpacked as they are read: nothing of their size is kept. For reading in order.

    Raises DataError, also while it is read, where a compressed file is damaged or cannot be read here.
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
        raise DataError(f"{path}: not a readable {name} file ({error}); it is cut off, or no such file") from error


def first_line(path: Path, longest: int) -> tuple[int, bytes]:
    """(number, bytes) of the first line that is not blank; number 0 where there is none.

    longest: bytes that are looked at, of which a longer line, or that much white space, takes all.
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
