"""Causal attention of the last positions of a sequence on a CPU, whose kernel supports top-left alignment only.

    k, v   | prefix: unmasked | diagonal: causal |      q is above the diagonal block
    o      merged from both by their log-sum-exps, and so is the gradient: each part's backward with the merged
           output and log-sum-exp gives exactly the share of that part (as in ring attention, arXiv 2310.01889)

Neither a mask nor the scores are materialized.

Shape letters: B batch, N query heads, G key-value heads, S positions of q, L of k and v, P = L - S of the prefix,
D head size of q and k, V of v and the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.head_dims import cut_features, equal_head_dims, pad_features

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class MergedAttention(torch.autograd.Function):
    """Attention of q [B, N, S, D], k [B, G, L, D], v [B, G, L, V] to [B, N, S, V]; position i attends to 0..P + i."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute both parts and merge them to [B, N, S, V]."""
        prefix, ctx.value_dim = k.shape[2] - q.shape[2], v.shape[-1]
        ctx.key_dim = q.shape[-1]
        q, k, v, ctx.scale = equal_head_dims(q, k, v)
        out, lse = _forward(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=ctx.scale)
        if prefix:
            before, lse_before = _forward(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=ctx.scale)
            whole = torch.logaddexp(lse, lse_before)
            shares = [(part - whole).exp().unsqueeze(-1) for part in (lse, lse_before)]
            out, lse = (out * shares[0] + before * shares[1]).to(q.dtype), whole
        ctx.save_for_backward(q, k, v, out, lse)
        merged: Tensor = cut_features(out, ctx.value_dim)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, N, S, D], dk [B, G, L, D] and dv [B, G, L, V]."""
        q, k, v, out, lse = ctx.saved_tensors
        prefix, grad, scaled = k.shape[2] - q.shape[2], pad_features(grads[0], v.shape[-1]), {"scale": ctx.scale}
        dq, dk, dv = _backward(grad, q, k[:, :, prefix:], v[:, :, prefix:], out, lse, 0.0, True, **scaled)
        if prefix:
            before = _backward(grad, q, k[:, :, :prefix], v[:, :, :prefix], out, lse, 0.0, False, **scaled)
            dq = dq + before[0]
            dk, dv = torch.cat((before[1], dk), dim=2), torch.cat((before[2], dv), dim=2)
        return cut_features(dq, ctx.key_dim), cut_features(dk, ctx.key_dim), cut_features(dv, ctx.value_dim)
