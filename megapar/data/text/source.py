"""Sources of documents: the built-in text, text files, JSONL files and parquet files, each read in chunks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from megapar.data.cache import Unread, cached_value, find_entry, hash_parts, make_once
from megapar.data.text import builtin
from megapar.data.text.chunks import BadRecords, LineNumbers, TextChunk, file_chunks, parquet_chunks, refuse_too_long
from megapar.errors import DataError, listed
from megapar.files.data_files import (
    AUTO,
    FIELD,
    FILE,
    INDEXED,
    MOST_LISTED,
    PARAGRAPH,
    PARQUET,
    Listing,
    first_line,
    inspect,
    is_compressed,
    kind_of,
    listing,
    nothing_read,
    numbered_lines,
    opened,
    refusal_of,
    text_of_line,
)
from megapar.files.data_object import BEGAN, DataFile, DataObject, at_once, found_at, name_of, size_of
from megapar.files.paths import near_path
from megapar.files.uri import is_stored

BUILTIN = "builtin"
MOCK = "mock"
PYTHON = "python:"  # prefix of the name of data that Python code passes
TEXT_FILE, WHOLE_FILE, JSONL_FILE, PARQUET_FILE = "TextFile", "WholeFile", "JsonlFile", "ParquetFile"
_UNPACKED = 4  # estimated ratio of text to the size of a compressed file
_Notes = dict[str, list[str]]
_LONGEST_FIRST_LINE = 1 << 20  # bytes; a longer first line is not checked in advance
_inspected = lru_cache(1 << 16)(inspect)  # of objects, which a run opens several times and which do not change


class TextSource(Protocol):
    """A named collection of documents in a fixed order."""

    @property
    def name(self) -> str:
        """The source as ``--data-path`` names it."""

    @property
    def bytes(self) -> int:
        """Bytes of text, estimated if the file is compressed."""

    def chunks(self) -> list[TextChunk]:
        """Return the chunks that together contain its documents, in order. Raises DataError if it cannot be read."""

    def content_hash(self, *, may_read: bool = True) -> str:
        """Return a hash of the content, independent of the file's name. For ``may_read``, see ``cached_value``."""


@dataclass(frozen=True)
class BuiltinSource:
    """The documentation that every CPython carries, collected once and kept in the cache."""

    name: str = BUILTIN
    bytes: int = builtin.ABOUT_BYTES

    def file(self) -> FileSource:
        """Return its JSONL file in the cache, after making it if it is missing."""
        return FileSource(make_once(self._entry(), _write_builtin), JSONL_FILE)

    @staticmethod
    def _entry() -> str:
        import sys

        version = "{}.{}.{}-{}".format(*sys.version_info[:4])
        return f"text/builtin-{builtin.VERSION}-python-{version}.jsonl"

    def chunks(self) -> list[TextChunk]:
        return self.file().chunks()

    def content_hash(self, *, may_read: bool = True) -> str:
        if not may_read and find_entry(self._entry()) is None:
            raise Unread(builtin.ABOUT_BYTES)
        return self.file().content_hash(may_read=may_read)


def _write_builtin(path: Path) -> None:
    with open(path, "w", encoding="utf-8") as out:
        for text in builtin.documents():
            out.write(json.dumps({FIELD: text}) + "\n")


