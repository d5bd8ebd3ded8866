"""Inputs of ``megapar data prepare``, cut in chunks that do not depend on who reads them.

Text and JSONL files are cut at every 16 MiB, those below 4 GiB in 256 chunks of 1 MiB at least, and towards their end
four times as often, so that no worker waits long for another at the end: a chunk holds the documents that begin in its
bytes. A compressed file is one chunk, because it is read from its beginning only. Parquet files are cut by row groups,
``datasets`` sources by 8,192 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megapar.config.data_files import is_compressed, opened
from megapar.config.record import (
    FIELD,
    LONGEST_LINE,
    checked_text,
    decoded,
    rest_of_line,
    text_of_line,
    too_long,
)
from megapar.data.source import BadRecords, BuiltinSource, JsonlFile, ParquetFile, Source, TextFile, open_sources
from megapar.errors import DataError

CHUNK_BYTES = 16 << 20
LEAST_CHUNK_BYTES = 1 << 20
CHUNKS = 256  # of a file, where they are not larger or smaller than these
LAST = 4  # so many chunks at the end of a file are cut again, in pieces of
LAST_BYTES = 1 << 18  # at least
_END = 1 << 62  # of a file whose length nobody knows
CHUNK_ROWS = 8192
_WHITE_SPACE = " \t\n\r\v\f"  # as of bytes
_BLOCK_BYTES = 1 << 18  # read and decoded at a time, and the rest of the last line


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


def chunks_of(
    paths: Sequence[str], dataset: str | None, part: str, field: str, say: Callable[[str], object] = lambda text: None
) -> list[Chunk]:
    """The chunks of all inputs. dataset: a ``datasets`` source, of which ``part`` is read; raises DataError.

    say: is told what is skipped of a folder.
    """
    sources = open_sources(paths, field, say) if paths else ()
    found = [chunk for source in sources for chunk in _of_source(source, field)]
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
    if is_compressed(source.path):
        return [Chunk(kind, source.name, 0, _END, field)]
    return [Chunk(kind, source.name, *piece, field) for piece in _pieces(source.path.stat().st_size)]


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of so many bytes begin and end."""
    step = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, size // CHUNKS))
    edge = max(0, size // step - LAST) * step
    last = min(step, max(LAST_BYTES, step // 4))
    begins = [*range(0, edge, step), *range(edge, size, last)]
    yield from zip(begins, [*begins[1:], size], strict=True)


def _steps(kind: str, path: str, size: int, step: int, field: str) -> list[Chunk]:
    return [Chunk(kind, path, first, min(first + step, size), field) for first in range(0, size, step)]


class _Lines:
    """The lines of a file that begin in a chunk, and those behind it for whoever asks for them.

    ``refuse`` names the line that was given last; only then are the lines before the chunk counted, once.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._path = chunk.path
        self._first, self._last = chunk.first, chunk.last
        self._given = 0
        self._before: int | None = None

    def texts(self) -> Iterator[str | bytes | None]:
        """Those that begin in the chunk, decoded; the lines of a block that is not UTF-8 are given as they are.

        None stands for a line of more than LONGEST_LINE bytes, of which no more is held. A block is decoded at once and
        cut then, which takes half the time of its lines one by one.
        """
        with opened(Path(self._path)) as file:
            place = self._seek(file)
            while (left := self._last - place) > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
                rest, size = (b"", 0) if block.endswith(b"\n") else rest_of_line(file)
                place += len(block) + size
                last = block.rfind(b"\n") + 1
                long = size > 0 and len(block) - last + size > LONGEST_LINE
                block = block[:last] if long else block + rest
                for line in _cut(block) if block else ():
                    self._given += 1
                    yield line
                if long:
                    self._given += 1
                    yield None

    def places(self) -> Iterator[tuple[int, bytes | None]]:
        """(place of the first byte, line) to the end of the file; None for a line that is too long."""
        with opened(Path(self._path)) as file:
            place = self._seek(file)
            while True:
                line, size = rest_of_line(file)
                if not size:
                    return
                self._given += 1
                yield place, line if size <= LONGEST_LINE else None
                place += size

    def _seek(self, file: IO[bytes]) -> int:
        """To the first line that begins in the chunk or behind it; its place."""
        if self._first:
            file.seek(self._first - 1)
            rest_of_line(file)
            self._first = file.tell()
        return self._first

    def refuse(self, error: DataError) -> DataError:
        """The same error with file and line before it."""
        if self._before is None:
            self._before = _newlines(self._path, self._first)
        return DataError(f"{self._path}, line {self._before + self._given}{error}")


def _cut(block: bytes) -> Sequence[str | bytes]:
    block = block.removesuffix(b"\n")
    try:
        return block.decode().split("\n")
    except UnicodeDecodeError:
        return block.split(b"\n")


def _jsonl(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    lines = _Lines(chunk)
    for line in lines.texts():
        if line is None:
            bad.take(lines.refuse(too_long("")))
            continue
        if not (line.strip(_WHITE_SPACE) if isinstance(line, str) else line.strip()):
            continue
        try:
            text = text_of_line(line, "", chunk.field)
        except DataError as error:
            bad.take(lines.refuse(error))
            continue
        if text and not text.isspace():
            yield text


def _lines(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    lines = _Lines(chunk)
    for line in lines.texts():
        if line is None:
            bad.take(lines.refuse(too_long("")))
            continue
        try:
            text = line if isinstance(line, str) else decoded(line, "")
        except DataError as error:
            bad.take(lines.refuse(error))
            continue
        if text and not text.isspace():
            yield text.rstrip()


def _blank(chunk: Chunk, bad: BadRecords) -> Iterator[str]:
    """From the first blank line in the chunk (or the file's begin) to the first one behind the chunk.

    Blank is what ``TextFile`` takes for it: a line of white space as of Unicode.
    """
    lines = _Lines(chunk)
    document: list[str] = []
    held, inside = 0, chunk.first == 0
    for place, line in lines.places():
        text, error = _stripped(line)
        if text != "":
            size = LONGEST_LINE + 1 if line is None else len(line)
            held += size
            if inside and error is not None:
                bad.take(lines.refuse(error))
            if inside and held > LONGEST_LINE:  # the rest up to a blank line goes with it
                if held - size <= LONGEST_LINE:
                    bad.take(lines.refuse(too_long("")))
                document = []
            elif inside and text is not None:
                document.append(text)
            continue
        held = 0
        if document:
            yield "\n".join(document)
            document = []
        if place >= chunk.last:
            return
        inside = True
    if document:
        yield "\n".join(document)


def _stripped(line: bytes | None) -> tuple[str | None, DataError | None]:
    """A line's text, "" of a blank one; None, and why, of one that is none, or (without a reason) too long."""
    try:
        return (None if line is None else decoded(line, "").rstrip()), None
    except DataError as error:
        return None, error


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
