"""Files that ``--data-path`` may name: their kinds by name and by their first bytes, their records, compression.

Zstandard needs pyarrow below Python 3.14.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from megapar.errors import DataError
from megapar.files.data_object import DataFile, DataObject, name_of, size_of
from megapar.files.regular_file import HEAD_BYTES, PAGE, not_this
from megapar.schema.phase_plan import NAME

JSONL = (".jsonl", ".json", ".ndjson")  # suffixes of files with one JSON record per line

FIELD = "text"  # field of a JSONL record, and column of a parquet file, that contains the document

AUTO, FILE, PARAGRAPH = "auto", "file", "paragraph"
"""Values of --document-per: what a document of text files is."""

ROW = ""  # in place of a field or column: records are read whole

LONGEST_LINE = 1 << 24
"""Maximum bytes of a record or a line. Tokenizing needs some 50 times the memory of the document; a long book has a
third of this."""

GZIP, ZSTANDARD = ".gz", ".zst"
COMPRESSED = (GZIP, ZSTANDARD)
TEXT = (".txt", ".text", ".md")
PARQUET = ".parquet"
INDEXED = (".bin", ".idx")
MOST_LISTED = 8  # files in a message
NUMBER = re.compile(r"\+?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_BLOCK_BYTES = 1 << 18
_BYTE_ORDER_MARK = "\ufeff"  # json accepts it in bytes, but not in str
_RECORDS = 64  # lines that must be records in a file whose name does not say so
_MOST_BYTES = 1 << 22  # read for that many lines
_ABOUT_DATA = ("readme", "license", "licence", "notice", "citation", "changelog", "contributing")
_ARCHIVE = "an archive: unpack it, and pass the folder"
_NUMBERS = "numbers, not text"
_OFFICE = "an office document: extract its text to a .txt or .jsonl file"


NO_TEXT: Mapping[str, str] = MappingProxyType(
    {
        ".csv": "a table: convert it to a parquet file, {convert}",
        ".tsv": "a table: convert it to a parquet file, {convert}",
        **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _ARCHIVE),
        **dict.fromkeys((".bz2", ".xz", ".lz4", ".br", ".lzma"), "compressed in an unsupported way: use gzip or zstd"),
        **dict.fromkeys((".pdf", ".doc", ".docx", ".xls", ".xlsx", ".odt", ".epub"), _OFFICE),
        **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".pkl", ".h5", ".safetensors"), _NUMBERS),
        ".arrow": "a file of a datasets folder: pass the folder with --data-source hf --hf-dataset",
    }
)
"""Content of the files that are not read as text, by suffix, and the alternative."""


def too_long(place: str) -> DataError:
    """Return the error for a line or a document of more than LONGEST_LINE bytes. ``place``: for the message."""
    return DataError(
        f"{place}: it has more than {LONGEST_LINE:,} bytes, the maximum for one document; split it into several, or "
        "set --on-bad-record skip"
    )


def rest_of_line(file: IO[bytes]) -> tuple[bytes, int]:
    """Return (rest of the current line, its bytes); if the line is too long, only its beginning."""
    line = file.readline(LONGEST_LINE + 1)
    size, piece = len(line), line
    while len(line) > LONGEST_LINE and piece and not piece.endswith(b"\n"):
        piece = file.readline(_BLOCK_BYTES)
        size += len(piece)
    return line, size


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line), counted from 1; the line is None if it has more than LONGEST_LINE bytes."""
    number = 0
    while True:
        line, size = rest_of_line(file)
        if not size:
            return
        number += 1
        yield number, line if size <= LONGEST_LINE else None


def text_of_line(line: bytes | str, place: str, field: str) -> str:
    """Return the document of a JSONL line, decoded or not. ``place``: for messages. Raises DataError."""
    try:
        record = json.loads(line.removeprefix(_BYTE_ORDER_MARK) if isinstance(line, str) else line)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise DataError(
            f"{place}: not a JSON record ({error}); repair or remove the line, or set --on-bad-record skip"
        ) from error
    return checked_text(record.get(field) if isinstance(record, dict) else None, record, place, field)