@dataclass(frozen=True)
class FileSource:
    """A file or an object of documents, perhaps compressed.

    ``read_as`` is part of content hashes, which checkpoints record, so these words must never change:

        TextFile       blank lines separate documents, as in BERT's pre-training data; without any, each line is one
        WholeFile      the file is one document
        JsonlFile      one object per line, the document in ``field``; blank lines are skipped
        ParquetFile    documents are the column ``field``, read by the package ``pyarrow``
    """

    path: DataFile
    read_as: str
    field: str = FIELD

    @property
    def name(self) -> str:
        """The path or the URI of the file."""
        return str(self.path)

    @property
    def bytes(self) -> int:
        """The size of the file, as an estimate if it is compressed."""
        return size_of(self.path) * (_UNPACKED if is_compressed(self.path) else 1)

    def content_hash(self, *, may_read: bool = True) -> str:
        """Return a hash of the uncompressed bytes and the reader; remembered by the file's path, size and mtime.

        Of an object, it is of size and ETag in place of the bytes.
        """
        packed = is_compressed(self.path)
        unpacked = ("unpacked",) if packed else ()
        reader = (self.read_as, *(() if self.field == FIELD else (self.field,)))
        if isinstance(self.path, DataObject):
            return hash_parts(*reader, str(self.path.head.size), self.path.head.etag)
        try:
            return hash_parts(*reader, cached_value(self.path, self._sha256, *unpacked, may_read=may_read))
        except Unread as unread:
            raise Unread(unread.bytes * (_UNPACKED if packed else 1)) from None

    def _sha256(self) -> str:
        state = hashlib.sha256()
        with opened(self.path) as data:
            while block := data.read(1 << 20):
                state.update(block)
        return state.hexdigest()

    def chunks(self) -> list[TextChunk]:
        """See TextSource."""
        if self.read_as == PARQUET_FILE:
            return parquet_chunks(self.path, self.field)
        if self.read_as == JSONL_FILE:
            return file_chunks("jsonl", self.path, self.field)
        if self.read_as == WHOLE_FILE:
            return file_chunks("whole", self.path)
        return file_chunks("blank" if self._has_blank_line() else "lines", self.path)

    def _has_blank_line(self) -> bool:
        """Return True if the file has a blank line between two other lines."""
        seen = blank = False
        with opened(self.path, 0) as file:
            for _, line in numbered_lines(file):
                if line is None or not _is_blank(line):
                    if blank:
                        return True
                    seen = True
                else:
                    blank = seen
        return False


def open_sources(
    paths: Sequence[str],
    field: str = FIELD,
    report: Callable[[str], object] = lambda text: None,
    *,
    per: str = PARAGRAPH,
    may_read: bool = True,
) -> tuple[TextSource, ...]:
    """Open the sources that ``--data-path`` names, in order; a folder means its files, sorted by name.

    Raises DataError if a path is missing, empty, or of a kind that is not read here.

    Args:
        paths: Files, folders, URIs of objects and of folders with objects, or ``builtin``.
        field: The field or column of records that contains the document.
        report: Called with messages about the files of a folder that are skipped, and about files whose content is not
            what their names say.
        per: What a document of text is, as --document-per says it.
        may_read: False raises Unread if whole files would have to be read to find copies.
    """
    sources: list[TextSource] = []
    notes: _Notes = {}
    every = [None if path == BUILTIN else _named(path) for path in paths]
    files = (file for named in every for file in (named.taken if isinstance(named, Listing) else (named,)))
    at_once(partial(_look, field), (file for file in files if isinstance(file, DataObject)))
    for path, named in zip(paths, every, strict=True):
        if named is None:
            sources.append(BuiltinSource())
        elif isinstance(named, Listing):
            sources += _of_folder(path, named, field, FILE if per == AUTO else per, report, may_read, notes)
        else:
            sources.append(_file_source(named, field, per, notes))
    if not sources:
        raise DataError("no data path was given; --data-path builtin needs no file")
    for text, names in notes.items():
        report(f"{listed(names, MOST_LISTED)}: {text}")
    return tuple(sources)


def _look(field: str, file: DataObject) -> None:
    """Have the inspection of an object ready, unless it fails, which its source reports."""
    with suppress(DataError, OSError):
        _inspected(file, field)


def _named(path: str) -> DataFile | Listing:
    """Return the file that a path or a URI names, or the content of the folder."""
    if is_stored(path):
        found = BEGAN.get(path) or found_at(path)
        return found if isinstance(found, DataObject) else listing(found)
    return listing(Path(path)) if Path(path).is_dir() else Path(path)


def unread_bytes(paths: Sequence[str], field: str) -> int:
    """Return the bytes to read before all content hashes of ``open_sources`` are known. Raises its DataErrors."""
    total = 0
    for path in paths:
        named = Path() if path == BUILTIN else _named(path)
        for file in named.taken if isinstance(named, Listing) else (named,):
            source = BuiltinSource() if path == BUILTIN else _file_source(file, field, PARAGRAPH, {})
            try:
                source.content_hash(may_read=False)
            except Unread as unread:
                total += unread.bytes
    return total


