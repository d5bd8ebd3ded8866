"""Header of a safetensors file: names, types, shapes and places of its tensors, without their data.

    bytes 0-7: length of the header (little endian) | header: JSON, padded with spaces to a multiple of 8 | tensors
    header: {name: {"dtype": "F32", "shape": [...], "data_offsets": [first byte, end]}}, counted from the header's end

Standard library only: a folder of weights is refused before torch is imported.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megapar.errors import CheckpointError
from megapar.files.location import Place, at
from megapar.files.regular_file import HEAD_BYTES, UnfitFileError, not_this

if TYPE_CHECKING:
    from typing_extensions import Self


MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_NUMBER = 1 << 60
_BYTES = {8: ("F64", "I64"), 4: ("F32", "I32"), 2: ("F16", "BF16", "I16"), 1: ("F8_E4M3", "I8", "U8", "BOOL")}
ITEM_BYTES: Mapping[str, int] = MappingProxyType({code: size for size, codes in _BYTES.items() for code in codes})
"""Bytes of an element, by the code of its type."""


def is_number(value: Any) -> bool:
    """Return True if a JSON value is an integer in the valid range of sizes and offsets."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


class TensorFile:
    """An open safetensors file. Raises CheckpointError if it is missing, truncated, or of another format."""

    def __init__(self, path: Place) -> None:
        self.path = at(path)
        try:
            self._file = self.path.read()
        except (FileNotFoundError, NotADirectoryError, UnfitFileError) as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}") from error
        try:
            self._entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self) -> Mapping[str, Any]:
        size = self._file.seek(0, os.SEEK_END)
        length = int.from_bytes(self._read_at(0, 8), "little")
        self._start = 8 + length
        if length > MAX_HEADER_BYTES or self._start > size:
            damage = f"is damaged: it claims a header of {length} bytes in {size}"
            raise CheckpointError(f"{self.path} {not_this(bytes(self._read_at(0, min(size, HEAD_BYTES)))) or damage}")
        self._num_bytes = size - self._start
        try:
            header = json.loads(self._read_at(8, length), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is damaged: its header is not JSON ({str(error)[:200]})") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path} is damaged: its header is not a JSON object")
        self._refuse_overlaps(header)
        return header

    def _refuse_overlaps(self, header: Mapping[str, Any]) -> None:
        """Raise CheckpointError if two tensors share bytes: one of them would be wrong, and no writer produces that."""
        spans = []
        for name, entry in header.items():
            offsets = entry.get("data_offsets") if isinstance(entry, dict) and name != "__metadata__" else None
            if isinstance(offsets, list) and len(offsets) == 2 and all(is_number(offset) for offset in offsets):
                spans.append((*offsets, name))
        spans.sort()
        for (_, end, one), (first, last, other) in pairwise(spans):
            if first < end and first < last:
                raise CheckpointError(
                    f"{self.path} is damaged: {one:.100} and {other:.100} share bytes {first}-{min(end, last)}"
                )

    def position(self, name: str, code: str, shape: Sequence[int]) -> int:
        """Return the position of a tensor's data in the file, in bytes.

        Raises CheckpointError if dtype or shape differ from the expected ones, or the data is not inside the file.
        """
        entry = self._entries.get(name)
        expected = {"dtype": code, "shape": list(shape)}
        if not isinstance(entry, dict) or {key: entry.get(key) for key in expected} != expected:
            raise CheckpointError(f"{self.path} does not contain {name} as {expected}, but as {str(entry)[:200]}")
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(is_number(offset) for offset in offsets)):
            raise CheckpointError(f"{self.path} is damaged: {name} is at {str(offsets)[:100]}")
        first, end = offsets
        if end - first != prod(shape) * ITEM_BYTES[code] or end > self._num_bytes:
            raise CheckpointError(f"{self.path} is damaged: {name} is at {first}-{end} of {self._num_bytes} bytes")
        return self._start + int(first)

    def names(self) -> list[str]:
        """Return the names of the tensors in the file."""
        return [name for name in self._entries if name != "__metadata__"]

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype code and the shape in the header. Raises CheckpointError if it has none for this name."""
        entry = self._entries.get(name)
        code, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(code, str) or not isinstance(shape, list) or not all(is_number(size) for size in shape):
            raise CheckpointError(f"{self.path} is damaged: {name} is described by {str(entry)[:200]}")
        return code, tuple(shape)

    def _read_at(self, position: int, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        try:
            self._file.seek(position)
            while len(view):
                got = self._file.readinto(view)
                if not got:
                    raise CheckpointError(f"{self.path} is truncated: it ends {len(view)} bytes early")
                view = view[got:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a duplicate name, because readers differ in which value they use."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{duplicate:.100} is there twice")
    return unique


CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weights_name(number: int, count: int) -> str:
    """Return the name of a file of weights. number: from 1 to ``count``, the number of files."""
    return WEIGHTS_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
