"""Token dropping by capacity factor: the pairs that an expert with capacity C keeps, by deepspeed_moe's policies.

Every expert has a queue of the (token, choice) pairs that chose it, and keeps the first C of them. The policies differ
only in the order of the queue, drawn here for three tokens a, b, c and two choices:

    token    a1 a2 b1 b2 c1 c2     all choices of a token before the next token's
    choice   a1 b1 c1 a2 b2 c2     all first choices before the second ones (GShard, DeepSpeed's top-2)
    probs    highest probability first, ties in token order (DeepSpeed's top-k)

Tokens must be in the order of the micro-batch: original position, then sample. A piece of the micro-batch (a slice, a
rank's chunk) queues its pairs after those of all lower-numbered pieces, by ``queue_starts``. Policy ``probs`` has no
such order of pieces.

Shape letters: T tokens of this piece, k choices per token, E experts, C capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.context_parallel.share import Share
from megapar.moe.sizes import MoeSizes


def capacity_on_device(sizes: MoeSizes, tokens: Tensor) -> Tensor:
    """Return ``sizes.capacity`` for token counts that are only on the device. tokens: int64, any shape."""
    ratio = sizes.capacity_per_token
    room = -torch.div(-tokens * ratio.numerator, ratio.denominator, rounding_mode="floor")
    return room.clamp(min=sizes.min_capacity)


def queue_starts(counts_PkE: Tensor, piece: int, policy: str) -> Tensor:
    """Count the pairs that precede this piece's c-th choices in each expert's queue: [k, E] int64.

    counts_PkE: Pairs per piece, choice and expert (``RouterSums.counts``), pieces in token order. Policy ``choice``
    needs all pieces; ``token`` reads only those before ``piece``, so a running count suffices.
    """
    before_kE = counts_PkE[:piece].sum(0)
    if policy == "token":
        return before_kE.sum(0).expand_as(before_kE)
    if policy == "choice":
        total_kE = counts_PkE.sum(0)
        return total_kE.cumsum(0) - total_kE + before_kE
    raise ValueError(f"drop policy {policy!r} has no queue starts; use keep_by_probability on all tokens at once")


def keep_by_order(
    experts_Tk: Tensor, valid_T: Tensor | None, starts_kE: Tensor, *, capacity: int | Tensor, policy: str
) -> Tensor:
    """Return the pairs that policy ``token`` or ``choice`` keeps, none of padding: [T, k] bool.

    starts_kE: From ``queue_starts``.
    """
    num_experts = starts_kE.shape[1]
    choice_k = torch.arange(experts_Tk.shape[1], device=experts_Tk.device)
    # Under ``choice`` each (choice, expert) has a separate queue, after those of the earlier choices.
    queue_Tk = experts_Tk + choice_k * num_experts if policy == "choice" else experts_Tk
    if valid_T is not None:
        queue_Tk = torch.where(valid_T[:, None], queue_Tk, starts_kE.numel())
    place_Tk = _places(queue_Tk.flatten(), starts_kE.numel()).view_as(experts_Tk)
    kept_Tk = place_Tk + starts_kE[choice_k.expand_as(experts_Tk), experts_Tk] < capacity
    return kept_Tk if valid_T is None else kept_Tk & valid_T[:, None]


def keep_by_probability(
    experts_Tk: Tensor,
    valid_T: Tensor | None,
    probs_TE: Tensor,
    *,
    capacity: int | Tensor,
    share: Share | None = None,
    own_length: int = 0,
    number: int | None = None,
) -> Tensor:
    """Return each expert's C most probable pairs over a whole micro-batch (policy ``probs``): [T, k] bool.

    Args:
        share: The ranks that share the micro-batch, each with T tokens, of which [T, 2 k + 1] are all-gathered.
        own_length: Positions on this rank.
        number: The slice of these positions; None: they are the whole sequence.
    """
    score_Tk, topk = probs_TE.detach().gather(1, experts_Tk), experts_Tk.shape[1]
    if share is None:
        return _keep_by_score(experts_Tk, valid_T, score_Tk, probs_TE.shape[1], capacity)
    ok_T1 = torch.ones_like(score_Tk[:, :1]) if valid_T is None else valid_T[:, None].to(score_Tk.dtype)
    # Expert numbers are sent as floating point numbers, exact below 2^24.
    whole = share.gather(torch.cat([score_Tk, experts_Tk.to(score_Tk.dtype), ok_T1], dim=1))
    whole = share.in_order(whole, own_length, number)
    score_Tk, experts_Tk, ok_T = whole[:, :topk], whole[:, topk:-1].long(), whole[:, -1] > 0
    kept_Tk = _keep_by_score(experts_Tk, ok_T, score_Tk, probs_TE.shape[1], capacity)
    return share.own(kept_Tk, own_length, number)


def _keep_by_score(
    experts_Tk: Tensor, valid_T: Tensor | None, score_Tk: Tensor, num_experts: int, capacity: int | Tensor
) -> Tensor:
    by_score = torch.sort(score_Tk.flatten(), descending=True, stable=True).indices
    queue_Tk = experts_Tk if valid_T is None else torch.where(valid_T[:, None], experts_Tk, num_experts)
    place_sorted = _places(queue_Tk.flatten()[by_score], num_experts)
    place = torch.empty_like(place_sorted).scatter_(0, by_score, place_sorted)
    kept_Tk = place.view_as(experts_Tk) < capacity
    return kept_Tk if valid_T is None else kept_Tk & valid_T[:, None]


def _places(queue: Tensor, num_queues: int) -> Tensor:
    """Return each pair's position in its queue, from 0; pairs are queued in input order. queue: [N] 0..num_queues."""
    order = torch.sort(queue, stable=True).indices
    lengths = queue.new_zeros(num_queues + 1).scatter_add_(0, queue, torch.ones_like(queue))
    first = lengths.cumsum(0) - lengths
    places_sorted = torch.arange(queue.numel(), device=queue.device) - first[queue[order]]
    return torch.empty_like(queue).scatter_(0, order, places_sorted)
