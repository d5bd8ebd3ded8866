"""The MoE layer: route, dispatch, experts, combine, and the shared experts beside them.

Shape letters: B samples, S positions, T = B·S tokens, H hidden, E experts, k choices per token, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapar.core.axis import Axis
from megapar.errors import DistributedError
from megapar.moe.capacity import keep_by_order, keep_by_probability, queue_starts
from megapar.moe.dispatch import Dispatcher, LocalDispatcher
from megapar.moe.experts import Experts
from megapar.moe.router import Router, Routing, gate_weights
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats, router_losses


class MoeLayer(nn.Module):
    """x [B, S, H] -> y [B, S, H] and the routing's statistics.

    Ledger (one rank holds all experts and the whole micro-batch):
        router.weight [E, H]; experts.* as in ``Experts``; shared.* as the module passed in
        forward   x [T, H] -> router -> rows [R, H] sorted by expert -> experts -> times gate weight
                  -> y [T, H] (+ shared(x)); no collective
    The gate weights multiply the expert outputs before the combine, so that backward never needs what the
    combine returns. Padding is routed nowhere; it gets zeros from the routed experts.
    """

    def __init__(
        self,
        sizes: MoeSizes,
        *,
        shared: nn.Module | None = None,
        ep: Axis | None = None,
        emp: Axis | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Create the layer with uninitialised parameters.

        shared: the shared experts, one module [.., H] -> [.., H] of width ``sizes.shared_width``; given exactly
        when ``sizes.shared_experts`` is not 0. Raises DistributedError for ep or emp above 1.
        """
        super().__init__()
        for axis in (ep, emp):
            if axis is not None and axis.size > 1:
                raise DistributedError(
                    f"MoeLayer holds all experts on one rank, but the {axis.name} axis has {axis.size} ranks; "
                    "set --ep-degree and --expert-mp-degree to 1"
                )
        if (shared is None) != (sizes.shared_experts == 0):
            given = "no module" if shared is None else "a module"
            raise ValueError(f"shared_experts is {sizes.shared_experts}, but {given} was passed as shared")
        self.sizes = sizes
        self.router = Router(sizes.hidden_size, sizes.num_experts, sizes.topk, dtype=dtype, device=device)
        self.experts = Experts(
            sizes.hidden_size,
            sizes.ffn_hidden_size,
            sizes.num_experts,
            gated=sizes.gated,
            add_bias=sizes.add_bias,
            dtype=dtype,
            device=device,
        )
        self.shared = shared
        self.dispatcher: Dispatcher = LocalDispatcher(sizes.num_experts)

    def forward(
        self, x_BSH: Tensor, valid_BS: Tensor | None = None, valid_tokens: int | None = None
    ) -> tuple[Tensor, MoeStats]:
        """Send every non-padding token through its k experts.

        valid_BS: bool, False is padding; None is no padding. valid_tokens: how many are True, known on the
        host so that capacity and buffers do not wait for the device; may be left out without padding.
        Raises ValueError where the two contradict each other in a way the host can see.
        """
        batch, length, _ = x_BSH.shape
        tokens = _host_count(valid_BS, valid_tokens, batch * length)
        x_TH = x_BSH.flatten(0, 1)
        valid_T = None if valid_BS is None else valid_BS.flatten()

        routing = self.router(x_TH, valid_T)
        kept_Tk = self._kept(routing, valid_T, batch, tokens)
        weights_Tk = gate_weights(routing, kept_Tk, over_kept=self.sizes.has_capacity)

        sent = self.dispatcher.dispatch(
            x_TH, weights_Tk, routing.experts, kept_Tk, self._rows(tokens), not self.sizes.has_capacity
        )
        out_RH = self.experts(sent.rows, sent.counts) * sent.weights.to(x_TH.dtype)[:, None]
        y_BSH = self.dispatcher.combine(out_RH, sent).view_as(x_BSH)
        if self.shared is not None:
            y_BSH = y_BSH + self.shared(x_BSH)
        return y_BSH, self._stats(routing, kept_Tk, tokens)

    def _kept(self, routing: Routing, valid_T: Tensor | None, batch: int, tokens: int) -> Tensor | None:
        """[T, k] bool: pairs that reach an expert; None: all of them."""
        if not self.sizes.has_capacity:
            return None if valid_T is None else valid_T[:, None].expand_as(routing.experts)
        capacity = self.sizes.capacity(tokens)
        # Queues stand in token order: position, then sample. Tokens lie by sample, then position.
        experts_Tk = _by_position(routing.experts, batch)
        valid_by_position = None if valid_T is None else _by_position(valid_T, batch)
        if self.sizes.drop_policy == "probs":
            probs_TE = _by_position(routing.probs, batch)
            kept_Tk = keep_by_probability(experts_Tk, valid_by_position, probs_TE, capacity=capacity)
        else:
            policy = self.sizes.drop_policy
            starts_kE = queue_starts(routing.sums.counts[None], 0, policy)
            kept_Tk = keep_by_order(experts_Tk, valid_by_position, starts_kE, capacity=capacity, policy=policy)
        return _by_sample(kept_Tk, batch)

    def _rows(self, tokens: int) -> int:
        """Rows to make room for: exact when dropless, else the most that capacity can let through."""
        pairs = tokens * self.sizes.topk
        if not self.sizes.has_capacity:
            return pairs
        return min(pairs, self.sizes.num_experts * self.sizes.capacity(tokens))

    def _stats(self, routing: Routing, kept_Tk: Tensor | None, tokens: int) -> MoeStats:
        first_only = self.sizes.has_capacity and self.sizes.drop_policy == "choice"
        aux, z = router_losses(routing.sums, tokens, first_choices_only=first_only)
        load_E = routing.sums.counts.sum(0)
        dropped = load_E.new_zeros(())
        if self.sizes.has_capacity and kept_Tk is not None:
            dropped = load_E.sum() - kept_Tk.sum()
        return MoeStats(aux, z, load_E, dropped)


def _host_count(valid_BS: Tensor | None, valid_tokens: int | None, tokens: int) -> int:
    """The non-padding tokens as the host knows them."""
    if valid_tokens is None:
        if valid_BS is not None:
            raise ValueError("valid was given without valid_tokens; pass the number of True in it")
        return tokens
    if valid_tokens > tokens or (valid_BS is None and valid_tokens != tokens):
        padding = "without padding" if valid_BS is None else "with padding"
        raise ValueError(f"valid_tokens is {valid_tokens}, but the batch {padding} has {tokens} tokens")
    return valid_tokens


def _by_position(x: Tensor, batch: int) -> Tensor:
    """[B·S, ...] -> [S·B, ...]."""
    y: Tensor = x.unflatten(0, (batch, -1)).transpose(0, 1).flatten(0, 1)
    return y


def _by_sample(x: Tensor, batch: int) -> Tensor:
    """[S·B, ...] -> [B·S, ...]."""
    y: Tensor = x.unflatten(0, (-1, batch)).transpose(0, 1).flatten(0, 1)
    return y
