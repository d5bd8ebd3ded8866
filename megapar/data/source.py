"""Sources of documents: the built-in text, text files, JSONL files, parquet files. One iterator of texts each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megapar.config.data_files import (
    INDEXED,
    MOST_TOLD,
    is_compressed,
    kind_of,
    listing,
    nothing_read,
    opened,
    refusal_of,
)
from megapar.config.hints import near_path
from megapar.config.record import (
    FIELD,
    JSONL,
    LONGEST_LINE,
    checked_text,
    decoded,
    numbered_lines,
    text_of_line,
    too_long,
)
from megapar.data import builtin
from megapar.data.cache import digest, known, made_once
from megapar.data.remembered import Unread, remembered
from megapar.errors import DataError

BUILTIN = "builtin"
MOCK = "mock"
_UNPACKED = 4  # times as large as its file is what a compressed one holds, about


class BadRecords:
    """Records that were passed over: how many, and what was wrong with the first ones.

    stops: nothing is passed over, the first one is raised.
    """

    KEPT = 5

    def __init__(self, *, stops: bool = False) -> None:
        self.count = 0
        self.first: list[str] = []
        self._stops = stops

    def take(self, error: DataError) -> None:
        """One more broken record."""
        if self._stops:
            raise error
        self.count += 1
        if len(self.first) < self.KEPT:
            self.first.append(str(error))

    def __str__(self) -> str:
        more = f"; and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"{self.count} broken records were passed over: {'; '.join(self.first)}{more}"


class Source(Protocol):
    """A named collection of documents in a fixed order."""

    @property
    def name(self) -> str:
        """What the user called it."""

    def documents(self, bad: BadRecords | None = None) -> Iterator[str]:
        """The documents, none of them empty; a broken one goes to ``bad``, or raises DataError with file and line."""

    def content_hash(self, *, may_read: bool = True) -> str:
        """A hash of the content, whatever the file is called. may_read: see ``remembered``."""


@dataclass(frozen=True)
class BuiltinSource:
    """The text every CPython carries, kept in the cache after it has been collected once."""

    name: str = BUILTIN

    def file(self) -> JsonlFile:
        """The JSONL file that it is kept in."""
        return JsonlFile(made_once(self._entry(), _write_builtin))

    @staticmethod
    def _entry() -> str:
        import sys

        version = "{}.{}.{}-{}".format(*sys.version_info[:4])
        return f"text/builtin-{builtin.VERSION}-python-{version}.jsonl"

    def documents(self, bad: BadRecords | None = None) -> Iterator[str]:
        """See Source."""
        return self.file().documents(bad)

    def content_hash(self, *, may_read: bool = True) -> str:
        """See Source."""
        if not may_read and known(self._entry()) is None:
            raise Unread(builtin.ABOUT_BYTES)
        return self.file().content_hash(may_read=may_read)


def _write_builtin(path: Path) -> None:
    with open(path, "w", encoding="utf-8") as out:
        for text in builtin.documents():
            out.write(json.dumps({FIELD: text}) + "\n")


@dataclass(frozen=True)
class _File:
    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def content_hash(self, *, may_read: bool = True) -> str:
        """SHA-256 of the file's bytes, unpacked, and how it is read; remembered by path, size and time of change."""
        packed = is_compressed(self.path)
        unpacked = ("unpacked",) if packed else ()
        try:
            return digest(*self._read_as(), remembered(self.path, self._sha256, *unpacked, may_read=may_read))
        except Unread as unread:
            raise Unread(unread.bytes * (_UNPACKED if packed else 1)) from None

    def _sha256(self) -> str:
        state = hashlib.sha256()
        with opened(self.path) as data:
            while block := data.read(1 << 20):
                state.update(block)
        return state.hexdigest()

    def _read_as(self) -> tuple[str, ...]:
        """What makes other documents of the same bytes."""
        return (type(self).__name__,)


