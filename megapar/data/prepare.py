"""Documents to an indexed file on all cores: chunks are tokenised into parts, which are put together in order.

PREFIX.parts/ holds a part per finished chunk while the work goes on; a killed run goes on from them. The bytes of
the result follow from the inputs and the tokenizer, whatever the number of workers.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapar.data.cache import digest
from megapar.data.chunks import Chunk, chunks_of, describe
from megapar.data.indexed import IndexedDataset, IndexedDatasetBuilder, smallest_dtype
from megapar.data.source import BadRecords
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.errors import DataError

VERSION = 1
_BATCH = 32  # documents encoded at a time; more of them leave the caches of a core
_CODES = {"uint16": "H", "int32": "i"}  # lists become arrays of these four times as fast as numpy's


@dataclass(frozen=True)
class Done:
    """What one chunk gave, or all together. bad: records passed over; first_bad: what was wrong with the first."""

    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: tuple[str, ...] = ()

    def __add__(self, other: Done) -> Done:
        first = (*self.first_bad, *other.first_bad)[: BadRecords.KEPT]
        return Done(self.documents + other.documents, self.tokens + other.tokens, self.bad + other.bad, first)


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
    part: str = "train",
    field: str = "text",
    append_end: bool = True,
    skip_bad: bool = False,
    progress: Callable[[int, int, Done], None] = lambda done, total, result: None,
) -> Done:
    """Write OUTPUT.bin and OUTPUT.idx, one sequence per document.

    paths: as --data-path (without weights). dataset: a ``datasets`` source, of which ``part`` is read. field: of a
    JSONL record or column. append_end: each document is followed by the end token. skip_bad: broken records are left
    out and counted; otherwise the first one stops the work. workers: processes.
    progress: called with the chunks done, all chunks, and what they gave.

    Memory is bounded by the workers and the longest document, not by the input. Raises DataError; then OUTPUT has no
    file, and OUTPUT.parts what was finished.
    """
    tokenizer = load_tokenizer(tokenizer_model)
    end = tokenizer.special.need("eos") if append_end else None
    chunks = chunks_of(paths, dataset, part, field)
    folder = Path(f"{output}.parts")
    job = _Job(str(folder), tokenizer_model, smallest_dtype(tokenizer.size), end, skip_bad)
    _claim(folder, _key(chunks, tokenizer, job))
    total, finished = Done(), 0
    for result in _run(chunks, job, tokenizer, workers):
        total, finished = total + result, finished + 1
        progress(finished, len(chunks), total)
    if total.documents == 0:
        shutil.rmtree(folder)
        raise DataError(f"{', '.join((*paths, *filter(None, [dataset])))}: the corpus holds no documents")
    total = _join(output, folder, len(chunks), job.dtype)
    shutil.rmtree(folder)
    return total


def _key(chunks: Sequence[Chunk], tokenizer: Tokenizer, job: _Job) -> str:
    facts = [VERSION, describe(chunks), tokenizer.fingerprint(), job.dtype, job.end, job.skip_bad]
    return digest(json.dumps(facts))


def _claim(folder: Path, key: str) -> None:
    """Keep the parts of a run that was broken off, if it was this one."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "key"
    if not mark.exists() or mark.read_text() != key:
        for old in folder.iterdir():
            old.unlink()
        mark.write_text(key)


def _run(chunks: Sequence[Chunk], job: _Job, tokenizer: Tokenizer, workers: int) -> Iterator[Done]:
    """What each chunk gave, as they are finished; those that an earlier run finished first."""
    waiting = []
    for number, chunk in enumerate(chunks):
        found = _finished(Path(job.folder), number)
        if found is None:
            waiting.append((number, chunk))
        else:
            yield found
    if workers == 1 or len(waiting) <= 1:
        for number, chunk in waiting:
            yield _encode(number, chunk, job, tokenizer)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every worker is one core's
    rest = iter(waiting)
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(job,)) as pool:
        flying: set[Future[Done]] = set()
        try:
            while True:
                while len(flying) < 2 * workers and (following := next(rest, None)) is not None:
                    flying.add(pool.submit(_work, *following))
                if not flying:
                    return
                done, flying = wait(flying, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker died, perhaps for want of memory; give fewer than {workers} workers and run the same again: "
                f"what is finished in {job.folder} is used"
            ) from error
        finally:
            for future in flying:
                future.cancel()


_worker: dict[str, Any] = {}


def _start(job: _Job) -> None:
    """Load the tokenizer once per process."""
    _worker.update(job=job, tokenizer=load_tokenizer(job.tokenizer))


def _work(number: int, chunk: Chunk) -> Done:
    return _encode(number, chunk, _worker["job"], _worker["tokenizer"])


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _finished(folder: Path, number: int) -> Done | None:
    path = _part(folder, number).with_suffix(".json")
    if not path.exists():
        return None
    facts = json.loads(path.read_text())
    return Done(**{**facts, "first_bad": tuple(facts["first_bad"])})


def _encode(number: int, chunk: Chunk, job: _Job, tokenizer: Tokenizer) -> Done:
    """Write one part; its .json comes last and says that it is whole."""
    import numpy as np

    prefix = _part(Path(job.folder), number)
    bad = BadRecords(stops=not job.skip_bad)
    documents = tokens = 0
    with IndexedDatasetBuilder(prefix, job.dtype) as builder:
        for texts in _batches(chunk.documents(bad)):
            lengths, flat = [], array(_CODES[job.dtype])
            for ids in tokenizer.encode_batch(texts):
                if job.end is not None:
                    ids.append(job.end)
                flat.fromlist(ids)
                lengths.append(len(ids))
            builder.add_documents(np.frombuffer(flat, dtype=job.dtype), np.array(lengths))
            documents, tokens = documents + len(lengths), tokens + len(flat)
        builder.finalize(sync=False)
    result = Done(documents, tokens, bad.count, tuple(bad.first))
    aside = prefix.with_suffix(".unfinished")
    aside.write_text(json.dumps(asdict(result)))
    os.replace(aside, prefix.with_suffix(".json"))
    return result


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _join(output: str, folder: Path, parts: int, dtype: str) -> Done:
    total = Done()
    with IndexedDatasetBuilder(output, dtype) as builder:
        for number in range(parts):
            builder.append(IndexedDataset(_part(folder, number)))
            found = _finished(folder, number)
            assert found is not None
            total += found
        builder.finalize()
    return total
