"""Content of files by their first bytes, whatever their names: the one place that looks, before any parser stumbles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import IO, Any

from megapar.files.data_files import PARQUET, is_compressed, kind_of, opened
from megapar.files.record import FIELD, JSONL
from megapar.files.regular_file import open_regular

HEAD_BYTES = 1 << 13
RECORDS = 64  # lines that must be records in a file whose name does not say so
MOST_BYTES = 1 << 22  # read for that many lines
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


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
    if _PAGE.match(head):
        return "is a web page, not the file itself: download it again, and look at the page for the reason"
    return "" if head else "is empty: download or write it again"


def look_at(path: Path, field: str = FIELD) -> tuple[str, bool, str]:
    """Return (defect, records, note) of a text, JSONL or parquet file.

    The defect concerns the whole file and is a predicate with the remedy, or "". ``records`` is True if each line is a
    JSON record. The note says how a file is read whose name does not. Raises OSError, and DataError for a compressed
    file that is damaged.
    """
    kind, named = kind_of(path), kind_of(path) in JSONL
    if is_compressed(path) and (refused := not_itself(path)):
        return refused, False, ""
    with opened(path) as file:
        head = file.read(HEAD_BYTES)
        other = not_this(head)
        if other and (named or kind == PARQUET or not _PAGE.match(head)):  # text may consist of web pages
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
            whole = first.strip() == "{" and bool(rest.strip())
        if whole:
            return "has records over several lines: write one per line, for example with `jq -c .`"
    return ""


def _records(head: bytes, file: IO[bytes], field: str) -> tuple[bool, str]:
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return False, ""
    block = head
    while block and head.count(b"\n") < RECORDS and len(head) < MOST_BYTES:
        head += (block := file.read(len(head)))
    lines = head.split(b"\n")[: None if not block else -1]
    records = [_parsed(line) for line in lines if line.strip()][:RECORDS]
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
