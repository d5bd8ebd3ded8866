"""Schedules as data: for every pipeline rank the list of what it does, one action after the other.

The orders come from torch.distributed.pipelining, which also puts sends and receives between the computations so that
both ends of every pair of ranks see the same order (then nothing can wait in a circle: ``simulate`` proves it).

An action is written as in torch: chunk, kind, micro-batch. ``2F0`` is the forward of micro-batch 0 through chunk 2.

    F  forward           B  backward                    SEND_F RECV_F   activations to the next chunk
    I  backward, inputs  W  backward, weights           SEND_B RECV_B   gradients to the chunk before

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved (arXiv 2104.04473), zero bubble and ZBV (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from megapar.core.pipeline.stages import rank_of_chunk

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = "gpipe", "1f1b", "interleaved", "zero_bubble"
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
# A rank waits for its oldest send when it has more unfinished ones than this for every chunk of the pipeline.
SENDS_PER_CHUNK = 4


class Action(NamedTuple):
    """One thing that a rank does."""

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step.

    name: of --pp-schedule. programs: per pp rank its actions in order, computations and communication.
    num_chunks: pp x vpp. style: where chunks live, "loop" or "v".
    """

    name: str
    programs: tuple[tuple[Action, ...], ...]
    num_chunks: int
    num_micro_batches: int
    style: str

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.programs)

    @property
    def sends_kept(self) -> int:
        """Sends that a rank leaves unfinished behind it."""
        return SENDS_PER_CHUNK * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return self.name == ZERO_BUBBLE

    def rank_of(self, chunk: int) -> int:
        """Where a chunk lives."""
        return rank_of_chunk(chunk, self.num_ranks, self.style)

    def backward_order(self, chunk: int) -> tuple[int, ...]:
        """Micro-batches in the order in which a chunk's gradients (with split backward: its weights') are complete."""
        kinds = (BACKWARD, WEIGHT)
        program = self.programs[self.rank_of(chunk)]
        return tuple(a.micro_batch for a in program if a.chunk == chunk and a.kind in kinds)


def style_of(name: str, chunks_per_rank: int) -> str:
    """Where a schedule wants its chunks: ZBV, which is zero-bubble with two chunks, comes back to the first rank."""
    return "v" if name == ZERO_BUBBLE and chunks_per_rank == 2 else "loop"


def least_micro_batches(name: str, num_ranks: int) -> int:
    """Micro-batches without which a schedule does not work."""
    return 1 if name == GPIPE else num_ranks


@lru_cache(maxsize=64)
def make_schedule(name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int) -> Schedule:
    """The schedule ``name`` for pp x vpp chunks.

    Raises ValueError where it does not exist: fewer micro-batches than ranks (but for GPipe), or several chunks per
    rank where it has one.
    """
    if num_micro_batches < least_micro_batches(name, num_ranks):
        raise ValueError(f"{name} over {num_ranks} ranks needs {num_ranks} micro-batches or more: {num_micro_batches}")
    if name in (GPIPE, ONE_F_ONE_B) and chunks_per_rank != 1:
        raise ValueError(f"{name} has one chunk per rank, not {chunks_per_rank}")
    style, num_chunks = style_of(name, chunks_per_rank), num_ranks * chunks_per_rank
    orders = _orders(name, num_ranks, chunks_per_rank, num_micro_batches)
    programs = _with_communication(orders, num_ranks, num_chunks, style)
    return Schedule(name, programs, num_chunks, num_micro_batches, style)


def _orders(name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int) -> dict[int, list[Any]]:
    """Computations per rank, as torch's actions."""
    from torch.distributed.pipelining import schedules

    if name in (GPIPE, ONE_F_ONE_B):
        early = num_micro_batches if name == GPIPE else 0
        return {rank: _one_chunk(rank, num_ranks, num_micro_batches, early) for rank in range(num_ranks)}
    kind: Any = schedules.ScheduleInterleaved1F1B
    if name == ZERO_BUBBLE:
        v_shaped = style_of(name, chunks_per_rank) == "v"
        kind = schedules.ScheduleZBVZeroBubble if v_shaped else schedules.ScheduleInterleavedZeroBubble
    # A schedule's constructor works out the orders of all ranks; it wants stages, of which it only asks numbers.
    stages = [_stage(index, num_ranks, num_ranks * chunks_per_rank) for index in range(chunks_per_rank)]
    order = kind(stages, num_micro_batches).pipeline_order
    return {rank: [action for action in actions if action is not None] for rank, actions in order.items()}


def _one_chunk(rank: int, num_ranks: int, num_micro_batches: int, early: int) -> list[Any]:
    """GPipe and 1F1B: ``early`` forwards (1F1B: as many as ranks follow), then one backward behind every forward.

    Torch 2.13 writes 1F1B out only inside the function that runs it; the order it draws skips the last rank's first
    micro-batch.
    """
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    ahead = min(num_micro_batches, early or num_ranks - 1 - rank)
    kinds = ["F"] * ahead + ["F", "B"] * (num_micro_batches - ahead) + ["B"] * ahead
    counts = {"F": 0, "B": 0}
    actions = []
    for kind in kinds:
        actions.append(_Action(rank, _ComputationType(kind), counts[kind]))
        counts[kind] += 1
    return actions


def _stage(index: int, num_ranks: int, num_chunks: int) -> Any:
    """What a schedule's constructor asks of a stage."""
    return SimpleNamespace(
        stage_index=index * num_ranks,
        num_stages=num_chunks,
        group_size=num_ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=False,
        has_backward=True,
        submod=None,
    )


def _with_communication(
    orders: dict[int, list[Any]], num_ranks: int, num_chunks: int, style: str
) -> tuple[tuple[Action, ...], ...]:
    """Put sends and receives between the computations.

    An I and the W behind it are not made one B: the gradient leaves before the weights' part begins.
    """
    from torch.distributed.pipelining.schedules import _add_send_recv

    programs = _add_send_recv(orders, lambda chunk: rank_of_chunk(chunk, num_ranks, style), num_chunks)
    return tuple(_actions(programs[rank]) for rank in range(num_ranks))


def _actions(program: Sequence[Any]) -> tuple[Action, ...]:
    return tuple(Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in program)
