"""Number of embedding rows if ``--vocab-size`` is not given: the checkpoint's, else the tokenizer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megapar.checkpoints.format.names import stored_facts
from megapar.errors import Complaint
from megapar.files.tokenizer_files import TRAINED_SIZE, BadTokenizer, Vocabulary, too_large, vocabulary_of
from megapar.files.uri import is_stored

MOCK = ("mock",)


class EmbeddingRows(NamedTuple):
    """Number of embedding rows, and the source of this number, for messages."""

    size: int
    source: str


def derived_rows(values: Mapping[str, Any], restarted_from: str | None = None) -> EmbeddingRows:
    """Return the value of a --vocab-size that is not given, from flat values as the rules read them.

    A checkpoint keeps its number of rows, whatever the tokenizer. Rows that pad the embedding to the number of ranks
    are only used in the computation and are not counted. ``restarted_from`` is the folder of --save of a restart.
    """
    for flag, root in (("--save", restarted_from), ("--load", values.get("load"))):
        step = values.get("ckpt_step") if flag == "--load" else None
        if root and (stored := _stored(root, step)) is not None:
            return EmbeddingRows(stored, f"{flag} {root}")
    if values.get("tokenizer_model"):
        known = known_vocabulary(values)
        name = f"--tokenizer-model {values['tokenizer_model']}"
        if known is None:
            return EmbeddingRows(TRAINED_SIZE, f"assumed, because {name} cannot be read here")
        return EmbeddingRows(known.size, name)
    if values.get("data_path") == MOCK:
        return EmbeddingRows(TRAINED_SIZE, "the default for random tokens")
    return EmbeddingRows(TRAINED_SIZE, "the default for a tokenizer that is trained on the data")


def assumed_rows(values: Mapping[str, Any]) -> str:
    """Return a note if --vocab-size is neither given nor can be determined on this machine, else ""."""
    unknown = values.get("tokenizer_model") and not values.get("load_hf") and known_vocabulary(values) is None
    if not unknown or values.get("vocab_size") != TRAINED_SIZE:
        return ""
    path = values["tokenizer_model"]
    return f"--vocab-size {TRAINED_SIZE} is assumed: --tokenizer-model {path} cannot be read here. Set --vocab-size."


def source_of_rows(origin: str, values: Mapping[str, Any]) -> str:
    """Return the source of the number of rows. ``origin`` is that of --vocab-size."""
    if origin != "derived":
        return "--vocab-size"
    return f"--load-hf {values['load_hf']}" if values.get("load_hf") else derived_rows(values).source


def known_vocabulary(values: Mapping[str, Any]) -> Vocabulary | None:
    """Return the vocabulary of --tokenizer-model, or None if it cannot be read from its files."""
    path = values.get("tokenizer_model")
    try:
        return vocabulary_of(path) if path and Path(path).exists() else None
    except (BadTokenizer, OSError, KeyError, TypeError, ValueError):
        return None


def check_vocabulary(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield complaints about an existing tokenizer: its files, its size, a token that the model needs."""
    path = values.get("tokenizer_model")
    if not path or not Path(path).exists():
        return
    try:
        vocabulary = vocabulary_of(path)
    except (BadTokenizer, OSError, KeyError, TypeError, ValueError) as error:
        fix = "Pass a sentencepiece model, a tokenizer.json, or the folder of a Hugging Face tokenizer."
        yield Complaint("tokenizer", f"--tokenizer-model {path} cannot be read: {error}.", fix)
        return
    if vocabulary is None:
        if values.get("requested", {}).get("vocab_size") is None and derived_rows(values).source.startswith("assumed"):
            message = f"--tokenizer-model {path}: its files do not contain the number of its ids."
            yield Complaint("vocabulary", message, "Set --vocab-size.")
        return
    if "vocab_size" in values and vocabulary.size > values["vocab_size"]:
        fixed = bool(values.get("load_hf")) or bool(
            values.get("load") and _stored(values["load"], values.get("ckpt_step")) is not None
        )
        yield too_large(path, vocabulary.size, values["vocab_size"], fixed=fixed)
    if values.get("kind") == "ernie" and not vocabulary.mask:
        message = f"--tokenizer-model {path} has no mask token, which pretrain_ernie.py needs."
        fix = "Pass a tokenizer that has one, or leave the flag out to train a tokenizer on the text."
        yield Complaint("tokenizer", message, fix)


def _stored(root: str, step: int | None) -> int | None:
    if is_stored(root):
        return None
    stored = stored_facts(root, step)
    size = stored[1].get("vocab_size") if stored is not None else None
    return size if isinstance(size, int) else None
