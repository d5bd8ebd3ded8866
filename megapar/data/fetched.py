"""Data in object stores: copied into the cache of each node before it is read, once for each content.

An entry is named by URI, sizes and ETags: data that changes is copied again, and a run reads what it began with.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megapar.core.units import GIBIBYTE
from megapar.data.cache import cache_folder, hash_parts, make_once
from megapar.errors import DataError
from megapar.files.bucket import BucketStore
from megapar.files.data_files import INDEXED, split_name
from megapar.files.location import Location, at, copy
from megapar.files.objects import ObjectHead
from megapar.files.tokenizer_files import FACTS, TOKENIZER_FILES
from megapar.files.uri import is_stored

Files = dict[Location, ObjectHead]

_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja")


def fetched(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the items of a ``--data-path`` with paths of copies for URIs. Raises DataError."""
    return tuple(_fetched_item(item) for item in paths)


def _fetched_item(item: str) -> str:
    name, path = split_name(item)
    if not is_stored(path):
        return item
    return f"{name}={_fetched(at(path))}" if name else _fetched(at(path))


def fetched_tokenizer(folder: Location) -> str | None:
    """Return a copy of the tokenizer in a folder of a store, or None if it has none. Raises DataError."""

    def files() -> Files:
        every = _in_folder(folder)
        found = {file: head for file, head in every.items() if file.path.suffix in _BESIDE_WEIGHTS}
        return found if any(file.path.match(name) for file in found for name in (FACTS, *TOKENIZER_FILES)) else {}

    return _copied(folder, files)


def _fetched(place: Location) -> str:
    copied = _copied(place, partial(_files, place))
    if copied is None:
        raise DataError(f"{place}: there is no such object, and no folder with objects")
    return copied


def _copied(place: Location, files: Callable[[], Files]) -> str | None:
    """Return a copy of the objects of a place, or None if there are none."""
    try:
        found = files()
        parts = [f"{file}\0{head.size}\0{head.etag}" for file, head in found.items()]
        entry = make_once(f"objects/{hash_parts(*parts)}", partial(_copy, place, files, found)) if found else None
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {error}") from error
    return None if entry is None else str(entry / "data" / place.name)


def _files(place: Location) -> Files:
    """Return the objects that a place names: itself, the two of a prefix of tokens, or those in a folder."""
    beside = _in_folder(place.parent)
    names = [place.name, *(f"{place.name}{suffix}" for suffix in INDEXED)]
    found = {file: beside[file] for name in names if (file := place.with_name(name)) in beside}
    return found or _in_folder(place)


def _in_folder(folder: Location) -> Files:
    """Return the objects in a folder, where they lie."""
    assert isinstance(folder.store, BucketStore), f"{folder} is on a disk"
    lies = Location(folder.store, folder.store.folder(folder.path))
    found = folder.store.objects.list(str(lies.path))
    return {lies / name: head for name, head in sorted(found.items()) if head is not None}


def _copy(place: Location, now: Callable[[], Files], files: Files, path: Path) -> None:
    size, free = sum(head.size for head in files.values()), shutil.disk_usage(cache_folder()).free
    what = f"{place}: {len(files)} objects of {size / GIBIBYTE:.3f} GiB"
    if size > free:
        raise DataError(f"{what} do not fit into the cache {cache_folder()}, which has {free / GIBIBYTE:.3f} GiB free")
    logging.getLogger(__name__).warning("%s are copied into the cache %s", what, cache_folder())
    for file in files:
        inside = file.name if file.parent == place.parent else f"{place.name}/{file.name}"
        copy(file, at(path) / f"data/{inside}")
    if now() != files:
        raise DataError(f"{what}: they have changed while they were copied")
