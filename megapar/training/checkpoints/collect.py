"""Whole parameters on rank 0, one at a time, from the pieces that ranks master."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.world import World
from megapar.core.sharding.cut import is_primary, is_speaker, master_box
from megapar.core.sharding.master_shard import ParameterView, Sharding
from megapar.model.parameter import ParameterSpec


def collect(
    world: World, spec: ParameterSpec, view: ParameterView | None, dtype: torch.dtype, *, full: bool
) -> Tensor | None:
    """The whole tensor on the CPU of rank 0, None elsewhere; every rank must call it with the same parameter.

    Each rank that answers for its piece sends it; which rank holds what is arithmetic over the grid. view: None on
    ranks whose pipeline stage does not have the parameter. full: of the sharding.
    """
    grid = world.grid
    if grid.world_size == 1:
        assert view is not None
        return view.tensor.detach().cpu()
    owners = [rank for rank in range(grid.world_size) if is_primary(spec, grid, rank)]
    mine = None if view is None else view.tensor.detach().cpu().contiguous()
    if world.rank != 0:
        if world.rank in owners and mine is not None and mine.numel():
            dist.send(mine, 0)
        return None
    whole = torch.empty(spec.shape, dtype=dtype)
    for rank in owners:
        box = master_box(spec, grid, rank, full=full)
        if rank == 0:
            assert mine is not None
            whole[box.slices] = mine
        elif box.numel:
            piece = torch.empty(box.sizes, dtype=dtype)
            dist.recv(piece, rank)
            whole[box.slices] = piece
    return whole


def collect_all(
    world: World, table: Iterable[ParameterSpec], sharding: Sharding, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) one after the other on rank 0; other ranks yield nothing but must be run to the end.

    table: of the whole model; its trainable parameters are collected in its order. tensors: beside this rank's parts.
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
    """As ``collect_all``, of what no gradient moves; every rank of a stage has these whole.

    dtype: of all of them, for a rank 0 that has none.
    """
    for spec in table:
        if spec.trainable:
            continue
        speaker = next(rank for rank in range(world.grid.world_size) if is_speaker(spec, world.grid, rank))
        if world.rank == speaker and speaker:
            dist.send(buffers[spec.name].cpu().contiguous(), 0)
        elif world.rank == 0:
            whole = torch.empty(spec.shape, dtype=dtype) if speaker else buffers[spec.name].cpu()
            if speaker:
                dist.recv(whole, speaker)
            yield spec.name, whole
