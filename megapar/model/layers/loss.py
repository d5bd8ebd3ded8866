"""Loss terms of a micro-batch, and the vocab parallel linear cross-entropy that computes most of them.

Cross-entropy is computed chunk by chunk so that the full logits never exist.

Shape letters: N rows (tokens), H hidden, V vocabulary; /mp marks the split over the tensor parallel axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.autograd import all_reduce_
from megapar.core.comm.axis import Axis
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.kinds import device_class
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.layers import vocab_parallel_cross_entropy_, vocabulary_range
from megapar.model.cost.operators import rows_at_a_time
from megapar.model.sizes import NO_LOSS
from megapar.moe.stats import MoeStats


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    vocab_size: int,
    mp: Axis,
    logits_bytes: int | None = None,
) -> Tensor:
    """Return the sum over rows of weight * cross-entropy(hidden w^T + b, label), except rows labeled -100.

    The forward computes the gradients chunk by chunk, so that no logits are kept: dw [V/mp, H] and db [V/mp] are
    complete on their rank, dhidden [N, H] is a partial sum over mp, which the caller's ``copy`` or ``all_gather``
    reduces. The loss is a scalar in max(fp32, dtype), the same on all mp ranks; 0 for N = 0.
    Raises ValueError if the weight is not this rank's shard.

    Args:
        hidden: [N, H], the same on all mp ranks.
        weight: [V/mp, H], this rank's shard, as is the bias [V/mp].
        labels: [N] int64.
        weights: [N] fp32, read only where there is a label; None for 1, at no cost.
        logits_bytes: Most bytes of logits, in max(fp32, dtype), that exist at a time; None for the device's default.
    """
    first_token, rows = check_shard(weight, vocab_size, mp)
    held = device_class(hidden.device.type).logits_bytes if logits_bytes is None else logits_bytes
    chunk = rows_at_a_time(hidden.shape[0], rows * at_least_fp32(hidden.dtype).itemsize, held)
    return _VocabParallelLinearCrossEntropy.apply(
        hidden, weight, bias, labels, weights, first_token, mp, chunk, torch.is_grad_enabled()
    )


def vocab_parallel_label_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, mp: Axis
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, and 1 where another token is likelier, [N] each; 0 without a label.

    Of equally likely tokens the first one counts. The arguments are those of the cross-entropy; no gradients.
    """
    first_token, rows = check_shard(weight, vocab_size, mp)
    held = device_class(hidden.device.type).logits_bytes
    chunk = rows_at_a_time(hidden.shape[0], rows * at_least_fp32(hidden.dtype).itemsize, held)
    counted = labels != NO_LOSS
    tokens, found = labels * counted, list[tuple[Tensor, Tensor]]()
    for first in range(0, hidden.shape[0], chunk):
        logits, here = _logits(hidden[first : first + chunk], weight, None), slice(first, first + chunk)
        own, place = logits.max(-1)
        peak = all_reduce_(own.clone(), mp, dist.ReduceOp.MAX)
        place = all_reduce_(torch.where(own == peak, place + first_token, vocab_size), mp, dist.ReduceOp.MIN)
        log_probs = vocab_parallel_cross_entropy_(logits, tokens[here], first_token, mp, hidden.dtype)[0]
        found.append((log_probs, (place != tokens[here]).to(log_probs.dtype)))
    log_probs, misses = (torch.cat(parts) for parts in zip(*found, strict=True))
    return log_probs * counted, misses * counted


