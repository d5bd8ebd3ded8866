"""Inputs of ``megapar data prepare``, cut in chunks that do not depend on who reads them.

Text and JSONL files are cut at every 16 MiB, those below 1 GiB in 64 chunks of 1 MiB at least, so that no worker waits
long for another: a chunk holds the documents that begin in its bytes. Parquet files are cut by row groups, ``datasets``
sources by 8,192 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.data.source import (
    FIELD,
    BadRecords,
    BuiltinSource,
    JsonlFile,
    ParquetFile,
    Source,
    TextFile,
    checked_text,
    decoded,
    open_sources,
    text_of_line,
)
from megapar.errors import DataError

CHUNK_BYTES = 16 << 20
LEAST_CHUNK_BYTES = 1 << 20
CHUNKS = 64  # of a file, where they are not larger or smaller than these
CHUNK_ROWS = 8192


@dataclass(frozen=True)
class Chunk:
    """A stretch of one input. kind: jsonl, lines, blank (documents between blank lines), parquet, rows.

    first, last: bytes of a file, row groups of a parquet file, rows of a dataset.
    """

    kind: str
    path: str
    first: int
    last: int
    field: str = FIELD

    def documents(self, bad: BadRecords) -> Iterator[str]:
        """The documents that begin in it; broken records go to ``bad`` by their line or row of the whole input."""
        readers = {"jsonl": _jsonl, "lines": _lines, "blank": _blank, "parquet": _parquet, "rows": _rows}
        return readers[self.kind](self, bad)


def chunks_of(paths: Sequence[str], dataset: str | None, part: str, field: str) -> list[Chunk]:
    """The chunks of all inputs. dataset: a ``datasets`` source, of which ``part`` is read; raises DataError."""
    found = [chunk for source in (open_sources(paths) if paths else ()) for chunk in _of_source(source, field)]
    if dataset is not None:
        found += _steps("rows", f"{dataset}\0{part}", len(_dataset(dataset, part, field)), CHUNK_ROWS, field)
    return found


def _of_source(source: Source, field: str) -> list[Chunk]:
    if isinstance(source, BuiltinSource):
        source, field = source.file(), FIELD
    if isinstance(source, ParquetFile):
        return _steps("parquet", source.name, _parquet_file(source.name, field).num_row_groups, 1, field)
    assert isinstance(source, JsonlFile | TextFile)
    kind = "jsonl"
    if isinstance(source, TextFile):
        kind = "blank" if source.has_blank_line() else "lines"
    size = source.path.stat().st_size
    step = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, size // CHUNKS))
    return _steps(kind, source.name, size, step, field)


def _steps(kind: str, path: str, size: int, step: int, field: str) -> list[Chunk]:
    return [Chunk(kind, path, first, min(first + step, size), field) for first in range(0, size, step)]


class _Lines:
    """The lines of a file from the first one that begins in a chunk on.

    Iterating gives (place of the first byte, line). ``refuse`` names the line that was given last; only then are the
    lines before the chunk counted, once.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._path = chunk.path
        self._first = chunk.first
        self._given = 0
        self._before: int | None = None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with open(self._path, "rb") as file:
            if self._first:
                file.seek(self._first - 1)
                self._first += len(file.readline()) - 1
            place = self._first
            for line in file:
                self._given += 1
                yield place, line
                place += len(line)

    def refuse(self, error: DataError) -> DataError:
        """The same error with file and line before it."""
        if self._before is None:
            self._before = _newlines(self._path, self._first)
        return DataError(f"{self._path}, line {self._before + self._given}{error}")


def _jsonl(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    lines = _Lines(chunk)
    for place, line in lines:
        if place >= chunk.last:
            return
        if line.strip():
            try:
                text = text_of_line(line, "", chunk.field)
            except DataError as error:
                bad.take(lines.refuse(error))
                continue
            if text.strip():
                yield text


def _lines(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    lines = _Lines(chunk)
    for place, line in lines:
        if place >= chunk.last:
            return
        try:
            text = decoded(line, "")
        except DataError as error:
            bad.take(lines.refuse(error))
            continue
        if text.strip():
            yield text.rstrip()


def _blank(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    """From the first blank line in the chunk (or the file's begin) to the first one behind the chunk."""
    lines = _Lines(chunk)
    document: list[str] = []
    inside = chunk.first == 0
    for place, line in lines:
        if line.strip():
            if inside:
                try:
                    document.append(decoded(line, "").rstrip())
                except DataError as error:
                    bad.take(lines.refuse(error))
            continue
        if document:
            yield "\n".join(document)
            document = []
        if place >= chunk.last:
            return
        inside = True
    if document:
        yield "\n".join(document)


def _newlines(path: str, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (block := file.read(min(1 << 20, end))):
            count += block.count(b"\n")
            end -= len(block)
    return count


def _parquet_file(path: str, field: str) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: parquet files need the package pyarrow (pip install pyarrow)") from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # whatever pyarrow raises for a file it cannot read
        raise DataError(f"{path}: not a readable parquet file ({error})") from error
    if field not in file.schema_arrow.names:
        columns = ", ".join(map(repr, file.schema_arrow.names))
        raise DataError(f"{path}: no field {field!r}; the columns are {columns}")
    return file


def _parquet(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    file = _parquet_file(chunk.path, chunk.field)
    row = sum(file.metadata.row_group(i).num_rows for i in range(chunk.first))
    try:
        for batch in file.iter_batches(256, row_groups=range(chunk.first, chunk.last), columns=[chunk.field]):
            for text in batch.column(0).to_pylist():
                yield from _text(text, f"{chunk.path}, row {row}", chunk.field, bad)
                row += 1
    except OSError as error:
        raise DataError(f"{chunk.path}: not a readable parquet file ({error})") from error


def _dataset(name: str, part: str, field: str) -> Any:
    from megapar.data.streaming import open_dataset

    return open_dataset(name, part, field)


def _rows(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    name, part = chunk.path.split("\0")
    rows = _dataset(name, part, chunk.field)
    for first in range(chunk.first, chunk.last, 256):
        for number, text in enumerate(rows[first : min(first + 256, chunk.last)][chunk.field], first):
            yield from _text(text, f"{name}, row {number}", chunk.field, bad)


def _text(text: Any, place: str, field: str, bad: BadRecords) -> Iterator[str]:
    try:
        good = checked_text(text, {field: text}, place, field)
    except DataError as error:
        bad.take(error)
        return
    if good.strip():
        yield good


def describe(chunks: Sequence[Chunk]) -> list[list[Any]]:
    """What decides the content of the chunks: paths, stretches, and size and time of change of each file."""
    told = []
    for chunk in chunks:
        path = Path(chunk.path.split("\0")[0])
        status = path.stat() if path.is_file() else None
        stamp = [status.st_size, status.st_mtime_ns] if status else []
        told.append([chunk.kind, chunk.path, chunk.first, chunk.last, chunk.field, *stamp])
    return told
