"""Content of files by their first bytes, whatever their names: the only place that looks, for inputs of every kind.

Inputs are looked at before they are parsed, because a parser can only say where it stumbled. Standard library only.

Tested in ``tests/files/test_content.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import IO, Any, NamedTuple

from megapar.files.data_files import COMPRESSED, PARQUET, is_compressed, kind_of, opened
from megapar.files.record import FIELD, JSONL
from megapar.files.regular_file import open_regular

HEAD_BYTES = 1 << 13
RECORDS = 64
"""Lines of a file that must be records if its name does not say that they are."""
MOST_BYTES = 1 << 22
"""Bytes read for that many lines."""

_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_FORMATS = (
    (b"PAR1", "a parquet file", PARQUET),
    (b"\x1f\x8b\x08", "a gzip file", COMPRESSED[0]),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", COMPRESSED[1]),
)


class Look(NamedTuple):
    """Form of a file of documents.

    Attributes:
        refused: The defect of the whole file and the remedy, as a predicate; "" if there is none.
        records: Each line is a JSON record.
        objects: Each line is a JSON object, but not every one has the field, so they are text.
    """

    refused: str = ""
    records: bool = False
    objects: bool = False


def not_itself(path: Path | str) -> str:
    """Return what a file is in place of its content, and the remedy, as a predicate; "" if it is nothing of the kind.

    Raises OSError.
    """
    with open_regular(path) as file:
        return _not_itself(file.read(HEAD_BYTES))


def _not_itself(head: bytes) -> str:
    if head.startswith(_POINTER):
        size = re.search(rb"\nsize ([0-9]{1,18})\n", head)
        bytes_ = f" ({int(size[1]):,} bytes)" if size else ""
        fix = "run `git lfs pull`, or download it with `hf download`"
        return f"is a Git LFS pointer, not the file itself{bytes_}: {fix}"
    if _PAGE.match(head):
        return "is a web page, not the file itself: download it again, and look at the page for the reason"
    return "" if head else "is empty: download or write it again"


def look_at(path: Path, field: str = FIELD) -> Look:
    """Look at a text, JSONL or parquet file. Raises OSError, and DataError for a compressed file that is damaged."""
    kind = kind_of(path)
    if is_compressed(path) and (refused := not_itself(path)):
        return Look(refused)
    with opened(path) as file:
        head = file.read(HEAD_BYTES)
        named = kind in JSONL
        other = _not_itself(head)
        if other and (named or kind == PARQUET or not _PAGE.match(head)):  # text may consist of web pages
            return Look(other)
        if kind == PARQUET:
            return Look()
        if refused := _format(path, head) or _encoding(head, file) or _json_form(head, named, field):
            return Look(refused)
        return Look(records=True) if named else _records(head, file, field)


def _format(path: Path, head: bytes) -> str:
    for magic, name, suffix in _FORMATS:
        if head.startswith(magic):
            return f"is {name}: rename it to {path}{suffix}"
    return ""


def _encoding(head: bytes, file: IO[bytes]) -> str:
    start = head[:64]
    wide = any(start) and (not any(start[::2]) or not any(start[1::2]))  # ASCII in units of two bytes or more
    marked = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if marked or (wide and len(start) > 1):
        name = "UTF-32" if b"\0\0" in start[:4] else "UTF-16"
        order = "" if marked else "BE" if not start[0] else "LE"
        return f"is {name} text: convert it with `iconv -f {name}{order} -t UTF-8`"
    if b"\r" in head.rstrip(b"\r") and b"\n" not in head and b"\n" not in file.read(MOST_BYTES):
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
            whole = first.strip() == "{"
        if whole:
            return "has records over several lines: write one per line, for example with `jq -c .`"
    return ""


def _records(head: bytes, file: IO[bytes], field: str) -> Look:
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return Look()
    block = head
    while block and head.count(b"\n") < RECORDS and len(head) < MOST_BYTES:
        block = file.read(len(head))
        head += block
    lines = head.split(b"\n")[: None if not block else -1]
    records = [_parsed(line) for line in lines if line.strip()][:RECORDS]
    objects = bool(records) and all(isinstance(record, dict) for record in records)
    complete = objects and all(field in record for record in records)
    return Look(records=complete, objects=objects and not complete)


def _parsed(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
