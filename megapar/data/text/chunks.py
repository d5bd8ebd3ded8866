"""Chunks of inputs, the only way in which text is read; they yield the same documents to every reader.

Text and JSONL files are cut every 16 MiB, files below 4 GiB into 256 chunks of at least 1 MiB, and the end of a file
four times as finely, so that workers finish together. A chunk contains the documents that begin in its bytes. A
compressed file is one chunk, because it can only be read from its beginning, and so is one that is a document. Parquet
files are cut by row groups, ``datasets`` sources every 8,192 rows. ``BadRecords`` counts the broken records of all
chunks, or refuses the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from megapar.data.cache import hash_parts, make_once
from megapar.data.text.hf_dataset import open_dataset
from megapar.errors import DataError
from megapar.files.data_files import (
    FIELD,
    LONGEST_LINE,
    ROW,
    checked_text,
    decoded,
    is_compressed,
    opened,
    rest_of_line,
    text_of_line,
    too_long,
)
from megapar.files.data_object import DataFile, DataObject, size_of
from megapar.files.location import at
from megapar.files.objects import ObjectHead


class BadRecords:
    """Counts the records that a reader skips, and keeps the messages of the first few.

    Attributes:
        count: Number of records skipped.
        first: The messages of the first ``KEPT``.
    """

    KEPT = 5

    def __init__(self, *, stops: bool = False) -> None:
        """Raise the first broken record if ``stops``, instead of skipping it."""
        self.count = 0
        self.first: list[str] = []
        self._stops = stops

    def add(self, error: DataError) -> None:
        """Count one skipped record, or raise ``error`` with the flag that would skip it."""
        if self._stops and "--on-bad-record" in str(error):
            raise error
        if self._stops:
            raise DataError(f"{error}; repair or remove the record, or set --on-bad-record skip") from error
        self.count += 1
        if len(self.first) < self.KEPT:
            self.first.append(str(error))

    def __str__(self) -> str:
        return skipped_text(self.count, self.first)


def skipped_text(count: int, first: list[str]) -> str:
    """Return the sentence that reports ``count`` skipped records and describes the ``first`` of them."""
    more = f"; and {count - len(first)} more" if count > len(first) else ""
    return f"{count} broken records were skipped: {'; '.join(first)}{more}"


CHUNK_BYTES = 16 << 20
LEAST_CHUNK_BYTES = 1 << 20
CHUNKS = 256  # chunks of a file, unless they would be larger or smaller than the limits above
LAST = 4  # chunks at the end of a file that are cut again
LAST_BYTES = 1 << 18  # minimum size of the pieces of these last chunks
CHUNK_ROWS = 8192
_END = 1 << 62  # in place of the unknown length of a compressed file
_WHITE_SPACE = " \t\n\r\v\f"  # white space according to bytes.strip()
_BLOCK_BYTES = 1 << 18  # read and decoded at once, plus the rest of the last line


class LineNumbers:
    """Counts the lines before an offset in a file, which only messages need.

    If the chunks of a file are read in order, each byte is counted once.

    Attributes:
        bytes_read: Bytes read for counting so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._path: DataFile = Path()
        self._end = self._lines = 0

    def before(self, path: DataFile, end: int) -> int:
        """Return the number of line ends in the first ``end`` bytes of a file, 0 if it is compressed."""
        if path != self._path or end < self._end:
            self._path, self._end, self._lines = path, 0, 0
        with opened(path, end) as file:
            file.seek(self._end)
            while self._end < end and (block := file.read(min(1 << 20, end - self._end))):
                self._lines += block.count(b"\n")
                self._end += len(block)
                self.bytes_read += len(block)
        return self._lines


