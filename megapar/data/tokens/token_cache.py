"""Text as indexed files in the cache folder, encoded once per content and tokenizer.

    tokens/4f2a../corpus.bin, .idx, .hashes    as ``megapar data prepare`` writes them
    tokens/4f2a../notes.json                   messages about the text, if there are any
    tokens/.4f2a...parts                       finished parts, while it is encoded

An entry does not depend on the split of the documents (see store.py).

Large text is encoded by workers of a separate process, which is started and not forked: a trainer has threads and a
device, which forked workers must not inherit, and processes that multiprocessing spawns would run the user's script
again. The process is a plain Python, which reads one job as JSON from standard input, forks its workers, and writes the
result as JSON to standard output, after a line of JSON for each Status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import megapar
from megapar.core.status_line import Status, silent
from megapar.data.cache import cache_folder, hash_parts, make_once
from megapar.data.chat.chat_encoder import ChatSettings
from megapar.data.text.chunks import TextChunk, skipped_text
from megapar.data.text.source import TextSource, check_first_records, sources_hash
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.encode import EncodeJob, Encoding, encode
from megapar.data.tokens.indexed import IndexedDataset
from megapar.data.tokens.parts import Encoded
from megapar.errors import DataError
from megapar.files.data_files import LONGEST_LINE
from megapar.files.data_object import at_once
from megapar.health.stop.parent import die_with_parent
from megapar.health.stop.process import cores

VERSION = 3  # increased whenever the files written here change, so that no older cache entry is read

PARALLEL_BYTES = 32 << 20
"""Bytes of text from which several processes encode it; for less, starting them takes longer than they save."""

_NOTES = "notes.json"


class EncodedText(NamedTuple):
    """All documents of some sources, with notes about them for the log."""

    tokens: IndexedDataset
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TokenCache:
    """Opens text as the tokens of one tokenizer.

    Attributes:
        path: The file or folder of the tokenizer; None if no other process can load it.
        skip_bad: Skip broken records and note them; otherwise the first one is raised.
        chat: See ``Encoding``.
        status: Hears of the work.
    """

    tokenizer: Tokenizer
    path: Path | None
    skip_bad: bool = False
    chat: ChatSettings | None = None
    status: Status = silent

    def open(self, sources: Sequence[TextSource]) -> EncodedText:
        """Return the documents of the sources, encoding them if they are not in the cache.

        Any number of processes may call this at once. Raises DataError if a source is broken or has no documents.
        """
        encoding = Encoding.of(self.tokenizer, skip_bad=self.skip_bad, chat=self.chat)
        skipping = ("skip",) if self.skip_bad else ()
        # A content hash names the same bytes, however long a document may be.
        content = (sources_hash(sources), self.tokenizer.fingerprint(), str(encoding.end))
        key = hash_parts(str(VERSION), str(LONGEST_LINE), *content, *skipping, *encoding.of_chat)
        folder = make_once(f"tokens/{key}", lambda made: self._encode(sources, encoding, made), self.status)
        notes = folder / _NOTES
        messages = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else ()
        return EncodedText(IndexedDataset(folder / "corpus"), tuple(messages))

    def _encode(self, sources: Sequence[TextSource], encoding: Encoding, folder: Path) -> None:
        """Write one entry to a temporary ``folder``, which has the entry's name."""
        folder.mkdir()
        if not self.skip_bad and self.chat is None:
            check_first_records(sources)
        chunks = tuple(chain.from_iterable(at_once(lambda source: source.chunks(), sources)))
        parts = cache_folder() / "tokens" / f".{folder.name}.parts"
        names = ", ".join(source.name for source in sources)
        job = EncodeJob(str(folder / "corpus"), str(parts), chunks, encoding, str(self.path), names)
        large = sum(source.bytes for source in sources) >= PARALLEL_BYTES
        if self.path is not None and large and len(chunks) > 1 and cores() > 1:
            done = encode_in_process(job, cores(), self.status)
        else:
            done = encode(job, self.tokenizer, workers=1, keep_parts=False, status=self.status)
        if done.bad:
            note = skipped_text(done.bad, list(done.first_bad))
            (folder / _NOTES).write_text(json.dumps([note]), encoding="utf-8")


def encode_in_process(job: EncodeJob, workers: int, status: Status = silent) -> Encoded:
    """Run ``encode`` in a process that ends with this one. Raises its DataError or OSError."""
    root = str(Path(megapar.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command, pipe = [sys.executable, "-c", f"from {__name__} import main; main()"], subprocess.PIPE
    environ = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as ended:
        assert ended.stdin is not None
        assert ended.stdout is not None
        try:
            with suppress(BrokenPipeError), ended.stdin:
                json.dump({"job": asdict(job), "workers": workers}, ended.stdin)
            answer: dict[str, Any] = {}
            for line in filter(lambda text: text.startswith('{"'), ended.stdout):  # others are prints of libraries
                answer = json.loads(line)
                if "status" in answer:
                    status(*answer["status"])
        except BaseException:
            ended.kill()
            raise
    if ended.returncode != 0:
        raise DataError(
            f"{job.names}: the process that encodes it ended with status {ended.returncode}"
            f"{', possibly out of memory' if ended.returncode == -signal.SIGKILL else ''}; the same command "
            "resumes from its finished parts"
        ) from ChildProcessError()  # of the machine, not of the data
    if "system" in answer:
        raise OSError(*answer["system"])
    if "error" in answer:
        raise DataError(answer["error"])
    return Encoded(**{**answer["done"], "first_bad": tuple(answer["done"]["first_bad"])})


def _job(fields: Mapping[str, Any]) -> EncodeJob:
    chunks = tuple(TextChunk(**chunk) for chunk in fields["chunks"])
    encoding = Encoding(**fields["encoding"])
    if encoding.chat is not None:
        encoding = replace(encoding, chat=ChatSettings(**fields["encoding"]["chat"]))
    return EncodeJob(**{**fields, "chunks": chunks, "encoding": encoding})


def main() -> None:
    """Run the job on standard input, and write its result to standard output."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it as well, and ends this process
    request = json.load(sys.stdin)
    job = _job(request["job"])

    def say(answer: dict[str, Any]) -> None:
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()

    try:
        tokenizer = load_tokenizer(job.tokenizer)
        done = encode(
            job, tokenizer, workers=request["workers"], keep_parts=False, status=lambda *now: say({"status": now})
        )
        say({"done": asdict(done)})
    except DataError as error:
        say({"error": str(error)})
    except OSError as error:
        say({"system": [error.errno, error.strerror, error.filename]})
