"""Routing statistics of one MoE layer: load balancing loss, z-loss, load and dropped tokens.

Every statistic is computed in two steps: sums over tokens, which add up over slices and ranks, and a final function
that divides by the tokens of the micro-batch. So if a layout divides the micro-batch, the sums are merged first, and
the result is that of the whole micro-batch, not a mean of means.

Shape letters: T tokens, k choices per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.context_parallel.share import Share


class MoeStats(NamedTuple):
    """Statistics of one layer over one micro-batch, without padding. The losses have no coefficients.

    ``aux``, ``z`` and ``dropped`` are computed when they are read, so that a model computes those of all its layers at
    once (``model.layers.loss``).

    Attributes:
        probs: [E] sum of the tokens' scores, differentiable.
        counted: [E] int64, (token, choice) pairs that the load balancing loss counts for each expert.
        aux_scale: The load balancing loss is this number times the product of ``probs`` and ``counted``.
        squares: Scalar, sum of squared log-sum-exps of the router logits, differentiable.
        tokens: The z-loss is ``squares`` divided by this number.
        sequence: Scalar, sum over samples of each one's load balancing loss; None if not used.
        orthogonal: Scalar, a loss of the router's weight alone (``Router.orthogonal_loss``); None if not used.
        load: [E] int64, (token, choice) pairs routed to each expert, before drops.
        over: int64 scalar, (token, choice) pairs beyond the capacity of their expert; None without a capacity.
    """

    probs: Tensor
    counted: Tensor
    aux_scale: float
    squares: Tensor
    tokens: int
    sequence: Tensor | None
    orthogonal: Tensor | None
    load: Tensor
    over: Tensor | None

    @classmethod
    def of(
        cls,
        sums: RouterSums,
        valid_tokens: int,
        topk: int,
        *,
        first_choices_only: bool = False,
        orthogonal: Tensor | None = None,
    ) -> MoeStats:
        """Return the statistics of ``valid_tokens`` non-padding tokens, none dropped, from the sums over them.

        aux = E/k · Σ_e mean(p_e) · mean(count_e), where count_e is 1 for a token's best k experts by score, regardless
        of biases and groups; it is 1 under even load. With ``first_choices_only`` (drop policy ``choice``, as in
        GShard's top-2) only the best expert counts, without 1/k. z = mean(logsumexp²). Both are 0 without tokens.
        Source: GShard, arXiv 2006.16668, algorithm 1; ST-MoE, arXiv 2202.08906, equation 5; for the counts DeepSeek-V3,
        arXiv 2412.19437, equation 18.
        """
        load_E, tokens = over_choices(sums.counts), max(valid_tokens, 1)
        counted_E = sums.counts[0] if first_choices_only else load_E
        if len(sums.best):
            counted_E = sums.best
        scale = len(load_E) / (1 if first_choices_only else topk) / tokens**2
        sequence = sequence_loss(sums, topk) if len(sums.by_sample) else None
        return cls(
            probs=sums.probs,
            counted=counted_E,
            aux_scale=scale,
            squares=sums.squares,
            tokens=tokens,
            sequence=sequence,
            orthogonal=orthogonal,
            load=load_E,
            over=None,
        )

    @property
    def aux(self) -> Tensor:
        """Scalar, the load balancing loss (auxiliary loss), differentiable."""
        return torch.dot(self.probs, self.counted.to(self.probs.dtype)) * self.aux_scale

    @property
    def z(self) -> Tensor:
        """Scalar, mean squared log-sum-exp of the router logits, differentiable."""
        return self.squares / self.tokens

    @property
    def dropped(self) -> Tensor:
        """Dropped (token, choice) pairs, an int64 scalar."""
        return self.load.new_zeros(()) if self.over is None else self.over


class RouterSums(NamedTuple):
    """Sums over the non-padding tokens of one piece of a micro-batch.

    Attributes:
        probs: [E] sum of the full scores, before bias and renormalization, differentiable.
        squares: Scalar sum of squared log-sum-exps, differentiable.
        counts: [k, E] int64, tokens whose c-th choice is expert e, before drops; or [1, E], all choices together.
        by_sample: [B, 2, E] for each sample, the sum of the scores (differentiable), and the number of tokens that have
            each expert among their best k by score; B is 0 if not used.
        best: [E] int64, tokens that have each expert among their best by score, if biases or groups may change the
            choice; empty if the choices are the best, which ``counts`` counts.
    """

    probs: Tensor
    squares: Tensor
    counts: Tensor
    by_sample: Tensor
    best: Tensor


def count_pairs(experts_Tk: Tensor, mask_Tk: Tensor | None, num_experts: int, *, by_choice: bool = True) -> Tensor:
    """Count the (token, choice) pairs under the mask for each expert, int64: [k, E], or [1, E] for all choices.

    mask_Tk: bool, broadcastable to [T, k]; None: count every pair.
    """
    # A number is added, not a tensor, for which torch's deterministic form would copy from pageable memory and wait.
    bin_Tk = experts_Tk if mask_Tk is None else torch.where(mask_Tk, experts_Tk, num_experts)
    bins = bin_Tk.t() if by_choice else bin_Tk.reshape(1, -1)
    counts = experts_Tk.new_zeros(len(bins), num_experts + (mask_Tk is not None))
    return counts.scatter_(1, bins, 1, reduce="add")[:, :num_experts].contiguous()


def over_choices(counts_kE: Tensor) -> Tensor:
    """Sum the counts of pairs over the choices: [E]. One row is returned as it is."""
    return counts_kE[0] if len(counts_kE) == 1 else counts_kE.sum(0)


def router_sums(
    lse_T: Tensor | None,
    probs_TE: Tensor,
    experts_Tk: Tensor,
    valid_T: Tensor | None,
    samples: int = 0,
    best: int = 0,
    *,
    by_choice: bool = True,
    total_E: Tensor | None = None,
    squares: Tensor | None = None,
    counts_2E: Tensor | None = None,
) -> RouterSums:
    """Sum over the tokens the quantities that the losses and the load need.

    Args:
        probs_TE: Shares of a token, which sum to 1.
        samples: Number of samples to sum by, for losses per sample; 0: not used.
        best: Number of a token's best experts by score that the losses count, if ``experts_Tk`` may differ from them;
            0: ``experts_Tk`` are the best.
        total_E: The sum of the shares of all tokens but padding, if it has been computed.
        squares: The same of squared ``lse_T``, which are then not read.
        counts_2E: The same of the choices, if not ``by_choice``, and of the best.
    """
    num_experts = probs_TE.shape[1]
    ranks = best and (samples or counts_2E is None)
    best_Tk = torch.topk(probs_TE.detach(), experts_Tk.shape[1], dim=1).indices if ranks else experts_Tk
    by_sample = _by_sample(probs_TE, best_Tk, valid_T, samples)
    mask_T1 = None if valid_T is None else valid_T[:, None]
    if by_choice or counts_2E is None:
        counts = count_pairs(experts_Tk, mask_T1, num_experts, by_choice=by_choice)
    else:
        counts = counts_2E[:1]
    best_E = counts.new_empty(0)
    if best and counts_2E is not None:
        best_E = counts_2E[1]
    elif best:
        best_E = count_pairs(best_Tk[:, :best], mask_T1, num_experts, by_choice=False)[0]
    valid_weight_T = None if valid_T is None else valid_T.to(probs_TE.dtype)
    if total_E is None:
        total_E = probs_TE.sum(0) if valid_weight_T is None else valid_weight_T @ probs_TE
    if squares is None:
        assert lse_T is not None
        squares = torch.dot(lse_T if valid_weight_T is None else lse_T * valid_weight_T, lse_T)
    return RouterSums(total_E, squares, counts, by_sample, best_E)


def _by_sample(probs_TE: Tensor, best_Tk: Tensor, valid_T: Tensor | None, samples: int) -> Tensor:
    if not samples:
        return probs_TE.new_empty((0, 2, probs_TE.shape[1]))
    pairs_TE = torch.zeros_like(probs_TE).scatter_(1, best_Tk, 1.0)
    both = torch.stack((probs_TE, pairs_TE), dim=1)
    if valid_T is not None:
        both = torch.where(valid_T[:, None, None], both, 0.0)
    return both.unflatten(0, (samples, -1)).sum(1)


def add_sums(parts: Sequence[RouterSums]) -> RouterSums:
    """Add up the sums of slices, in the given order."""
    return RouterSums(*(torch.stack(values).sum(0) for values in zip(*parts, strict=True)))


def gather_sums(sums: RouterSums, share: Share, counts_RkE: Tensor | None = None) -> tuple[RouterSums, Tensor]:
    """Return (sums of the whole micro-batch, counts [ranks, k, E]) from the sums of the ranks that share it.

    One all-gather for each axis that shares. All ranks compute the same from the result, so the gradient of each rank's
    sums is complete on that rank, and the ranks' gradients of a replicated weight add up to the weight's gradient.
    counts_RkE: counts of this rank's runs of positions, equally many on every rank, in place of those of all.
    """
    counts = sums.counts[None] if counts_RkE is None else counts_RkE
    # Counts are sent as floating point numbers, exact below 2^24 tokens in a micro-batch.
    by_sample = sums.by_sample.flatten()
    pairs = torch.cat([counts.flatten(), sums.best])
    sent = torch.cat([sums.probs, sums.squares[None], pairs.to(sums.probs.dtype), by_sample])
    sizes = [len(sums.probs), 1, counts.numel(), len(sums.best), by_sample.numel()]
    probs, squares, pairs, best, by_sample = share.gather(sent[None]).split(sizes, dim=1)
    counts_PkE = pairs.detach().long().unflatten(1, counts.shape).flatten(0, 1)
    whole = by_sample.sum(0).view_as(sums.by_sample)
    return RouterSums(probs.sum(0), squares.sum(), counts_PkE.sum(0), whole, best.detach().long().sum(0)), counts_PkE


def sequence_loss(sums: RouterSums, topk: int) -> Tensor:
    """Return the sequence-wise load balancing loss: the sum over samples of E/k · Σ_e mean(p_e) · mean(count_e).

    The means are over the tokens of a sample; a sample without tokens adds 0. count_e: see ``MoeStats.of``.
    Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    probs_BE, pairs_BE = sums.by_sample.unbind(1)
    tokens_B1 = (pairs_BE.detach().sum(1, keepdim=True) / topk).clamp(min=1.0)
    return probs_BE.shape[1] / topk * (probs_BE / tokens_B1 * (pairs_BE.detach() / tokens_B1)).sum()
