"""A run's tokenizer beside its checkpoints: ``SAVE/tokenizer``, which ``--tokenizer-model`` takes like any other."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from megapar.config.kept import FACTS, FOLDER, kept_fingerprint
from megapar.core.checkpoint.durable import put_new
from megapar.data.sampling.mock import MockTokenizer
from megapar.data.tokenizers.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from megapar.errors import CheckpointError, DataError


def keep(tokenizer: Tokenizer, root: Path) -> tuple[str, ...]:
    """Write what gives the same ids again into ``root``/tokenizer; what people should know of it. One rank calls it.

    The folder appears when it is complete. Another tokenizer that is there is moved aside and not lost. Runs without
    text (mock data, files of tokens without a tokenizer) keep none. Raises CheckpointError where it cannot be written.
    """
    if isinstance(tokenizer, (NoTokenizer, MockTokenizer)):
        return ()
    folder, fingerprint = root / FOLDER, tokenizer.fingerprint()
    try:
        there = kept_fingerprint(folder)
        if there == fingerprint:
            return ()
        aside = root / f".{FOLDER}.unfinished-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write(tokenizer, aside)
        facts = {"fingerprint": fingerprint, "size": tokenizer.size}
        (aside / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        moved = None
        if folder.exists():
            moved = root / f"{FOLDER}-{(there or 'unknown')[:8]}"
            shutil.rmtree(moved, ignore_errors=True)
            folder.rename(moved)
        put_new(aside, folder)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be kept in {folder}: {error}") from error
    if moved is None:
        return ()
    note = (
        f"WARNING: {folder} was another tokenizer than this run's, and the weights there were trained on its ids. "
        f"It is now {moved.name}; to go on with it: --tokenizer-model {moved}"
    )
    return (note,)


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    """A sentencepiece model as it is: what other libraries make of it gives other ids to a few texts."""
    model = getattr(tokenizer, "model", None)
    if isinstance(model, bytes):
        (folder / "tokenizer.model").write_bytes(model)
    else:
        tokenizer.save_hf(folder)


def kept(root: Path) -> Tokenizer | None:
    """The tokenizer that ``keep`` wrote there; None where there is none. Raises CheckpointError for a damaged one."""
    folder = root / FOLDER
    if not (folder / FACTS).is_file():
        return None
    try:
        return load_tokenizer(folder)
    except DataError as error:
        raise CheckpointError(f"{folder}, which the run kept its tokenizer in, is damaged: {error}") from error
