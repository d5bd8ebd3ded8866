"""Rows of the embedding where ``--vocab-size`` is not given: the checkpoint's, else the tokenizer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megapar.config.stored import stored_facts
from megapar.config.vocabulary import TRAINED_SIZE, BadTokenizer, Vocabulary, too_large, vocabulary_of
from megapar.errors import Complaint

MOCK = ("mock",)


class EmbeddingRows(NamedTuple):
    """size: rows of the embedding. source: where the number is from, for people."""

    size: int
    source: str


def derived_rows(values: Mapping[str, Any]) -> EmbeddingRows:
    """What stands for a --vocab-size that is not given. values: flat, as the rules see them.

    A checkpoint keeps the rows that it was trained with, whatever the tokenizer: padding to the ranks is for compute
    only and no part of them.
    """
    if values.get("load") and (found := _stored(values)) is not None:
        return EmbeddingRows(found, f"--load {values['load']}")
    if values.get("tokenizer_model"):
        known = known_vocabulary(values)
        name = f"--tokenizer-model {values['tokenizer_model']}"
        if known is None:
            return EmbeddingRows(TRAINED_SIZE, f"assumed, as {name} cannot be read here")
        return EmbeddingRows(known.size, name)
    if values.get("data_path") == MOCK:
        return EmbeddingRows(TRAINED_SIZE, "the default for random tokens")
    return EmbeddingRows(TRAINED_SIZE, "the default for a tokenizer that is trained on the data")


def assumed_rows(values: Mapping[str, Any]) -> str:
    """What to say of a --vocab-size that is neither given nor to be had on this machine; "" where it is known."""
    unknown = values.get("tokenizer_model") and not values.get("load_hf") and known_vocabulary(values) is None
    if not unknown or values.get("vocab_size") != TRAINED_SIZE:
        return ""
    path = values["tokenizer_model"]
    return f"--vocab-size {TRAINED_SIZE} is assumed: --tokenizer-model {path} cannot be read here; give --vocab-size."


def source_of_rows(origin: str, values: Mapping[str, Any]) -> str:
    """Where the number of rows is from. origin: of --vocab-size. values: as ``derived_rows`` takes them."""
    if origin != "derived":
        return "--vocab-size"
    return f"--load-hf {values['load_hf']}" if values.get("load_hf") else derived_rows(values).source


def known_vocabulary(values: Mapping[str, Any]) -> Vocabulary | None:
    """That of --tokenizer-model, where it can be read from its files."""
    path = values.get("tokenizer_model")
    try:
        return vocabulary_of(path) if path and Path(path).exists() else None
    except (BadTokenizer, OSError, KeyError, TypeError, ValueError):
        return None


def check_vocabulary(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """What is wrong with a tokenizer that is there: its files, its size, a token that the model needs."""
    path = values.get("tokenizer_model")
    if not path or not Path(path).exists():
        return
    try:
        found = vocabulary_of(path)
    except (BadTokenizer, OSError, KeyError, TypeError, ValueError) as error:
        fix = "Give a sentencepiece model, a tokenizer.json, or the folder of a Hugging Face tokenizer."
        yield Complaint("tokenizer", f"--tokenizer-model {path} cannot be read: {error}.", fix)
        return
    if found is None:
        if values.get("asked", {}).get("vocab_size") is None and derived_rows(values).source.startswith("assumed"):
            message = f"--tokenizer-model {path} does not say in its files how many ids it has."
            yield Complaint("vocabulary", message, "Give --vocab-size.")
        return
    if "vocab_size" in values and found.size > values["vocab_size"]:
        fixed = bool(values.get("load_hf")) or bool(values.get("load") and _stored(values) is not None)
        yield too_large(path, found.size, values["vocab_size"], fixed=fixed)
    if values.get("kind") == "ernie" and not found.mask:
        message = f"--tokenizer-model {path} has no mask token, which is needed here."
        fix = "Give one that has, or leave it out to have a tokenizer trained on the text."
        yield Complaint("tokenizer", message, fix)


def _stored(values: Mapping[str, Any]) -> int | None:
    found = stored_facts(Path(values["load"]), values.get("ckpt_step"))
    size = found[1].get("vocab_size") if found is not None else None
    return size if isinstance(size, int) else None
