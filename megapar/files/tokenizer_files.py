"""Number of ids and special tokens of a tokenizer, read from its files without the tokenizer library.

Standard library only: a tokenizer that is larger than the embedding is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from megapar.errors import Complaint
from megapar.files.location import Place, at
from megapar.files.regular_file import INDEX_BYTES, not_itself, read_json, read_regular, read_regular_text

FOLDER = "tokenizer"
FACTS = "megapar.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
"""Every folder with a tokenizer contains one of these; a sentencepiece model may have any name before ``.model``."""


def foreign_tokenizer(path: Path) -> str:
    """Return the sentence about a file of a tokenizer that is not what its name says; "" if there is none."""
    names = TOKENIZER_FILES[:-1] if (path / TOKENIZER_FILES[0]).exists() else TOKENIZER_FILES
    files = [path] if path.is_file() else [file for name in names for file in sorted(path.glob(name))]
    return next((f"{file} {other}" for file in files if file.is_file() and (other := not_itself(file))), "")


def stored_fingerprint(folder: Place) -> str | None:
    """Return the fingerprint in a folder that ``data.tokenizers.load.store_tokenizer`` wrote, or None."""
    try:
        fingerprint = (at(folder) / FACTS).json().get("fingerprint")
    except (OSError, ValueError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None


TRAINED_SIZE = 4096  # vocabulary size of a tokenizer that a run trains on its data, if --vocab-size is not given

FREE_IDS = 100_000  # ids without a token that a vocabulary may have, besides as many as it has tokens

# Special tokens that these classes of transformers add if the files lack them.
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "Bert": _BERT,
    "GPT2": ("<|endoftext|>",),
    "Llama": ("<unk>", "<s>", "</s>"),
}
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MASKS = ("[MASK]", "<mask>", "<mask:0>")  # names of a mask token if the configuration does not name it


class BadTokenizer(ValueError):
    """Files are not a valid tokenizer; the message names the file and the reason."""


@dataclass(frozen=True)
class Vocabulary:
    """Content of a tokenizer's files.

    Attributes:
        size: Number of ids; every id is below it.
        mask: There is a mask token.
    """

    size: int
    mask: bool


def vocabulary_of(path: str | Path) -> Vocabulary | None:
    """Return the vocabulary at a --tokenizer-model path, or None if only the tokenizer's own library can read it.

    Raises BadTokenizer for files that are damaged or not a tokenizer, OSError for unreadable ones.
    """
    path = Path(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())
    return _read(path, stamps)


@lru_cache(maxsize=8)
def _read(path: Path, stamps: tuple[Any, ...]) -> Vocabulary | None:
    """Read a vocabulary, cached by the sizes and times of its files, because a search calls this thousands of times."""
    try:
        return _counted(path)
    except BadTokenizer:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadTokenizer(f"{path} does not have a tokenizer's format ({type(error).__name__}: {error})") from error


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
        try:
            text = read_regular_text(path / "vocab.txt", INDEX_BYTES)
        except OSError as error:
            raise BadTokenizer(f"{path / 'vocab.txt'} cannot be read ({error})") from error
        lines = [line.rstrip("\n") for line in StringIO(text)]  # str.splitlines would also split at other characters
        # A file of this name is WordPiece, whatever class the folder names.
        return _complete(dict(zip(lines, range(len(lines)), strict=True)), {"tokenizer_class": "Bert", **config})
    models = sorted(path.glob("*.model"))
    try:
        return _sentencepiece(models[0], config) if len(models) == 1 else None
    except BadTokenizer:  # other libraries use this suffix, too
        return None


def _fast(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read tokenizer.json of the library ``tokenizers``: a vocabulary, and tokens that were added to it."""
    whole = _json(path)
    vocabulary = (whole.get("model") or {}).get("vocab")
    if isinstance(vocabulary, Mapping):
        ids = {str(token): int(number) for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # unigram model: pairs of token and score
        ids = {str(pair[0]): number for number, pair in enumerate(vocabulary)}
    else:
        raise BadTokenizer(f"{path} has no model with a vocabulary")
    for token in whole.get("added_tokens") or ():
        ids.setdefault(str(token["content"]), int(token["id"]))
    return _complete(ids, {**config, "tokenizer_class": ""})


def _sentencepiece(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    try:
        pieces = [next(_fields(piece, 1), b"").decode() for piece in _fields(read_regular(path, INDEX_BYTES), 1)]
    except (IndexError, UnicodeDecodeError, OSError) as error:
        raise BadTokenizer(f"{path} is not a sentencepiece model") from error
    if not pieces:
        raise BadTokenizer(f"{path} is not a sentencepiece model (it has no pieces)")
    ids = {piece: number for number, piece in enumerate(pieces)}
    return _complete(ids, config)


def _complete(ids: Mapping[str, int], config: Mapping[str, Any]) -> Vocabulary:
    """Add the tokens that the configuration names; those without an id get one after the vocabulary."""
    if not ids:
        raise BadTokenizer("the tokenizer contains no tokens")
    check_largest(max(ids.values()), len(ids))
    new = {token for token in _named(config) if token not in ids}
    has_mask = any(_content(item.get("mask_token")) for item in _sources(config))
    has_mask = has_mask or any(item in ids or item in new for item in MASKS)
    return Vocabulary(max(ids.values()) + 1 + len(new), mask=has_mask)


def check_largest(largest: int, entries: int) -> None:
    """Raise BadTokenizer if an id far exceeds the number of entries, because tables by id would be as large."""
    if largest > 2 * entries + FREE_IDS:
        raise BadTokenizer(
            f"the tokenizer has {entries:,} tokens, and one of them has the id {largest:,}: number the tokens from 0 on"
        )


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    kind = str(config.get("tokenizer_class") or "")
    yield from next((tokens for name, tokens in _DEFAULTS.items() if kind.startswith(name)), ())
    for source in _sources(config):
        older, extra = (source.get(f"{more}_special_tokens") or () for more in ("additional", "extra"))
        # As in transformers: a list takes the place of the older name, an object of named tokens does not.
        several = [extra] if isinstance(extra, list) and extra else [older, extra]
        values = [value for one in several for value in (one.values() if isinstance(one, Mapping) else one)]
        for value in (*(source.get(role) for role in _ROLES), *values):
            if (token := _content(value)) is not None:
                yield token
    yield from (config.get("added_tokens.json") or {})
    for value in (config.get("added_tokens_decoder") or {}).values():
        if (token := _content(value)) is not None:
            yield token


def _sources(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return config, config.get("special_tokens_map.json") or {}


def _content(value: Any) -> str | None:
    """Return a token from a configuration, where it is a string or an object with one."""
    token = value.get("content") if isinstance(value, Mapping) else value
    return token if isinstance(token, str) and token else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise BadTokenizer(f"{path} cannot be read ({error})") from error


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the values of one field of a protocol buffer, as bytes. Raises IndexError for other data."""
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, offset = _varint(message, offset)
            continue
        if kind == 2:
            size, offset = _varint(message, offset)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise IndexError(f"no field is of kind {kind}")
        if offset + size > len(message):
            raise IndexError("truncated")
        if number == wanted and kind == 2:
            yield message[offset : offset + size]
        offset += size


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7


def too_large(name: str | None, size: int, rows: int, *, fixed: bool = False) -> Complaint:
    """Return the complaint about more ids than the embedding has rows. ``fixed``: rows of loaded weights."""
    return Complaint(
        "vocabulary",
        f"the tokenizer {name or 'trained here'} has {size} ids, more than the {rows} rows of the embedding "
        f"(--vocab-size {rows}).",
        "Pass the tokenizer that the weights were trained with." if fixed else f"Set --vocab-size {size} or more.",
    )