@dataclass(frozen=True)
class TextChunk:
    """A range of one input.

    Attributes:
        kind: jsonl, lines, blank (documents between blank lines), whole (the file is one document), parquet, or rows
            (of a ``datasets`` source).
        path: The file; for a ``datasets`` source, its name and split with a zero character between them.
        first: The first byte of a file, row group of a parquet file, or row.
        last: The end of the range, excluded.
        field: The field or column that contains the document; ROW for whole rows.
        head: Size and ETag of an object, whose URI is ``path``; None for other inputs.
    """

    kind: str
    path: str
    first: int
    last: int
    field: str = FIELD
    head: tuple[int, str] | None = None

    @property
    def file(self) -> DataFile:
        """The file or the object."""
        return Path(self.path) if self.head is None else DataObject(at(self.path), ObjectHead(*self.head))

    def documents(self, bad: BadRecords, numbers: LineNumbers | None = None) -> Iterator[str]:
        """Yield the documents that begin in the chunk, except those of only white space.

        Args:
            bad: Receives broken records, with their line or row in the whole input.
            numbers: Shared by all chunks of one reader.
        """
        if self.kind in _ROW_READERS:
            return _texts(self, bad)
        return _LINE_READERS[self.kind](self, _Lines(self, numbers or LineNumbers()), bad)

    def records(self, numbers: LineNumbers | None = None) -> Iterator[tuple[Any, Callable[[DataError], DataError]]]:
        """Yield each line of JSONL, or row of a table (a dict), and what puts its place in front of an error's message.

        A line that is too long is None. Raises DataError for text.
        """
        if self.kind in _ROW_READERS:
            for place, row in _ROW_READERS[self.kind](self):
                yield row, partial(_placed, place)
        elif self.kind == "jsonl":
            lines = _Lines(self, numbers or LineNumbers())
            for line in lines.texts():
                yield line, lines.refuse
        else:
            raise DataError(f"{self.path}: text has no records; pass JSONL or parquet files")


def _placed(place: str, error: DataError) -> DataError:
    return DataError(f"{place}{error}")


def file_chunks(kind: str, path: DataFile, field: str = FIELD) -> list[TextChunk]:
    """Return the chunks of a text or JSONL file."""
    stretches = [(0, _END)] if kind == "whole" or is_compressed(path) else _stretches(size_of(path))
    return [TextChunk(kind, str(path), *stretch, field, getattr(path, "head", None)) for stretch in stretches]


def parquet_chunks(path: DataFile, field: str) -> list[TextChunk]:
    """Return one chunk per row group of a parquet file. Raises DataError if it is unreadable or lacks the column."""
    with _parquet_file(path, field) as file:
        return _steps("parquet", str(path), file.num_row_groups, 1, field, getattr(path, "head", None))


def dataset_chunks(name: str, split: str, field: str) -> list[TextChunk]:
    """Return the chunks of one split of a ``datasets`` source. Raises DataError if it cannot be read."""
    return _steps("rows", f"{name}\0{split}", len(open_dataset(name, split, field)), CHUNK_ROWS, field)


def _stretches(size: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) bytes of the chunks of a file of ``size`` bytes."""
    step = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, size // CHUNKS))
    edge = max(0, size // step - LAST) * step
    last = min(step, max(LAST_BYTES, step // 4))
    begins = [*range(0, edge, step), *range(edge, size, last)]
    yield from zip(begins, [*begins[1:], size], strict=True)


def _steps(kind: str, path: str, size: int, step: int, field: str, head: ObjectHead | None = None) -> list[TextChunk]:
    return [TextChunk(kind, path, first, min(first + step, size), field, head) for first in range(0, size, step)]


class _Lines:
    """The lines of a file that begin in a chunk; ``places`` also yields those after it.

    ``refuse`` names the last line yielded. The lines before the chunk are counted only for the first such message.
    """

    def __init__(self, chunk: TextChunk, numbers: LineNumbers) -> None:
        self._file = chunk.file
        self._first, self._last = chunk.first, chunk.last
        self._given = 0
        self._numbers = numbers
        self._before: int | None = None

    def texts(self) -> Iterator[str | bytes | None]:
        """Yield the lines that begin in the chunk, decoded; the lines of a block that is not UTF-8 are bytes.

        A line of more than LONGEST_LINE bytes is yielded as None and never held in memory. A block is decoded as a
        whole and then split, which takes half the time of decoding line by line.
        """
        with opened(self._file, self._last) as file:
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
        """Yield (offset of the first byte, line) up to the end of the file; None for a line that is too long."""
        with opened(self._file, self._last) as file:
            place = self._seek(file)
            while True:
                line, size = rest_of_line(file)
                if not size:
                    return
                self._given += 1
                yield place, line if size <= LONGEST_LINE else None
                place += size

    def _seek(self, file: IO[bytes]) -> int:
        """Seek to the first line that begins at or after the chunk's first byte; return its offset."""
        if self._first:
            file.seek(self._first - 1)
            rest_of_line(file)
            self._first = file.tell()
        return self._first

    def refuse(self, error: DataError) -> DataError:
        """Return the error with the file and the line in front of its message."""
        if self._before is None:
            self._before = self._numbers.before(self._file, self._first)
        return DataError(f"{self._file}, line {self._before + self._given}{error}")


