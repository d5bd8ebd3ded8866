"""layout.json: the index of a checkpoint, which describes it without opening its shards.

    {"sha256": "<of every byte below this line>",
    "format": "megapar checkpoint", "version": 1,
    "model": {...},                     the facts that must equal those of the loading run's model
    "grid": {...},                      axis sizes of the run that wrote it; for the reader, not used by the loader
    "scalars": [name, bytes, sha256],   the file of counters and other scalars
    "tensors": {name: {"shape": [...], "dtype": "float32", "starts": [...], "files": [...]}},     see tiling.py
    "files": [[name, bytes, sha256], ...]}

The file is untrusted input: reading it either returns a CheckpointLayout or raises CheckpointError, whatever it
contains.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megapar.checkpoints.format import tiling
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.format.tiling import Tiling
from megapar.core.units import Json
from megapar.errors import CheckpointError
from megapar.files.location import Place, at
from megapar.files.tensor_file import MAX_NUMBER, is_number

FORMAT = "megapar checkpoint"
VERSION = 1
MAX_BYTES = 1 << 28
"""Size limit of the file. For 10,000 ranks it has a megabyte of file names and a few hundred bytes per tensor."""
MAX_DIMS = 16
MAX_BRACKETS = 1 << 20
BYTES_PER_BRACKET = 8
"""A layout may have one list or object per this many bytes, plus ``MAX_BRACKETS``. A file with more of them would only
take twenty times its size in memory."""

DTYPES_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint; ``name`` has no folder."""

    name: str
    size: int
    sha256: str

    def to_json(self) -> list[Json]:
        """Return the form in layout.json."""
        return [self.name, self.size, self.sha256]


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor.

    Attributes:
        name: The same on every rank.
        cut: The JSON of its tiling. A rank parses it for its own tensors only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Mapping[str, Json]

    def tiling(self, num_files: int) -> Tiling:
        """Return its tiling over ``num_files`` files. Raises CheckpointError if the JSON is not a tiling."""
        return tiling.from_json(self.name, self.shape, dict(self.cut), num_files)

    def to_json(self) -> dict[str, Json]:
        """Return the form in layout.json."""
        return {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype], **self.cut}


@dataclass(frozen=True)
class CheckpointLayout:
    """The content of layout.json.

    Attributes:
        model: Facts about the model, compared at load.
        grid: Axis name to size, on the run that wrote the checkpoint.
        files: The shard files; a tiling refers to them by position.
    """

    model: Mapping[str, Json]
    grid: Mapping[str, Json]
    scalars: FileEntry
    tensors: Mapping[str, TensorEntry]
    files: Sequence[FileEntry]

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
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
    """Return the content of the file, given all but its first line."""
    return b'{"sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode() + body


def read_layout(folder: Place) -> CheckpointLayout:
    """Return the layout of a checkpoint folder. Raises CheckpointError if it is missing or damaged."""
    path = at(folder) / LAYOUT_FILE
    try:
        content = path.content(MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {LAYOUT_FILE}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return parse_layout(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_layout(content: bytes) -> CheckpointLayout:
    """Return the layout with this content. Raises CheckpointError if the content is not a layout."""
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
        raise CheckpointError(f"it has {len(content):,} bytes, more than this machine has memory to parse") from None
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
    # A plain name in this folder: no separator, no parent folder, not hidden, and not the layout itself.
    _expect(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name), f"bad file {name!r:.100}"
    )
    _expect(name != LAYOUT_FILE, f"the layout names itself as a file, {name}")
    _expect(is_number(size), f"{name} has the size {size!r:.100}")
    _expect(isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256), f"{name} has a bad SHA-256")
    return FileEntry(name, size, sha256)


def _tensor(name: str, value: Json) -> TensorEntry:
    _expect(isinstance(value, dict), f"tensor {name!r:.100} is not described by an object")
    shape, dtype = value.get("shape"), value.get("dtype")
    _expect(
        isinstance(shape, list) and len(shape) <= MAX_DIMS and all(is_number(size) for size in shape),
        f"tensor {name!r:.100} has the shape {str(shape)[:100]}",
    )
    numel = 1
    for size in shape:
        numel *= size
    _expect(numel <= MAX_NUMBER, f"tensor {name!r:.100} has {numel} elements")
    _expect(
        isinstance(dtype, str) and dtype in DTYPES_BY_NAME, f"tensor {name!r:.100} has the dtype {str(dtype)[:100]}"
    )
    cut = {key: value[key] for key in ("starts", "files", "pieces") if key in value}
    return TensorEntry(name, tuple(shape), DTYPES_BY_NAME[dtype], cut)


def _expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise CheckpointError(otherwise)