def decoded(line: bytes, place: str, more: str = ", or set --on-bad-record skip") -> str:
    """Decode a line of a text file. Raises DataError if it is not UTF-8, which names ``more`` ways out."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text ({error.reason}); convert the file, for example with "
            f"iconv -f ISO-8859-1 -t UTF-8 if it is Latin-1{more}"
        ) from error


def checked_text(text: Any, record: Any, place: str, field: str) -> str:
    """Return the text of a record's field. Raises DataError if it is missing, not a string, or not valid Unicode."""
    if isinstance(text, str):
        try:
            if not text.isascii():
                text.encode()
            return text
        except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair
            raise DataError(f"{place}: field {field!r} is not valid Unicode ({error.reason})") from error
    if isinstance(record, dict) and field not in record:
        names = ", ".join(map(repr, list(record)[:8])) or "no fields"
        texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
        name = shlex.quote(max(texts, key=texts.__getitem__)) if texts else "NAME"
        fix = f"Name the field that contains the text: --text-field {name} (in megapar data: --field {name})"
        if "messages" in record or "conversations" in record:
            fix = "It is a conversation: --task sft trains on these"
        raise DataError(f"{place}: no field {field!r}; the record has {names}. {fix}")
    kind = type(text if isinstance(record, dict) else record).__name__
    where = f"field {field!r} is" if isinstance(record, dict) else "the record is"
    wanted = "a string" if isinstance(record, dict) else f"an object with a field {field!r}"
    raise DataError(f"{place}: {where} of type {kind}, not {wanted}")


def bare_name(name: str) -> str:
    """Return only the letters and digits of a data set's name: caches write case, dots and slashes differently."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_compressed(file: DataFile) -> bool:
    """Return True if the file's name is that of a gzip or Zstandard file."""
    return name_of(file).suffix.lower() in COMPRESSED


def kind_of(file: DataFile) -> str:
    """Return the suffix of a file's content, ``.jsonl`` for ``a.jsonl`` and ``a.JSONL.gz``; "" without a suffix."""
    path = name_of(file)
    return PurePath(path.stem).suffix.lower() if is_compressed(file) else path.suffix.lower()


def refusal_of(file: DataFile) -> str:
    """Return the reason why a file is not read as text, and the alternative, as half a sentence; "" if it is read."""
    kind, path = kind_of(file), name_of(file)
    if is_compressed(file) and kind in (PARQUET, *INDEXED):
        return f"a compressed {kind} file, which is not supported: unpack it"
    separator = r", sep='\t'" if kind == ".tsv" else ""
    whole = str(file)
    made = whole.removesuffix(path.suffix) + PARQUET
    command = f"import datasets; datasets.Dataset.from_csv({whole!r}{separator}).to_parquet({made!r})"
    quoted = shlex.quote(command) if set(command) & set('"$`!') else f'"{command}"'
    convert = f"python -c {quoted}, and name its text column with --text-field"
    return NO_TEXT.get(kind, "").format(convert=convert)


def may_be_text(words: Iterable[str]) -> bool:
    """Return True if one of the words of ``--data-path`` may name text files, by its name."""
    names = [split_name(word)[1] for word in words if not NUMBER.fullmatch(word)]
    files = [Path(name) for name in names if name not in ("builtin", "mock")]
    return any(kind_of(file) not in (*JSONL, PARQUET, *INDEXED) for file in files)


class Listing(NamedTuple):
    """Entries of a folder, sorted by name: files that are read, and (name, reason) of the others."""

    taken: tuple[DataFile, ...]
    skipped: tuple[tuple[str, str], ...]


def listing(folder: Path | Sequence[DataObject]) -> Listing:
    """List a folder, or the objects in one.

    Text, JSONL and parquet files, of known kinds or without a suffix, are read. Hidden entries are neither read nor
    listed as skipped.
    """
    entries: Iterable[DataFile] = folder.iterdir() if isinstance(folder, Path) else folder
    reasons = [(path, _skipped(path)) for path in sorted(entries, key=name_of) if name_of(path).name[0] != "."]
    taken = tuple(path for path, reason in reasons if not reason)
    return Listing(taken, tuple((name_of(path).name, reason) for path, reason in reasons if reason))


