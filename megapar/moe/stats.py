"""Routing statistics of one MoE layer: load balancing loss, z-loss, load and dropped tokens.

Every statistic is computed in two steps: sums over tokens, which add up over slices and ranks, and a final function
that divides by the tokens of the micro-batch. So if a layout divides the micro-batch, the sums are merged first, and
the result is that of the whole micro-batch, not a mean of means.

Shape letters: T tokens, k choices per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.core.context_parallel.share import Share
from megapar.core.device.compiled import counted


class MoeStats(NamedTuple):
    """Statistics of one layer over one micro-batch, without padding.

    Attributes:
        aux: Scalar, the load balancing loss (auxiliary loss) without its coefficient, differentiable.
        z: Scalar, mean squared log-sum-exp of the router logits without its coefficient, differentiable.
        sequence: Scalar, sum over samples of each one's load balancing loss; 0 if not used.
        orthogonal: Scalar, a loss of the router's weight alone (``Router.orthogonal_loss``); 0 if not used.
        load: [E] int64, (token, choice) pairs routed to each expert, before drops.
        dropped: int64 scalar, (token, choice) pairs beyond the capacity of their expert.
    """

    aux: Tensor
    z: Tensor
    sequence: Tensor
    orthogonal: Tensor
    load: Tensor
    dropped: Tensor


class RouterSums(NamedTuple):
    """Sums over the non-padding tokens of one piece of a micro-batch.

    Attributes:
        probs: [E] sum of the full scores, before bias and renormalization, differentiable.
        z: Scalar sum of squared log-sum-exps, differentiable.
        counts: [k, E] int64, tokens whose c-th choice is expert e, before drops.
        by_sample: [B, 2, E] for each sample, the sum of the scores (differentiable), and the number of tokens that have
            each expert among their best k by score; B is 0 if not used.
        best: [E] int64, tokens that have each expert among their best by score, if biases or groups may change the
            choice; empty if the choices are the best, which ``counts`` counts.
    """

    probs: Tensor
    z: Tensor
    counts: Tensor
    by_sample: Tensor
    best: Tensor


def count_pairs(experts_Tk: Tensor, mask_Tk: Tensor | None, num_experts: int) -> Tensor:
    """Count the (token, choice) pairs under the mask for each expert, by choice: [k, E] int64.

    mask_Tk: bool, broadcastable to [T, k]; None: count every pair. The host never waits for the device.
    """
    # A number is added, not a tensor, for which torch's deterministic form would copy from pageable memory and wait.
    bin_Tk = experts_Tk if mask_Tk is None else torch.where(mask_Tk, experts_Tk, num_experts)
    counts = experts_Tk.new_zeros(experts_Tk.shape[1], num_experts + (mask_Tk is not None))
    return counts.scatter_(1, bin_Tk.t(), 1, reduce="add")[:, :num_experts].contiguous()


@counted(1, 1, 1, 1)
def router_sums(
    logits_TE: Tensor,
    probs_TE: Tensor,
    experts_Tk: Tensor,
    valid_T: Tensor | None,
    samples: int = 0,
    best: int = 0,
    softmax: bool = False,
) -> RouterSums:
    """Sum over the tokens the quantities that the losses and the load need.

    Args:
        logits_TE: Router logits.
        probs_TE: Shares of a token, which sum to 1.
        experts_Tk: The chosen experts.
        valid_T: bool, False for padding; None: no padding.
        samples: Number of samples to sum by, for losses per sample; 0: not used.
        best: Number of a token's best experts by score that the losses count, if ``experts_Tk`` may differ from them;
            0: ``experts_Tk`` are the best.
        softmax: The shares are the softmax of the logits.
    """
    num_experts = probs_TE.shape[1]
    z_T = _SquaredLogSumExp.apply(logits_TE, probs_TE) if softmax else torch.logsumexp(logits_TE, dim=1).square()
    best_Tk = torch.topk(probs_TE.detach(), experts_Tk.shape[1], dim=1).indices if best else experts_Tk
    by_sample = _by_sample(probs_TE, best_Tk, valid_T, samples)
    mask_T1 = None if valid_T is None else valid_T[:, None]
    counts_kE = count_pairs(experts_Tk, mask_T1, num_experts)
    best_E = count_pairs(best_Tk[:, :best], mask_T1, num_experts).sum(0) if best else counts_kE.new_empty(0)
    if valid_T is None:
        return RouterSums(probs_TE.sum(0), z_T.sum(), counts_kE, by_sample, best_E)
    share_T = valid_T.to(probs_TE.dtype)
    return RouterSums(share_T @ probs_TE, share_T @ z_T, counts_kE, by_sample, best_E)


class _SquaredLogSumExp(torch.autograd.Function):
    """The squared log-sum-exp of each token's logits [T, E], from their softmax: no exponential is computed again."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, probs_TE: Tensor) -> Tensor:
        lse_T = logits_TE.amax(1) - probs_TE.amax(1).log()  # of the largest probability, which is at least 1 / E
        ctx.save_for_backward(lse_T, probs_TE)
        return lse_T.square()

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        lse_T, probs_TE = ctx.saved_tensors
        return probs_TE * (2 * lse_T * grad_T)[:, None], None


