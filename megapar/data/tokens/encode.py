"""Encoding of documents into an indexed file on all cores: workers encode chunks into parts, which are joined in order.

    workers     chunk 0 -> part 0    chunk 2 -> part 2    ..
                chunk 1 -> part 1    chunk 3 -> part 3    ..
    parent      .. part 0, part 1 -> PREFIX.bin.unfinished, each as soon as all parts before it are joined

While the work runs, a folder contains one part per finished chunk; a run that was killed resumes from them. The bytes
of the result depend on the inputs and the tokenizer, not on the number of workers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from megapar.core.status_line import Status, silent
from megapar.data.cache import hash_parts
from megapar.data.chat import chat_encoder
from megapar.data.chat.chat_encoder import ChatEncoder, ChatSettings
from megapar.data.lazy_numpy import np
from megapar.data.text.chunks import BadRecords, LineNumbers, TextChunk, describe
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.indexed import LAST_OF_DOCUMENT, TARGETS, IndexedDatasetBuilder, smallest_dtype
from megapar.data.tokens.parts import Encoded, PartWriter, claimed, finished, opened, parts_in, remove_parts
from megapar.data.tokens.prepared import HashesWriter, hashes_of
from megapar.errors import DataError
from megapar.health.stop.parent import end_with

VERSION = 5
_BATCH = 32  # documents encoded at a time; more would not fit the caches of a core
_CODES = {"uint16": "H", "int32": "i"}  # array.array converts lists four times as fast as numpy does


@dataclass(frozen=True)
class Encoding:
    """The settings of encoding.

    Attributes:
        dtype: Type of the ids in the file.
        end: The token after each document; None for no token.
        skip_bad: Skip and count broken records; otherwise the first one stops the work.
        chat: Settings of conversations, whose records become documents with targets; None for text.
    """

    dtype: str
    end: int | None
    skip_bad: bool
    chat: ChatSettings | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, append_end: bool = True, skip_bad: bool = False, chat: ChatSettings | None = None
    ) -> Encoding:
        """Return the settings for a tokenizer. Raises DataError if ``append_end`` but it has no end token.

        Conversations get no end token: their template writes what ends a turn.
        """
        end = tokenizer.special.need("eos") if append_end and chat is None else None
        return cls(smallest_dtype(tokenizer.size), end, skip_bad, chat)

    @property
    def of_chat(self) -> tuple[str, ...]:
        """Everything else that decides the tokens of conversations, as strings; () for text."""
        return () if self.chat is None else (f"chat {chat_encoder.VERSION}", json.dumps(asdict(self.chat)))


@dataclass(frozen=True)
class EncodeJob:
    """Everything that decides one indexed file, PREFIX.bin, PREFIX.idx and PREFIX.hashes.

    Attributes:
        folder: Folder of the finished parts.
        chunks: The chunks of all inputs, in order.
        tokenizer: The file or folder from which workers load the tokenizer.
        names: The inputs, for messages.
    """

    prefix: str
    folder: str
    chunks: tuple[TextChunk, ...]
    encoding: Encoding
    tokenizer: str
    names: str

    def key(self, tokenizer: Tokenizer) -> str:
        """Return a hash of everything that decides the parts."""
        encoding = self.encoding
        parts = [VERSION, describe(self.chunks), tokenizer.fingerprint(), encoding.dtype, encoding.end]
        parts += encoding.of_chat
        return hash_parts(json.dumps(parts))


def encode(job: EncodeJob, tokenizer: Tokenizer, *, workers: int, keep_parts: bool, status: Status = silent) -> Encoded:
    """Write PREFIX.bin and PREFIX.idx, one sequence per document, and what belongs to them (see prepared.py).

    Memory is bounded by the number of workers and the longest document, not by the input. Raises DataError if an input
    is broken; PREFIX then has no files, or its old ones.

    Args:
        workers: Number of processes; 1 works in this process.
        keep_parts: Keep the finished parts after a DataError for the next run, and mention them in the message. A
            process that is killed keeps them in any case.
    """
    folder = Path(job.folder)
    with claimed(folder, job.key(tokenizer)):
        try:
            total = _written(job, tokenizer, workers, status)
        except DataError as error:
            kept = parts_in(folder)
            if kept == 0 or not keep_parts:
                remove_parts(folder)
                raise
            raise DataError(
                f"{error} ({kept} of {len(job.chunks)} chunks are finished and kept in {folder}; the same command "
                "resumes from them, also with --on-bad-record skip)"
            ) from error
        remove_parts(folder)
    return total


def _written(job: EncodeJob, tokenizer: Tokenizer, workers: int, status: Status) -> Encoded:
    """Encode the chunks that are not finished yet, and copy each part as soon as all parts before it are finished."""
    folder, total = Path(job.folder), Encoded()
    starts = [0, *(before.path != chunk.path for before, chunk in pairwise(job.chunks)), 1]
    files = list(accumulate(starts))  # that are done after this many chunks, if they finish in order
    small = 2 * files[-1] > len(job.chunks)
    status("encoding", 0, files[-1] if small else len(job.chunks), "files" if small else "chunks")
    early: dict[int, Encoded] = {}
    following = 0
    with (
        IndexedDatasetBuilder(job.prefix, job.encoding.dtype, multimodal=job.encoding.chat is not None) as builder,
        HashesWriter(job.prefix) as hashes,
        closing(_finished_chunks(job, tokenizer, workers)) as results,
    ):
        for count, (number, result) in enumerate(results, start=1):
            early[number] = result
            while (part := early.pop(following, None)) is not None:
                with opened(folder, following) as (ids, lengths, part_hashes, marks):
                    builder.copy_documents(ids, lengths, marks)
                    hashes.add(part_hashes)
                total += part  # in the order of the chunks, which is that of the messages in it
                following += 1
            status("encoding", *((files[count], files[-1], "files") if small else (count, len(job.chunks), "chunks")))
        if total.documents == 0:
            remove_parts(folder)
            what = "documents" if job.encoding.chat is None else "conversations"
            raise DataError(f"{job.names}: the corpus contains no {what}")
        facts = None if job.encoding.chat is None else job.encoding.chat.facts(tokenizer)
        builder.finalize(partial(hashes.finish, facts=facts))
    return total


def _finished_chunks(job: EncodeJob, tokenizer: Tokenizer, workers: int) -> Generator[tuple[int, Encoded]]:
    """Yield the number and the result of each chunk as it finishes, first those that an earlier run finished."""
    waiting = []
    for number, chunk in enumerate(job.chunks):
        done = finished(Path(job.folder), number)
        if done is None or (done.bad and not job.encoding.skip_bad):
            waiting.append((number, chunk))
        else:
            yield number, done
    if workers == 1 or len(waiting) <= 1:
        numbers = LineNumbers()
        for number, chunk in waiting:
            yield number, _encode_chunk(number, chunk, job.folder, job.encoding, tokenizer, numbers)
    else:
        yield from _in_workers(waiting, job, tokenizer, workers)


def _in_workers(
    waiting: Sequence[tuple[int, TextChunk]], job: EncodeJob, tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[int, Encoded]]:
    # Forked workers inherit the parent's tokenizer; loading a large one takes a second.
    inherited = tokenizer if multiprocessing.get_start_method() == "fork" else None
    remaining = iter(waiting)
    settings = (job.folder, job.encoding, job.tokenizer, inherited)
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=settings) as pool:
        in_flight: dict[Future[Encoded], int] = {}
        try:
            while True:
                while len(in_flight) < 2 * workers and (following := next(remaining, None)) is not None:
                    in_flight[pool.submit(_work, *following)] = following[0]
                if not in_flight:
                    return
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    yield in_flight.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker died, possibly out of memory; encode with fewer than {workers} workers "
                "(megapar data prepare --workers)"
            ) from error
        finally:
            for future in in_flight:
                future.cancel()


_worker: dict[str, Any] = {}


def _start_worker(folder: str, encoding: Encoding, path: str, tokenizer: Tokenizer | None) -> None:
    """Load the tokenizer in a worker. Workers ignore interrupts, which their parent handles, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(os.getppid())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one core
    tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
    _worker.update(folder=folder, encoding=encoding, tokenizer=tokenizer, numbers=LineNumbers())