def _cut(block: bytes) -> Sequence[str | bytes]:
    block = block.removesuffix(b"\n")
    try:
        return block.decode().split("\n")
    except UnicodeDecodeError:
        return block.split(b"\n")


def _record(line: str | bytes, field: str) -> str:
    """Return the document of a line of JSONL, "" for a blank one."""
    blank = not (line.strip(_WHITE_SPACE) if isinstance(line, str) else line.strip())
    return "" if blank else text_of_line(line, "", field)


def _line(line: str | bytes, field: str) -> str:
    return (line if isinstance(line, str) else decoded(line, "")).rstrip()


def _by_line(
    read: Callable[[str | bytes, str], str], chunk: TextChunk, lines: _Lines, bad: BadRecords
) -> Iterator[str]:
    """Yield the document that ``read`` makes of each line."""
    for line in lines.texts():
        try:
            if line is None:
                raise too_long("")
            text = read(line, chunk.field)
        except DataError as error:
            bad.add(lines.refuse(error))
            continue
        if text and not text.isspace():
            yield text


def _blank(chunk: TextChunk, lines: _Lines, bad: BadRecords) -> Iterator[str]:
    """Yield the documents from the first blank line in the chunk (or the file's beginning) to the first one after it.

    A line is blank if it contains only Unicode white space.
    """
    document: list[str] = []
    held, inside = 0, chunk.first == 0
    for place, line in lines.places():
        text, error = _stripped(line)
        if text != "":
            size = LONGEST_LINE + 1 if line is None else len(line)
            held += size
            if inside and error is not None:
                bad.add(lines.refuse(error))
            if inside and held > LONGEST_LINE:  # the rest of the document is skipped too, up to a blank line
                if held - size <= LONGEST_LINE:
                    bad.add(lines.refuse(too_long("")))
                document = []
            elif inside and text is not None:
                document.append(text)
            continue
        held = 0
        if document:
            yield "\n".join(document)
            document = []
        if place >= chunk.last:
            if isinstance(chunk.file, DataObject):  # ``places`` does not come to its end
                chunk.file.refuse_changed()
            return
        inside = True
    if document:
        yield "\n".join(document)


def _whole(chunk: TextChunk, lines: _Lines, bad: BadRecords) -> Iterator[str]:
    """Yield the file as one document, without white space at the ends of lines; nothing if it is broken or too long."""
    document, size = list[str](), 0
    for _, line in lines.places():
        text, error = _stripped(line)
        size += LONGEST_LINE + 1 if line is None else len(line)
        if size > LONGEST_LINE:
            bad.add(_file_too_long(chunk.file))
            return
        if error is not None:
            bad.add(lines.refuse(error))
            return
        document.append(text or "")
    if text := "\n".join(document).strip("\n"):
        yield text


def refuse_too_long(file: DataFile) -> None:
    """Raise DataError if a file has more bytes than one document may have."""
    if size_of(file) > LONGEST_LINE:
        raise _file_too_long(file)


def _file_too_long(file: DataFile) -> DataError:
    return DataError(
        f"{file}: it has more than {LONGEST_LINE:,} bytes, the maximum for one document; set --document-per paragraph "
        "to end documents at blank lines, split the file, or set --on-bad-record skip"
    )


def _stripped(line: bytes | None) -> tuple[str | None, DataError | None]:
    """Return (text, error): the text is "" for a blank line, and None if it is too long or not UTF-8 (an error)."""
    try:
        return (None if line is None else decoded(line, "").rstrip()), None
    except DataError as error:
        return None, error


