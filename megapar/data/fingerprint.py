"""Fingerprints of the data of ``--data-path`` and ``--hf-dataset``; they do not depend on names.

    text, JSONL, parquet    SHA-256 of all bytes, and the reader
    the same in a store     sizes and ETags of the objects, and the reader
    PREFIX.bin, PREFIX.idx  SHA-256 of the index; the length of the tokens and 64 blocks of 1 MiB spread over them
    a datasets source       its revision if the Hub's cache has it, and the names and lengths of its files

Hashes that need whole files to be read are remembered in the cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from megapar.data.blend import Group, groups_of
from megapar.data.cache import Unread, cached_value, hash_parts
from megapar.data.text.source import MOCK, PYTHON, open_sources, unread_bytes
from megapar.data.tokens.indexed import without_suffix
from megapar.data.tokens.prepared import hashes_path, index_hash
from megapar.errors import DataError, listed
from megapar.files.data_files import FIELD, PARAGRAPH, bare_name
from megapar.files.data_object import BEGAN
from megapar.files.location import at
from megapar.files.regular_file import read_regular_text
from megapar.files.uri import is_stored

BLOCKS = 64  # blocks of a file of tokens that are hashed
BLOCK_BYTES = 1 << 20
_NAMES = 3  # paths of one corpus that are shown
BY_TEXT, BY_POSITION = "text", "position"
"""The two ways to split documents: by a hash of their text, or by their numbers."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one source of a mixture; all paths without weights are one source.

    Attributes:
        value: The hash; None if it is not known without reading ``unread`` bytes.
        weight: Weight in the mixture; None if no weights are given.
        cut: BY_TEXT or BY_POSITION, the way its documents are split; "" if they are not.
        unread: Bytes to read before ``value`` is known.
        named: ``name`` is the one that ``--data-path`` gives it (NAME=PATH), not a path.
    """

    name: str
    value: str | None
    weight: Fraction | None
    cut: str
    unread: int = 0
    named: bool = False


def fingerprints_of(
    paths: Sequence[str], field: str = FIELD, *, per: str = PARAGRAPH, may_read: bool = True
) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of the sources that ``--data-path`` names, in order, or in that of their names.

    ``field`` and ``per`` are those of ``source.open_sources``; without ``may_read``, only the cache is used. Raises
    DataError if a source cannot be read.
    """
    if list(paths) == [MOCK]:
        return (Fingerprint("mock", "mock", None, ""),)
    if len(paths) == 1 and paths[0].startswith(PYTHON):
        return (Fingerprint(paths[0], paths[0], None, ""),)  # the caller's name stands for the content
    groups = groups_of(paths)
    fingerprints = [_of_group(group, field, per, may_read) for group in groups]
    if groups and groups[0].name:
        pairs = zip(groups, fingerprints, strict=True)
        fingerprints = [replace(each, name=group.name, named=True) for group, each in pairs]
        return tuple(sorted(fingerprints, key=lambda each: each.name))
    if len(fingerprints) == 1 or fingerprints[0].weight is not None:
        return tuple(fingerprints)
    values = [each.value for each in fingerprints if each.value is not None]
    whole = hash_parts(*values) if len(values) == len(fingerprints) else None
    names = listed([path for group in groups for path in group.paths], _NAMES)
    cut = "+".join(sorted({each.cut for each in fingerprints}))
    return (Fingerprint(names, whole, None, cut, sum(each.unread for each in fingerprints)),)


def _of_group(group: Group, field: str, per: str, may_read: bool) -> Fingerprint:
    names = listed(group.paths, _NAMES)
    if any(is_stored(path) and path not in BEGAN for path in group.paths):  # known when a run has looked at it
        return Fingerprint(names, None, group.weight, BY_TEXT)
    by_text = not group.indexed or hashes_path(group.paths[0]).exists()
    cut = BY_TEXT if by_text else BY_POSITION
    try:
        value = _indexed(group.paths[0], may_read) if group.indexed else _texts(group.paths, field, per, may_read)
    except Unread as unread:
        return Fingerprint(names, None, group.weight, cut, unread.bytes)
    except OSError as error:
        raise DataError(f"{names}: cannot be read: {error}") from error
    return Fingerprint(names, value, group.weight, cut)


