"""The router: top-k choice of experts for each token, and the gate weights of their outputs.

Shape letters: T tokens, H hidden, E experts, k choices per token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.core.device.compiled import FunctionRunner, counted, plain
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.tensor_parallel.layers import local
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import RouterSums, router_sums

SMALLEST_TOTAL = 1e-12  # lower bound of the divisor in renormalization; the value of the ERNIE 4.5 models


class Routing(NamedTuple):
    """The router's choices for T tokens. Padding is routed like other tokens here, and masked later.

    Attributes:
        probs: [T, E] full scores (not normalized for sigmoid), max(fp32, dtype), differentiable.
        experts: [T, k] int64, best choice first.
        sums: Sums over the non-padding tokens.
        orthogonal: Scalar, see ``Router.orthogonal_loss``; None if that loss is not used.
        shares: [T, k] scores of the choices, renormalized over all choices, differentiable; None: computed from
            ``probs`` (``gate_weights``).
    """

    probs: Tensor
    experts: Tensor
    sums: RouterSums
    orthogonal: Tensor | None = None
    shares: Tensor | None = None


class Router(nn.Module):
    """Router in max(fp32, dtype): x [T, H] -> logits [T, E] -> scores (softmax or sigmoid) -> top k.

    Attributes:
        weight: [E, H], whole on every rank, in max(fp32, dtype) whatever the compute dtype.
        correction_bias: [E], a buffer in the same dtype; added to the scores for the choice of experts, but not for
            the gate weights (arXiv 2408.15664).
    """

    weight: nn.Parameter
    correction_bias: Tensor

    def __init__(
        self,
        sizes: MoeSizes,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        copies: int = 1,
        run: FunctionRunner = plain,
    ) -> None:
        """Create a router with an uninitialized weight. copies: Ranks whose gradients of the weight are summed."""
        super().__init__()
        self.sizes, self.copies = sizes, copies
        self.run, self.top = run, TopExperts(sizes, run)
        self.renormalizes = sizes.score == "softmax" and sizes.renormalizes and not sizes.has_capacity
        exact = at_least_fp32(dtype)
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, sizes.hidden_size, dtype=exact, device=device))
        self.register_buffer("correction_bias", torch.zeros(sizes.num_experts, dtype=exact, device=device))

    def fan_out(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [T, H] for the router, for the dispatch and for the shared experts.

        If the router computes in a wider dtype, the first one has that dtype, and the gradients of all three are added
        at once, that of the router without rounding.
        """
        dtype = self.weight.dtype
        if x_TH.dtype == dtype or not torch.is_grad_enabled():
            return x_TH, x_TH, x_TH
        of_router, of_dispatch, of_shared = _FanOut.apply(x_TH, dtype, self.run)
        return of_router, of_dispatch, of_shared

    def forward(self, x_TH: Tensor, valid_T: Tensor | None = None, samples: int = 1) -> Routing:
        """Choose k experts for every token, in the dtype of the experts or of the router (``fan_out``).

        samples: Number of samples of the same length that the T tokens belong to, concatenated.
        """
        sizes, weight_EH = self.sizes, local(self.weight)
        logits_TE = F.linear(x_TH.to(weight_EH.dtype), weight_EH)
        probs_TE, shares_TE, lse_T = self.run(score, logits_TE, sizes)
        experts_Tk = self.choose(probs_TE)
        weights_Tk = total_E = None
        if self.renormalizes:
            valid_weight_T = None if valid_T is None else valid_T.to(probs_TE.dtype)
            weights_Tk, total_E = _ChosenShares.apply(logits_TE, probs_TE.detach(), experts_Tk, valid_weight_T)
        sums = router_sums(
            lse_T,
            shares_TE,
            experts_Tk,
            valid_T,
            samples if sizes.sequence_aux else 0,
            sizes.loss_choices,
            by_choice=sizes.has_capacity,
            total_E=total_E,
        )
        # Computed in the forward: afterwards FSDP may have resharded the weight.
        orthogonal = self.orthogonal_loss() if sizes.orthogonal else None
        return Routing(probs_TE, experts_Tk, sums, orthogonal, weights_Tk)

    @torch.no_grad()
    def choose(self, probs_TE: Tensor) -> Tensor:
        return self.top(probs_TE.detach(), self.correction_bias)

    def orthogonal_loss(self) -> Tensor:
        """Return the mean squared entry of W W^T - 1 with normalized rows of W: 0 if the experts' rows are orthogonal.

        Its gradient is divided by ``copies``. Source: the orthogonal loss of ERNIE 4.5 (its technical report).
        """
        weight_EH = local(self.weight)
        if self.copies > 1:
            part = weight_EH / self.copies
            weight_EH = part + (weight_EH - part).detach()
        rows_EH = F.normalize(weight_EH, dim=1)
        eye = torch.eye(rows_EH.shape[0], dtype=rows_EH.dtype, device=rows_EH.device)
        return (rows_EH @ rows_EH.T - eye).square().mean()


