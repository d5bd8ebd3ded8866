"""Norms of an update by class of tensors: of the change of their weights, and of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.world import World
from megapar.core.device.dtypes import widest
from megapar.core.sharding.cut import ParameterInfo, is_primary
from megapar.core.sharding.sharding import Sharding

TENSOR_CLASSES = ("embeddings", "attention", "mlps", "experts", "routers", "vectors", "head")


def class_of(spec: ParameterInfo) -> str:
    """Return the class of a parameter: vectors are norms, biases and sinks, mlps all other matrices of layers."""
    if not spec.decay:
        return "vectors"
    if spec.router or spec.expert:
        return "routers" if spec.router else "experts"
    if ".attention." in spec.name:
        return "attention"
    if spec.unit == "embedding":
        return "embeddings"
    return "head" if spec.unit == "head" and not spec.name.startswith("mtp.") else "mlps"


class UpdateNorms:
    """Measures an update between ``begin`` and ``take``, with a copy of this rank's masters."""

    def __init__(self, sharding: Sharding, world: World) -> None:
        self._sharding, self._world = sharding, world
        self._before: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the masters as they are before the update."""
        shards = self._sharding.master_shards
        self._before = [shard.values if shard.weights else shard.values.clone() for shard in shards]

    @torch.no_grad()
    def take(self) -> Tensor:
        """Return the 2-norms of the change and of the weights of ``TENSOR_CLASSES`` [7, 2], of the whole model."""
        moved, self._before = self._before, []
        masters = [shard.values for shard in self._sharding.master_shards]
        torch._foreach_sub_(moved, masters)
        grid, rank = self._world.grid, self._world.rank
        dtype = widest(self._world.device.torch_device)
        squares = torch.zeros(len(TENSOR_CLASSES), 2, dtype=dtype, device=self._world.device.torch_device)
        for column, tensors in enumerate((moved, masters)):
            for view in self._sharding.views(tensors):
                if is_primary(view.spec, grid, rank):  # one rank counts each piece
                    norm = torch.linalg.vector_norm(view.tensor, dtype=dtype)
                    squares[TENSOR_CLASSES.index(class_of(view.spec)), column] += norm.square()
        reduce_numbers(squares, self._world.axis("world"), "update norms")
        return squares.sqrt_()
