"""``megapar data prepare``: inputs of any kind to PREFIX.bin, PREFIX.idx and PREFIX.hashes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megapar.data.text.chunks import TextChunk, dataset_chunks
from megapar.data.text.source import check_first_records, open_sources
from megapar.data.tokenizers.tokenizer import load_tokenizer
from megapar.data.tokens.encode import EncodeJob, Encoding, Progress, encode
from megapar.data.tokens.indexed import without_suffix
from megapar.data.tokens.parts import Done, claims
from megapar.errors import DataError


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
    progress: Progress = lambda done, total, result: None,
    say: Callable[[str], object] = lambda text: None,
) -> Done:
    """Write OUTPUT.bin, OUTPUT.idx and OUTPUT.hashes (see ``encode``).

    paths: as --data-path (without weights). dataset: a ``datasets`` source, of which ``split`` is read. field: of a
    JSONL record or column. append_end: each document is followed by the end token. skip_bad: broken records are left
    out and counted; otherwise the first one stops the work. overwrite: replace files of this name, which are otherwise
    an error. workers: processes. say: called with what is skipped of a folder.

    Raises DataError; then OUTPUT has no files (or the old ones), and OUTPUT.parts holds finished parts, if there are
    any, from which the same call resumes.
    """
    output = _prefix(output)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the workers uses one core
    tokenizer = load_tokenizer(tokenizer_model)
    encoding = Encoding.of(tokenizer, append_end=append_end, skip_bad=skip_bad)
    chunks = tuple(input_chunks(paths, dataset, split, field, say, check_first=not skip_bad))
    names = ", ".join((*paths, *filter(None, [dataset])))
    job = EncodeJob(output, f"{output}.parts", chunks, encoding, tokenizer_model, names)
    if not overwrite:
        _refuse_existing(output, resumes=claims(Path(job.folder), job.key(tokenizer)))
    return encode(job, tokenizer, workers=workers, keep_parts=True, progress=progress)


def input_chunks(
    paths: Sequence[str],
    dataset: str | None = None,
    split: str = "train",
    field: str = "text",
    say: Callable[[str], object] = lambda text: None,
    *,
    check_first: bool = False,
) -> list[TextChunk]:
    """The chunks of all inputs. check_first: refuse a wrong field by first lines. See ``prepare`` for the others.

    Raises DataError.
    """
    sources = open_sources(paths, field, say) if paths else ()
    if check_first:
        check_first_records(sources)
    found = [chunk for source in sources for chunk in source.chunks()]
    return found if dataset is None else [*found, *dataset_chunks(dataset, split, field)]


def _prefix(output: str) -> str:
    prefix = without_suffix(output)
    if prefix.endswith("/"):
        raise DataError(f"--output {prefix} is a folder: give the beginning of names in it, {Path(prefix) / 'corpus'}")
    return prefix


def _refuse_existing(output: str, resumes: bool) -> None:
    """resumes: there are parts of the same work, which may have been killed between giving its two files names."""
    there = [path for path in (f"{output}.idx", f"{output}.bin") if os.path.lexists(path)]
    if there and not (resumes and there == [f"{output}.bin"]):
        raise DataError(f"{there[0]} is there already; give --overwrite to replace it, or another --output")