@lru_cache(256)
def _footer(path: DataObject) -> Any:
    """Return the footer of a parquet object, which each of its chunks needs: this node's cache keeps it."""
    import pyarrow.parquet as parquet

    def read(entry: Path) -> None:
        with path.opened() as source:
            parquet.read_metadata(source.raw).write_metadata_file(entry)

    name = hash_parts(str(path), str(path.head.size), path.head.etag)
    return parquet.read_metadata(make_once(f"footers/{name}", read))


@contextmanager
def _parquet_file(path: DataFile, field: str) -> Iterator[Any]:
    """Open a parquet file. Raises DataError, also in place of an error while it is read."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: parquet files need the package pyarrow (pip install pyarrow)") from error
    with nullcontext(path) if isinstance(path, Path) else path.opened() as source:
        try:
            footer = None if isinstance(path, Path) else _footer(path)
            with parquet.ParquetFile(source if isinstance(source, Path) else source.raw, metadata=footer) as file:
                if field not in (ROW, *file.schema_arrow.names):
                    columns = ", ".join(map(repr, file.schema_arrow.names))
                    raise DataError(f"{path}: no field {field!r}; the columns are {columns}")
                yield file
        except DataError:
            raise
        except Exception as error:  # pyarrow raises many types for a file that it cannot read
            raise DataError(f"{path}: not a readable parquet file ({error})") from error


def _parquet(chunk: TextChunk) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the columns of each row of a chunk, as ``_rows`` does."""
    columns = None if chunk.field == ROW else [chunk.field]
    with _parquet_file(chunk.file, chunk.field) as file:
        row = sum(file.metadata.row_group(i).num_rows for i in range(chunk.first))
        for batch in file.iter_batches(256, row_groups=range(chunk.first, chunk.last), columns=columns):
            for record in batch.to_pylist():
                yield f"{chunk.path}, row {row}", record
                row += 1


def _rows(chunk: TextChunk) -> Iterator[tuple[str, dict[str, Any]]]:
    name, part = chunk.path.split("\0")
    rows = open_dataset(name, part, chunk.field)
    for first in range(chunk.first, chunk.last, 256):
        batch = rows[first : min(first + 256, chunk.last)]
        for number, values in enumerate(zip(*batch.values(), strict=True), first):
            yield f"{name}, row {number}", dict(zip(batch, values, strict=True))


def _texts(chunk: TextChunk, bad: BadRecords) -> Iterator[str]:
    """Yield the documents in the column ``field`` of each row."""
    for place, row in _ROW_READERS[chunk.kind](chunk):
        text = row[chunk.field]
        try:
            document = checked_text(text, {chunk.field: text}, place, chunk.field)
        except DataError as error:
            bad.add(error)
            continue
        if document.strip():
            yield document


_LINE_READERS: dict[str, Callable[[TextChunk, _Lines, BadRecords], Iterator[str]]] = {
    "jsonl": partial(_by_line, _record),
    "lines": partial(_by_line, _line),
    "blank": _blank,
    "whole": _whole,
}
_ROW_READERS: dict[str, Callable[[TextChunk], Iterator[tuple[str, dict[str, Any]]]]] = {
    "parquet": _parquet,
    "rows": _rows,
}


def describe(chunks: Sequence[TextChunk]) -> list[list[Any]]:
    """Return everything that decides the content of the chunks: paths, ranges, and size and mtime or ETag of each.

    Of a dataset it is the fingerprint, with which its folder is read.
    """
    described, fingerprints = [], dict[str, str]()
    for chunk in chunks:
        path = Path(chunk.path.split("\0")[0])
        status = path.stat() if path.is_file() else None
        stamp = [*(chunk.head or ()), *([status.st_size, status.st_mtime_ns] if status else [])]
        if chunk.kind == "rows":
            if chunk.path not in fingerprints:
                name, part = chunk.path.split("\0")
                fingerprints[chunk.path] = str(open_dataset(name, part, chunk.field)._fingerprint)
            stamp = [fingerprints[chunk.path]]
        described.append([chunk.kind, chunk.path, chunk.first, chunk.last, chunk.field, *stamp])
    return described
