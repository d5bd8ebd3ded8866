"""Shards, each a rank's part of a global tensor, and the checkpoint files that contain shards and scalars.

The files are safetensors (``files.tensor_file``), which any reader can open, written one tensor at a time and read in
blocks, so that neither needs much memory. Tensors are sorted by descending element size, which keeps them aligned.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megapar.checkpoints.format.layout import FileEntry
from megapar.checkpoints.format.names import MOST_SCALARS_BYTES
from megapar.core.box import Box
from megapar.core.units import Json
from megapar.errors import CheckpointError
from megapar.files.location import Place, at
from megapar.files.regular_file import UnfitFileError
from megapar.files.tensor_file import TensorFile


@dataclass(frozen=True, eq=False)
class Shard:
    """A local tensor that covers one box of a global tensor. Raises CheckpointError if box, shape and tensor disagree.

    Attributes:
        name: The same on every rank.
        shape: Shape of the global tensor.
        box: The part of the global tensor that this rank holds.
        tensor: Local tensor [box.sizes], on any device, with any strides. Read at save, written in place at load.
        primary: This rank may write the box at save. If several primary ranks hold the same box, one of them writes it.
        casts: At load it may be stored in another of fp64, fp32 and bf16, and is then rounded to nearest.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    primary: bool = True
    casts: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tensor, DTensor):
            raise CheckpointError(f"{self.name}: pass the local tensor of the DTensor, and its box")
        ends = (o + s for o, s in zip(self.box.offsets, self.box.sizes, strict=True))
        fits = len(self.shape) == len(self.box.sizes) and all(
            offset >= 0 and end <= size for offset, end, size in zip(self.box.offsets, ends, self.shape, strict=True)
        )
        if not fits or tuple(self.tensor.shape) != tuple(self.box.sizes):
            raise CheckpointError(
                f"{self.name}: a local tensor of shape {list(self.tensor.shape)} was given for {self.box} "
                f"of a global tensor of shape {list(self.shape)}"
            )

    @classmethod
    def whole(cls, name: str, tensor: Tensor, primary: bool = True) -> Shard:
        """Make the shard of a tensor that is complete on this rank."""
        shape = tuple(tensor.shape)
        return cls(name, shape, Box.whole(shape), tensor, primary)


Verify: TypeAlias = Literal["full", "size", "off"]
"""The check of a file: its size and SHA-256, its size, or its existence."""