def _by_sample(probs_TE: Tensor, best_Tk: Tensor, valid_T: Tensor | None, samples: int) -> Tensor:
    """Return ``RouterSums.by_sample``, [B, 2, E]."""
    if not samples:
        return probs_TE.new_empty((0, 2, probs_TE.shape[1]))
    pairs_TE = torch.zeros_like(probs_TE).scatter_(1, best_Tk, 1.0)
    both = torch.stack((probs_TE, pairs_TE), dim=1)
    if valid_T is not None:
        both = torch.where(valid_T[:, None, None], both, 0.0)
    summed: Tensor = both.unflatten(0, (samples, -1)).sum(1)
    return summed


def add_sums(parts: Sequence[RouterSums]) -> RouterSums:
    """Add up the sums of slices, in the given order."""
    return RouterSums(*(torch.stack(values).sum(0) for values in zip(*parts, strict=True)))


def gather_sums(sums: RouterSums, share: Share, counts_RkE: Tensor | None = None) -> tuple[RouterSums, Tensor]:
    """Return (sums of the whole micro-batch, counts [ranks, k, E]) from the sums of the ranks that share it.

    One all-gather for each axis that shares. All ranks compute the same from the result, so the gradient of each rank's
    sums is complete on that rank, and the ranks' gradients of a replicated weight add up to the weight's gradient.
    counts_RkE: counts of this rank's runs of positions, equally many on every rank; if given, the counts of every run
    are returned, [ranks * R, k, E].
    """
    counts = sums.counts[None] if counts_RkE is None else counts_RkE
    # Counts are sent as floating point numbers, exact below 2^24 tokens in a micro-batch.
    by_sample = sums.by_sample.flatten()
    pairs = torch.cat([counts.flatten(), sums.best])
    own = torch.cat([sums.probs, sums.z[None], pairs.to(sums.probs.dtype), by_sample])
    sizes = [len(sums.probs), 1, counts.numel(), len(sums.best), by_sample.numel()]
    probs, z, pairs, best, by_sample = share.gather(own[None]).split(sizes, dim=1)
    counts_PkE = pairs.detach().long().unflatten(1, counts.shape).flatten(0, 1)
    whole = by_sample.sum(0).view_as(sums.by_sample)
    return RouterSums(probs.sum(0), z.sum(), counts_PkE.sum(0), whole, best.detach().long().sum(0)), counts_PkE


def aux_and_z_loss(sums: RouterSums, valid_tokens: int, *, first_choices_only: bool = False) -> tuple[Tensor, Tensor]:
    """Return (load balancing loss, z-loss) from the sums over a micro-batch of ``valid_tokens`` non-padding tokens.

    aux = E/k · Σ_e mean(p_e) · mean(count_e), where count_e is 1 for a token's best k experts by score, regardless of
    biases and groups; it is 1 under even load. With ``first_choices_only`` (drop policy ``choice``, as in GShard's
    top-2) only the best expert counts, without 1/k. z = mean(logsumexp²). Both are 0 without tokens.
    Source: GShard, arXiv 2006.16668, algorithm 1; ST-MoE, arXiv 2202.08906, equation 5; for the counts DeepSeek-V3,
    arXiv 2412.19437, equation 18.
    """
    topk, num_experts = sums.counts.shape
    tokens = max(valid_tokens, 1)
    if len(sums.best):
        counted = sums.best
    else:
        counted = sums.counts[0] if first_choices_only else sums.counts.sum(0)
    scale = num_experts / (1 if first_choices_only else topk)
    aux = torch.dot(sums.probs, counted.to(sums.probs.dtype)) * (scale / tokens**2)
    return aux, sums.z / tokens


def sequence_loss(sums: RouterSums) -> Tensor:
    """Return the sequence-wise load balancing loss: the sum over samples of E/k · Σ_e mean(p_e) · mean(count_e).

    The means are over the tokens of a sample; a sample without tokens adds 0. count_e: see ``aux_and_z_loss``.
    Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    if not len(sums.by_sample):
        return sums.z.new_zeros(())
    topk, num_experts = sums.counts.shape
    probs_BE, pairs_BE = sums.by_sample.unbind(1)
    tokens_B1 = (pairs_BE.detach().sum(1, keepdim=True) / topk).clamp(min=1.0)
    return num_experts / topk * (probs_BE / tokens_B1 * (pairs_BE.detach() / tokens_B1)).sum()
