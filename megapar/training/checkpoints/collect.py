"""Collection of whole parameters on rank 0, one at a time, from the shards of all ranks (unshard on the host)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megapar.core.comm import host_messages
from megapar.core.comm.world import World
from megapar.core.sharding.cut import is_primary, is_speaker, master_box
from megapar.core.sharding.master_shard import ParameterView
from megapar.core.sharding.sharding import Sharding
from megapar.model.parameter import ParameterSpec


def collect(
    world: World, spec: ParameterSpec, view: ParameterView | None, dtype: torch.dtype, *, full: bool
) -> Tensor | None:
    """Return the whole tensor on the CPU of rank 0, and None on other ranks. All ranks must collect the same parameter.

    The primary rank of each shard sends it. Which rank has which shard follows from the device mesh.

    Args:
        view: This rank's shard. None on ranks whose pipeline stage does not have the parameter.
        dtype: dtype of the tensor.
        full: True at sharding stage 3.
    """
    grid = world.grid
    if grid.world_size == 1:
        assert view is not None
        return view.tensor.detach().cpu()
    owners = [rank for rank in range(grid.world_size) if is_primary(spec, grid, rank)]
    mine = None if view is None else view.tensor.detach().cpu().contiguous()
    if world.rank != 0:
        if world.rank in owners and mine is not None and mine.numel():
            host_messages.send(mine, 0)
        return None
    whole = torch.empty(spec.shape, dtype=dtype)
    for rank in owners:
        box = master_box(spec, grid, rank, full=full)
        if rank == 0:
            assert mine is not None
            whole[box.slices] = mine
        elif box.numel:
            piece = torch.empty(box.sizes, dtype=dtype)
            host_messages.receive(piece, rank)
            whole[box.slices] = piece
    return whole


def collect_all(
    world: World, table: Iterable[ParameterSpec], sharding: Sharding, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) one at a time on rank 0. Other ranks yield nothing but must exhaust the iterator.

    Args:
        table: Rows of the whole model. Its trainable parameters are collected in this order.
        sharding: The sharding of this rank's parameters.
        tensors: A tensor for each of the sharding's master shards, such as its master weights.
    """
    mine = {view.spec.name: view for view in sharding.views(tensors)}
    dtype = next(iter(mine.values())).tensor.dtype
    for spec in table:
        if spec.trainable:
            whole = collect(world, spec, mine.get(spec.name), dtype, full=sharding.full)
            if whole is not None:
                yield spec.name, whole


def collect_buffers(
    world: World, table: Iterable[ParameterSpec], buffers: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) like ``collect_all``. Every rank of a stage has its buffers whole.

    ``dtype`` is that of all buffers. Rank 0 needs it to receive buffers that it does not have.
    """
    for spec in table:
        if spec.trainable:
            continue
        speaker = next(rank for rank in range(world.grid.world_size) if is_speaker(spec, world.grid, rank))
        if world.rank == speaker and speaker:
            host_messages.send(buffers[spec.name].cpu().contiguous(), 0)
        elif world.rank == 0:
            whole = torch.empty(spec.shape, dtype=dtype) if speaker else buffers[spec.name].cpu()
            if speaker:
                host_messages.receive(whole, speaker)
            yield spec.name, whole
