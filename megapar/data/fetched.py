"""Data in object stores: copied into the cache of each node before it is read, once for each content.

An entry is named by URI, sizes and ETags: data that changes is copied again, and a run reads what it began with.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megapar.core.units import GIBIBYTE
from megapar.data.cache import cache_folder, hash_parts, make_once
from megapar.errors import DataError
from megapar.files.bucket import objects_of
from megapar.files.data_files import INDEXED, split_name
from megapar.files.location import Location, at, copy
from megapar.files.objects import ObjectHead
from megapar.files.uri import is_stored


def fetched(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the items of a ``--data-path`` with paths of copies for URIs. Raises DataError."""
    return tuple(_fetched_item(item) for item in paths)


def _fetched_item(item: str) -> str:
    name, path = split_name(item)
    if not is_stored(path):
        return item
    return f"{name}={_fetched(at(path))}" if name else _fetched(at(path))


def _fetched(place: Location) -> str:
    try:
        files = _files(place)
        parts = [f"{file}\0{head.size}\0{head.etag}" for file, head in files.items()]
        if not files:
            raise DataError(f"{place}: there is no such object, and no folder with objects")
        entry = make_once(f"objects/{hash_parts(*parts)}", partial(_copy, place, files))
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {error}") from error
    return str(entry / "data" / place.name)


def _files(place: Location) -> dict[Location, ObjectHead]:
    """Return the objects that a place names: itself, the two of a prefix of tokens, or those in a folder."""
    store = objects_of(str(place).partition(":")[0])
    beside = store.list(str(place.parent.path))
    names = [place.name, *(f"{place.name}{suffix}" for suffix in INDEXED)]
    found = {place.with_name(name): beside.get(name) for name in names}
    if not any(found.values()):
        found = {place / name: head for name, head in sorted(store.list(str(place.path)).items())}
    return {file: head for file, head in found.items() if head is not None}


def _copy(place: Location, files: dict[Location, ObjectHead], path: Path) -> None:
    size, free = sum(head.size for head in files.values()), shutil.disk_usage(cache_folder()).free
    what = f"{place}: {len(files)} objects of {size / GIBIBYTE:.3f} GiB"
    if size > free:
        raise DataError(f"{what} do not fit into the cache {cache_folder()}, which has {free / GIBIBYTE:.3f} GiB free")
    logging.getLogger(__name__).warning("%s are copied into the cache %s", what, cache_folder())
    for file in files:
        copy(file, at(path) / f"data/{file.path.relative_to(place.path.parent)}")
