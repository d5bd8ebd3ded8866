"""Documents to an indexed file on all cores: chunks are tokenised into parts, which are put together in order.

    workers     chunk 0 -> part 0    chunk 2 -> part 2    ..
                chunk 1 -> part 1    chunk 3 -> part 3    ..
    parent      .. part 0, part 1 -> PREFIX.bin.unfinished, as soon as all parts before them are there

PREFIX.parts/ holds a part per finished chunk while the work goes on; a killed run goes on from them. The bytes of
the result follow from the inputs and the tokenizer, whatever the number of workers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.config.data_files import first_line
from megapar.config.record import text_of_line
from megapar.core.parent import end_with
from megapar.data.cache import digest
from megapar.data.chunks import Chunk, chunks_of, describe
from megapar.data.indexed import IndexedDatasetBuilder, smallest_dtype, without_suffix
from megapar.data.parts import Done, Part, claimed, claims, finished, opened
from megapar.data.prepared import HashesWriter, hashes_of
from megapar.data.sentencepiece_tokenizer import SentencePieceTokenizer
from megapar.data.source import BadRecords, JsonlFile, open_sources
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

VERSION = 4
_LONGEST_LOOK = 1 << 20  # bytes; a longer first line is left to its worker
_BATCH = 32  # documents encoded at a time; more of them leave the caches of a core
_CODES = {"uint16": "H", "int32": "i"}  # lists become arrays of these four times as fast as numpy's


@dataclass(frozen=True)
class _Job:
    """What a worker has to know."""

    folder: str
    tokenizer: str
    dtype: str
    end: int | None
    skip_bad: bool


def prepare(
    output: str,
    paths: Sequence[str],
    tokenizer_model: str,
    *,
    workers: int,
    dataset: str | None = None,
    split: str = "train",
    field: str = "text",
    append_end: bool = True,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int, Done], None] = lambda done, total, result: None,
    say: Callable[[str], object] = lambda text: None,
) -> Done:
    """Write OUTPUT.bin and OUTPUT.idx, one sequence per document, and OUTPUT.hashes (see prepared.py).

    paths: as --data-path (without weights). dataset: a ``datasets`` source, of which ``split`` is read. field: of a
    JSONL record or column. append_end: each document is followed by the end token. skip_bad: broken records are left
    out and counted; otherwise the first one stops the work. overwrite: replace files of this name, which are otherwise
    an error. workers: processes.
    progress: called with the chunks done, all chunks, and what they gave. say: is told what is skipped of a folder.

    Memory is bounded by the workers and the longest document, not by the input. Raises DataError; then OUTPUT has no
    file (or the old ones), and OUTPUT.parts what was finished, if anything was.
    """
    output = _prefix(output)
    tokenizer = load_tokenizer(tokenizer_model)
    end = tokenizer.special.need("eos") if append_end else None
    if not skip_bad:
        _check_first_records(paths, field)
    chunks = chunks_of(paths, dataset, split, field, say)
    folder = Path(f"{output}.parts")
    job = _Job(str(folder), tokenizer_model, smallest_dtype(tokenizer.size), end, skip_bad)
    key = _key(chunks, tokenizer, job)
    if not overwrite:
        _refuse_existing(output, broken_off=claims(folder, key))
    with claimed(folder, key):
        try:
            results = closing(_run(chunks, job, tokenizer, workers))
            with IndexedDatasetBuilder(output, job.dtype) as builder, HashesWriter(output) as hashes, results as each:
                join, seen = _Join(folder, builder, hashes), Done()
                for finished_chunks, (number, result) in enumerate(each, start=1):
                    join.take(number, result)
                    seen += result
                    progress(finished_chunks, len(chunks), seen)
                if join.total.documents == 0:
                    names = ", ".join((*paths, *filter(None, [dataset])))
                    shutil.rmtree(folder)
                    raise DataError(f"{names}: the corpus holds no documents")
                builder.finalize(hashes.finish)
        except DataError as error:
            raise _with_what_is_kept(error, folder, len(chunks)) from error
        shutil.rmtree(folder)
    return join.total


def _prefix(output: str) -> str:
    prefix = without_suffix(output)
    if prefix.endswith("/"):
        raise DataError(f"--output {prefix} is a folder: give the beginning of names in it, {Path(prefix) / 'corpus'}")
    return prefix


def _check_first_records(paths: Sequence[str], field: str) -> None:
    """A wrong field is wrong in the first line: workers would meet it first wherever theirs begins."""
    for source in open_sources(paths, field) if paths else ():
        if isinstance(source, JsonlFile):
            number, line = first_line(source.path, _LONGEST_LOOK)
            if 0 < len(line) < _LONGEST_LOOK:
                text_of_line(line, f"{source.path}, line {number}", field)


def _refuse_existing(output: str, broken_off: bool) -> None:
    """broken_off: there are parts of the same work, which may have been killed between giving its two files names."""
    there = [path for path in (f"{output}.idx", f"{output}.bin") if os.path.lexists(path)]
    if there and not (broken_off and there == [f"{output}.bin"]):
        raise DataError(f"{there[0]} is there already; give --overwrite to replace it, or another --output")


def _with_what_is_kept(error: DataError, folder: Path, chunks: int) -> DataError:
    kept = sum(finished(folder, number) is not None for number in range(chunks))
    if kept == 0:
        shutil.rmtree(folder, ignore_errors=True)
        return error
    return DataError(
        f"{error} ({kept} of {chunks} chunks are finished and kept in {folder}; the same command goes on from them, "
        "with --on-bad-record skip too)"
    )


def _key(chunks: Sequence[Chunk], tokenizer: Tokenizer, job: _Job) -> str:
    return digest(json.dumps([VERSION, describe(chunks), tokenizer.fingerprint(), job.dtype, job.end]))


class _Join:
    """Puts parts into a builder by their numbers, each as soon as all before it are there.

    total: of the parts that are in.
    """

    def __init__(self, folder: Path, builder: IndexedDatasetBuilder, hashes: HashesWriter) -> None:
        self.total = Done()
        self._folder, self._builder, self._hashes = folder, builder, hashes
        self._next = 0
        self._early: dict[int, Done] = {}

    def take(self, number: int, done: Done) -> None:
        """One more part is finished."""
        self._early[number] = done
        while (found := self._early.pop(self._next, None)) is not None:
            with opened(self._folder, self._next) as (ids, lengths, hashes):
                self._builder.copy_documents(ids, lengths)
                self._hashes.add(hashes)
            self.total += found
            self._next += 1


def _run(chunks: Sequence[Chunk], job: _Job, tokenizer: Tokenizer, workers: int) -> Generator[tuple[int, Done]]:
    """The number of each chunk as it is finished, and what it gave; those that an earlier run finished first."""
    waiting = []
    for number, chunk in enumerate(chunks):
        found = finished(Path(job.folder), number)
        if found is None or (found.bad and not job.skip_bad):
            waiting.append((number, chunk))
        else:
            yield number, found
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every worker is one core's
    if workers == 1 or len(waiting) <= 1:
        for number, chunk in waiting:
            yield number, _encode(number, chunk, job, tokenizer)
        return
    # A forked worker has the parent's tokenizer; loading a large one takes a second.
    given = tokenizer if multiprocessing.get_start_method() == "fork" else None
    rest = iter(waiting)
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(job, given)) as pool:
        flying: dict[Future[Done], int] = {}
        try:
            while True:
                while len(flying) < 2 * workers and (following := next(rest, None)) is not None:
                    flying[pool.submit(_work, *following)] = following[0]
                if not flying:
                    return
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    yield flying.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DataError(f"a worker died, perhaps for want of memory; give fewer than {workers} workers") from error
        finally:
            for future in flying:
                future.cancel()


_worker: dict[str, Any] = {}


def _start(job: _Job, tokenizer: Tokenizer | None) -> None:
    """Have a tokenizer in the process. An interrupt is the parent's matter; its death is everybody's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(os.getppid())
    _worker.update(job=job, tokenizer=load_tokenizer(job.tokenizer) if tokenizer is None else tokenizer)