def _work(number: int, chunk: TextChunk) -> Encoded:
    return _encode_chunk(
        number, chunk, _worker["folder"], _worker["encoding"], _worker["tokenizer"], _worker["numbers"]
    )


def _encode_chunk(
    number: int, chunk: TextChunk, folder: str, encoding: Encoding, tokenizer: Tokenizer, numbers: LineNumbers
) -> Encoded:
    """Encode one chunk and write its part."""
    bad = BadRecords(stops=not encoding.skip_bad)
    documents = tokens = 0
    with PartWriter(Path(folder), number) as part:
        if encoding.chat is not None:
            for one in ChatEncoder(tokenizer, encoding.chat).read(chunk, bad, numbers):
                part.add(one.ids.astype(encoding.dtype), *_runs(one.targets, hashes_of([one.text])))
                documents, tokens = documents + 1, tokens + len(one.ids)
        else:
            for texts in _batches(chunk.documents(bad, numbers)):
                flat, lengths = _tokens(tokenizer, texts, encoding)
                part.add(flat, np.array(lengths), hashes_of(texts))
                documents, tokens = documents + len(lengths), tokens + len(flat)
        result = Encoded(documents, tokens, bad.count, tuple(bad.first))
        part.finish(result)
    return result


def _runs(targets: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lengths, hashes and marks of a conversation, whose sequences are runs of targets and of others."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(targets)) + 1])
    marks = np.where(targets[starts], TARGETS, 0)
    marks[-1] |= LAST_OF_DOCUMENT
    return np.diff(starts, append=len(targets)), hashes, marks


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], encoding: Encoding) -> tuple[np.ndarray, list[int]]:
    """Return the concatenated ids of all documents, each with its end token, and the length of each document."""
    arrays = tokenizer.encode_arrays(texts) if isinstance(tokenizer, SentencePieceTokenizer) else None
    if arrays is not None:
        end = np.array([] if encoding.end is None else [encoding.end], dtype=np.int32)
        ids = np.concatenate([part for document in arrays for part in (document, end)])
        return ids.astype(encoding.dtype), [len(document) + len(end) for document in arrays]
    lengths, flat = [], array(_CODES[encoding.dtype])
    for document in tokenizer.encode_batch(texts):
        if encoding.end is not None:
            document.append(encoding.end)
        flat.fromlist(document)
        lengths.append(len(document))
    return np.frombuffer(flat, dtype=encoding.dtype), lengths


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
