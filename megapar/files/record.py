"""Documents in lines of files and fields of records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from megapar.errors import DataError

JSONL = (".jsonl", ".json", ".ndjson")
"""Suffixes of files with one JSON record per line."""

FIELD = "text"
"""Field of a JSONL record, and column of a parquet file, that contains the document."""

LONGEST_LINE = 1 << 24
"""Maximum bytes of a record or a line. Tokenizing needs some 50 times the memory of the document; a long book has a
third of this."""

_BLOCK_BYTES = 1 << 18
_BYTE_ORDER_MARK = "\ufeff"  # json accepts it in bytes, but not in str


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


def text_of_line(line: bytes | str, place: str, field: str = FIELD) -> str:
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
            f"{place}: not UTF-8 text ({error.reason}); convert the file, for example with iconv -t UTF-8{more}"
        ) from error


def checked_text(text: Any, record: Any, place: str, field: str = FIELD) -> str:
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
        name = max(texts, key=texts.__getitem__) if texts else "NAME"
        raise DataError(
            f"{place}: no field {field!r}; the record has {names}. Name the field that contains the text: "
            f"--text-field {name} (in megapar data: --field {name})"
        )
    kind = type(text if isinstance(record, dict) else record).__name__
    where = f"field {field!r} is" if isinstance(record, dict) else "the record is"
    wanted = "a string" if isinstance(record, dict) else f"an object with a field {field!r}"
    raise DataError(f"{place}: {where} of type {kind}, not {wanted}")