def _of_folder(
    folder: str, content: Listing, field: str, per: str, report: Callable[[str], object], may_read: bool, notes: _Notes
) -> list[TextSource]:
    """Return the files of a folder, each content once, because a second copy is usually a mistake."""
    files, not_read = content
    if not files:
        raise DataError(f"{folder}: {nothing_read(content)}")
    sources: list[TextSource] = []
    skipped = [f"{name} ({reason})" for name, reason in not_read]
    twins, seen = _may_be_copies(files), dict[str, DataFile]()
    for file in files:
        source = _file_source(file, field, per, notes)
        first = seen.setdefault(source.content_hash(may_read=may_read), file) if file in twins else file
        if first is file:
            sources.append(source)
        else:
            skipped.append(f"{name_of(file).name} (the same content as {name_of(first).name})")
    if skipped:
        entries = f"{len(sources)} of {len(sources) + len(skipped)} entries"
        report(f"{folder}: {entries} are read, skipped: {listed(skipped, MOST_LISTED)}")
    return sources


def _may_be_copies(files: Sequence[DataFile]) -> set[DataFile]:
    """Return the files that have another file's size, or its name except for compression; only these are hashed."""
    alike: dict[object, list[DataFile]] = {}
    for file in files:
        for mark in (size_of(file), name_of(file).stem if is_compressed(file) else name_of(file).name):
            alike.setdefault(mark, []).append(file)
    return {file for group in alike.values() if len(group) > 1 for file in group}


def _file_source(path: DataFile, field: str, per: str, notes: _Notes) -> TextSource:
    """Return the source of one file. ``notes`` receives the files whose content is not what their names say."""
    if str(path) == MOCK:
        raise DataError("mock makes random tokens and cannot be mixed with text; pass --data-path mock alone")
    if isinstance(path, Path) and not path.is_file():
        raise DataError(f"{path}: no such file. {near_path(str(path))} Text, JSONL and parquet files can be read")
    if isinstance(path, Path) and not os.access(path, os.R_OK):
        raise DataError(f"{path}: no permission to read the file; change its permissions")
    if size_of(path) == 0:
        raise DataError(f"{path}: the file is empty; pass a file with text in it")
    if name_of(path).suffix in INDEXED:
        raise DataError(f"{path}: contains tokens, but text is needed; pass the text, JSONL or parquet file")
    if reason := refusal_of(path):
        raise DataError(f"{path}: {reason}")
    defect, records, note = (inspect if isinstance(path, Path) else _inspected)(path, field)
    if defect:
        raise DataError(f"{path} {defect}")
    if note:
        notes.setdefault(note, []).append(str(path))
    if records:
        return FileSource(path, JSONL_FILE, field)
    text = WHOLE_FILE if per == FILE else TEXT_FILE
    return FileSource(path, PARQUET_FILE, field) if kind_of(path) == PARQUET else FileSource(path, text)


def all_documents(sources: Iterable[TextSource], bad: BadRecords | None = None) -> Iterator[str]:
    """Yield the documents of all sources in order; ``bad`` receives broken records, None raises the first one."""
    bad, numbers = bad or BadRecords(stops=True), LineNumbers()
    for source in sources:
        for chunk in source.chunks():
            yield from chunk.documents(bad, numbers)


def check_first_records(sources: Iterable[TextSource]) -> None:
    """Raise DataError if the first line of a JSONL file does not have the field, or a file is too long a document.

    Workers that read in parallel would otherwise report any of their lines.
    """
    at_once(_check_first_record, sources)


def _check_first_record(source: TextSource) -> None:
    if not isinstance(source, FileSource):
        return
    if source.read_as == WHOLE_FILE and not is_compressed(source.path):
        refuse_too_long(source.path)
    if source.read_as == JSONL_FILE:
        number, line = first_line(source.path, _LONGEST_FIRST_LINE)
        if 0 < len(line) < _LONGEST_FIRST_LINE:
            text_of_line(line, f"{source.path}, line {number}", source.field)


def sources_hash(sources: Sequence[TextSource]) -> str:
    """Return one hash of the content of all sources, in order."""
    return hash_parts(*(source.content_hash() for source in sources))


def _is_blank(line: bytes) -> bool:
    """Return True for a line of white space, also of Unicode's, as ``chunks`` splits documents."""
    rest = line.strip()
    if not rest or 0x20 < rest[0] < 0x80:
        return not rest
    first = rest[:4].decode("utf-8", "replace")[0]  # decoding all of every line would take its time
    return first.isspace() and not rest.decode("utf-8", "replace").strip()
