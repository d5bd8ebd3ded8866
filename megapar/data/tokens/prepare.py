"""``megapar data prepare``: encodes inputs of any kind as PREFIX.bin, PREFIX.idx and PREFIX.hashes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megapar.core.status_line import Status, silent
from megapar.data.chat.chat_encoder import ChatSettings
from megapar.data.text.chunks import TextChunk, dataset_chunks
from megapar.data.text.source import check_first_records, open_sources
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokens.encode import EncodeJob, Encoding, encode
from megapar.data.tokens.indexed import without_suffix
from megapar.data.tokens.parts import Encoded, claims
from megapar.errors import DataError
from megapar.files.data_files import AUTO, ROW


def prepare(
    output: str,
    paths: Sequence[str],
    tokenizer_model: str,
    *,
    workers: int,
    dataset: str | None = None,
    split: str = "train",
    field: str = "text",
    per: str = AUTO,
    append_end: bool = True,
    skip_bad: bool = False,
    overwrite: bool = False,
    chat: ChatSettings | None = None,
    status: Status = silent,
    report: Callable[[str], object] = lambda text: None,
) -> Encoded:
    """Write OUTPUT.bin, OUTPUT.idx and OUTPUT.hashes (see ``encode``).

    Raises DataError if an input is broken. OUTPUT then has no files, or its old ones, and OUTPUT.parts contains the
    finished parts, if any, from which the same call resumes.

    Args:
        output: Prefix of the files.
        paths: Files and folders, as in --data-path, without weights.
        dataset: A ``datasets`` source that is read after the paths.
        split: The split of ``dataset``.
        per: What a document of text is, as --document-per says it.
        append_end: Append the end token to each document.
        skip_bad: Skip and count broken records; otherwise the first one stops the work.
        overwrite: Replace existing files, which are otherwise an error.
        chat: The records are conversations, encoded with these settings (see ``encode.Encoding``).
        report: Called with a message about the files of a folder that are skipped.
    """
    output = _prefix(output)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the workers uses one core
    tokenizer = load_tokenizer(tokenizer_model)
    encoding = Encoding.of(tokenizer, append_end=append_end, skip_bad=skip_bad, chat=chat)
    field = field if chat is None else ROW
    checks = not skip_bad and chat is None
    chunks = tuple(input_chunks(paths, dataset, split, field, report, per=per, check_first=checks))
    names = ", ".join((*paths, *filter(None, [dataset])))
    job = EncodeJob(output, f"{output}.parts", chunks, encoding, tokenizer_model, names)
    if not overwrite:
        _refuse_existing(output, resumes=claims(Path(job.folder), job.key(tokenizer)))
    return encode(job, tokenizer, workers=workers, keep_parts=True, status=status)


def input_chunks(
    paths: Sequence[str],
    dataset: str | None = None,
    split: str = "train",
    field: str = "text",
    report: Callable[[str], object] = lambda text: None,
    *,
    per: str = AUTO,
    check_first: bool = False,
) -> list[TextChunk]:
    """Return the chunks of all inputs; the arguments are those of ``prepare``.

    With ``check_first``, a wrong field is refused by the first line of each file. Raises DataError if an input cannot
    be read.
    """
    sources = open_sources(paths, field, report, per=per) if paths else ()
    if check_first:
        check_first_records(sources)
    chunks = [chunk for source in sources for chunk in source.chunks()]
    return chunks if dataset is None else [*chunks, *dataset_chunks(dataset, split, field)]


def _prefix(output: str) -> str:
    prefix = without_suffix(output)
    if prefix.endswith("/"):
        raise DataError(
            f"--output {prefix} is a folder; pass a prefix of file names, such as {Path(prefix) / 'corpus'}"
        )
    return prefix


def _refuse_existing(output: str, resumes: bool) -> None:
    """Raise DataError if the output exists.

    With ``resumes``, parts of the same work exist; it may have been killed between the renames of its two files, so
    that PREFIX.bin alone is accepted.
    """
    existing = [path for path in (f"{output}.idx", f"{output}.bin") if os.path.lexists(path)]
    if existing and not (resumes and existing == [f"{output}.bin"]):
        raise DataError(f"{existing[0]} already exists; pass --overwrite to replace it, or another --output")
