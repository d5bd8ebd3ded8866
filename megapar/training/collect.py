"""Whole parameters on rank 0, one at a time, from the pieces that ranks master."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.sharding.cut import is_primary, master_box
from megapar.core.sharding.part import View
from megapar.core.world import World


def collect(world: World, view: View) -> Tensor | None:
    """The whole tensor on the CPU of rank 0, None elsewhere; every rank must call it with the same parameter.

    Each rank that answers for its piece sends it; which rank holds what is arithmetic over the grid.
    """
    grid, spec = world.grid, view.spec
    if grid.world_size == 1:
        return view.tensor.detach().cpu()
    owners = [rank for rank in range(grid.world_size) if is_primary(spec, grid, rank)]
    mine = view.tensor.detach().cpu().contiguous()
    if world.rank != 0:
        if world.rank in owners and mine.numel():
            dist.send(mine, 0)
        return None
    whole = torch.empty(spec.shape, dtype=mine.dtype)
    for rank in owners:
        box = master_box(spec, grid, rank)
        if rank == 0:
            whole[box.slices] = mine
        elif box.numel:
            piece = torch.empty(box.sizes, dtype=mine.dtype)
            dist.recv(piece, rank)
            whole[box.slices] = piece
    return whole


def collect_all(world: World, views: Iterator[View]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) one after the other on rank 0; other ranks yield nothing but must be run to the end."""
    for view in views:
        whole = collect(world, view)
        if whole is not None:
            yield view.spec.name, whole
