"""Megatron's indexed token files: PREFIX.bin, the concatenated ids of all sequences, and PREFIX.idx.

Format of the .idx file, little endian, without gaps (Megatron-LM core/datasets/indexed_dataset.py, version 1):

    offset  bytes  what
    0       9      magic "MMIDIDX" and two zero bytes
    9       8      version, uint64: 1
    17      1      dtype code, uint8: see DTYPE_CODES
    18      8      N, uint64: sequences
    26      8      D, uint64: documents + 1
    34      4 N    length of each sequence in elements, int32
            8 N    offset of each sequence in the .bin file in bytes, int64
            8 D    document d is sequences [indices[d], indices[d + 1]), int64
            N      mode of each sequence, int8; only in multimodal files
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from megapar.data.lazy_numpy import np
from megapar.errors import DataError
from megapar.files.disk import sync
from megapar.files.token_index import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    SAMPLE_TOKENS,
    SAMPLES,
    VERSION,
    Head,
    bad_id,
    check_dtype,
    places,
    read_head,
)

_BLOCK = 1 << 20  # sequences or tokens in memory at a time during a full pass

TARGETS, LAST_OF_DOCUMENT = 1, 2
"""Bits of a sequence's marks. TARGETS is also its mode in files of conversations, whose sequences are runs of tokens
that are learned, or are not. LAST_OF_DOCUMENT is not in a file."""


class Summary(NamedTuple):
    """The result of a full check. ``largest`` is the largest id, or -1 for an empty file."""

    documents: int
    sequences: int
    tokens: int
    largest: int


@dataclass(frozen=True)
class MappedFile:
    """A file as it was mapped, even if replaced since. ``status``: device, inode, size, mtime in nanoseconds."""

    path: Path
    status: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: Path) -> MappedFile:
        """Return a file as it is now. Raises OSError."""
        now = path.stat()
        return cls(path, (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))

    def check(self) -> None:
        """Raise DataError if the file was overwritten in place, and what is mapped has changed with it."""
        try:
            now = MappedFile.of(self.path).status
        except OSError:
            return
        if now[:2] == self.status[:2] and now != self.status:
            raise DataError(
                f"{self.path} was overwritten while it was mapped: it had {self.status[2]:,} bytes and has {now[2]:,}. "
                "What was read since may be other data: restore it, and resume from the last checkpoint. To change the "
                "data of a run, write a new file and pass --override-data sources"
            )


class IndexedDataset:
    """The sequences of PREFIX.bin and PREFIX.idx, memory-mapped: opening takes the same time at any size.

    ``len(dataset)`` is N, the number of sequences. ``dataset[i]`` is [T], the ids of sequence i in the file's dtype,
    without a copy.

    Attributes:
        prefix: The path without suffix.
        files: The two files, as they were when they were mapped.
        dtype: Type of the ids.
        tokens: The ids of all sequences.
        lengths: [N] int32, ids of each sequence.
        pointers: [N] int64, offset of each sequence in bytes.
        document_indices: [D] int64, see the format.
        modes: [N] int8; None if the file has none.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Open PREFIX.bin and PREFIX.idx; ``prefix`` may also end in ``.bin`` or ``.idx``.

        Checks magic, version, dtype, counts, the lengths of both files, and samples of the index. Raises DataError with
        the file's name and the two numbers that differ.
        """
        self.prefix = without_suffix(prefix)
        self.index_path, self.data_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        for path in (self.index_path, self.data_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file; an indexed corpus is a .bin and an .idx file of one prefix")
        self.files = (MappedFile.of(self.index_path), MappedFile.of(self.data_path))
        head = read_head(self.index_path, self.data_path)
        self.dtype = np.dtype(head.dtype).newbyteorder("<")
        self._map(head)
        self._check_places()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> np.ndarray:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{number} is not one of {len(self)} sequences")
        start = int(self.pointers[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def document_start(self, document: int) -> int:
        """Return the index in ``tokens`` where a document begins; for ``documents``, where the last one ends."""
        sequence = int(self.document_indices[document])
        if sequence == len(self):
            return len(self.tokens)
        return int(self.pointers[sequence]) // int(self.dtype.itemsize)

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError if 32 runs of 1,024 tokens, spread over the file, contain ids outside [0, vocab_size)."""
        check_dtype(self.data_path, self.dtype.name)
        for start in places(len(self.tokens), SAMPLES):
            self._check_run(start, min(start + SAMPLE_TOKENS, len(self.tokens)), vocab_size)

    def verify(self, vocab_size: int | None = None) -> Summary:
        """Check the whole index and, against ``vocab_size``, every id. Raises DataError at the first bad entry."""
        address = 0
        for start in range(0, len(self), _BLOCK):
            lengths = np.asarray(self.lengths[start : start + _BLOCK], dtype=np.int64)
            expected = address + np.concatenate([[0], np.cumsum(lengths * self.dtype.itemsize)])
            wrong = np.flatnonzero((lengths < 0) | (self.pointers[start : start + _BLOCK] != expected[:-1]))
            if len(wrong):
                first = int(wrong[0])
                self._bad_sequence(start + first, int(expected[first]))
            address = int(expected[-1])
        for start in range(0, self.documents, _BLOCK):
            indices = np.asarray(self.document_indices[start : start + _BLOCK + 1])
            falling = np.flatnonzero(np.diff(indices) < 0)
            if len(falling):
                self._bad_document(start + int(falling[0]))
        largest = -1
        for start in range(0, len(self.tokens), _BLOCK):
            largest = max(largest, self._check_run(start, min(start + _BLOCK, len(self.tokens)), vocab_size))
        return Summary(self.documents, len(self), len(self.tokens), largest)

    def _map(self, head: Head) -> None:
        sequences, documents = head.sequences, head.documents
        buffer = _mapped(self.index_path, np.dtype(np.uint8))
        starts = HEADER.size + np.cumsum([0, 4 * sequences, 8 * sequences, 8 * documents])

        def array(place: int, dtype: str, count: int) -> Any:
            return np.frombuffer(buffer, dtype=dtype, count=count, offset=int(starts[place]))

        self.lengths = array(0, "<i4", sequences)
        self.pointers = array(1, "<i8", sequences)
        self.document_indices = array(2, "<i8", documents)
        self.modes = array(3, "<i1", sequences) if head.modes else None
        filled = self.data_path.stat().st_size > 0
        self.tokens = _mapped(self.data_path, self.dtype) if filled else np.empty(0, dtype=self.dtype)

    def _check_places(self) -> None:
        """Check the ends of the index and samples of it: each sequence must begin where the previous one ends."""
        item = self.dtype.itemsize
        if len(self) and int(self.pointers[0]) != 0:
            self._bad_sequence(0, 0)
        for number in places(len(self) - 1, SAMPLES):
            end = int(self.pointers[number]) + int(self.lengths[number]) * item
            if int(self.lengths[number]) < 0 or int(self.pointers[number + 1]) != end:
                self._bad_sequence(number + 1, end)
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if first != 0 or last != len(self):
            raise DataError(
                f"{self.index_path}: the documents are sequences {first} to {last}, but the file has 0 to {len(self)}"
            )
        for document in places(self.documents, SAMPLES):
            if self.document_indices[document] > self.document_indices[document + 1]:
                self._bad_document(document)

    def _bad_sequence(self, number: int, expected: int) -> None:
        raise DataError(
            f"{self.index_path}: sequence {number} begins at byte {int(self.pointers[number])} and has "
            f"{int(self.lengths[number])} elements, but the sequences before it end at byte {expected}"
        )

    def _bad_document(self, number: int) -> None:
        first, last = (int(i) for i in self.document_indices[number : number + 2])
        raise DataError(
            f"{self.index_path}: document {number} begins at sequence {first} and ends before it, at {last}"
        )

    def _check_run(self, start: int, end: int, vocab_size: int | None) -> int:
        """Return the largest id of tokens[start:end]. Raises DataError for an id outside [0, vocab_size)."""
        run = self.tokens[start:end]
        low, high = run.min(), run.max()
        if vocab_size is not None and (low < 0 or high >= vocab_size):
            place = start + int(np.flatnonzero((run < 0) | (run >= vocab_size))[0])
            raise bad_id(self.data_path, place, int(self.tokens[place]), vocab_size)
        return int(high)