def _work(number: int, chunk: Chunk) -> Done:
    return _encode(number, chunk, _worker["job"], _worker["tokenizer"])


def _encode(number: int, chunk: Chunk, job: _Job, tokenizer: Tokenizer) -> Done:
    """Write one part."""
    import numpy as np

    bad = BadRecords(stops=not job.skip_bad)
    documents = tokens = 0
    with Part(Path(job.folder), number) as part:
        for texts in _batches(chunk.documents(bad)):
            flat, lengths = _tokens(tokenizer, texts, job)
            part.add(flat, np.array(lengths), hashes_of(texts))
            documents, tokens = documents + len(lengths), tokens + len(flat)
        result = Done(documents, tokens, bad.count, tuple(bad.first))
        part.finish(result)
    return result


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], job: _Job) -> tuple[np.ndarray, list[int]]:
    """All documents' ids one after the other, each with its end token; how many each has."""
    import numpy as np

    arrays = tokenizer.encode_arrays(texts) if isinstance(tokenizer, SentencePieceTokenizer) else None
    if arrays is not None:
        end = np.array([] if job.end is None else [job.end], dtype=np.int32)
        ids = np.concatenate([part for one in arrays for part in (one, end)])
        return ids.astype(job.dtype), [len(one) + len(end) for one in arrays]
    lengths, flat = [], array(_CODES[job.dtype])
    for document in tokenizer.encode_batch(texts):
        if job.end is not None:
            document.append(job.end)
        flat.fromlist(document)
        lengths.append(len(document))
    return np.frombuffer(flat, dtype=job.dtype), lengths


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
