"""The router: top-k choice of experts for each token, and the gate weights of their outputs.

Shape letters: T tokens, H hidden, E experts, k choices per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op
from megapar.core.device.routing import SMALLEST_TOTAL, choose
from megapar.core.tensor_parallel.layers import local
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import RouterSums, router_sums


class Routing(NamedTuple):
    """The router's choices for T tokens. Padding is routed like other tokens here, and masked later.

    Attributes:
        probs: [T, E] full scores (not normalized for sigmoid), max(fp32, dtype), differentiable.
        experts: [T, k] int64, best choice first.
        sums: Sums over the non-padding tokens.
        orthogonal: Scalar, see ``Router.orthogonal_loss``; None if that loss is not used.
        weights: [T, k] gate weights if every choice is kept, differentiable; None: computed from ``probs``
            (``gate_weights``).
        passed: x for the dispatch and for the shared experts, whose gradients are added to the router's at once, which
            is not rounded before; None: the router takes x in its own dtype.
    """

    probs: Tensor
    experts: Tensor
    sums: RouterSums
    orthogonal: Tensor | None = None
    weights: Tensor | None = None
    passed: tuple[Tensor, Tensor] | None = None


class Router(nn.Module):
    """Router in max(fp32, dtype): x [T, H] -> logits [T, E] -> scores -> top k.

    Attributes:
        weight: [E, H], whole on every rank, in max(fp32, dtype) whatever the compute dtype.
        bias: [E], added to the logits, in the same dtype; None for none.
        correction_bias: [E], a buffer in the same dtype; added to the scores for the choice of experts, but not for
            the gate weights (arXiv 2408.15664).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
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
        exact = at_least_fp32(dtype)
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, sizes.hidden_size, dtype=exact, device=device))
        bias = nn.Parameter(torch.empty(sizes.num_experts, dtype=exact, device=device)) if sizes.linear_bias else None
        self.register_parameter("bias", bias)
        self.register_buffer("correction_bias", torch.zeros(sizes.num_experts, dtype=exact, device=device))

    def forward(self, x_TH: Tensor, valid_T: Tensor | None = None, samples: int = 1) -> Routing:
        """Choose k experts for every token, in the dtype of the experts or of the router.

        samples: Number of samples of the same length that the T tokens belong to, concatenated.
        """
        sizes = self.sizes
        routed: Any = op("route", x_TH)(x_TH, local(self.weight), valid_T, self)
        sums = router_sums(
            routed.lse,
            routed.shares,
            routed.experts,
            valid_T,
            samples if sizes.sequence_aux else 0,
            sizes.loss_choices,
            by_choice=sizes.has_capacity,
            total_E=routed.total,
            squares=routed.squares,
            counts_2E=routed.counts,
        )
        # Computed in the forward: afterwards FSDP may have resharded the weight.
        orthogonal = self.orthogonal_loss() if sizes.orthogonal else None
        return Routing(routed.scores, routed.experts, sums, orthogonal, routed.weights, routed.passed)

    @property
    def logit_bias(self) -> Tensor | None:
        """The bias for one use."""
        return None if self.bias is None else local(self.bias)

    @property
    def is_observed(self) -> bool:
        """The choice has hooks, so that it is made here even if a kernel could."""
        return bool(self.top._forward_hooks)

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
    if routing.weights is not None and (kept_Tk is None or not over_kept):
        return routing.weights if kept_Tk is None else torch.where(kept_Tk, routing.weights, 0.0)
    divided = routing.experts.shape[1] > 1 if renormalizes is None else renormalizes
    weights_Tk = _shares(routing, kept_Tk, over_kept, divided)
    return weights_Tk if scaling == 1.0 else weights_Tk * scaling


def _shares(routing: Routing, kept_Tk: Tensor | None, over_kept: bool, divided: bool) -> Tensor:
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
