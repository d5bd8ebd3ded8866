"""The MoE layer: route, dispatch, experts, combine, and the shared experts beside them.

Shape letters: B samples, S positions on this rank, T = B·S tokens, H hidden, E experts, k choices per token, R rows,
P pieces of a micro-batch. Under sequence parallelism S is the sequence divided by mp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from megapar.core.axis import Axis
from megapar.core.context_parallel.share import Share
from megapar.core.execution import DEFAULT, Execution
from megapar.core.replay import Replay, once
from megapar.core.tensor_parallel import piece_shape
from megapar.core.traffic import Traffic
from megapar.errors import DistributedError
from megapar.moe.capacity import (
    capacity_on_device,
    keep_by_order,
    keep_by_probability,
    keep_by_probability_over,
    queue_starts,
)
from megapar.moe.dispatch import Dispatcher, LocalDispatcher
from megapar.moe.expert_parallel import ExpertParallelDispatcher
from megapar.moe.experts import Experts
from megapar.moe.router import Router, Routing, gate_weights
from megapar.moe.sizes import MoeSizes
from megapar.moe.sliced import Passage
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats, RouterSums, count_pairs, gather_sums, router_losses, sequence_loss

READ_SIZES = "MoeLayer.read_sizes"  # where the host waits for the rows of experts


class MoeLayer(nn.Module):
    """x [B, S, H] -> y [B, S, H] and the routing's statistics.

    Ledger (this rank):
        router.weight [E, H]; experts.* [E/ep, .., F/emp, ..] as in ``Experts``; shared.* as the module passed in
        forward   x [T, H] -> router -> rows [R, H] sorted by expert -> experts -> times gate weight
                  -> y [T, H] (+ shared(x)); the collectives over ep and emp are drawn in ``expert_parallel``
        dgrad     the same way back with the same splits
        wgrad     experts whole on their rank, over the tokens of all ranks of ep (and emp), so that nothing but the
                  sum over edp is left; router over this rank's own tokens: without sequence parallelism the same on
                  every mp rank, with it a part, the parts summed over mp
    The gate weights multiply the expert outputs behind the sum over emp and before the combine, so that backward never
    needs what the combine returns. Padding is routed nowhere; it gets zeros from the routed experts.

    The statistics are those of the whole micro-batch and the same on every mp rank. Their gradient counts the loss
    once although every mp rank differentiates it, like that of every other term.
    """

    dispatcher_class: ClassVar[type[ExpertParallelDispatcher]] = ExpertParallelDispatcher

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
        slicing: Slicing | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        execution: Execution = DEFAULT,
    ) -> None:
        """Create the layer with uninitialised parameters.

        shared: the shared experts, one module [.., H] -> [.., H] of width ``sizes.shared_width``; given exactly
        when ``sizes.shared_experts`` is not 0; in a recomputed unit it also takes ``closing``, as ``Mlp`` does.
        ep: experts are dealt out over it in contiguous chunks. emp: each expert's features are cut over it; all of
        mp, or one rank. Left out, an axis has one rank.
        sequence_parallel: positions are cut over mp in contiguous chunks. share: all ranks that have positions of one
        micro-batch, those of cp too; by default what sequence_parallel says. slicing: how ``passage`` cuts what
        travels. execution: how the layer runs; its traffic tracks what the layer launches.
        Raises DistributedError where the axes do not fit each other, ValueError where they do not divide the sizes.
        """
        super().__init__()
        ep, emp, mp = ep or Axis.single("ep"), emp or Axis.single("emp"), mp or Axis.single("mp")
        _check_axes(emp, mp, sequence_parallel)
        _check_shared(sizes, shared)
        self.sizes, self.mp = sizes, mp
        self.cut = sequence_parallel and mp.size > 1
        self.share = share or Share(mp=mp if self.cut else Axis.single("mp"))
        self.parted = self.share.size > 1
        # Who is dropped is decided on this rank alone.
        self.alone = not self.parted or sizes.capacity_scope == "rank"
        self.even = sizes.has_capacity and self.alone and (ep.size > 1 or (self.cut and emp.size > 1))
        self.router = Router(sizes, dtype=dtype, device=device, copies=self.share.size, run=execution.run)
        self.experts = _own_experts(sizes, ep, emp, dtype, device, execution)
        self.shared = shared
        self.traffic = execution.traffic or Traffic()
        self.experts_here = sizes.num_experts // ep.size
        widths = sizes.hidden_size, self.experts.down.shape[2]
        self._host_sizes = bool(self.traffic.device.grouped_lacks(dtype, widths))
        over_ranks = partial(self.dispatcher_class, sizes.num_experts, ep, emp, self.cut, traffic=self.traffic)
        travels = ep.size > 1 or emp.size > 1
        self.dispatcher: Dispatcher = over_ranks(self.even) if travels else LocalDispatcher(sizes.num_experts)
        self.sliced_dispatcher = over_ranks(even=False)
        self.slice_by(slicing or Slicing())

    def forward(
        self,
        x_BSH: Tensor,
        valid_BS: Tensor | None = None,
        valid_tokens: int | None = None,
        replay: Replay | None = None,
        closing: Replay | None = None,
    ) -> tuple[Tensor, MoeStats]:
        """Send every non-padding token through its k experts.

        valid_BS: bool, False is padding; None is no padding in the whole micro-batch. valid_tokens: non-padding tokens
        of the whole micro-batch, known on the host so that capacity and buffers do not wait for the device; may be
        left out without padding. replay: of the recomputed unit that the layer is in; the splits of its forward are
        used again. closing: of the one whose output needs this layer's and nothing else does; the combine is not sent
        again. All ranks of ep call this together; for deepspeed_moe, whose messages have even splits, with the same B
        and S.
        Raises ValueError where the two contradict each other in a way the host can see.
        """
        batch, length, _ = x_BSH.shape
        tokens = _host_count(valid_BS, valid_tokens, batch * length * self.share.size)
        x_TH = x_BSH.flatten(0, 1)
        valid_T = None if valid_BS is None else valid_BS.flatten()

        routing = self.router(x_TH, valid_T, batch)
        sums, counts_PkE = routing.sums, routing.sums.counts[None]
        capacity: int | Tensor = self.sizes.capacity(tokens)
        own = counts_PkE
        runs: tuple[tuple[int, int], ...] = ((0, length),)
        if self.parted and (self.alone or not self.sizes.has_capacity):
            sums, counts_PkE = gather_sums(routing.sums, self.share)
            capacity = capacity_on_device(self.sizes, own[0, 0].sum()) if self.alone else capacity
        elif self.parted:
            runs, most, order = self.share.runs(length)
            counts_RkE = self._counts_by_run(routing, valid_T, batch, [positions for _, positions in runs], most)
            sums, counts_PkE = gather_sums(routing.sums, self.share, counts_RkE)
            own = self.share.sort(counts_PkE, order)
        kept_Tk = self.kept(routing, own, valid_T, batch, capacity, runs=runs)
        weights_Tk = gate_weights(routing, kept_Tk, over_kept=self.sizes.has_capacity, scaling=self.sizes.scaling)

        rows, exact = self._room(batch * length, tokens, padded=valid_BS is not None)
        sent = self.dispatcher.dispatch(x_TH, weights_Tk, routing.experts, kept_Tk, rows, exact, replay)
        known = self.sizes_of(sent.counts, None if sent.plan is None else sent.plan.sizes, sent.rows, replay)
        out_RH = self.experts(lambda experts, *rows: experts.compute(*rows, known), sent.rows, sent.counts)
        y_BSH = self.dispatcher.combine(out_RH, sent, closing).view_as(x_BSH)
        beside_BSH = self.beside(x_BSH, closing)
        if beside_BSH is not None:
            y_BSH = y_BSH + beside_BSH
        return y_BSH, self.stats(sums, counts_PkE, tokens, routing.orthogonal)

    def sizes_of(
        self, counts_E: Tensor, known: tuple[int, ...] | None, rows_RH: Tensor, replay: Replay | None
    ) -> tuple[int, ...] | None:
        """The rows of each expert here as the host needs them for its products; None where the device's own do without.

        known: where the plan says them. replay: what was read in the forward is not read again.
        """
        if not self._host_sizes or known is not None:
            return known if self._host_sizes else None
        return once(replay, lambda: self.read_sizes(counts_E, rows_RH.shape[0]))

    def read_sizes(self, counts_E: Tensor, rows: int) -> tuple[int, ...]:
        """The counts on the host, which waits for the device, once for all products. rows: their sum."""
        numbers, ready = self.traffic.device.host_copy(counts_E)
        ready.synchronize()
        self.traffic.count_host_wait(READ_SIZES)
        found = tuple(numbers.tolist())
        assert sum(found) == rows, (found, rows)
        return found

    def beside(self, x: Tensor, closing: Replay | None) -> Tensor | None:
        """What the shared experts make of [.., H]; None where there are none."""
        if self.shared is None:
            return None
        y: Tensor = self.shared(x) if closing is None else self.shared(x, closing)
        return y

    def slice_by(self, slicing: Slicing) -> None:
        """How ``passage`` cuts what travels from now on."""
        self.slicing = slicing
        even = self.even and slicing.capacity == "slice" and not slicing.expert_pieces
        self.sliced_dispatcher = replace(self.sliced_dispatcher, even=even)

    def passage(
        self,
        length: int,
        valid_tokens: int,
        own_valid_BS: Tensor | None,
        batch: int,
        replay: Replay | None = None,
        closing: Replay | None = None,
    ) -> Passage:
        """The way of one micro-batch through this layer slice by slice.

        batch, length: samples, and positions on this rank. The others: as ``forward`` takes them.
        """
        positions = batch * length
        tokens = _host_count(own_valid_BS, valid_tokens, positions * self.share.size)
        capacity: int | Tensor = self.sizes.capacity(tokens)
        if self.parted and self.alone:
            capacity = self.sizes.capacity(positions)
            if own_valid_BS is not None:
                capacity = capacity_on_device(self.sizes, own_valid_BS.sum())
        return Passage(self, tokens, capacity, replay, closing)

    def kept(
        self,
        routing: Routing,
        counts_PkE: Tensor,
        valid_T: Tensor | None,
        batch: int,
        capacity: int | Tensor,
        piece: int = 0,
        runs: Sequence[tuple[int, int]] | None = None,
        slice_number: int | None = None,
    ) -> Tensor | None:
        """[T, k] bool: pairs that reach an expert; None: all of them.

        counts_PkE: of the pieces that share a capacity, in token order; these tokens are piece number ``piece``, or
        where they are several pieces, ``runs`` (number, positions). slice_number: of the slice that they are.
        """
        if not self.sizes.has_capacity:
            return None if valid_T is None else valid_T[:, None].expand_as(routing.experts)
        policy = self.sizes.drop_policy
        # Queues stand in token order: position, then sample. Tokens lie by sample, then position.
        experts_Tk = _by_position(routing.experts, batch)
        valid_by_position = None if valid_T is None else _by_position(valid_T, batch)
        if policy == "probs":
            probs_TE = _by_position(routing.probs, batch)
            if self.alone:
                kept_Tk = keep_by_probability(experts_Tk, valid_by_position, probs_TE, capacity=capacity)
            else:
                length = len(experts_Tk) // batch
                kept_Tk = keep_by_probability_over(
                    self.share,
                    length,
                    experts_Tk,
                    valid_by_position,
                    probs_TE,
                    capacity=capacity,
                    number=slice_number,
                )
            return _by_sample(kept_Tk, batch)
        kept, start = [], 0
        for number, positions in runs or ((piece, len(experts_Tk) // batch),):
            rows = slice(start * batch, (start + positions) * batch)
            starts_kE = queue_starts(counts_PkE, number, policy)
            valid_rows = None if valid_by_position is None else valid_by_position[rows]
            kept.append(keep_by_order(experts_Tk[rows], valid_rows, starts_kE, capacity=capacity, policy=policy))
            start += positions
        return _by_sample(kept[0] if len(kept) == 1 else torch.cat(kept), batch)

    def _counts_by_run(
        self, routing: Routing, valid_T: Tensor | None, batch: int, positions: Sequence[int], most: int
    ) -> Tensor:
        """[most, k, E] pairs of each run of this rank's positions, zeros behind the last one."""
        if most == 1:
            return routing.sums.counts[None]
        rows = [n * batch for n in positions]
        experts = _by_position(routing.experts, batch).split(rows)
        valid = [None] * len(rows) if valid_T is None else _by_position(valid_T[:, None], batch).split(rows)
        counts = [count_pairs(e, v, self.sizes.num_experts) for e, v in zip(experts, valid, strict=True)]
        return torch.stack(counts + [torch.zeros_like(counts[0])] * (most - len(counts)))

    def _room(self, positions: int, tokens: int, *, padded: bool) -> tuple[int, bool]:
        """Rows to make room for, and whether all are needed: exact when dropless, else what capacity lets through.

        positions: of this rank, padding too. tokens: non-padding ones of the micro-batch.
        """
        sizes = self.sizes
        if self.even:
            # Padding may differ between the ranks of ep, the rows that they send each other may not.
            return sizes.num_experts * sizes.capacity(positions), False
        pairs = (positions if self.parted else tokens) * sizes.topk
        if not sizes.has_capacity:
            return pairs, not (self.parted and padded)
        return min(pairs, sizes.num_experts * sizes.capacity(tokens)), False

    def stats(self, sums: RouterSums, counts_PkE: Tensor, tokens: int, orthogonal: Tensor | None = None) -> MoeStats:
        """From the sums of a whole micro-batch, and the counts of every rank that shares it."""
        sizes = self.sizes
        first_only = sizes.has_capacity and sizes.drop_policy == "choice"
        aux, z = router_losses(sums, tokens, first_choices_only=first_only)
        sequence = sequence_loss(sums)
        orthogonal = torch.zeros_like(z) if orthogonal is None else orthogonal
        load_E = sums.counts.sum(0)
        if not sizes.has_capacity:
            return MoeStats(aux, z, sequence, orthogonal, load_E, load_E.new_zeros(()))
        # Every expert is as full as it can be, whatever the policy.
        over = load_E - sizes.capacity(tokens)
        if self.parted and self.alone:
            over = counts_PkE.sum(1) - capacity_on_device(sizes, counts_PkE[:, 0].sum(1))[:, None]
        return MoeStats(aux, z, sequence, orthogonal, load_E, over.clamp(min=0).sum())