@dataclass(frozen=True)
class _Records(_File):
    """A file of records. field: the one that holds the document."""

    field: str = FIELD

    def _read_as(self) -> tuple[str, ...]:
        return (type(self).__name__, *(() if self.field == FIELD else (self.field,)))


@dataclass(frozen=True)
class TextFile(_File):
    """A text file: blank lines separate documents, as in BERT's pre-training data.

    A file without any blank line holds one document per line.
    """

    def documents(self, bad: BadRecords | None = None) -> Iterator[str]:
        """See Source."""
        bad = bad or BadRecords(stops=True)
        line_is_document = not self.has_blank_line()
        lines: list[str] = []
        held = 0  # bytes of the document so far, of which no more than LONGEST_LINE are kept
        with opened(self.path) as file:
            for number, line in numbered_lines(file):
                text, size = self._text(number, line, bad)
                held += size
                if size and held > LONGEST_LINE:  # what follows up to a blank line goes with it
                    if held - size <= LONGEST_LINE:
                        bad.take(too_long(f"{self.path}, line {number}"))
                    lines = []
                elif text:
                    lines.append(text)
                if line_is_document or not size:
                    if lines:
                        yield "\n".join(lines)
                    lines, held = [], 0
        if lines:
            yield "\n".join(lines)

    def _text(self, number: int, line: bytes | None, bad: BadRecords) -> tuple[str, int]:
        """(a line's text, its bytes, 0 of a blank one); "" for one that is too long or no text."""
        if line is None:
            return "", LONGEST_LINE + 1
        try:
            text = decoded(line, f"{self.path}, line {number}").rstrip()
            return text, len(line) if text else 0
        except DataError as error:
            bad.take(error)
            return "", len(line)

    def has_blank_line(self) -> bool:
        """Whether a blank line stands between two others."""
        seen = blank = False
        with opened(self.path) as file:
            for _, line in numbered_lines(file):
                if line is None or line.strip():
                    if blank:
                        return True
                    seen = True
                else:
                    blank = seen
        return False


@dataclass(frozen=True)
class JsonlFile(_Records):
    """A JSONL file: one object per line, the document in one of its fields; blank lines are passed over."""

    def documents(self, bad: BadRecords | None = None) -> Iterator[str]:
        """See Source."""
        bad = bad or BadRecords(stops=True)
        with opened(self.path) as file:
            for number, line in numbered_lines(file):
                if line is None or line.strip():
                    place = f"{self.path}, line {number}"
                    try:
                        if line is None:
                            raise too_long(place)
                        text = text_of_line(line, place, self.field)
                    except DataError as error:
                        bad.take(error)
                        continue
                    if text.strip():
                        yield text


@dataclass(frozen=True)
class ParquetFile(_Records):
    """A parquet file with the documents in one of its columns, read in batches through the package ``datasets``."""

    def documents(self, bad: BadRecords | None = None) -> Iterator[str]:
        """See Source."""
        bad = bad or BadRecords(stops=True)
        try:
            import datasets
        except ImportError as error:
            raise DataError(f"{self.path}: parquet files need the package datasets (pip install datasets)") from error
        try:
            rows = datasets.load_dataset("parquet", data_files=str(self.path), split="train", streaming=True)
            for number, row in enumerate(rows):
                try:
                    text = checked_text(row.get(self.field), row, f"{self.path}, row {number}", self.field)
                except DataError as error:
                    bad.take(error)
                    continue
                if text.strip():
                    yield text
        except DataError:
            raise
        except Exception as error:  # whatever pyarrow and datasets raise for a file they cannot read
            raise DataError(f"{self.path}: not a readable parquet file ({error})") from error


_FORMATS: tuple[tuple[tuple[str, ...], type[JsonlFile] | type[ParquetFile]], ...] = (
    (JSONL, JsonlFile),
    ((".parquet",), ParquetFile),
)


