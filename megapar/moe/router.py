"""The router: which experts a token is sent to, and with what weight.

Shape letters: T tokens, H hidden, E experts, k choices per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.ops import wide
from megapar.core.tensor_parallel import local
from megapar.moe.stats import RouterSums, router_sums

SMALLEST_TOTAL = 1e-12  # below it renormalisation would divide by nothing; the value of the ERNIE 4.5 models


class Routing(NamedTuple):
    """The router's answer for T tokens; padding is routed like the rest here and masked by who uses it.

    probs: [T, E] full scores, max(fp32, dtype), differentiable. experts: [T, k] int64, best choice first.
    sums: sums over the non-padding tokens, see ``stats.RouterSums``.
    """

    probs: Tensor
    experts: Tensor
    sums: RouterSums


class Router(nn.Module):
    """Softmax router in max(fp32, dtype): x [T, H] -> logits [T, E] -> probabilities -> top k.

    weight [E, H] is whole on every rank; correction_bias [E] is a buffer that takes part in the choice and
    never in the weights (arXiv 2408.15664). Both are kept in max(fp32, dtype) whatever the compute dtype.
    """

    weight: nn.Parameter
    correction_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.topk = topk
        exact = wide(dtype)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=exact, device=device))
        self.register_buffer("correction_bias", torch.zeros(num_experts, dtype=exact, device=device))

    def forward(self, x_TH: Tensor, valid_T: Tensor | None = None) -> Routing:
        """Choose k experts for every token. valid_T: bool, False is padding; None is no padding."""
        weight_EH = local(self.weight)
        logits_TE = F.linear(x_TH.to(weight_EH.dtype), weight_EH)
        probs_TE = logits_TE.softmax(dim=1)
        experts_Tk = self.choose(probs_TE)
        return Routing(probs_TE, experts_Tk, router_sums(logits_TE, probs_TE, experts_Tk, valid_T))

    @torch.no_grad()
    def choose(self, probs_TE: Tensor) -> Tensor:
        """[T, k] experts by probability plus correction bias, best first."""
        return torch.topk(probs_TE + self.correction_bias, self.topk, dim=1).indices


def gate_weights(routing: Routing, kept_Tk: Tensor | None, *, over_kept: bool) -> Tensor:
    """[T, k] weights of the expert outputs, from the unbiased probabilities; 0 where a pair is not kept.

    k = 1: the raw probability. k >= 2: renormalised over the kept choices (``over_kept``, deepspeed_moe) or
    over all chosen ones (megatron_moe). kept_Tk: bool; None keeps every pair.
    """
    chosen_Tk = routing.probs.gather(1, routing.experts)
    weights_Tk = chosen_Tk if kept_Tk is None else torch.where(kept_Tk, chosen_Tk, 0.0)
    if chosen_Tk.shape[1] == 1:
        return weights_Tk
    total_T = (weights_Tk if over_kept else chosen_Tk).sum(dim=1, keepdim=True)
    return weights_Tk / total_T.clamp(min=SMALLEST_TOTAL)


@torch.no_grad()
def move_correction_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """bias += rate · sign(mean load − load), in place: busy experts are chosen less, idle ones more.

    load_E: (token, choice) pairs per expert over the whole global batch, on all axes, before drops.
    """
    load_E = load_E.to(bias_E.dtype)
    bias_E.add_(torch.sign(load_E.mean() - load_E), alpha=rate)