BLOCK_BYTES = 16 << 20  # the most that is hashed, written or read at a time

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES_BY_CODE = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class TensorPlan:
    """The description of a tensor to write, without its data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its data in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class HashedFile:
    """A new file that counts and hashes the bytes written to it."""

    def __init__(self, path: Place) -> None:
        self._path = at(path)
        self._file = self._path.write()
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: memoryview | bytes) -> None:
        """Append all of these bytes."""
        view = memoryview(data)
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._digest.update(block)
            self._file.write(block)
        self._size += len(view)

    def close(self, sync: bool = True) -> FileEntry:
        """End the file, flushed to disk unless ``sync`` is off, and return its entry."""
        self._file.finish(durable=sync)
        return FileEntry(self._path.name, self._size, self._digest.hexdigest())


def write_bytes(path: Place, content: bytes) -> FileEntry:
    """Write a new file with this content, flush it to disk, and return its entry."""
    file = HashedFile(path)
    file.write(content)
    return file.close()


def file_order(plans: Iterable[TensorPlan]) -> list[TensorPlan]:
    """Return the tensors in the order that they have in a file."""
    return sorted(plans, key=lambda plan: (-plan.dtype.itemsize, plan.name))


def write_shards(
    path: Place,
    plans: Sequence[TensorPlan],
    fetch: Callable[[str], Tensor | Iterator[Tensor]],
    sync: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write a new file of tensors, one tensor at a time, and return its entry.

    Args:
        path: Must not exist.
        plans: The tensors in ``file_order``.
        fetch: Returns the tensor of a name, or its consecutive pieces in row-major order.
        sync: Flush the file to disk.
        metadata: Texts for the header, by name.
    """
    header: dict[str, Json] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for plan in plans:
        end = position + plan.num_bytes
        header[plan.name] = {"dtype": CODES[plan.dtype], "shape": list(plan.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = HashedFile(path)
    file.write(len(text).to_bytes(8, "little") + text)
    for plan in plans:
        data = fetch(plan.name)
        written = sum(_write_tensor(file, part) for part in ([data] if isinstance(data, Tensor) else data))
        assert written == plan.num_bytes, f"{plan.name} has {written} bytes, {plan.num_bytes} were planned"
    return file.close(sync)


def _write_tensor(file: HashedFile, tensor: Tensor) -> int:
    """Append the bytes of a tensor and return their number."""
    if tensor.numel():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        file.write(data.numpy().data)
    return tensor.nbytes


class ShardFile(TensorFile):
    """An open shard file, with the data of its tensors."""

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """Return ``position`` for a torch dtype: the tensor's first byte, if the file has it with this shape."""
        return self.position(name, CODES[dtype], shape)

    def read_as(self, name: str, shape: Sequence[int], piece: Box, part: Box, out: Tensor) -> None:
        """Read as ``read`` does, from a tensor stored in another ``shape`` with the same elements in the same order."""
        position = self.check(name, out.dtype, shape)
        if not part.sizes:
            self._copy(position, (1,), [0], out.view(1))
        else:
            self._copy(position, piece.sizes, [p - o for p, o in zip(part.offsets, piece.offsets, strict=True)], out)

    def read(self, name: str, piece: Box, part: Box, out: Tensor) -> None:
        """Copy ``part`` of a global tensor to ``out`` [part.sizes].

        Args:
            name: The stored tensor.
            piece: The box of the global tensor that the stored one covers.
            part: A box within ``piece``.
            out: Its dtype must be the stored one.
        """
        self.read_as(name, piece.sizes, piece, part, out)

    def _copy(self, position: int, sizes: Sequence[int], starts: Sequence[int], out: Tensor) -> None:
        """Copy the part [out.shape] at ``starts`` of a tensor [sizes] at byte ``position``, in blocks of whole rows."""
        if not out.numel():
            return  # includes a tensor whose rows have no bytes
        row_bytes = prod(sizes[1:]) * out.dtype.itemsize
        if row_bytes > BLOCK_BYTES and len(sizes) > 1:
            for i in range(out.shape[0]):
                self._copy(position + (starts[0] + i) * row_bytes, sizes[1:], starts[1:], out[i])
            return
        rows = max(1, BLOCK_BYTES // row_bytes)
        inner = (slice(None), *(slice(s, s + n) for s, n in zip(starts[1:], out.shape[1:], strict=True)))
        for first in range(0, out.shape[0], rows):
            count = min(rows, out.shape[0] - first)
            data = self._read_at(position + (starts[0] + first) * row_bytes, count * row_bytes)
            block = torch.frombuffer(data, dtype=out.dtype).view(count, *sizes[1:])
            out[first : first + count].copy_(block[inner])


def check_file(folder: Place, entry: FileEntry, verify: Verify) -> str:
    """Return the problem with a file that layout.json describes, or ""."""
    path = at(folder) / entry.name
    try:
        with path.read() as file:
            size = file.seek(0, os.SEEK_END)
        if verify != "off" and size != entry.size:
            return f"{entry.name} has {size} bytes instead of {entry.size}"
        if verify == "full" and path.sha256() != entry.sha256:
            return f"{entry.name} is damaged: its SHA-256 is not the one of layout.json"
    except (FileNotFoundError, NotADirectoryError, UnfitFileError):
        return f"{entry.name} is missing"
    except OSError as error:
        return f"{entry.name} cannot be read: {error}"
    return ""


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is not a number that a run saves")
    return number


def read_scalars(folder: Place, file: FileEntry, verify: Verify) -> dict[str, Json]:
    """Return the scalars of a checkpoint. Raises CheckpointError if their file is missing or damaged."""
    problem = check_file(folder, file, verify)
    if problem:
        raise CheckpointError(f"{folder} is damaged or incomplete: {problem}")
    path = at(folder) / file.name
    try:
        scalars = json.loads(path.content(MOST_SCALARS_BYTES), parse_constant=_finite, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}") from error
    if not isinstance(scalars, dict):
        raise CheckpointError(f"{path} is damaged: it does not contain a JSON object")
    return scalars