def check_shard(weight: Tensor, vocab_size: int, mp: Axis) -> tuple[int, int]:
    """Return (first token, number of tokens) of this rank's shard. Raises ValueError if ``weight`` has other rows."""
    first_token, rows = vocabulary_range(vocab_size, mp)
    if weight.shape[0] != rows:
        raise ValueError(
            f"the head got {weight.shape[0]} vocabulary rows, but rank {mp.rank} of {mp.size} holds {rows}. "
            "Unshard the weight before the head runs."
        )
    return first_token, rows


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [n, H] w^T + b, [n, V/mp] in max(fp32, dtype)."""
    logits = rows.new_empty(rows.shape[0], weight.shape[0], dtype=at_least_fp32(rows.dtype))
    if bias is not None:
        logits.copy_(bias)
    return op("add_product", rows)(logits, rows, weight.t(), begins=bias is None)


class _HeadGradients(NamedTuple):
    """Gradients of the head, summed over chunks of rows: hidden [N, H], weight [V/mp, H] and bias [1, V/mp].

    Sums over many chunks lose bits in 16-bit dtypes, so those of weight and bias are in fp32 and rounded once.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _HeadGradients:
        """Return uninitialized gradients; zeros if there are no rows."""
        exact = at_least_fp32(hidden.dtype)
        make = torch.empty if hidden.shape[0] else torch.zeros
        d_bias = None if bias is None else make(1, bias.shape[0], dtype=exact, device=bias.device)
        return cls(hidden.new_empty(hidden.shape), make(weight.shape, dtype=exact, device=weight.device), d_bias)

    def add(self, first: int, d_logits: Tensor, rows: Tensor, weight: Tensor, factors: Tensor) -> None:
        """Add the gradients of a chunk: ``rows`` [n, H] from row ``first``; ``factors`` [n, 1] are their weights."""
        torch.mm(d_logits, weight, out=self.hidden[first : first + rows.shape[0]])
        add_product = op("add_product", d_logits)
        add_product(self.weight, d_logits.t(), (rows * factors).to(rows.dtype), begins=first == 0)
        if self.bias is not None:
            add_product(self.bias, factors.t().to(d_logits.dtype), d_logits, begins=first == 0)

    def whole(self, factors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients in their dtypes, 0 for rows without a loss."""
        dtype = self.hidden.dtype
        d_bias = None if self.bias is None else self.bias.squeeze(0).to(dtype)
        return self.hidden.mul_(factors), self.weight.to(dtype), d_bias


class _VocabParallelLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        first_token: int,
        mp: Axis,
        chunk: int,
        differentiate: bool,
    ) -> Tensor:
        counted = labels != NO_LOSS  # multiplied with what is small: the hidden states, not the logits
        tokens, factors = labels * counted, counted if weights is None else counted * weights
        gradients = _HeadGradients.empty(hidden, weight, bias) if differentiate else None
        found = [hidden.new_zeros(0, dtype=at_least_fp32(hidden.dtype))]
        for first in range(0, hidden.shape[0], chunk):
            rows, here = hidden[first : first + chunk], slice(first, first + chunk)
            log_probs, d_logits = vocab_parallel_cross_entropy_(
                _logits(rows, weight, bias), tokens[here], first_token, mp, hidden.dtype
            )
            found.append(log_probs)
            if gradients is not None:
                gradients.add(first, d_logits, rows, weight, factors[here].unsqueeze(-1))
            del d_logits  # before the next chunk's logits
        if gradients is not None:
            ctx.save_for_backward(*gradients.whole(factors.unsqueeze(-1)))
        return -(torch.cat(found) * factors).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        # A zero-dim factor does not promote, so the products keep the gradients' dtypes.
        d_bias = None if d_bias is None else d_bias * grad
        return d_hidden * grad, d_weight * grad, d_bias, None, None, None, None, None, None


ROUTING = ("aux", "z", "sequence", "orthogonal")


class Terms(NamedTuple):
    """Loss terms of one micro-batch on this rank, neither averaged nor weighted.

    Routing losses are scalars without coefficients, summed over the mixture-of-experts layers; 0 without such layers.

    Attributes:
        sums: Scalar sums over this rank's items in max(fp32, dtype): "lm" (predicted tokens); for ERNIE also "sop"
            (sequences); with multi-token prediction also "mtp" (the tokens that it predicts).
        aux: Load balancing loss of the micro-batch.
        z: Router z-loss.
        sequence: Load balancing loss of each sequence, also summed over the samples.
        orthogonal: Orthogonal loss of the routers.
        load: [mixture-of-experts layers, experts] int64, (token, choice) pairs routed before drops; [0, 0] without
            such layers.
        dropped: int64 scalar, dropped (token, choice) pairs.
    """

    sums: dict[str, Tensor]
    aux: Tensor
    z: Tensor
    sequence: Tensor
    orthogonal: Tensor
    load: Tensor
    dropped: Tensor

    def routing(self) -> Tensor:
        """Return the routing losses in the order of ROUTING, [4], without gradients."""
        return torch.stack([getattr(self, name).detach() for name in ROUTING])


def collect(sums: dict[str, Tensor], stats: Sequence[MoeStats], like: Tensor | None = None) -> Terms:
    """Combine the loss sums, none on a pipeline stage without a head, with the layers' statistics, summed.

    like: tensor with the dtype and device of the zeros; None for ``sums["lm"]``.
    """
    like = sums["lm"] if like is None else like
    if not stats:
        aux, z, sequence, orthogonal = like.new_zeros(4).unbind()
        dropped = torch.zeros((), dtype=torch.int64, device=like.device)
        load = dropped.new_empty((0, 0))
        return Terms(sums, aux=aux, z=z, sequence=sequence, orthogonal=orthogonal, load=load, dropped=dropped)
    zero = like.new_zeros(())
    load = torch.stack([s.load for s in stats])
    counted = load if all(s.counted is s.load for s in stats) else torch.stack([s.counted for s in stats])
    scale, tokens = stats[0].aux_scale, stats[0].tokens  # of the micro-batch and of all layers
    over = [s.over for s in stats if s.over is not None]
    return Terms(
        sums,
        aux=(torch.stack([s.probs for s in stats]) * counted).sum() * scale,
        z=torch.stack([s.squares for s in stats]).sum() / tokens,
        sequence=_sum([s.sequence for s in stats], zero),
        orthogonal=_sum([s.orthogonal for s in stats], zero),
        load=load,
        dropped=torch.stack(over).sum() if over else load.new_zeros(()),
    )


def _sum(losses: Sequence[Tensor | None], zero: Tensor) -> Tensor:
    """Return the sum of the layers' losses; ``zero`` if they are not used."""
    used = [loss for loss in losses if loss is not None]
    return torch.stack(used).sum() if used else zero
