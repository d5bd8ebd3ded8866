"""Routing of tokens to experts: scores, choices, gate weights, and sums over tokens, with one kernel on GPUs.

Shape letters: T tokens, H hidden, E experts, k choices per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device import triton_operators
from megapar.core.device.compiled import FunctionRunner, counted
from megapar.core.device.dtypes import wide_product, wide_product_reference

SMALLEST_TOTAL = 1e-12  # lower bound of the divisor in renormalization; the value of the ERNIE 4.5 models


class RouterParts(Protocol):
    """Attributes of ``moe.router.Router`` that forms use.

    Attributes:
        sizes: ``moe.sizes.MoeSizes``, which this floor does not import.
        run: Caller of functions that may be compiled.
        logit_bias: [E], added to the logits; None for none.
        is_observed: ``choose``, from scores [T, E] to experts [T, k], is called even by a form that could choose.
    """

    correction_bias: Tensor
    sizes: Any
    run: FunctionRunner

    @property
    def logit_bias(self) -> Tensor | None: ...

    @property
    def is_observed(self) -> bool: ...

    def choose(self, probs_TE: Tensor) -> Tensor: ...


class Routed(NamedTuple):
    """Routes of T tokens; None is what a form leaves to others. Sums are over all tokens but padding.

    Attributes:
        scores: [T, E] full scores (not normalized for sigmoid), in max(fp32, dtype), differentiable.
        experts: [T, k] int64, best choice first.
        weights: [T, k] gate weights if every choice is kept, differentiable.
        shares: [T, E], each expert's share of a token; any tensor if there are all sums, and no loss per sample.
        lse: [T] log-sum-exps of the logits.
        total: [E] sum of the shares, differentiable.
        squares: Scalar sum of squared log-sum-exps, differentiable.
        counts: [2, E] int64, choices, and which are the ``loss_choices`` best by score.
        passed: x for the dispatch and for the shared experts, if the gradients of all readers are added at once.
    """

    scores: Tensor
    experts: Tensor
    weights: Tensor | None
    shares: Tensor
    lse: Tensor | None
    total: Tensor | None
    squares: Tensor | None
    counts: Tensor | None
    passed: tuple[Tensor, Tensor] | None


def route_reference(x_TH: Tensor, weight_EH: Tensor, valid_T: Tensor | None, router: RouterParts) -> Routed:
    """Route tokens in the dtype of the weight. Padding, where ``valid_T`` is False, is routed like other tokens."""
    sizes = router.sizes
    passed = None
    if x_TH.dtype == weight_EH.dtype or not torch.is_grad_enabled():
        wide_TH = x_TH.to(weight_EH.dtype)
    else:
        wide_TH, *readers = FanOut.apply(x_TH, weight_EH.dtype, router.run)
        passed = (readers[0], readers[1])
    logits_TE = F.linear(wide_TH, weight_EH, router.logit_bias)
    scores_TE, shares_TE, lse_T = router.run(score, logits_TE, sizes)
    experts_Tk = router.choose(scores_TE)
    weights_Tk = None
    if sizes.renormalizes and sizes.score == "softmax" and not sizes.has_capacity:
        # A softmax of some logits is the softmax of all of them, renormalized, and exact where those vanish.
        weights_Tk = logits_TE.gather(1, experts_Tk).softmax(1) * sizes.scaling
    return Routed(scores_TE, experts_Tk, weights_Tk, shares_TE, lse_T, None, None, None, passed)


def route_cuda(x_TH: Tensor, weight_EH: Tensor, valid_T: Tensor | None, router: RouterParts) -> Routed:
    """Compute ``route_reference`` by a product of bf16 factors, of which the weight is three, and one kernel each way.

    Logits and the weight's gradient have fp32's accuracy. The gradient of x lacks the products of small parts, 2^-17 of
    it; its product adds it to the gradients of the other readers in fp32, before it is rounded.
    """
    sizes = router.sizes
    scored = sizes.groups * sizes.scored_of_group if sizes.group_topk < sizes.groups else 0
    takes = sizes.score in KERNEL_SCORES and triton_operators.takes_router(x_TH, weight_EH, sizes.topk, scored)
    if router.logit_bias is not None or not takes:
        return route_reference(x_TH, weight_EH, valid_T, router)
    scores_TE, experts_Tk, weights_Tk, total_E, squares, counts_2E, *readers = _InOneKernel.apply(
        x_TH, weight_EH, valid_T, router
    )
    weights = None if sizes.has_capacity else weights_Tk
    shares = shares_of(scores_TE) if sizes.score != "softmax" and sizes.sequence_aux else scores_TE
    passed = (readers[0], readers[1])
    return Routed(scores_TE, experts_Tk, weights, shares, None, total_E, squares, counts_2E, passed)


class _InOneKernel(torch.autograd.Function):
    """The router of bf16 tokens, and the tokens for two other readers. Keeps logits, and no tokens in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_EH: Tensor, valid_T: Tensor | None, router: RouterParts
    ) -> tuple[Tensor, ...]:
        sizes, ops = router.sizes, torch.ops.megapar
        product = wide_product if x_TH.is_cuda else wide_product_reference
        parts = product(x_TH, ops.split_matrix(weight_EH)[1:].flatten(0, 1).t()).unflatten(1, (3, -1))
        given = router.choose(score(parts.sum(1), sizes)[0]) if router.is_observed else None
        numbers = [sizes.topk, sizes.groups, sizes.group_topk, sizes.scored_of_group, sizes.loss_choices]
        numbers += [KERNEL_SCORES.index(sizes.score), int(sizes.renormalizes and not sizes.has_capacity)]
        form = (numbers, 1.0 if sizes.has_capacity else sizes.scaling)
        bias = router.correction_bias if sizes.biased else None
        logits, scores, lse, experts, weights, sums = ops.route(parts, bias, valid_T, given, *form)
        sums_4E = sums.sum(0)[:, : logits.shape[1]]
        counts = sums_4E[1:3].long()
        ctx.save_for_backward(x_TH, weight_EH, logits, lse, experts, weights, valid_T)
        ctx.form, ctx.product = form, product
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts, counts)
        readers = x_TH.view_as(x_TH), x_TH.view_as(x_TH)
        return scores, experts, weights, sums_4E[0], sums_4E[3, 0], counts, *readers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_TH, weight_EH, *kept = ctx.saved_tensors
        of_scores, _, *of_sums, _, first, second = grads
        d_x = first if second is None else second if first is None else first + second
        if all(grad is None for grad in (of_scores, *of_sums)):
            return d_x, None, None, None
        parts = torch.ops.megapar.route_backward(*kept, of_scores, *of_sums, *ctx.form)
        d_weight = ctx.product(parts[:, :3].flatten(1).t(), x_TH).unflatten(0, (3, -1)).sum(0)
        left, right = parts[:, 1:].flatten(1), torch.ops.megapar.split_matrix(weight_EH)[:3].flatten(0, 1)
        if d_x is None:
            d_x = left @ right
        elif d_x is first or d_x is second:
            d_x = torch.addmm(d_x, left, right)
        else:
            d_x.addmm_(left, right)
        return d_x, d_weight, None, None


