"""layout.json: all that is known of a checkpoint without opening its shards.

    {"sha256": "<of every byte below this line>",
    "format": "megapar checkpoint", "version": 1,
    "model": {...},                     what must agree for this to be a checkpoint of one's model
    "grid": {...},                      sizes of the axes it was written on; for people, loading does not need it
    "scalars": [name, bytes, sha256],   the file of counters and such
    "tensors": {name: {"shape": [...], "dtype": "float32", "starts": [...], "files": [...]}},     see tiling.py
    "files": [[name, bytes, sha256], ...]}

A layout comes from a stranger's disk: whatever it holds, reading it ends in a Layout or in CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megapar.config.regular_file import read_regular
from megapar.core.checkpoint import tiling
from megapar.core.checkpoint.tiling import Tiling
from megapar.core.units import Json
from megapar.errors import CheckpointError

FILE_NAME = "layout.json"
FORMAT = "megapar checkpoint"
VERSION = 1
MAX_BYTES = 1 << 28
"""Of the file. That of 10,000 ranks has a megabyte of file names and some hundred bytes a tensor."""
MAX_DIMS = 16
MAX_BRACKETS = 1 << 20
BYTES_PER_BRACKET = 8
"""A layout has one list or object in so many bytes at most, and a million of them besides: more would be a file that
takes twenty times its size of memory, and says nothing."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: its plain name, its size in bytes and its SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str

    def to_json(self) -> list[Json]:
        """The form in layout.json."""
        return [self.name, self.size, self.sha256]


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor. tiling is JSON until it is asked for: a rank needs those of its own tensors only."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Mapping[str, Json]

    def tiling(self, num_files: int) -> Tiling:
        """How it is cut, and which of ``num_files`` files hold what."""
        return tiling.from_json(self.name, self.shape, dict(self.cut), num_files)

    def to_json(self) -> dict[str, Json]:
        """The form in layout.json."""
        return {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype], **self.cut}


@dataclass(frozen=True)
class CheckpointLayout:
    """The whole of layout.json. scalars: the file of the scalars."""

    model: Mapping[str, Json]
    grid: Mapping[str, Json]
    scalars: FileEntry
    tensors: Mapping[str, TensorEntry]
    files: Sequence[FileEntry]

    def to_bytes(self) -> bytes:
        """The file's content."""
        lines = [
            f'"format": "{FORMAT}", "version": {VERSION},',
            f'"model": {json.dumps(self.model, sort_keys=True)},',
            f'"grid": {json.dumps(self.grid, sort_keys=True)},',
            f'"scalars": {json.dumps(self.scalars.to_json())},',
            '"tensors": {',
            ",\n".join(f"{json.dumps(name)}: {json.dumps(entry.to_json())}" for name, entry in self.tensors.items()),
            '}, "files": [',
            ",\n".join(json.dumps(entry.to_json()) for entry in self.files),
            "]}\n",
        ]
        return seal("\n".join(lines).encode())


def seal(body: bytes) -> bytes:
    """The file's content from all but its first line."""
    return b'{"sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode() + body


def read(folder: Path) -> CheckpointLayout:
    """The layout of a checkpoint folder. Raises CheckpointError where there is none or it is damaged."""
    path = folder / FILE_NAME
    try:
        content = read_regular(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {FILE_NAME}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse(content: bytes) -> CheckpointLayout:
    """A layout from the file's content."""
    brackets = content.count(b"[") + content.count(b"{")
    _expect(
        brackets <= MAX_BRACKETS + len(content) // BYTES_PER_BRACKET,
        f"damaged: it has {brackets:,} lists and objects in {len(content):,} bytes",
    )
    try:
        root = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, absurd numbers
        raise CheckpointError(f"damaged: not JSON ({str(error)[:200]})") from error
    except MemoryError:
        raise CheckpointError(f"it has {len(content):,} bytes, and this machine no memory for what they say") from None
    _expect(isinstance(root, dict) and root.get("format") == FORMAT, f"not a {FORMAT}")
    _expect(root.get("version") == VERSION, f"format version {str(root.get('version'))[:20]}, known is {VERSION}")
    body = content.partition(b"\n")[2]
    _expect(root.get("sha256") == hashlib.sha256(body).hexdigest(), "damaged: its SHA-256 is not the one it states")
    model, grid, tensors, files = (root.get(key) for key in ("model", "grid", "tensors", "files"))
    _expect(isinstance(model, dict) and isinstance(grid, dict), "model or grid is not an object")
    _expect(isinstance(tensors, dict) and isinstance(files, list), "tensors or files are missing")
    entries = [_file(entry) for entry in files]
    scalars = _file(root.get("scalars"))
    names = {entry.name for entry in entries}
    _expect(len(names | {scalars.name}) == len(entries) + 1, "two files have the same name")
    return CheckpointLayout(
        model, grid, scalars, {name: _tensor(name, value) for name, value in tensors.items()}, entries
    )


def _file(value: Json) -> FileEntry:
    _expect(isinstance(value, list) and len(value) == 3, f"{str(value)[:100]} is not a file's name, size and SHA-256")
    name, size, sha256 = value
    # A plain name in this folder: no separators, no parent, nothing hidden, and not the layout itself.
    _expect(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name), f"bad file {name!r:.100}"
    )
    _expect(name != FILE_NAME, f"the layout names itself as a file, {name}")
    _expect(tiling.is_number(size), f"{name} has the size {size!r:.100}")
    _expect(isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256), f"{name} has a bad SHA-256")
    return FileEntry(name, size, sha256)


def _tensor(name: str, value: Json) -> TensorEntry:
    _expect(isinstance(value, dict), f"tensor {name!r:.100} is not described by an object")
    shape, dtype = value.get("shape"), value.get("dtype")
    _expect(
        isinstance(shape, list) and len(shape) <= MAX_DIMS and all(tiling.is_number(size) for size in shape),
        f"tensor {name!r:.100} has the shape {str(shape)[:100]}",
    )
    numel = 1
    for size in shape:
        numel *= size
    _expect(numel <= tiling.MAX_NUMBER, f"tensor {name!r:.100} has {numel} elements")
    _expect(isinstance(dtype, str) and dtype in DTYPES, f"tensor {name!r:.100} has the dtype {str(dtype)[:100]}")
    cut = {key: value[key] for key in ("starts", "files", "pieces") if key in value}
    return TensorEntry(name, tuple(shape), DTYPES[dtype], cut)


def _expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise CheckpointError(otherwise)
