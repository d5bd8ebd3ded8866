"""Shards: a rank's part of a global tensor, in the form that torch.distributed.checkpoint (DCP) accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megapar.core.box import Box
from megapar.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Shard:
    """A local tensor that covers one box of a global tensor. Raises CheckpointError if box, shape and tensor disagree.

    Attributes:
        name: The same on every rank.
        shape: Shape of the global tensor.
        box: The part of the global tensor that this rank holds.
        tensor: Local tensor [box.sizes], on any device, with any strides. Read at save, written in place at load.
        primary: This rank may write the box at save. If several primary ranks hold the same box, one of them writes it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    primary: bool = True

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

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the item to write (DCP's protocol)."""
        data = TensorWriteData(
            chunk=self.__create_chunk_list__()[0],
            properties=TensorProperties(dtype=self.tensor.dtype),
            size=torch.Size(self.shape),
        )
        return [WriteItem(MetadataIndex(fqn, self.box.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes of the global tensor on this rank (DCP's protocol)."""
        return [ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the local tensor of the box that starts at ``index.offset`` (DCP's protocol)."""
        if index.offset is not None and tuple(index.offset) != tuple(self.box.offsets):
            raise CheckpointError(f"{self.name}: no box starts at {tuple(index.offset)} here, {self.box} does")
        return self.tensor.detach()