def open_sources(
    paths: Sequence[str],
    field: str = FIELD,
    say: Callable[[str], object] = lambda text: None,
    *,
    may_read: bool = True,
) -> tuple[Source, ...]:
    """The sources that ``--data-path`` names, in order; a folder stands for its files, sorted by name.

    field: of records, the one that holds the document. say: is told what is skipped of a folder. may_read: otherwise
    Unread is raised where whole files would have to be read to tell copies apart.
    Raises DataError where a path is missing, empty, or of a kind that is read otherwise.
    """
    sources: list[Source] = []
    for path in paths:
        if path == BUILTIN:
            sources.append(BuiltinSource())
        elif Path(path).is_dir():
            sources += _of_folder(Path(path), field, say, may_read)
        else:
            sources.append(_file_source(Path(path), field))
    if not sources:
        raise DataError("no data path was given; --data-path builtin needs no file")
    return tuple(sources)


def unread_bytes(paths: Sequence[str], field: str = FIELD) -> int:
    """How much would be read to know the hashes of all that ``open_sources`` finds, and which of it are copies.

    Raises DataError as that does.
    """
    total = 0
    for path in paths:
        for one in listing(Path(path)).taken if path != BUILTIN and Path(path).is_dir() else (path,):
            source = BuiltinSource() if one == BUILTIN else _file_source(Path(one), field)
            try:
                source.content_hash(may_read=False)
            except Unread as unread:
                total += unread.bytes
    return total


def _of_folder(folder: Path, field: str, say: Callable[[str], object], may_read: bool) -> list[Source]:
    """Its files, each content once: a second copy in a folder is a mistake more often than a wish."""
    found, skipped = listing(folder)
    if not found:
        raise DataError(f"{folder}: {nothing_read(folder)}")
    sources: list[Source] = []
    told = [f"{name} ({reason})" for name, reason in skipped]
    twins, seen = _may_be_copies(found), dict[str, Path]()
    for file in found:
        source = _file_source(file, field)
        first = seen.setdefault(source.content_hash(may_read=may_read), file) if file in twins else file
        if first is file:
            sources.append(source)
        else:
            told.append(f"{file.name} (the same content as {first.name})")
    if told:
        more = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
        entries = f"{len(sources)} of {len(sources) + len(told)} entries"
        say(f"{folder}: {entries} are read, skipped: {', '.join(told[:MOST_TOLD])}{more}")
    return sources


def _may_be_copies(files: Sequence[Path]) -> set[Path]:
    """Those as large as another one, or called like one but for its compression: only they are worth reading twice."""
    alike: dict[object, list[Path]] = {}
    for file in files:
        for mark in (file.stat().st_size, file.stem if is_compressed(file) else file.name):
            alike.setdefault(mark, []).append(file)
    return {file for group in alike.values() if len(group) > 1 for file in group}


def _file_source(path: Path, field: str) -> Source:
    if str(path) == MOCK:
        raise DataError("mock makes random tokens and cannot be mixed with text; give --data-path mock alone")
    if not path.is_file():
        raise DataError(f"{path}: no such file. {near_path(str(path))} What is read: text, JSONL and parquet files")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: the file may not be read; change its permissions")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; give one with text in it")
    if path.suffix in INDEXED:
        raise DataError(f"{path}: holds tokens, where text is needed; give the text, JSONL or parquet file")
    if reason := refusal_of(path):
        raise DataError(f"{path}: {reason}")
    for suffixes, kind in _FORMATS:
        if kind_of(path) in suffixes:
            return kind(path, field)
    return TextFile(path)


def all_documents(sources: Iterable[Source], bad: BadRecords | None = None) -> Iterator[str]:
    """The documents of all sources, one source after the other. bad: takes broken records; None: they are raised."""
    for source in sources:
        yield from source.documents(bad)


def sources_hash(sources: Sequence[Source]) -> str:
    """One hash over the content of all sources, in order."""
    return digest(*(source.content_hash() for source in sources))


def place_of(text: str) -> float:
    """Where a document falls in [0, 1): a hash of its text, so that copies of it never end on two sides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
