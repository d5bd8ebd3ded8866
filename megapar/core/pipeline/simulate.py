"""Runs a schedule without processes: whether it can hang, when everything happens, how much of the time is bubble.

Standard library only. Two questions, two models of a message:

    check       a send waits until its receiver is at the receive, and both go on together. What passes cannot hang on
                any network: whatever a backend buffers only makes it freer.
    simulate    sends and receives cost nothing to launch; a message arrives ``send`` after it was launched, and only
                computations wait for it. That is what the runner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapar.core.pipeline.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    ZERO_BUBBLE,
    Action,
    Schedule,
    style_of,
)


class DeadlockError(RuntimeError):
    """Ranks wait for each other in a circle, or for what never comes."""


@dataclass(frozen=True)
class Costs:
    """Time of one chunk's parts, in any one unit. forward, input, weight: computation; a whole backward is input +
    weight. send: from the launch of a message to its arrival. chunks: a factor for every chunk, by default 1.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0
    chunks: tuple[float, ...] = ()

    def of(self, action: Action) -> float:
        """How long a computation takes."""
        one = {
            FORWARD: self.forward,
            BACKWARD: self.input + self.weight,
            INPUT: self.input,
            WEIGHT: self.weight,
        }[action.kind]
        return one * self.chunks[action.chunk] if self.chunks else one


class Slot(NamedTuple):
    """A computation with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What happened when. slots: per rank, in order. in_flight: per rank the most forwards that waited for backward."""

    slots: tuple[tuple[Slot, ...], ...]
    in_flight: tuple[int, ...]

    @property
    def end(self) -> float:
        """When the last rank is done."""
        return max(slots[-1].end for slots in self.slots)

    @property
    def bubble_share(self) -> float:
        """The part of all ranks' time, from the common start to the common end, in which nothing is computed."""
        busy = sum(slot.end - slot.start for slots in self.slots for slot in slots)
        return 1 - busy / (self.end * len(self.slots))


def check(schedule: Schedule) -> None:
    """Prove that a schedule cannot hang, even where every message waits for its receiver.

    Raises DeadlockError naming what every rank waits for; also where a computation comes before its input, a message is
    not the next one that its receiver expects, or work is missing or done twice.
    """
    programs = [list(program) for program in schedule.programs]
    done: set[Action] = set()
    progress = True
    while progress:
        progress = False
        for program in programs:
            while program and program[0].kind in COMPUTE and _ready(schedule, program[0], done):
                done.add(_once(program.pop(0), done))
                progress = True
            if program and program[0].kind in (SEND_F, SEND_B):
                expected = _receipt(program[0])
                peer = programs[schedule.rank_of(expected.chunk)]
                if peer and peer[0] == expected and _sendable(program[0], done):
                    done.update((_once(program.pop(0), done), _once(peer.pop(0), done)))
                    progress = True
    if any(programs):
        waiting = ", ".join(f"rank {rank} before {program[0]}" for rank, program in enumerate(programs) if program)
        raise DeadlockError(f"{schedule.name} over {schedule.num_ranks} ranks hangs: {waiting}")
    _check_complete(schedule, done)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """When every computation runs. Raises DeadlockError where some never does."""
    costs = costs or Costs()
    programs = [list(program) for program in schedule.programs]
    clocks = [0.0] * schedule.num_ranks
    ended: dict[Action, float] = {}
    arrived: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in programs]
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while program:
                start = _start(schedule, program[0], clocks[rank], ended, arrived)
                if start is None:
                    break
                action = program.pop(0)
                progress = True
                if action.kind in COMPUTE:
                    clocks[rank] = ended[action] = start + costs.of(action)
                    slots[rank].append(Slot(action, start, clocks[rank]))
                elif action.kind in (SEND_F, SEND_B):
                    arrived[_receipt(action)] = clocks[rank] + costs.send
    if any(programs):
        waiting = ", ".join(f"rank {rank} before {program[0]}" for rank, program in enumerate(programs) if program)
        raise DeadlockError(f"{schedule.name} over {schedule.num_ranks} ranks never ends: {waiting}")
    return Simulation(tuple(map(tuple, slots)), tuple(_most_in_flight(program) for program in schedule.programs))


