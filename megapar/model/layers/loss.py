"""Vocab parallel linear cross-entropy, computed chunk by chunk so that the full logits never exist.

Shape letters: N rows (tokens), H hidden, V vocabulary; /mp marks the split over the tensor parallel axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.axis import Axis
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.kinds import device_class
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.layers import vocab_parallel_cross_entropy_, vocabulary_range
from megapar.model.cost.logits import rows_at_a_time

IGNORED = -100


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    vocab_size: int,
    mp: Axis,
    logits_bytes: int | None = None,
) -> Tensor:
    """Return the sum over rows of cross-entropy(hidden w^T + b, label), except rows labeled -100.

    The forward computes the gradients chunk by chunk, so that no logits are kept: dw [V/mp, H] and db [V/mp] are
    complete on their rank, dhidden [N, H] is a partial sum over mp, which the caller's ``copy`` or ``all_gather``
    reduces. The loss is a scalar in max(fp32, dtype), the same on all mp ranks; 0 for N = 0.
    Raises ValueError if the weight is not this rank's shard.

    Args:
        hidden: [N, H], the same on all mp ranks.
        weight: [V/mp, H], this rank's shard.
        bias: [V/mp], this rank's shard, or None.
        labels: [N] int64.
        vocab_size: V.
        mp: The tensor parallel axis.
        logits_bytes: Most bytes of logits, in max(fp32, dtype), that exist at a time; None for the device's default.
    """
    first_token, rows = check_shard(weight, vocab_size, mp)
    held = device_class(hidden.device.type).logits_bytes if logits_bytes is None else logits_bytes
    chunk = rows_at_a_time(hidden.shape[0], rows * at_least_fp32(hidden.dtype).itemsize, held)
    loss: Tensor = _VocabParallelLinearCrossEntropy.apply(
        hidden, weight, bias, labels, first_token, mp, chunk, torch.is_grad_enabled()
    )
    return loss


def check_shard(weight: Tensor, vocab_size: int, mp: Axis) -> tuple[int, int]:
    """Return (first token, number of tokens) of this rank's shard. Raises ValueError if ``weight`` has other rows."""
    first_token, rows = vocabulary_range(vocab_size, mp)
    if weight.shape[0] != rows:
        raise ValueError(
            f"the head got {weight.shape[0]} vocabulary rows, but rank {mp.rank} of {mp.size} holds {rows}. "
            "Unshard the weight before the head runs."
        )
    return first_token, rows


class _VocabParallelLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        first_token: int,
        mp: Axis,
        chunk: int,
        differentiate: bool,
    ) -> Tensor:
        exact = at_least_fp32(hidden.dtype)
        loss = hidden.new_zeros((), dtype=exact)
        d_hidden = hidden.new_empty(hidden.shape) if differentiate else None
        # Sums over many chunks lose bits in 16-bit dtypes, so accumulate in fp32 and round once.
        d_weight = weight.new_empty(weight.shape, dtype=exact) if differentiate else None
        d_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=exact)
        for first in range(0, hidden.shape[0], chunk):
            count = min(chunk, hidden.shape[0] - first)
            rows = hidden.narrow(0, first, count)
            logits = F.linear(rows, weight, bias).to(exact)
            loss += vocab_parallel_cross_entropy_(
                logits, labels.narrow(0, first, count), first_token, mp, IGNORED
            ).sum()
            if d_hidden is None or d_weight is None:
                continue
            if d_bias is not None:
                d_bias += logits.sum(0)
            d_logits = logits.to(hidden.dtype)
            torch.mm(d_logits, weight, out=d_hidden.narrow(0, first, count))
            op("add_product", d_logits)(d_weight, d_logits.t(), rows, begins=first == 0)
        if d_weight is not None and not hidden.shape[0]:
            d_weight.zero_()
        if d_hidden is not None and d_weight is not None:
            d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype), d_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        # A zero-dim factor does not promote, so the products keep the gradients' dtypes.
        d_bias = None if d_bias is None else d_bias * grad
        return d_hidden * grad, d_weight * grad, d_bias, None, None, None, None, None
