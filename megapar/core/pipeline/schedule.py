"""Schedules as data: a list of actions for every pipeline rank, performed one at a time.

1F1B and GPipe are ordered here (``_one_chunk``). Interleaved and zero bubble take torch's order. For p ranks, v chunks
per rank and a multiple of p micro-batches, interleaved has Megatron's warmup: 2 (p - 1 - rank) + (v - 1) p forwards.
torch then inserts the sends and receives, so that both ends of every pair of ranks have the same order. This rules out
deadlocks, as ``simulate`` proves.

An action is written as in torch: chunk, kind, micro-batch. ``2F0`` is the forward of micro-batch 0 through chunk 2.

    F  forward           B  backward                    SEND_F RECV_F   activations to the next chunk
    I  backward, inputs  W  backward, weights           SEND_B RECV_B   gradients to the previous chunk

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved (arXiv 2104.04473), zero bubble and ZBV (arXiv 2401.10241).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from megapar.core.pipeline.stages import rank_of_chunk

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = "gpipe", "1f1b", "interleaved", "zero_bubble"
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
# A rank waits for its oldest send when more than this many per chunk of the pipeline are in flight.
SENDS_PER_CHUNK = 4


class Action(NamedTuple):
    """One step of a rank's program: a computation, a send or a receive."""

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The programs of all pipeline ranks for one step.

    Attributes:
        name: A value of --pp-schedule.
        programs: The actions of each pp rank in order, computations and communication.
        style: Placement of chunks on ranks, "loop" or "v" (``rank_of_chunk``).
        receives_ahead: Computations that run between the launch of a receive and the one that needs it (``lookahead``);
            None: receives wait for no computation.
    """

    name: str
    programs: tuple[tuple[Action, ...], ...]
    num_chunks: int
    num_micro_batches: int
    style: str
    receives_ahead: int | None = None

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.programs)

    @property
    def sends_kept(self) -> int:
        """The maximum number of sends that a rank leaves in flight."""
        return SENDS_PER_CHUNK * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed separately from input gradients."""
        return self.name == ZERO_BUBBLE

    def rank_of(self, chunk: int) -> int:
        """Return the pipeline rank of a chunk."""
        return rank_of_chunk(chunk, self.num_ranks, self.style)

    def backward_order(self, chunk: int) -> tuple[int, ...]:
        """Return the micro-batches in the order in which a chunk's weight gradients are complete."""
        kinds = (BACKWARD, WEIGHT)
        program = self.programs[self.rank_of(chunk)]
        return tuple(a.micro_batch for a in program if a.chunk == chunk and a.kind in kinds)


def style_of(name: str, chunks_per_rank: int) -> str:
    """Return the placement of a schedule's chunks: "v" for ZBV (zero bubble with two chunks per rank), else "loop"."""
    return "v" if name == ZERO_BUBBLE and chunks_per_rank == 2 else "loop"


def min_micro_batches(name: str, num_ranks: int) -> int:
    """Return the minimum number of micro-batches per step that a schedule needs."""
    return 1 if name == GPIPE else num_ranks


@lru_cache(maxsize=64)
def make_schedule(name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int) -> Schedule:
    """Make the schedule ``name`` for pp x vpp chunks.

    Raises ValueError for fewer micro-batches than ranks (except GPipe), or more chunks per rank than it has.
    """
    if num_micro_batches < min_micro_batches(name, num_ranks):
        raise ValueError(
            f"{name} over {num_ranks} ranks needs at least {num_ranks} micro-batches, not {num_micro_batches}"
        )
    if name in (GPIPE, ONE_F_ONE_B) and chunks_per_rank != 1:
        raise ValueError(f"{name} has one chunk per rank, not {chunks_per_rank}")
    style, num_chunks = style_of(name, chunks_per_rank), num_ranks * chunks_per_rank
    orders = _orders(name, num_ranks, chunks_per_rank, num_micro_batches)
    programs = _with_communication(orders, num_ranks, num_chunks, style)
    return Schedule(name, programs, num_chunks, num_micro_batches, style)


def _orders(name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int) -> dict[int, list[Any]]:
    """Return the computations of each rank, as torch's actions."""
    from torch.distributed.pipelining import schedules

    if name in (GPIPE, ONE_F_ONE_B):
        early = num_micro_batches if name == GPIPE else 0
        return {rank: _one_chunk(rank, num_ranks, num_micro_batches, early) for rank in range(num_ranks)}
    kind: Any = schedules.ScheduleInterleaved1F1B
    if name == ZERO_BUBBLE:
        v_shaped = style_of(name, chunks_per_rank) == "v"
        kind = schedules.ScheduleZBVZeroBubble if v_shaped else schedules.ScheduleInterleavedZeroBubble
    # A schedule's constructor computes the orders of all ranks; it takes stages but reads only their numbers.
    stages = [_stage(index, num_ranks, num_ranks * chunks_per_rank) for index in range(chunks_per_rank)]
    order = kind(stages, num_micro_batches).pipeline_order
    return {rank: [action for action in actions if action is not None] for rank, actions in order.items()}


def _one_chunk(rank: int, num_ranks: int, num_micro_batches: int, early: int) -> list[Any]:
    """Return the order of GPipe and 1F1B: warmup forwards, then one backward after every forward.

    Torch 2.13 has the order of 1F1B only inside the function that runs it; the order it draws skips the last rank's
    first micro-batch. early: warmup forwards; 0: as many as there are later ranks (1F1B).
    """
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    warmup = min(num_micro_batches, early or num_ranks - 1 - rank)
    kinds = ["F"] * warmup + ["F", "B"] * (num_micro_batches - warmup) + ["B"] * warmup
    counts = {"F": 0, "B": 0}
    actions = []
    for kind in kinds:
        actions.append(_Action(rank, _ComputationType(kind), counts[kind]))
        counts[kind] += 1
    return actions


def _stage(index: int, num_ranks: int, num_chunks: int) -> Any:
    """Return a stand-in for a stage, with the numbers that a schedule's constructor reads."""
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
    """Insert sends and receives between the computations.

    An I and the W after it are not merged into one B, so that the input's gradient is sent before W begins.
    """
    from torch.distributed.pipelining.schedules import _add_send_recv

    programs: Any = _add_send_recv(orders, lambda chunk: rank_of_chunk(chunk, num_ranks, style), num_chunks)
    return tuple(
        tuple(Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in programs[rank])
        for rank in range(num_ranks)
    )
