"""The places of experts on the ranks of ep during a run: chosen from their measured load, and changed between steps.

    after a step that is due    the loads of the steps so far, which ranks have summed for the log, give a placement
    next update                 optimizer, then masters and moments move, then parameters are gathered from the masters
    before a save, at the end   experts return to the order of their numbers, so files do not know of places; the next
                                update moves them back. Local checkpoints are saved as the ranks are

Nothing else knows of places: the layer maps experts to slots before its dispatch (``MoeLayer.slots``).

Source of moving experts by load between steps: the expert load balancer of DeepSeek-V3, arXiv:2412.19437, section
3.4; here without copies of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megapar.arguments import Config
from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.sharding.cut import local_box, shard_dim
from megapar.errors import CheckpointError
from megapar.model.decoder.model import Decoder
from megapar.moe.placement import PlacementRoom, busiest_rank, in_order, rebalanced
from megapar.training.step.job import Job

PLACES = "expert_places"  # among a checkpoint's scalars
Rows = tuple[tuple[int, ...], ...]  # of each layer with experts, the expert in each slot


class ExpertPlaces:
    """The placement of every layer's experts. All ranks of all stages know those of all layers.

    Attributes:
        interval: Steps between changes; 0: experts stay in order.
        rows: The placement in effect.
    """

    def __init__(self, config: Config, job: Job) -> None:
        self.interval = config.moe.moe_rebalance_interval
        self._job, self._layers = job, job.sizes.routed_layers
        self._ranks = job.world.grid.ep
        nodes = job.world.axis("ep").nodes
        self._node_ranks = self._ranks if nodes is None else nodes.within.size
        self._ordered: Rows = (in_order(job.sizes.routed_experts),) * len(self._layers)
        self.rows = self._before = self._ordered
        self._next: Rows | None = None
        self._moved_at = 0  # the step whose update made ``rows`` of ``_before``
        self._loads: list[list[float]] | None = None
        if self.interval:
            job.sharding.cut_rows(lambda spec: spec.expert)

    # Load

    def add(self, loads: Sequence[Sequence[float]]) -> None:
        """Add the load of a step, of each layer and expert, summed over all ranks."""
        if not self.interval:
            return
        if self._loads is None:
            self._loads = [list(layer) for layer in loads]
            return
        for total, layer in zip(self._loads, loads, strict=True):
            for expert, load in enumerate(layer):
                total[expert] += load

    def busiest(self, layer: int, loads: Sequence[float], iteration: int) -> float | None:
        """Return the busiest ep rank's load over the mean, None for one rank. ``layer`` counts those with experts."""
        if self._ranks == 1:
            return None
        rows = self._before if iteration <= self._moved_at else self.rows
        return busiest_rank(loads, rows[layer], self._ranks)

    # Choice

    def due(self, iteration: int) -> bool:
        """Return True if a placement is to be chosen after this step."""
        return self.interval > 0 and iteration % self.interval == 0

    def choose(self) -> str:
        """Choose the next update's placement from the loads since the last; return a log line, "" if nothing moves."""
        loads, self._loads = self._loads, None
        if loads is None:
            return ""
        now = self.rows if self._next is None else self._next
        chosen = tuple(
            rebalanced(load, row, self.room(number)) for number, load, row in zip(self._layers, loads, now, strict=True)
        )
        if chosen == now:
            return ""
        self._next = chosen
        moved = sum(old != new for pair in zip(now, chosen, strict=True) for old, new in zip(*pair, strict=True))
        peaks = [
            max(busiest_rank(load, row, self._ranks) for load, row in zip(loads, rows, strict=True))
            for rows in (now, chosen)
        ]
        layers = sum(old != new for old, new in zip(now, chosen, strict=True))
        return (
            f"{moved} experts of {layers} layers move with the next update: the busiest rank of any layer from "
            f"{peaks[0]:.2f} to {peaks[1]:.2f} of the mean"
        )

    def room(self, number: int) -> PlacementRoom:
        """Return the slots of a layer. number: of its block."""
        grid, experts = self._job.world.grid, self._job.sizes.routed_experts
        local, shards = experts // self._ranks, grid.expert_shards
        block = local
        for spec in self._job.table:
            of_layer = spec.expert and spec.name.startswith(self._prefix(number))
            if of_layer and shard_dim(local_box(spec, grid, 0).sizes, shards) == 0:
                block = -(-local // shards)
        return PlacementRoom(experts, self._ranks, self._node_ranks, block)

    def _prefix(self, number: int) -> str:
        return f"layers.{number}.moe." if number < self._job.sizes.num_layers else "mtp.block.moe."

    # Moves

    def update(self, iteration: int) -> None:
        """Put the chosen placement into effect at step ``iteration``, between the optimizer and the gathers."""
        if self._next is not None:
            self._before, self._moved_at = self.rows, iteration
            self._move(self._next)
            self._next = None

    @property
    def away(self) -> bool:
        """True if experts are not in the order of their numbers."""
        return self.rows != self._ordered

    def put_in_order(self) -> None:
        """Move all experts to the slots of their numbers, until the next update moves them back."""
        wanted = self.rows if self._next is None else self._next
        self._move(self._ordered)
        self._job.sharding.start_param_gather()
        self._next = wanted

    def _move(self, rows: Rows) -> None:
        """Move masters and optimizer state of this rank's layers, and change the layers' slots."""
        job, axis = self._job, self._job.world.axis("ep")
        masters = [shard.master for shard in job.sharding.master_shards]
        lists = [masters, *map(job.optimizer.state, job.optimizer.states)]
        views = list(zip(*(job.sharding.views(tensors) for tensors in lists), strict=True))
        for number, moe in cast(Decoder, job.model).expert_layers().items():  # other models have no flag for it
            place = self._layers.index(number)
            if self.rows[place] == rows[place]:
                continue
            moe.slots.set_order(rows[place])
            for same in views:
                view = same[0]
                if view.spec.expert and view.spec.name.startswith(self._prefix(number)):
                    piece = range(view.box.offsets[0], view.box.offsets[0] + view.box.sizes[0])
                    moves = RowMoves.between(self.rows[place], rows[place], piece, axis.size)
                    move_rows([view.tensor for view in same], moves, axis, job.world.device)
        self.rows = rows

    # Checkpoints

    def state(self) -> dict[str, list[list[int]]]:
        """Return, for a checkpoint's scalars, the placement ``now`` and that of the ``next`` update; [] if in order."""
        now, after = self.rows, self.rows if self._next is None else self._next
        return {
            name: [] if rows == self._ordered else [*map(list, rows)] for name, rows in (("now", now), ("next", after))
        }

    def restore(self, saved: Mapping[str, Sequence[Sequence[int]]]) -> str:
        """Continue with a checkpoint's placement if it fits this layout; return a line for the log, or "".

        On disk experts are in order, for any layout, and the next update moves them. Local checkpoints, which only this
        layout loads, have them where they were. Raises CheckpointError if this layout cannot have them there.
        """
        if not any(saved.values()):
            return ""
        now, after = (tuple(map(tuple, saved.get(name, ()))) or self._ordered for name in ("now", "next"))
        if not self._fits(now):
            raise CheckpointError("the checkpoint has experts in places that this layout does not have")
        self._take(now)
        fits = self._fits(after)
        wanted = after if fits and self.interval else self._ordered
        self._next = None if wanted == now else wanted
        return "" if fits else "experts begin in order: the checkpoint's placement is of another layout"

    def _fits(self, rows: Rows) -> bool:
        return len(rows) == len(self._layers) and all(
            self.room(number).fits(row) for number, row in zip(self._layers, rows, strict=True)
        )

    def _take(self, rows: Rows) -> None:
        """Change the layers' slots to those in which the loaded weights are."""
        if rows != self.rows:
            for number, moe in cast(Decoder, self._job.model).expert_layers().items():
                moe.slots.set_order(rows[self._layers.index(number)])
            self.rows = rows


@dataclass(frozen=True)
class RowMoves:
    """Moves between the slots of a rank's piece and those of others.

    Attributes:
        leaving: Slots of the piece, from its first one, in the order of their rows' destinations.
        arriving: Slots of the piece, in the order of their rows' sources, and of destinations from one source.
        send: Rows to each rank.
        receive: Rows from each rank.
    """

    leaving: tuple[int, ...]
    arriving: tuple[int, ...]
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @classmethod
    def between(cls, before: Sequence[int], after: Sequence[int], piece: range, ranks: int) -> RowMoves:
        """Return the moves of one rank on an axis of ``ranks`` ranks.

        Args:
            before: The expert (or other owner of rows) in each slot.
            after: The same experts, in the order of their slots afterwards.
            piece: Slots of this rank's piece.
        """
        local = len(before) // ranks
        source, target = ({expert: slot for slot, expert in enumerate(experts)} for experts in (before, after))
        changed = [slot for slot in piece if before[slot] != after[slot]]
        leaving = sorted((target[before[slot]], slot) for slot in changed)
        arriving = sorted((source[after[slot]] // local, slot) for slot in changed)
        send, receive = [0] * ranks, [0] * ranks
        for to, _ in leaving:
            send[to // local] += 1
        for rank, _ in arriving:
            receive[rank] += 1
        first = piece.start
        return cls(
            tuple(slot - first for _, slot in leaving),
            tuple(slot - first for _, slot in arriving),
            tuple(send),
            tuple(receive),
        )


@torch.no_grad()
def move_rows(tensors: Sequence[Tensor], moves: RowMoves, axis: Axis, device: Device) -> None:
    """Move rows [slots of the piece, ..] of all tensors over an axis of several ranks, in place.

    The tensors are this rank's pieces, of one dtype. Collective: ranks without moves take part.
    """
    leaving, arriving = device.integers((moves.leaving, moves.arriving)).unbind(0)  # as many of each
    sent = torch.cat([tensor.index_select(0, leaving).flatten(1) for tensor in tensors], dim=1)
    received = sent.new_empty(len(moves.arriving), sent.shape[1])
    with axis.waiting("all_to_all"):
        collectives.all_to_all(received, sent, axis, moves.receive, moves.send)
    widths = [math.prod(tensor.shape[1:]) for tensor in tensors]  # also of an empty piece
    for tensor, rows in zip(tensors, received.split(widths, dim=1), strict=True):
        tensor.index_copy_(0, arriving, rows.reshape(-1, *tensor.shape[1:]))