def _check_axes(emp: Axis, mp: Axis, sequence_parallel: bool) -> None:
    if emp.size not in (1, mp.size):
        raise DistributedError(
            f"experts are cut over {emp.size} ranks where mp has {mp.size}; set --expert-mp-degree to 1 or {mp.size}"
        )
    if mp.size > 1 and emp.size == 1 and not sequence_parallel:
        raise DistributedError(
            f"with whole experts (--expert-mp-degree 1) the {mp.size} ranks of mp would all dispatch the same tokens; "
            f"set --sequence-parallel, or --expert-mp-degree {mp.size}"
        )


def _check_shared(sizes: MoeSizes, shared: nn.Module | None) -> None:
    if (shared is None) != (sizes.shared_experts == 0):
        given = "no module" if shared is None else "a module"
        raise ValueError(f"shared_experts is {sizes.shared_experts}, but {given} was passed as shared")


def _own_experts(
    sizes: MoeSizes,
    ep: Axis,
    emp: Axis,
    dtype: torch.dtype,
    device: torch.device | str | None,
    execution: Execution,
) -> Experts:
    """This rank's piece of the experts: some of them over ep, some of their features over emp."""
    return Experts(
        sizes.hidden_size,
        piece_shape((sizes.ffn_hidden_size,), 0, emp)[0],
        piece_shape((sizes.num_experts,), 0, ep)[0],
        gated=sizes.gated,
        add_bias=sizes.add_bias,
        adds_down_bias=emp.rank == 0,
        dtype=dtype,
        device=device,
        execution=execution,
    )


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