def nothing_read(content: Listing) -> str:
    """Describe a folder without readable files: its content, and the kinds that are read."""
    skipped = content.skipped[:MOST_LISTED]
    found = f"only {', '.join(f'{name} ({reason})' for name, reason in skipped)}" if skipped else "no files"
    return f"the folder contains {found}; text, JSONL and parquet files are read"


def _skipped(path: DataFile) -> str:
    kind = kind_of(path)
    if isinstance(path, Path) and not path.is_file():
        return "a folder" if path.is_dir() else "not a regular file"
    if name_of(path).name.lower().split(".")[0] in _ABOUT_DATA and kind not in (*JSONL, PARQUET):
        return "about the data"
    if size_of(path) == 0:
        return "empty"
    if kind in INDEXED:
        return "indexed tokens, which are named by their prefix"
    if kind in NO_TEXT or refusal_of(path):
        return NO_TEXT.get(kind, "").partition(":")[0] or "compressed"
    return "" if kind in ("", *TEXT, *JSONL, PARQUET) else f"of unknown kind {kind}"


@contextmanager
def opened(file: DataFile, last: int | None = None) -> Iterator[IO[bytes]]:
    """Open a file for sequential reading, decompressing it on the fly; memory does not grow with its size.

    ``last`` is that of ``DataObject.opened``. Raises DataError, also while reading, if a compressed file is damaged or
    cannot be read on this machine.
    """
    kind = name_of(file).suffix.lower()
    reader = {GZIP: _gzip, ZSTANDARD: _zstandard}.get(kind)
    with _plain(file, last) as plain:
        if reader is None:
            yield plain
            return
        name = "gzip" if kind == GZIP else "Zstandard"
        stream, broken = reader(plain, file)
        try:
            with stream:
                yield stream
        except broken as error:
            raise DataError(f"{file}: not a readable {name} file ({error}); it is truncated, or not {name}") from error


def _plain(file: DataFile, last: int | None) -> AbstractContextManager[IO[bytes]]:
    return file.open("rb") if isinstance(file, Path) else file.opened(last)


def first_line(path: DataFile, longest: int) -> tuple[int, bytes]:
    """Return (number, bytes) of the first line that is not blank; number 0 if there is none.

    At most ``longest`` bytes are read; a longer line, or that much white space, is returned as ``longest`` bytes.
    """
    with opened(path, 0) as file:
        budget, number = longest, 0
        while budget > 0 and (line := file.readline(longest)):
            number, budget = number + 1, budget - len(line)
            if line.strip():
                return number, line
        return (0, b"") if budget > 0 else (number, b" " * longest)


_Opened = tuple[Any, tuple[type[BaseException], ...]]


def _gzip(plain: IO[bytes], path: DataFile) -> _Opened:
    return gzip.open(plain, "rb"), (gzip.BadGzipFile, EOFError, zlib.error)


def _zstandard(plain: IO[bytes], path: DataFile) -> _Opened:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.open(plain, "rb"), (zstd.ZstdError, EOFError)
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path}: Zstandard files need the package pyarrow here (pip install pyarrow); or unpack it: zstd -d {path}"
        ) from error
    stream = pyarrow.input_stream(plain, compression="zstd")
    return io.BufferedReader(stream, 1 << 18), (pyarrow.ArrowException, OSError)


class BlendItem(NamedTuple):
    """A path of ``--data-path`` with its weight, None without weights, and its name, "" without one."""

    weight: Fraction | None
    path: str
    name: str = ""


def split_name(word: str) -> tuple[str, str]:
    """Split ``NAME=PATH``; the name is "" for any other word, and if a file of the whole word exists."""
    name, _, path = word.partition("=")
    if not path or not NAME.fullmatch(name) or any(Path(f"{word}{suffix}").exists() for suffix in ("", *INDEXED)):
        return "", word
    return name, path


def blend_of(paths: Sequence[str]) -> tuple[BlendItem, ...]:
    """Parse ``0.7 A 0.3 B`` into weights and paths, of which all or none have names, as in ``0.7 a=A 0.3 b=B``.

    There are weights if the first item is a number; a file whose name is a number is written as ``./7``. Raises
    ValueError if weights and paths do not alternate, a weight is 0, or names are repeated or missing.
    """
    pairs = _weighted(paths)
    items = tuple(BlendItem(weight, *reversed(split_name(word))) for weight, word in pairs)
    names = [item.name for item in items if item.name]
    if names and len(set(names)) < len(items):
        raise ValueError("a name is repeated, or some paths have none")
    return items