def _texts(paths: Sequence[str], field: str, per: str, may_read: bool) -> str:
    """Return the hash of ``source.sources_hash``, which also names the tokens of the same text in the cache."""
    try:
        sources = open_sources(paths, field, per=per, may_read=may_read)
        return hash_parts(*(source.content_hash(may_read=may_read) for source in sources))
    except Unread:  # it counts only the first unread file
        raise Unread(unread_bytes(paths, field)) from None


def _indexed(path: str, may_read: bool) -> str:
    prefix = without_suffix(path)
    tokens, values, unread = Path(f"{prefix}.bin"), list[str](), 0
    parts: tuple[Callable[[], str], ...] = (
        lambda: index_hash(prefix, may_read=may_read),
        lambda: cached_value(tokens, lambda: _blocks(tokens), "blocks", may_read=may_read),
    )
    for value_of, maximum in zip(parts, (None, BLOCKS * BLOCK_BYTES), strict=True):
        try:
            values.append(value_of())
        except Unread as error:
            unread += error.bytes if maximum is None else min(maximum, error.bytes)
    if unread:
        raise Unread(unread)
    return hash_parts(*values)


def _blocks(tokens: Path) -> str:
    size = tokens.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with tokens.open("rb") as file:
        if size <= BLOCKS * BLOCK_BYTES:
            while block := file.read(BLOCK_BYTES):
                state.update(block)
        else:
            for number in range(BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
                state.update(file.read(BLOCK_BYTES))
    return state.hexdigest()


def fingerprint_of_file(name: str, path: Path, *, may_read: bool) -> Fingerprint:
    """Return the fingerprint of a file that is not a corpus, called ``name`` in messages. Raises DataError."""
    try:
        value = cached_value(path, lambda: at(path).sha256(), "bytes", may_read=may_read)
    except Unread as unread:
        return Fingerprint(name, None, None, "", unread.bytes)
    except OSError as error:
        raise DataError(f"{name} {path}: cannot be read: {error}") from error
    return Fingerprint(name, value, None, "")


def fingerprint_of_dataset(name: str, field: str = FIELD) -> Fingerprint:
    """Return the fingerprint of a ``datasets`` source, from names and lengths of files only.

    Its rows are split by their numbers. Raises DataError if it cannot be read.
    """
    path = Path(name)
    try:
        if path.is_file():
            parts = ["file", str(path.stat().st_size)]
        elif path.is_dir():
            parts = ["folder", *_listed(path)]
        else:
            parts = ["name", name, *_cached(name)]
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error}") from error
    return Fingerprint(name, hash_parts(*parts, field), None, BY_POSITION)


def _listed(folder: Path) -> Iterator[str]:
    """Yield names and lengths of the files in a folder, except hidden ones and those that ``datasets`` creates."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            if not file.startswith((".", "cache-")):
                path = Path(place, file)
                yield f"{path.relative_to(folder)} {path.stat().st_size}"


def _cached(name: str) -> Iterator[str]:
    """Yield revision and files of a name in the caches of the Hub's library and of ``datasets``."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    try:
        revision = read_regular_text(hub / "refs" / "main").strip()
    except (OSError, ValueError):
        cache = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
        wanted = bare_name(name)
        folders = sorted(cache.iterdir()) if cache.is_dir() else []
        yield from (line for folder in folders if bare_name(folder.name) == wanted for line in _listed(folder))
        return
    yield revision
    if (hub / "snapshots" / revision).is_dir():
        yield from _listed(hub / "snapshots" / revision)
