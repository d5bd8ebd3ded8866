"""Tokenizers on disk: the class that a folder or file needs, and the tokenizer of a run next to its checkpoints."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer, Tokenizer
from megapar.errors import CheckpointError, DataError
from megapar.files.bucket import BucketStore
from megapar.files.location import Location, Place, at, copy, read_locally, written_locally
from megapar.files.tokenizer_files import FACTS, FOLDER, foreign_tokenizer, stored_fingerprint


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a sentencepiece model, a ``tokenizer.json``, or a Hugging Face folder.

    Code in a folder is never run. Raises DataError if the path has no usable tokenizer.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{path}: no such tokenizer; --tokenizer-model takes a sentencepiece model file or a Hugging Face "
            "tokenizer folder on this machine"
        )
    if foreign := foreign_tokenizer(path):
        raise DataError(foreign)
    path = tokenizer_source(path)
    if path.is_file() and path.suffix != ".json":
        from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(path.read_bytes(), name=str(path))
    from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)


def tokenizer_source(path: Path) -> Path:
    """Return the sentencepiece model of a folder in which no other file requires another library, else the path."""
    model = path / "tokenizer.model"
    return model if path.is_dir() and model.is_file() and not any(path.glob("tokenizer*.json")) else path


def store_tokenizer(tokenizer: Tokenizer, root: Place) -> tuple[str, ...]:
    """Write the tokenizer to ``root``/tokenizer; return warnings for the log. Only one rank calls it.

    The folder appears when it is complete. A different tokenizer in its place is renamed, not lost. Runs without text
    (mock data, files of tokens without a tokenizer) keep none. Raises CheckpointError if it cannot be written.
    """
    if isinstance(tokenizer, (NoTokenizer, MockTokenizer)):
        return ()
    folder, fingerprint = at(root) / FOLDER, tokenizer.fingerprint()
    try:
        previous = stored_fingerprint(folder)
        if previous == fingerprint:
            return ()
        aside = _aside(folder)
        with written_locally(aside) as place:
            _write(tokenizer, place)
            facts = {"fingerprint": fingerprint, "size": tokenizer.size}
            (place / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        moved = None
        if folder.name in folder.parent.list():
            known = previous[:8] if previous and re.fullmatch("[0-9a-f]{8,}", previous) else "unknown"
            moved = _moved(folder, f"{FOLDER}-{known}")
        aside.publish(folder)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be kept in {folder}: {error}") from error
    if moved is None:
        return ()
    note = (
        f"WARNING: {folder} was not this run's tokenizer, and the weights in that folder were trained on its ids. "
        f"It is now {moved.name}; to continue with it: --tokenizer-model {moved}"
    )
    return (note,)


def _aside(folder: Location) -> Location:
    return folder.with_name(f"{FOLDER}.tmp-{uuid.uuid4().hex[:12]}")


def _moved(folder: Location, stem: str) -> Location:
    """Give the folder another name. An object store renames nothing: copy its files and remove the old ones."""
    store = folder.store
    if not isinstance(store, BucketStore) or store.folder(folder.path) != folder.path:
        return folder.publish_beside(stem)
    aside, names = _aside(folder), list(store.walk(folder.path))
    for name in names:
        copy(folder / name, aside / name)
    moved = aside.publish_beside(stem)
    for name in names:
        (folder / name).remove()
    return moved


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a sentencepiece model unchanged, because its form in other libraries gives a few texts other ids."""
    model = getattr(tokenizer, "model", None)
    if isinstance(model, bytes):
        (folder / "tokenizer.model").write_bytes(model)
    else:
        tokenizer.save_hf(folder)


def load_stored_tokenizer(root: Place) -> Tokenizer | None:
    """Return the tokenizer that ``store_tokenizer`` wrote, or None. Raises CheckpointError if it is damaged."""
    folder = at(root) / FOLDER
    if not (folder / FACTS).is_file():
        return None
    try:
        with read_locally(folder, below=True) as path:
            return load_tokenizer(path)
    except DataError as error:
        raise CheckpointError(f"{folder}, which contains the run's tokenizer, is damaged: {error}") from error