def _weighted(paths: Sequence[str]) -> tuple[tuple[Fraction | None, str], ...]:
    if not paths or not NUMBER.fullmatch(paths[0]):
        if any(NUMBER.fullmatch(path) for path in paths):
            raise ValueError("a weight follows its path instead of preceding it")
        return tuple((None, path) for path in paths)
    weights, names = paths[::2], paths[1::2]
    if len(weights) != len(names) or any(NUMBER.fullmatch(name) for name in names):
        raise ValueError("weights and paths do not alternate")
    if not all(NUMBER.fullmatch(weight) and Fraction(weight) > 0 for weight in weights):
        raise ValueError("not every weight is a number above 0")
    return tuple((Fraction(weight), name) for weight, name in zip(weights, names, strict=True))


def inspect(path: DataFile, field: str = FIELD) -> tuple[str, bool, str]:
    """Return (defect, records, note) of a text, JSONL or parquet file.

    The defect concerns the whole file and is a predicate with the remedy, or "". ``records`` is True if each line is a
    JSON record. The note says how a file is read whose name does not. Raises OSError, and DataError for a compressed
    file that is damaged.
    """
    kind, named = kind_of(path), kind_of(path) in JSONL
    if is_compressed(path):
        with _plain(path, 0) as file:
            if refused := not_this(file.read(HEAD_BYTES)):
                return refused, False, ""
    with opened(path, 0) as file:
        head = file.read(HEAD_BYTES)
        other = not_this(head)
        if other and (named or kind == PARQUET or not PAGE.match(head)):  # text may consist of web pages
            return other, False, ""
        if kind == PARQUET:
            return "", False, ""
        refused = _encoding(head, file) or _json_form(head, named, field)
        return (refused, named, "") if refused or named else ("", *_records(head, file, field))


def _encoding(head: bytes, file: IO[bytes]) -> str:
    start = head[:64]
    marked = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    zeros = not any(start[::2]), not any(start[1::2])
    wide = len(start) >= 16 and zeros[0] != zeros[1]  # ASCII in units of two bytes
    if marked or wide:
        name = "UTF-16" if marked else "UTF-16LE" if start[0] else "UTF-16BE"
        return f"is UTF-16 text: convert it with `iconv -f {name} -t UTF-8`"
    if b"\r" in head.rstrip(b"\r") and b"\n" not in head and b"\n" not in file.read(_MOST_BYTES):
        return r"has lines that end with CR alone: convert them with `tr '\r' '\n'`"
    return ""


def _json_form(head: bytes, named: bool, field: str) -> str:
    text = head.decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")
    first, _, rest = text.partition("\n")
    if not (named or (re.match(r'\[?\s*\{\s*"', text) and f'"{field}"' in text)):
        return ""
    if text.startswith("[") and (_parsed(first) is None or not rest.strip()):  # else one bad record
        return "is a JSON array: write one record per line, for example with `jq -c '.[]'`"
    if text.startswith("{") and _parsed(first) is None:
        try:
            whole = json.JSONDecoder().raw_decode(text)[1] > len(first)
        except (ValueError, RecursionError):
            whole = first.strip() == "{" and bool(rest.strip())
        if whole:
            return "has records over several lines: write one per line, for example with `jq -c .`"
    return ""


def _records(head: bytes, file: IO[bytes], field: str) -> tuple[bool, str]:
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return False, ""
    block = head
    while block and head.count(b"\n") < _RECORDS and len(head) < _MOST_BYTES:
        head += (block := file.read(len(head)))
    lines = head.split(b"\n")[: None if not block else -1]
    records = [_parsed(line) for line in lines if line.strip()][:_RECORDS]
    if not records or not all(isinstance(record, dict) for record in records):
        return False, ""
    if all(field in record for record in records):
        return True, "read as JSON lines, as its first records are, whatever its name"
    return False, f"read as text; its lines are JSON objects without the field {field!r}"


def _parsed(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
