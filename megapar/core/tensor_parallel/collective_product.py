"""torch's fused operators of a collective and a product, in the symmetric memory of a node's GPUs.

The operators pipeline internally: a product starts on the rows that have arrived, and finished rows are sent while the
others are computed. torch marks these operators as internal; names and arguments are those of torch 2.11 and 2.13.
megapar uses them in bf16 only.

Shape letters: B batch, S sequence, s = S / (ranks of mp), I in features, O out features.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis

SEQUENCE_DIM = 1


def enable(axis: Axis) -> None:
    """Enable symmetric memory for the group of ``axis``. Every rank of it calls this once, before the first product.

    torch 2.11 and 2.13 call this needless, but the operators of 2.11 fail without it.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert axis.group is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(axis.group.group_name)


def fused_gather_product(
    x: Tensor, right: Tensor, bias: Tensor | None, axis: Axis, *, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """Gather x [B, s, I] over the ranks to [B, S, I] and multiply it by right [I, O] (+ bias [O]).

    Returns (the gathered x, None unless ``keep``; the product [B, S, O]).
    """
    assert axis.group is not None
    collectives.count_all_gather(x, axis)
    whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [right], SEQUENCE_DIM, axis.group.group_name, return_A=keep
    )
    # The operator works position by position, so the result of several samples is a view.
    y = y.contiguous() if bias is None else y + bias
    return whole if keep else None, y


def fused_product_scatter(x: Tensor, right: Tensor, axis: Axis) -> Tensor:
    """Multiply x [B, S, I] by right [I, O], sum over the ranks, and return this rank's rows [B, s, O]."""
    assert axis.group is not None
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), right, "sum", SEQUENCE_DIM, axis.group.group_name
    )
    collectives.count_reduce_scatter(y, axis)
    return y.contiguous()