class FanOut(torch.autograd.Function):
    """x [T, H] for three readers, in a wider ``dtype`` for the first, the router, whose gradient is added unrounded."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, dtype: torch.dtype, run: FunctionRunner) -> tuple[Tensor, Tensor, Tensor]:
        ctx.run, ctx.dtype = run, x_TH.dtype
        ctx.set_materialize_grads(False)
        return x_TH.to(dtype), x_TH.view_as(x_TH), x_TH.view_as(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, wide: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        narrow = [grad for grad in grads if grad is not None]
        if wide is None:
            return (sum(narrow[1:], narrow[0]) if narrow else None), None, None
        if len(narrow) == 2:
            return ctx.run(gradient_sum, *narrow, wide), None, None
        total = torch.empty(wide.shape, dtype=ctx.dtype, device=wide.device)
        return (torch.add(narrow[0], wide, out=total) if narrow else total.copy_(wide)), None, None


@counted(1, 1, 1)
def gradient_sum(first_TH: Tensor, second_TH: Tensor, wide_TH: Tensor) -> Tensor:
    """Return the sum of three gradients in the dtype of the first two."""
    return (first_TH + second_TH).add_(wide_TH)


_FORMULAS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.softmax(1),
    "sigmoid": Tensor.sigmoid,
}
"""Scores of logits [T, E], at least 0: weights and losses divide by their sum."""
KERNEL_SCORES = ("softmax", "sigmoid")  # scores that ``megapar::route`` computes, by their numbers there


@counted(1)
def score(logits_TE: Tensor, sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores, each expert's share of a token, log-sum-exps of the logits): [T, E], [T, E] and [T]."""
    probs_TE = _FORMULAS[sizes.score](logits_TE)
    shares_TE = probs_TE if sizes.score == "softmax" else shares_of(probs_TE)
    return probs_TE, shares_TE, torch.logsumexp(logits_TE, dim=1)


def shares_of(scores_TE: Tensor) -> Tensor:
    """Return scores that are not normalized as the losses use them: with a sum of 1 per token."""
    return scores_TE / scores_TE.sum(dim=1, keepdim=True).clamp(min=SMALLEST_TOTAL)


@counted(1)
def choose(probs_TE: Tensor, bias_E: Tensor, sizes: Any) -> Tensor:
    """Choose the experts with the highest score plus correction bias in the best groups only, best first: [T, k].

    A group's score is the sum of its best ``scored_of_group`` experts: k / group_topk of them in DeepSeek-V3 (arXiv
    2412.19437, section 2.1.2), whose published class always takes two; one in DeepSeek-V2 (arXiv 2405.04434, section
    2.1.3).
    """
    biased_TE = probs_TE + bias_E if sizes.biased else probs_TE
    if sizes.group_topk < sizes.groups:
        grouped = biased_TE.unflatten(1, (sizes.groups, -1))
        best = grouped.topk(sizes.scored_of_group, dim=2).values.sum(2)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(sizes.group_topk, dim=1).indices, True)
        biased_TE = grouped.masked_fill(~chosen[:, :, None], -math.inf).flatten(1)
    return torch.topk(biased_TE, sizes.topk, dim=1).indices
