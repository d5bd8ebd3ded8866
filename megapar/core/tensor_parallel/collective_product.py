"""Torch's operators that are a collective and a product at once, over the symmetric memory of a node's GPUs.

They cut and hide by themselves: a product starts on the rows that have arrived, and what it has made leaves under the
rest. torch marks them as internal; names and arguments are those of torch 2.11 and 2.13. They take bf16 only here.

Shape letters: B batch, S sequence, s = S / (ranks of mp), I in features, O out features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.comm import collectives as transport
from megapar.core.comm.axis import Axis

SEQUENCE_DIM = 1


def enable(axis: Axis) -> None:
    """Let the group of ``axis`` have symmetric memory; every rank of it calls this once, before the first product."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert axis.group is not None
    enable_symm_mem_for_group(axis.group.group_name)


def fused_gather_product(
    x: Tensor, right: Tensor, bias: Tensor | None, axis: Axis, *, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """(x [B, s, I] of all ranks as [B, S, I] where ``keep``, that @ right [I, O] (+ bias [O]))."""
    assert axis.group is not None
    transport.count_all_gather(x, axis)
    whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [right], SEQUENCE_DIM, axis.group.group_name, return_A=keep
    )
    # The operator multiplies by position first, so the result of several samples is a view.
    y = y.contiguous() if bias is None else y + bias
    return whole if keep else None, y


def fused_product_scatter(x: Tensor, right: Tensor, axis: Axis) -> Tensor:
    """x [B, S, I] @ right [I, O], summed over the ranks: this one's rows [B, s, O]."""
    assert axis.group is not None
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), right, "sum", SEQUENCE_DIM, axis.group.group_name
    )
    transport.count_reduce_scatter(y, axis)
    return y.contiguous()