class TopExperts(nn.Module):
    """The top-k choice, as a module so that forward hooks can observe it or replace its result."""

    def __init__(self, sizes: MoeSizes, run: FunctionRunner) -> None:
        super().__init__()
        self.sizes, self.run = sizes, run

    def forward(self, probs_TE: Tensor, bias_E: Tensor) -> Tensor:
        return self.run(choose, probs_TE, bias_E, self.sizes)


class _FanOut(torch.autograd.Function):
    """x [T, H] for three readers, in ``dtype`` for the first."""

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


@counted(1)
def score(logits_TE: Tensor, sizes: MoeSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores, each expert's share of a token, log-sum-exps of the logits): [T, E], [T, E] and [T]."""
    if sizes.score == "softmax":
        probs_TE, lse_T = _Softmax.apply(logits_TE)
        return probs_TE, probs_TE, lse_T
    probs_TE = logits_TE.sigmoid()  # the losses use shares that sum to 1 per token
    shares_TE = probs_TE / probs_TE.sum(dim=1, keepdim=True).clamp(min=SMALLEST_TOTAL)
    return probs_TE, shares_TE, torch.logsumexp(logits_TE, dim=1)


class _Softmax(torch.autograd.Function):
    """Softmax of logits [T, E], and their log-sum-exps [T], for which no other pass computes exponentials."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        log_TE = logits_TE.log_softmax(1)
        lse_T = logits_TE[:, 0] - log_TE[:, 0]  # exact to the logits' rounding for every expert
        probs_TE = log_TE.exp()
        ctx.save_for_backward(probs_TE)
        ctx.set_materialize_grads(False)
        return probs_TE, lse_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        (probs_TE,) = ctx.saved_tensors
        of_probs, of_lse = grads
        grad_TE = None if of_probs is None else _softmax_backward(of_probs, probs_TE)
        if of_lse is None:
            return grad_TE
        more_TE: Tensor = probs_TE * of_lse[:, None]
        return more_TE if grad_TE is None else more_TE + grad_TE


def _softmax_backward(grad: Tensor, result: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, result, 1, result.dtype)


class _ChosenShares(torch.autograd.Function):
    """Scores of the choices, renormalized [T, k], and the sum of all scores over the tokens [E], of a softmax.

    A softmax of some logits is the softmax of all of them, renormalized. Both gradients of the logits are made in one
    buffer.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, probs_TE: Tensor, experts_Tk: Tensor, valid_weight_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shares_Tk = logits_TE.gather(1, experts_Tk).softmax(1)
        ctx.save_for_backward(probs_TE, experts_Tk, shares_Tk, valid_weight_T)
        ctx.set_materialize_grads(False)
        return shares_Tk, probs_TE.sum(0) if valid_weight_T is None else valid_weight_T @ probs_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        probs_TE, experts_Tk, shares_Tk, valid_weight_T = ctx.saved_tensors
        of_shares, of_total = grads
        if of_total is None:
            grad_TE = torch.zeros_like(probs_TE)
        else:
            of_probs = of_total.expand_as(probs_TE) if valid_weight_T is None else valid_weight_T[:, None] * of_total
            grad_TE = _softmax_backward(of_probs, probs_TE)
        if of_shares is not None:
            grad_TE.scatter_add_(1, experts_Tk, _softmax_backward(of_shares, shares_Tk))
        return grad_TE, None, None, None


@counted(1)
def choose(probs_TE: Tensor, bias_E: Tensor, sizes: MoeSizes) -> Tensor:
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


def gate_weights(
    routing: Routing, kept_Tk: Tensor | None, *, over_kept: bool, scaling: float = 1.0, renormalizes: bool | None = None
) -> Tensor:
    """Compute the gate weights of the expert outputs from the unbiased scores, 0 for dropped pairs: [T, k].

    They are the scores, or the scores renormalized over the kept choices (deepspeed_moe) or over all choices
    (megatron_moe). A sum below ``SMALLEST_TOTAL`` divides as that number. Published classes add 1e-20 to the sum
    instead (DeepSeek-V3), or nothing (Qwen): the same to 1e-8 of a weight wherever the sum is above ``SMALLEST_TOTAL``.

    Args:
        kept_Tk: bool; None: every pair is kept.
        over_kept: Renormalize over the kept choices only.
        renormalizes: Divide by the sum; None: if there are several choices.
    """
    divided = routing.experts.shape[1] > 1 if renormalizes is None else renormalizes
    weights_Tk = _shares(routing, kept_Tk, over_kept, divided)
    return weights_Tk if scaling == 1.0 else weights_Tk * scaling


def _shares(routing: Routing, kept_Tk: Tensor | None, over_kept: bool, divided: bool) -> Tensor:
    if routing.shares is not None and (kept_Tk is None or not over_kept):
        return routing.shares if kept_Tk is None else torch.where(kept_Tk, routing.shares, 0.0)
    chosen_Tk = routing.probs.gather(1, routing.experts)
    weights_Tk = chosen_Tk if kept_Tk is None else torch.where(kept_Tk, chosen_Tk, 0.0)
    if not divided:
        return weights_Tk
    if over_kept or kept_Tk is None:
        return _Renormalized.apply(weights_Tk)
    return weights_Tk / chosen_Tk.sum(dim=1, keepdim=True).clamp(min=SMALLEST_TOTAL)


class _Renormalized(torch.autograd.Function):
    """Weights [T, k] divided by their sum, or by ``SMALLEST_TOTAL`` if it is smaller; five kernels in the backward."""

    @staticmethod
    def forward(ctx: Any, weights_Tk: Tensor) -> Tensor:
        total_T1 = weights_Tk.sum(1, keepdim=True)
        divisor_T1 = total_T1.clamp(min=SMALLEST_TOTAL)
        shares_Tk = weights_Tk / divisor_T1
        ctx.save_for_backward(total_T1, divisor_T1, shares_Tk)
        return shares_Tk

    @staticmethod
    def backward(ctx: Any, grad_Tk: Tensor) -> Tensor:
        total_T1, divisor_T1, shares_Tk = ctx.saved_tensors
        mean_T1 = (grad_Tk * shares_Tk).sum(1, keepdim=True)
        # The lower bound is a constant: where it divides, the sum has no gradient.
        mean_T1 = torch.ops.aten.threshold_backward(mean_T1, total_T1, SMALLEST_TOTAL)
        return (grad_Tk - mean_T1) / divisor_T1


@torch.no_grad()
def move_correction_bias(bias_E: Tensor, load_E: Tensor, rate: float, keep: Tensor | None = None) -> None:
    """Update bias += rate · sign(mean load − load) in place, so that busy experts are chosen less and idle ones more.

    Args:
        load_E: (token, choice) pairs per expert over the whole global batch, on all axes, before drops.
        keep: A scalar on the device; if it is 0, nothing changes.
    """
    load_E = load_E.to(bias_E.dtype)
    sign_E = torch.sign(load_E.mean() - load_E)
    bias_E.add_(sign_E if keep is None else sign_E * keep, alpha=rate)
