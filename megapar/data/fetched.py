"""Data in object stores: text is read where it lies, what is mapped is first copied into the cache of each node.

An entry is named by URI, sizes and ETags: what changes is copied again, and a run reads what it began with.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath

from megapar.core.units import GIBIBYTE
from megapar.data.cache import cache_folder, hash_parts, make_once
from megapar.data.tokens.indexed import without_suffix
from megapar.data.tokens.prepared import CHAT, SUFFIX
from megapar.errors import DataError
from megapar.files.data_files import INDEXED, split_name
from megapar.files.data_object import BEGAN, DataObject, at_once, find, found_at, store_of
from megapar.files.location import Location, at, copy
from megapar.files.tokenizer_files import FACTS, TOKENIZER_FILES
from megapar.files.uri import is_stored

Objects = tuple[DataObject, ...]

_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja")


def fetched(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the items of ``--data-path``; tokens in stores are copied, text is not. Raises DataError."""
    try:
        return at_once(_fetched_item, paths)
    except OSError as error:
        raise DataError(f"data in an object store cannot be read: {error}") from error


def _fetched_item(item: str) -> str:
    name, path = split_name(item)
    if not is_stored(path):
        return item
    place = at(without_suffix(path))
    if not path.endswith(INDEXED) and (found := find(place)):
        BEGAN[path] = found
    elif (copied := _copied(place, partial(_of_prefix, place))) is not None:
        path = str(copied / place.name)
    else:
        BEGAN[path] = found_at(path)
    return f"{name}={path}" if name else path


def _of_prefix(place: Location) -> Objects:
    """Return the objects of a prefix of tokens; () for text."""
    names = (place.with_name(f"{place.name}{suffix}") for suffix in (*INDEXED, SUFFIX, CHAT))
    return tuple(found for name in names if (found := find(name)))


def fetched_tokenizer(folder: Location) -> str | None:
    """Return a copy of the tokenizer in a folder of a store, or None if it has none. Raises DataError."""

    store = store_of(folder)

    def files() -> Objects:
        lies = Location(store, store.folder(folder.path))
        names = sorted(name for name in store.walk(folder.path) if name.endswith(_BESIDE_WEIGHTS))
        found = tuple(one for name in names if (one := find(lies / name)) is not None)
        top = [PurePath(name) for name in names if "/" not in name]
        return found if any(name.match(one) for name in top for one in (FACTS, *TOKENIZER_FILES)) else ()

    copied = _copied(folder, files)
    return None if copied is None else str(copied)


def _copied(place: Location, files: Callable[[], Objects]) -> Path | None:
    """Return a folder with copies of the objects of a place, or None if there are none."""
    try:
        found = files()
        parts = [f"{one}\0{one.head.size}\0{one.head.etag}" for one in found]
        entry = make_once(f"objects/{hash_parts(*parts)}", partial(_copy, place, files, found)) if found else None
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {error}") from error
    return None if entry is None else entry / "data" / place.name


def _copy(place: Location, now: Callable[[], Objects], files: Objects, path: Path) -> None:
    size, free = sum(one.head.size for one in files), shutil.disk_usage(cache_folder()).free
    what = f"{place}: {len(files)} objects of {size / GIBIBYTE:.3f} GiB"
    if size > free:
        raise DataError(f"{what} do not fit into the cache {cache_folder()}, which has {free / GIBIBYTE:.3f} GiB free")
    logging.getLogger(__name__).warning("%s are copied into the cache %s", what, cache_folder())
    lies = store_of(place).folder(place.path)
    for one in files:
        name = os.path.relpath(one.location.path, lies) if one.location.path.is_relative_to(lies) else one.location.name
        copy(one.location, at(path / "data" / place.name / name))
    if now() != files:
        raise DataError(f"{what}: they have changed while they were copied")
