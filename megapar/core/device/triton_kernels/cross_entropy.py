"""Cross-entropy over the whole vocabulary and its gradient, one pass over the logits each.

Shape letters: N rows (tokens), V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _log_probability(logits, labels, lse, log_p, stride, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(line + start + offsets, mask=start + offsets < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        most = higher
    sum_of_logs = most + tl.log(total)
    tl.store(lse + row, sum_of_logs)
    tl.store(log_p + row, tl.load(line + tl.load(labels + row)).to(tl.float32) - sum_of_logs)


@triton.jit
def _gradient(logits, labels, lse, gradient, stride, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < V
    x = tl.load(logits + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(lse + row)) - tl.where(offsets == tl.load(labels + row), 1.0, 0.0)
    tl.store(gradient + row * V + offsets, share.to(gradient.dtype.element_ty), mask=inside)


def log_probabilities(logits: Tensor, labels: Tensor, results: tuple[Tensor, Tensor]) -> None:
    """Compute the logarithm of the sum of exponentials of each row, and the log-probability of its label; [N] fp32.

    Args:
        logits: [N, V], with contiguous rows.
        labels: [N] int64, 0..V - 1.
    """
    if logits.shape[0]:
        grid, sizes = (logits.shape[0],), {"V": logits.shape[1], "BLOCK": BLOCK}
        _log_probability[grid](logits, labels, *results, logits.stride(0), **sizes, num_warps=WARPS)


def gradient_of_logits(logits: Tensor, labels: Tensor, lse: Tensor, dtype: object, gradient: Tensor) -> None:
    """Compute softmax(logits) - [column is the label], [N, V]. ``lse`` is of ``log_probabilities``."""
    if logits.shape[0]:
        grid = (logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))
        sizes = {"V": logits.shape[1], "BLOCK": BLOCK}
        _gradient[grid](logits, labels, lse, gradient, logits.stride(0), **sizes, num_warps=WARPS)
