"""The mixture of experts layer: route, dispatch, experts, combine, and the shared experts next to them.

Shape letters: B samples, S positions on this rank, T = B·S tokens, H hidden, E experts, k choices per token, R rows.
Under sequence parallelism S is the sequence divided by mp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.share import Share
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.layers import piece_shape
from megapar.errors import DistributedError
from megapar.moe.capacity import capacity_on_device
from megapar.moe.dispatcher import Dispatcher
from megapar.moe.experts import Experts
from megapar.moe.forward import MoeForward
from megapar.moe.micro_batch import MicroBatchRouting
from megapar.moe.node_dispatcher import NodeDispatcher
from megapar.moe.placement import ExpertSlots
from megapar.moe.router import Router
from megapar.moe.sizes import MoeSizes
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats
from megapar.moe.token_dispatcher import TokenDispatcher


@dataclass(frozen=True)
class MoeParts:
    """The classes that layers of experts are made of, for tests and tools that replace some."""

    experts: type[Experts] = Experts
    routing: type[MicroBatchRouting] = MicroBatchRouting
    dispatcher: type[Dispatcher[Any]] = TokenDispatcher
    node_dispatcher: type[Dispatcher[Any]] = NodeDispatcher


class MoeLayer(nn.Module):
    """x [B, S, H] -> y [B, S, H], and the routing statistics.

    Ledger (this rank):
        router.* as in ``Router``; experts.* [E/ep, .., F/emp, ..] as in ``Experts``; shared.* as the module passed in
        forward   x [T, H] -> router -> rows [R, H] sorted by expert -> experts -> times gate weight
                  -> y [T, H] (+ shared(x)); the collectives over ep and emp are drawn in ``token_dispatcher``
        dgrad     the same path in reverse, with the same splits
        wgrad     experts: complete on their rank, over the tokens of all ranks of ep (and emp), so that only the sum
                  over edp remains; router: over this rank's own tokens, which are the same on every mp rank without
                  sequence parallelism, and a part with it, summed over mp
    Padding is not routed; the routed experts return zeros for it.

    The statistics are those of the whole micro-batch and the same on every mp rank. Every mp rank differentiates them,
    and their gradients count the loss once, like those of every other term.

    Attributes:
        share: The ranks that share the positions of a micro-batch.
        shares_batch: There is more than one such rank.
        local_capacity: This rank decides alone which of its pairs are dropped.
        dispatcher: Sends tokens to their experts and back, with even splits if capacities allow it.
    """

    def __init__(
        self,
        sizes: MoeSizes,
        *,
        shared: nn.Module | None = None,
        ep: Axis | None = None,
        emp: Axis | None = None,
        mp: Axis | None = None,
        sequence_parallel: bool = False,
        share: Share | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        execution: Execution = DEFAULT,
        parts: MoeParts | None = None,
    ) -> None:
        """Create the layer with uninitialized parameters. An axis that is None has one rank.

        Raises DistributedError if the axes do not fit together, ValueError if they do not divide the sizes.

        Args:
            shared: The shared experts, one module [.., H] -> [.., H] of width ``sizes.shared_width``; required if and
                only if that is not 0. In a recomputed unit it also takes ``ends_unit``, as ``Mlp``, and, with an
                attribute ``adds_onto``, a sum to add to.
            ep: Each rank has a contiguous chunk of the experts. With ``nodes``, dispatch is by node.
            emp: Each expert's features are sharded over it; all of mp, or one rank.
            share: All ranks that share the positions of a micro-batch, including those of cp; None: those of mp under
                sequence parallelism, else this rank.
            dtype: dtype of the experts; the router is max(fp32, dtype).
        """
        super().__init__()
        parts = parts or MoeParts()
        ep, emp, mp = ep or Axis.single("ep"), emp or Axis.single("emp"), mp or Axis.single("mp")
        _check_axes(emp, mp, sequence_parallel)
        _check_shared(sizes, shared)
        self.sizes, self.mp = sizes, mp
        self.sequence_sharded = sequence_parallel and mp.size > 1
        self.share = share or Share(mp=mp if self.sequence_sharded else Axis.single("mp"))
        self.shares_batch = self.share.size > 1
        self.local_capacity = not self.shares_batch or sizes.capacity_scope == "rank"
        self.router = Router(sizes, dtype=dtype, device=device, copies=self.share.size, run=execution.run)
        self.comm = execution.comm or CommContext()
        execution = replace(execution, comm=self.comm)
        self.experts = parts.experts(
            sizes.hidden_size,
            piece_shape((sizes.ffn_hidden_size,), 0, emp)[0],
            piece_shape((sizes.num_experts,), 0, ep)[0],
            gated=sizes.gated,
            clamped=sizes.clamped,
            add_bias=sizes.add_bias,
            adds_down_bias=emp.rank == 0,
            dtype=dtype,
            device=device,
            execution=execution,
        )
        self.shared = shared
        exchanges_rows = ep.size > 1 or (self.sequence_sharded and emp.size > 1)
        by_node = ep.nodes is not None
        even_splits = sizes.has_capacity and self.local_capacity and exchanges_rows and not by_node
        dispatcher = parts.node_dispatcher if by_node else parts.dispatcher
        self.dispatcher = dispatcher(sizes.num_experts, ep, emp, self.sequence_sharded, even_splits, comm=self.comm)
        self.slots = ExpertSlots(self.comm.device)
        self._routing_class = parts.routing

    def forward(
        self,
        x_BSH: Tensor,
        valid_BS: Tensor | None = None,
        valid_tokens: int | None = None,
        replay: Replay | None = None,
        ends_unit: Replay | None = None,
    ) -> tuple[Tensor, MoeStats]:
        """Send every non-padding token through its k experts.

        Collective over ep; for deepspeed_moe, whose messages have even splits, with the same B and S on all ranks.
        Raises ValueError if valid_BS and valid_tokens contradict each other in a way that the host can detect.

        Args:
            valid_BS: bool, False for padding; None: no padding in the whole micro-batch.
            valid_tokens: Non-padding tokens of the whole micro-batch, passed on the host so that capacity and buffer
                sizes do not wait for the device; optional without padding.
            replay: Of the recomputed unit that contains the layer; its recomputation reuses the forward's splits.
            ends_unit: Of the recomputed unit that ends with this layer; its recomputation does not send the combine,
                since only the unit's output needs it.
        """
        batch, length, _ = x_BSH.shape
        forward = self.begin(Slicing(), length, valid_tokens, valid_BS, batch, replay, ends_unit)
        forward.dispatch(x_BSH, valid_BS)  # route, keep, dispatch
        combines, (handles,), _ = forward.compute_experts()
        y_TH = combines.finish(0, handles)
        shared_BSH = forward.shared_experts(0, onto=y_TH)
        return (y_TH if shared_BSH is None else shared_BSH).view_as(x_BSH), forward.stats()

    def begin(
        self,
        slicing: Slicing,
        length: int,
        valid_tokens: int | None,
        own_valid_BS: Tensor | None,
        batch: int,
        replay: Replay | None = None,
        ends_unit: Replay | None = None,
    ) -> MoeForward:
        """Begin the forward of one micro-batch of ``batch`` samples. For the other arguments see ``forward``.

        Args:
            length: Positions on this rank.
            own_valid_BS: As ``valid_BS``, of this rank's positions.
        """
        positions = batch * length
        tokens = _host_count(own_valid_BS, valid_tokens, positions * self.share.size)
        capacity: int | Tensor = self.sizes.capacity(tokens)
        dispatcher = self.dispatcher
        if slicing.active:
            even_splits = dispatcher.even_splits and slicing.capacity == "slice" and not slicing.expert_pieces
            dispatcher = replace(dispatcher, even_splits=even_splits)
            if self.shares_batch and self.local_capacity:
                capacity = self.sizes.capacity(positions)
                if own_valid_BS is not None:
                    capacity = capacity_on_device(self.sizes, own_valid_BS.sum())
        local_capacity = self.local_capacity
        routing = self._routing_class(
            self.sizes, self.share, slicing, local_capacity=local_capacity, tokens=tokens, capacity=capacity
        )
        return MoeForward(
            router=self.router,
            experts=self.experts,
            shared=self.shared,
            slots=self.slots,
            routing=routing,
            dispatcher=dispatcher,
            slicing=slicing,
            replay=replay,
            ends_unit=ends_unit,
        )


def _check_axes(emp: Axis, mp: Axis, sequence_parallel: bool) -> None:
    if emp.size not in (1, mp.size):
        raise DistributedError(
            f"experts are sharded over {emp.size} ranks, but mp has {mp.size}; set --expert-mp-degree to 1 or {mp.size}"
        )
    if mp.size > 1 and emp.size == 1 and not sequence_parallel:
        raise DistributedError(
            f"with whole experts (--expert-mp-degree 1) the {mp.size} ranks of mp would all dispatch the same tokens; "
            f"set --sequence-parallel, or --expert-mp-degree {mp.size}"
        )


def _check_shared(sizes: MoeSizes, shared: nn.Module | None) -> None:
    if (shared is None) != (sizes.shared_width == 0):
        given = "no module" if shared is None else "a module"
        raise ValueError(f"shared_experts is {sizes.shared_experts}, but {given} was passed as shared")


def _host_count(valid_BS: Tensor | None, valid_tokens: int | None, tokens: int) -> int:
    if valid_tokens is None:
        if valid_BS is not None:
            raise ValueError("valid was given without valid_tokens; pass the number of True in it")
        return tokens
    if valid_tokens > tokens or (valid_BS is None and valid_tokens != tokens):
        padding = "without padding" if valid_BS is None else "with padding"
        raise ValueError(f"valid_tokens is {valid_tokens}, but the batch {padding} has {tokens} tokens")
    return valid_tokens
