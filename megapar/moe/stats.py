"""What one MoE layer reports about its routing beside its output.

Every statistic is made in two steps: sums over tokens, which add up over slices and over ranks, and one
finishing function that divides by the tokens of the micro-batch. So a layout that cuts the micro-batch
merges the sums first and gets the number of the whole, not a mean of means.

Shape letters: T tokens, k choices per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.axis import Axis
from megapar.core.collectives import gather


class MoeStats(NamedTuple):
    """Statistics of one layer over one micro-batch. Padding is in none of them.

    aux: scalar, load-balance loss without its coefficient, differentiable.
    z: scalar, mean squared log-sum-exp of the router logits without its coefficient, differentiable.
    load: [E] int64, (token, choice) pairs routed to each expert, before drops.
    dropped: int64 scalar, (token, choice) pairs that no expert had room for.
    """

    aux: Tensor
    z: Tensor
    load: Tensor
    dropped: Tensor


class RouterSums(NamedTuple):
    """Sums over the non-padding tokens of one piece of a micro-batch.

    probs: [E] sum of the full scores, before bias and renormalisation, differentiable.
    z: scalar sum of squared log-sum-exps, differentiable.
    counts: [k, E] int64, tokens whose c-th choice is expert e, before drops.
    """

    probs: Tensor
    z: Tensor
    counts: Tensor


def count_pairs(experts_Tk: Tensor, mask_Tk: Tensor | None, num_experts: int) -> Tensor:
    """[k, E] int64: how many of the (token, choice) pairs under the mask go to each expert, per choice.

    mask_Tk: bool, broadcastable to [T, k]; None counts every pair. Never waits for the device.
    """
    topk = experts_Tk.shape[1]
    columns = torch.arange(topk, device=experts_Tk.device) * num_experts
    ones = torch.ones_like(experts_Tk) if mask_Tk is None else mask_Tk.expand_as(experts_Tk).long()
    counts = experts_Tk.new_zeros(topk * num_experts)
    return counts.scatter_add_(0, (experts_Tk + columns).flatten(), ones.flatten()).view(topk, num_experts)


def router_sums(logits_TE: Tensor, probs_TE: Tensor, experts_Tk: Tensor, valid_T: Tensor | None) -> RouterSums:
    """Sum what the losses and the load need over the tokens; ``valid_T`` False is padding, None is no padding."""
    z_T = torch.logsumexp(logits_TE, dim=1).square()
    if valid_T is None:
        counts_kE = count_pairs(experts_Tk, None, probs_TE.shape[1])
        return RouterSums(probs_TE.sum(0), z_T.sum(), counts_kE)
    share_T = valid_T.to(probs_TE.dtype)
    counts_kE = count_pairs(experts_Tk, valid_T[:, None], probs_TE.shape[1])
    return RouterSums(share_T @ probs_TE, share_T @ z_T, counts_kE)


def add_sums(parts: Sequence[RouterSums]) -> RouterSums:
    """The sums of the whole from the sums of its slices, in the order given."""
    probs, z, counts = zip(*parts, strict=True)
    return RouterSums(torch.stack(probs).sum(0), torch.stack(z).sum(), torch.stack(counts).sum(0))


def gather_sums(sums: RouterSums, axis: Axis) -> tuple[RouterSums, Tensor]:
    """(sums of the whole, [size, k, E] counts of every piece) of a micro-batch that is cut over an axis.

    One all-gather. All ranks compute the same from the result, so each piece's gradient is whole where the piece was
    made: the ranks' gradients of a replicated weight add up to the weight's.
    """
    shape = sums.counts.shape
    # Counts travel as floating point numbers, exact below 2^24 tokens in a micro-batch.
    own = torch.cat([sums.probs, sums.z[None], sums.counts.flatten().to(sums.probs.dtype)])
    pieces = gather(own[None], axis, 0)
    num_experts = shape[1]
    probs, z, counts = pieces.split([num_experts, 1, sums.counts.numel()], dim=1)
    counts_PkE = counts.detach().long().unflatten(1, shape)
    return RouterSums(probs.sum(0), z.sum(), counts_PkE.sum(0)), counts_PkE


def router_losses(sums: RouterSums, valid_tokens: int, *, first_choices_only: bool = False) -> tuple[Tensor, Tensor]:
    """Finish (aux, z) from the sums over a whole micro-batch of ``valid_tokens`` non-padding tokens.

    aux = E/k · Σ_e mean(p_e) · mean(count_e over all k choices); it is 1 when the load is even. With
    ``first_choices_only`` (drop policy ``choice``, as GShard's top-2 does) only first choices count and
    there is no 1/k. z = mean(logsumexp²). Both are 0 without a token.
    Source: GShard, arXiv 2006.16668, algorithm 1; ST-MoE, arXiv 2202.08906, equation 5.
    """
    topk, num_experts = sums.counts.shape
    tokens = max(valid_tokens, 1)
    counted = sums.counts[0] if first_choices_only else sums.counts.sum(0)
    scale = num_experts / (1 if first_choices_only else topk)
    aux = scale * torch.dot(sums.probs / tokens, counted.to(sums.probs.dtype) / tokens)
    return aux, sums.z / tokens