class IndexedDatasetBuilder:
    """Writes PREFIX.bin and PREFIX.idx, which do not exist before ``finalize``.

        with IndexedDatasetBuilder("corpus", "uint16") as builder:
            builder.add_item([5, 6, 7])
            builder.end_document()
            builder.finalize()

    Memory is bounded, because lengths and document indices are written to temporary files too. An error or ``close``
    before ``finalize`` removes everything; a process that is killed leaves files called PREFIX.*.unfinished.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any, *, multimodal: bool = False) -> None:
        """Create the temporary files.

        ``dtype`` is a numpy dtype or its name; raises DataError if the format has no code for it. With ``multimodal``,
        each sequence has a mode.
        """
        self.prefix = without_suffix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {name: code for code, name in DTYPE_CODES.items()}
        if self.dtype.name not in codes:
            raise DataError(f"{self.dtype.name} has no code in the format; choose one of {', '.join(codes)}")
        self._code = codes[self.dtype.name]
        self._sequences = 0
        self._documents = 1
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        kinds = ("bin", "lengths", "documents", "idx", *(("modes",) if multimodal else ()))
        self._paths = {kind: Path(f"{self.prefix}.{kind}.unfinished") for kind in kinds}
        self._files: dict[str, IO[bytes]] = {kind: open(self._paths[kind], "wb") for kind in kinds}  # noqa: SIM115
        self._files["documents"].write(struct.pack("<q", 0))

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_item(self, ids: Any, mode: int = 0) -> None:
        """Add one sequence, anything that numpy converts to an array. Raises DataError if a value does not fit."""
        array = self._checked(ids)
        self._files["bin"].write(array.tobytes())
        self._files["lengths"].write(struct.pack("<i", array.size))
        if "modes" in self._files:
            self._files["modes"].write(struct.pack("<b", mode))
        self._sequences += 1

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add n documents of one sequence each: the ids ``tokens`` [T] of all, and ``lengths`` [n], whose sum is T."""
        self._index(lengths)
        self._files["bin"].write(self._checked(tokens).tobytes())

    def copy_documents(self, ids: IO[bytes], lengths: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Add documents like ``add_documents``, with ids of the same dtype from the current position of a file.

        With ``marks`` [n] int8, lengths are those of sequences, whose marks say their modes and where documents end.
        Raises DataError if the file ends early.
        """
        self._index(lengths, marks)
        left = int(lengths.sum()) * self.dtype.itemsize
        while left:
            block = ids.read(min(left, 1 << 22))
            if not block:
                raise DataError(f"{self.prefix}: {ids.name} ends {left} bytes early")
            self._files["bin"].write(block)
            left -= len(block)

    def _index(self, lengths: np.ndarray, marks: np.ndarray | None = None) -> None:
        if ("modes" in self._files) != (marks is not None):
            raise ValueError("a file with modes takes documents with marks, or one at a time, by add_item")
        self._files["lengths"].write(np.asarray(lengths, dtype="<i4").tobytes())
        ends = np.arange(self._sequences + 1, self._sequences + len(lengths) + 1, dtype="<i8")
        if marks is not None:
            self._files["modes"].write((marks & TARGETS).astype("<i1").tobytes())
            ends = ends[marks & LAST_OF_DOCUMENT > 0]
        self._files["documents"].write(ends.tobytes())
        self._sequences += len(lengths)
        self._documents += len(ends)

    def end_document(self) -> None:
        """End a document, which consists of the sequences added since the previous one."""
        self._files["documents"].write(struct.pack("<q", self._sequences))
        self._documents += 1

    def finalize(self, before_index: Callable[[Path], None] | None = None) -> None:
        """Write the index, sync both files and rename them. Raises DataError if a document was not ended.

        ``before_index`` is called with the path of the finished index before its rename, to write what belongs to it.
        """
        out = self._files["idx"]
        for kind in self._files:
            self._files[kind].flush()
        with open(self._paths["documents"], "rb") as documents:
            documents.seek(-8, os.SEEK_END)
            (ended,) = struct.unpack("<q", documents.read(8))
        if ended != self._sequences:
            raise DataError(f"{self.prefix}: {self._sequences - ended} sequences follow the last end_document()")
        out.write(HEADER.pack(MAGIC, VERSION, self._code, self._sequences, self._documents))
        self._copy("lengths")
        for pointers in self._pointers():
            out.write(pointers.tobytes())
        self._copy("documents")
        if "modes" in self._files:
            self._copy("modes")
        for kind in ("bin", "idx"):
            self._files[kind].flush()
            os.fsync(self._files[kind].fileno())
        # Between the two renames no index exists, so that an index never belongs to other data, not even on disk.
        for suffix in ("idx", "hashes", "chat"):
            Path(f"{self.prefix}.{suffix}").unlink(missing_ok=True)
        folder = Path(self.prefix).parent
        sync(folder)
        os.replace(self._paths["bin"], f"{self.prefix}.bin")
        if before_index is not None:
            before_index(self._paths["idx"])
        sync(folder)
        os.replace(self._paths["idx"], f"{self.prefix}.idx")
        self.close()
        sync(folder)

    def close(self) -> None:
        """Remove the files that are not finalized."""
        for kind, file in self._files.items():
            file.close()
            self._paths[kind].unlink(missing_ok=True)

    def _checked(self, ids: Any) -> np.ndarray:
        array = np.asarray(ids)
        if array.size == 0 or array.dtype == self.dtype:
            return array.astype(self.dtype)
        if self.dtype.kind in "iu":
            bounds = np.iinfo(self.dtype)
            if array.dtype.kind not in "iu" or array.min() < bounds.min or array.max() > bounds.max:
                raise DataError(
                    f"{self.prefix}: ids {array.min()} to {array.max()} do not fit {self.dtype.name} "
                    f"({bounds.min} to {bounds.max})"
                )
        return array.astype(self.dtype)

    def _pointers(self) -> Iterator[np.ndarray]:
        address = 0
        with open(self._paths["lengths"], "rb") as file:
            while block := file.read(4 * _BLOCK):
                sizes = np.frombuffer(block, dtype="<i4").astype(np.int64) * self.dtype.itemsize
                ends = address + np.cumsum(sizes)
                yield (ends - sizes).astype("<i8")
                address = int(ends[-1])

    def _copy(self, kind: str) -> None:
        with open(self._paths[kind], "rb") as file:
            shutil.copyfileobj(file, self._files["idx"], 1 << 22)


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Map the file as an array. Access is random, so the system is advised not to read ahead."""
    import mmap

    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapping, dtype=dtype)


def without_suffix(path: str | os.PathLike[str]) -> str:
    """Return the prefix of an indexed corpus, without a suffix ``.bin`` or ``.idx``."""
    text = os.fspath(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def is_indexed(path: str | os.PathLike[str]) -> bool:
    """Return True if the path is an indexed corpus, by its suffix or because PREFIX.idx or PREFIX.bin exists."""
    text = os.fspath(path)
    if text.endswith((".bin", ".idx")):
        return True
    return not os.path.exists(text) and (os.path.exists(f"{text}.idx") or os.path.exists(f"{text}.bin"))


def smallest_dtype(vocab_size: int) -> str:
    """Return the dtype of a vocabulary's ids, as in Megatron: uint16 for fewer than 65,500 ids, else int32."""
    return "uint16" if vocab_size < 65500 else "int32"
