"""Cross-entropy over the whole vocabulary, with its gradient.

Shape letters: N rows (tokens), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.device import triton_operators


def cross_entropy_reference(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of labels and the gradient of the sum of cross-entropies. Overwrites ``logits``.

    Args:
        logits: [N, V] in max(fp32, dtype).
        labels: [N] int64.
        dtype: Dtype of the gradient.

    Returns:
        The log-probabilities [N], and the gradient [N, V], softmax - 1 at the label.
    """
    column = labels.unsqueeze(-1)
    logits.sub_(logits.amax(-1, keepdim=True))
    target = logits.gather(-1, column)
    total = logits.exp_().sum(-1, keepdim=True)
    logits.mul_(total.reciprocal())
    logits.scatter_add_(-1, column, -torch.ones_like(total))
    return (target - total.log()).squeeze(-1), logits.to(dtype)


def cross_entropy_fused(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute ``cross_entropy_reference`` by Triton's kernels, or else by the log-softmax and its exponential.

    Each thread of the log-softmax reads an element before it writes it, so the output replaces the input.
    """
    if dtype != logits.dtype and triton_operators.usable(logits.device):  # of the same dtype, one buffer is enough
        return triton_operators.cross_entropy(logits, labels, dtype)
    column = labels.unsqueeze(-1)
    torch.log_softmax(logits, -1, out=logits)
    target = logits.gather(-1, column)
    gradient = logits.exp_() if dtype == logits.dtype else torch.exp(logits, out=torch.empty_like(logits, dtype=dtype))
    gradient.scatter_(-1, column, torch.expm1(target).to(dtype))
    return target.squeeze(-1), gradient
