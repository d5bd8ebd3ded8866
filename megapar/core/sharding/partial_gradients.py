"""Partial gradients: sums per mp rank that are completed once per optimizer step, in one collective.

Under sequence parallelism every mp rank sees a part of the positions, so parameters that are replicated over mp (norms,
the router, biases of row parallel layers) have partial gradients. Those that each rank applies to its own heads
(qk-norm) always have. The sharded gradients are summed, after the reduction over data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.sharding.sharding import Sharding


def sum_partial(sharding: Sharding, names: Sequence[str], mp: Axis, from_first_rank: frozenset[str]) -> None:
    """Sum the finished gradients of the named parameters over mp, in place, as one message.

    They are sent and added in the dtype of the masters. Of the parameters ``from_first_rank``, whose gradients each mp
    rank has whole, all take the first rank's: others add zeros.
    """
    selected = {*names, *from_first_rank}
    if mp.group is None or not selected:
        return
    grads = [shard.grad for shard in sharding.master_shards if shard.grad is not None]
    views = [view for view in sharding.views(grads) if view.spec.name in selected]
    pieces = [view.tensor.zero_() if mp.rank and view.spec.name in from_first_rank else view.tensor for view in views]
    if not pieces:
        return  # a stage without such parameters, the same on all its mp ranks
    message = torch.cat([piece.flatten().to(sharding.master_shards[0].dtype) for piece in pieces])
    work = collectives.all_reduce(message, mp, async_op=True)
    assert work is not None
    mp.meter.wait(work, f"{mp.name}/all_reduce")
    _scatter(message, pieces)


def sum_tied(sharding: Sharding, name: str, pp: Axis) -> None:
    """Sum the finished gradient of a tied parameter over the first and the last stage, in place, once per step.

    The two stages exchange their gradients and add: a + b and b + a have the same bits, so their weights stay equal.
    """
    if pp.rank not in (0, pp.size - 1):
        return
    grads = [shard.grad for shard in sharding.master_shards if shard.grad is not None]
    pieces = [view.tensor for view in sharding.views(grads) if view.spec.name == name]
    gradient = torch.cat([piece.flatten().to(sharding.master_shards[0].dtype) for piece in pieces])
    other = torch.empty_like(gradient)
    peer = pp.size - 1 - pp.rank
    # One call for both: if each rank's queue had a send before its receive, an accelerator would deadlock.
    work = collectives.send_receive(other, gradient, pp, peer, peer)
    assert work is not None
    pp.meter.wait(work, f"{pp.name}/send")
    _scatter(gradient + other, pieces)


def _scatter(message: Tensor, pieces: Sequence[Tensor]) -> None:
    offset = 0
    for piece in pieces:
        piece.copy_(message[offset : offset + piece.numel()].view(piece.shape))
        offset += piece.numel()
