"""How many ids a tokenizer has, and which of them have a role, read from its files without the library that runs it.

Standard library only: a tokenizer that is larger than the embedding is refused before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megapar.config.regular_file import INDEX_BYTES, read_regular
from megapar.errors import Complaint

TRAINED_SIZE = 4096
"""Ids of a tokenizer that a run trains on its own data, where nothing is said of the vocabulary."""

# Special tokens that these classes of transformers add where the files have them not.
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "Bert": _BERT,
    "GPT2": ("<|endoftext|>",),
    "Llama": ("<unk>", "<s>", "</s>"),
}
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MASKS = ("[MASK]", "<mask>", "<mask:0>")
"""What a mask token is called where nobody says."""


class BadTokenizer(ValueError):
    """Files that are no tokenizer; says which and why."""


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's files say. size: number of ids; every id is below it. mask: one stands for what is masked."""

    size: int
    mask: bool


def vocabulary_of(path: str | Path) -> Vocabulary | None:
    """The vocabulary at a path as --tokenizer-model takes it; None where only the tokenizer's own library knows.

    Raises BadTokenizer for files that are damaged or something else, OSError for those that cannot be read.
    """
    path = Path(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())
    return _read(path, stamps)


@lru_cache(maxsize=8)
def _read(path: Path, stamps: tuple[Any, ...]) -> Vocabulary | None:
    """stamps: of the files; others are read anew. A search asks thousands of times."""
    try:
        return _counted(path)
    except BadTokenizer:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadTokenizer(f"{path} is not as tokenizers are written ({type(error).__name__}: {error})") from error


def _counted(path: Path) -> Vocabulary | None:
    if path.is_file():
        return _fast(path, {}) if path.suffix == ".json" else _sentencepiece(path, {})
    config = _json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (path / name).exists():
            config = {**config, name: _json(path / name)}
    if (path / "tokenizer.json").exists():
        return _fast(path / "tokenizer.json", config)
    if (path / "vocab.json").exists():
        ids = {str(token): int(number) for token, number in _json(path / "vocab.json").items()}
        return _complete(ids, config)
    if (path / "vocab.txt").exists():
        with (path / "vocab.txt").open(encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in file]  # of newlines only, where str.splitlines has more
        # Its name says WordPiece, whatever class the folder names.
        return _complete(dict(zip(lines, range(len(lines)), strict=True)), {"tokenizer_class": "Bert", **config})
    models = sorted(path.glob("*.model"))
    try:
        return _sentencepiece(models[0], config) if len(models) == 1 else None
    except BadTokenizer:  # a library may have other models under this suffix
        return None


def _fast(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """tokenizer.json, as the library ``tokenizers`` writes it: a vocabulary, and tokens that were added to it."""
    whole = _json(path)
    found = (whole.get("model") or {}).get("vocab")
    if isinstance(found, Mapping):
        ids = {str(token): int(number) for token, number in found.items()}
    elif isinstance(found, list):  # of a unigram model: pairs of token and score
        ids = {str(pair[0]): number for number, pair in enumerate(found)}
    else:
        raise BadTokenizer(f"{path} has no model with a vocabulary")
    for token in whole.get("added_tokens") or ():
        ids.setdefault(str(token["content"]), int(token["id"]))
    return _complete(ids, {**config, "tokenizer_class": ""})


def _sentencepiece(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    try:
        pieces = [_text(piece) for piece in _fields(read_regular(path, INDEX_BYTES), 1)]
    except (IndexError, UnicodeDecodeError, OSError) as error:
        raise BadTokenizer(f"{path} is not a sentencepiece model") from error
    if not pieces:
        raise BadTokenizer(f"{path} is not a sentencepiece model (it has no pieces)")
    ids = {piece: number for number, piece in enumerate(pieces)}
    return _complete(ids, config)


def _complete(ids: Mapping[str, int], config: Mapping[str, Any]) -> Vocabulary:
    """With the tokens that are named beside the vocabulary, which get an id behind it where they have none."""
    if not ids:
        raise BadTokenizer("the tokenizer has no tokens")
    named = [*_named(config)]
    new = {token for token in named if token not in ids}
    said = any(_content(one.get("mask_token")) for one in _said(config))
    return Vocabulary(max(ids.values()) + 1 + len(new), mask=said or any(one in ids or one in new for one in MASKS))


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    kind = str(config.get("tokenizer_class") or "")
    yield from next((tokens for name, tokens in _DEFAULTS.items() if kind.startswith(name)), ())
    for said in _said(config):
        several = said.get("additional_special_tokens") or said.get("extra_special_tokens") or ()
        values: Iterable[Any] = several.values() if isinstance(several, Mapping) else several
        for value in (*(said.get(role) for role in _ROLES), *values):
            if (token := _content(value)) is not None:
                yield token
    yield from (config.get("added_tokens.json") or {})
    for value in (config.get("added_tokens_decoder") or {}).values():
        if (token := _content(value)) is not None:
            yield token


def _said(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return config, config.get("special_tokens_map.json") or {}


def _content(value: Any) -> str | None:
    """A token as configurations write it: a text, or an object with one."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) and found else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path, INDEX_BYTES))
    except OSError as error:
        raise BadTokenizer(f"{path} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise BadTokenizer(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise BadTokenizer(f"{path} holds no object")
    return found


def _text(message: bytes) -> str:
    return next(_fields(message, 1), b"").decode()


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """The values of one field of a protocol buffer, as bytes. Raises IndexError where it is none."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, place = _varint(message, place)
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise IndexError(f"no field is of kind {kind}")
        if place + size > len(message):
            raise IndexError("cut off")
        if number == wanted and kind == 2:
            yield message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7


def too_large(name: str | None, size: int, rows: int, *, fixed: bool = False) -> Complaint:
    """A tokenizer with more ids than the embedding has rows.

    name: of its file; None: it was trained here. fixed: the rows are of weights that are loaded.
    """
    return Complaint(
        "vocabulary",
        f"the tokenizer {name or 'trained here'} has {size} ids, more than the {rows} rows of the embedding "
        f"(--vocab-size {rows}).",
        "Give the tokenizer that it was trained with." if fixed else f"Give --vocab-size {size} or more.",
    )