def bubble_formula(name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int) -> float | None:
    """The bubble share that the literature gives: every stage alike, a backward twice a forward, messages free.

    With p ranks, v chunks per rank, m micro-batches: (p - 1) / (m + p - 1) for GPipe and 1F1B, (p - 1) / (v m + p - 1)
    interleaved (arXiv 2104.04473, 2.2). Zero-bubble leaves p - 1 units of a third of a micro-batch's chunk (ZB-H1 and
    ZBV of arXiv 2401.10241 for equal thirds, table 2): (p - 1) / (3 v m + p - 1). None, as there is none: ZBV of fewer
    than 2 p - 1 micro-batches.
    """
    if style_of(name, chunks_per_rank) == "v" and num_micro_batches < 2 * num_ranks - 1:
        return None
    extra = num_ranks - 1
    work = num_micro_batches * chunks_per_rank * (3 if name == ZERO_BUBBLE else 1)
    return extra / (work + extra)


def _ready(schedule: Schedule, action: Action, done: set[Action]) -> bool:
    return all(one in done for one in _needs(schedule, action))


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    """What must be there before a computation: its own forward (or I), and what comes from the neighbouring chunk."""
    chunk, kind, number = action
    own = schedule.rank_of(chunk)
    if kind == FORWARD:
        if chunk == 0:
            return []
        local = schedule.rank_of(chunk - 1) == own
        return [Action(chunk - 1, FORWARD, number) if local else Action(chunk, RECV_F, number)]
    if kind == WEIGHT:
        return [Action(chunk, INPUT, number)]
    needs = [Action(chunk, FORWARD, number)]
    if chunk + 1 < schedule.num_chunks:
        if schedule.rank_of(chunk + 1) != own:
            needs.append(Action(chunk, RECV_B, number))
        else:
            needs.append(Action(chunk + 1, INPUT if schedule.splits_backward else BACKWARD, number))
    return needs


def _sendable(action: Action, done: set[Action]) -> bool:
    kinds = (FORWARD,) if action.kind == SEND_F else (BACKWARD, INPUT)
    return any(action._replace(kind=kind) in done for kind in kinds)


def _receipt(action: Action) -> Action:
    """The receive that a send is for."""
    if action.kind == SEND_F:
        return Action(action.chunk + 1, RECV_F, action.micro_batch)
    return Action(action.chunk - 1, RECV_B, action.micro_batch)


def _once(action: Action, done: set[Action]) -> Action:
    if action in done:
        raise DeadlockError(f"{action} is done twice")
    return action


def _check_complete(schedule: Schedule, done: set[Action]) -> None:
    backward = (INPUT, WEIGHT) if schedule.splits_backward else (BACKWARD,)
    for chunk in range(schedule.num_chunks):
        for number in range(schedule.num_micro_batches):
            missing = [Action(chunk, kind, number) for kind in (FORWARD, *backward)]
            missing = [action for action in missing if action not in done]
            if missing:
                raise DeadlockError(f"{schedule.name} leaves out {', '.join(map(str, missing))}")


def _start(
    schedule: Schedule, action: Action, clock: float, ended: dict[Action, float], arrived: dict[Action, float]
) -> float | None:
    """When an action of a rank whose clock stands at ``clock`` can start; None: not yet known."""
    if action.kind not in COMPUTE:
        return clock
    start = clock
    for need in _needs(schedule, action):
        there = arrived if need.kind in (RECV_F, RECV_B) else ended
        if need not in there:
            return None
        start = max(start, there[need])
    return start


def _most_in_flight(program: Sequence[Action]) -> int:
    """Micro-batches (of a chunk) whose activations are kept at once: from F to B, or to W."""
    most = now = 0
    for action in program:
        now += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
        most = max(most, now)
    return most
