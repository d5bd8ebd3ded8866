"""Sources of documents: the built-in text, text files, JSONL files, parquet files. One iterator of texts each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megapar.data import builtin
from megapar.data.cache import digest, made_once
from megapar.errors import DataError

BUILTIN = "builtin"
MOCK = "mock"
FIELD = "text"
"""The field of a JSONL record, and the column of a parquet file, that holds the document."""


class Source(Protocol):
    """A named collection of documents in a fixed order."""

    @property
    def name(self) -> str:
        """What the user called it."""

    def documents(self) -> Iterator[str]:
        """The documents, none of them empty; raises DataError with file and line at the first broken one."""

    def content_hash(self) -> str:
        """A hash of the content, whatever the file is called."""


@dataclass(frozen=True)
class BuiltinSource:
    """The text every CPython carries, kept in the cache after it has been collected once."""

    name: str = BUILTIN

    def _file(self) -> JsonlFile:
        import sys

        version = "{}.{}.{}-{}".format(*sys.version_info[:4])
        return JsonlFile(made_once(f"text/builtin-{builtin.VERSION}-python-{version}.jsonl", _write_builtin))

    def documents(self) -> Iterator[str]:
        """See Source."""
        return self._file().documents()

    def content_hash(self) -> str:
        """See Source."""
        return self._file().content_hash()


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

    def content_hash(self) -> str:
        """SHA-256 of the file's bytes and its format; remembered by path, size and time of change."""
        status = self.path.stat()
        key = digest(str(self.path.resolve()), str(status.st_size), str(status.st_mtime_ns))

        def write(entry: Path) -> None:
            state = hashlib.sha256()
            with open(self.path, "rb") as data:
                while block := data.read(1 << 20):
                    state.update(block)
            entry.write_text(state.hexdigest())

        return digest(type(self).__name__, made_once(f"hashes/{key}", write).read_text())


@dataclass(frozen=True)
class TextFile(_File):
    """A text file: blank lines separate documents, as in BERT's pre-training data.

    A file without any blank line holds one document per line.
    """

    def documents(self) -> Iterator[str]:
        """See Source."""
        line_is_document = not self._has_blank_line()
        lines: list[str] = []
        for line in self._lines():
            if line.strip():
                lines.append(line.rstrip())
            if lines and (line_is_document or not line.strip()):
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)

    def _has_blank_line(self) -> bool:
        """Whether a blank line stands between two others."""
        seen = blank = False
        for line in self._lines():
            if line.strip():
                if blank:
                    return True
                seen = True
            else:
                blank = seen
        return False

    def _lines(self) -> Iterator[str]:
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield line.decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"{self.path}, line {number}: not UTF-8 text ({error.reason})") from error


@dataclass(frozen=True)
class JsonlFile(_File):
    """A JSONL file: one object per line, the document in its field ``text``; blank lines are passed over."""

    def documents(self) -> Iterator[str]:
        """See Source."""
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and (text := self._text(line, number)).strip():
                    yield text

    def _text(self, line: bytes, number: int) -> str:
        place = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # also bytes that are not UTF-8
            raise DataError(f"{place}: not a JSON record ({error}); repair or remove the line") from error
        return _checked_text(record.get(FIELD) if isinstance(record, dict) else None, record, place)


@dataclass(frozen=True)
class ParquetFile(_File):
    """A parquet file with a column ``text``, read in batches through the package ``datasets``."""

    def documents(self) -> Iterator[str]:
        """See Source."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(f"{self.path}: parquet files need the package datasets (pip install datasets)") from error
        try:
            rows = datasets.load_dataset("parquet", data_files=str(self.path), split="train", streaming=True)
            for number, row in enumerate(rows):
                text = _checked_text(row.get(FIELD), row, f"{self.path}, row {number}")
                if text.strip():
                    yield text
        except DataError:
            raise
        except Exception as error:  # whatever pyarrow and datasets raise for a file they cannot read
            raise DataError(f"{self.path}: not a readable parquet file ({error})") from error


def _checked_text(text: Any, record: Any, place: str) -> str:
    if isinstance(text, str):
        try:
            return text if text.isascii() else text.encode().decode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise DataError(f"{place}: field {FIELD!r} is not valid Unicode ({error.reason})") from error
    if isinstance(record, dict) and FIELD not in record:
        names = ", ".join(map(repr, list(record)[:8])) or "no fields"
        raise DataError(f"{place}: no field {FIELD!r}; the record has {names}")
    kind = type(text if isinstance(record, dict) else record).__name__
    where = f"field {FIELD!r} is" if isinstance(record, dict) else "the record is"
    wanted = "a string" if isinstance(record, dict) else f"an object with a field {FIELD!r}"
    raise DataError(f"{place}: {where} of type {kind}, not {wanted}")


_FORMATS: tuple[tuple[tuple[str, ...], type[TextFile] | type[JsonlFile] | type[ParquetFile]], ...] = (
    ((".jsonl", ".json", ".ndjson"), JsonlFile),
    ((".parquet",), ParquetFile),
)


def open_sources(paths: Sequence[str]) -> tuple[Source, ...]:
    """The sources that ``--data-path`` names, in order; a folder stands for its files, sorted by name.

    Raises DataError where a path is missing, empty, or of a kind that is read otherwise.
    """
    sources: list[Source] = []
    for path in paths:
        if path == BUILTIN:
            sources.append(BuiltinSource())
        elif Path(path).is_dir():
            files = sorted(p for p in Path(path).iterdir() if p.is_file() and not p.name.startswith("."))
            if not files:
                raise DataError(f"{path}: the folder holds no files")
            sources += [_file_source(file) for file in files]
        else:
            sources.append(_file_source(Path(path)))
    if not sources:
        raise DataError("no data path was given; --data-path builtin needs no file")
    return tuple(sources)


def _file_source(path: Path) -> Source:
    if str(path) == MOCK:
        raise DataError("mock makes random tokens and cannot be mixed with text; give --data-path mock alone")
    if not path.is_file():
        raise DataError(f"{path}: no such file; --data-path takes builtin, mock, and text, JSONL or parquet files")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: the file may not be read; change its permissions")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    if path.suffix in (".bin", ".idx"):
        raise DataError(f"{path}: indexed token files are not read; give the text, JSONL or parquet file")
    for suffixes, kind in _FORMATS:
        if path.suffix.lower() in suffixes:
            return kind(path)
    return TextFile(path)


def all_documents(sources: Iterable[Source]) -> Iterator[str]:
    """The documents of all sources, one source after the other."""
    for source in sources:
        yield from source.documents()


def sources_hash(sources: Sequence[Source]) -> str:
    """One hash over the content of all sources, in order."""
    return digest(*(source.content_hash() for source in sources))


def place_of(text: str) -> float:
    """Where a document falls in [0, 1): a hash of its text, so that copies of it never end on two sides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
