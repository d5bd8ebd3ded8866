"""Simulation of a schedule without processes: deadlocks, the time of every action, and the pipeline bubble.

There are two models of a message:

    check       A send blocks until its receiver has reached the receive. A schedule that ends under this model cannot
                hang on any network: buffering in a backend only relaxes it.
    simulate    Sends and receives cost nothing to launch, and the host launches them long before they run. A message
                takes ``send`` and starts when both ends have reached it, each on its queue (``Wiring``).
                Computations wait for it, and the number of sends in flight on a rank is limited. They take longer
                beside messages that are posted (``Costs.beside``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from megapar.core.pipeline import schedule as schedules
from megapar.core.pipeline.schedule import Action, Schedule, style_of


class DeadlockError(RuntimeError):
    """A cycle of ranks that wait for each other, or a wait for a message that is never sent."""


@dataclass(frozen=True)
class Costs:
    """Durations of one chunk's actions, in any one unit. A whole backward takes ``input + weight``.

    Attributes:
        send: From the launch of a message to its arrival.
        chunks: A factor for every chunk; empty: 1 for all.
        beside: A factor of computations beside 0, 1, 2 .. queues whose kernels wait or move a message; empty: 1.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0
    chunks: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()

    def of(self, action: Action) -> float:
        """Return the duration of a computation."""
        forward, backward = self.forward, self.input + self.weight
        by_kind = {
            schedules.FORWARD: forward,
            schedules.BACKWARD: backward,
            schedules.INPUT: self.input,
            schedules.WEIGHT: self.weight,
        }
        cost = by_kind[action.kind]
        return cost * self.chunks[action.chunk] if self.chunks else cost


@dataclass(frozen=True)
class Wiring:
    """Assignment of messages to queues (communicators), each of which runs in launch order on every rank.

    Attributes:
        queue: (sender, receiver) -> the queue's name on both; None: a separate queue for each message.
        separate_receives: Receives are launched from a separate stream. Otherwise a receive waits, as a send does, for
            the computations before it, and blocks everything after it on its queue.
    """

    queue: Callable[[int, int], Hashable | None]
    separate_receives: bool


FREE = Wiring(lambda sender, receiver: None, separate_receives=True)
_ROUNDS = 6  # of times of computations and of the messages beside them, which follow from each other
# The wiring of the runner (``queues``): a queue for each direction.
RUNNERS = Wiring(lambda sender, receiver: (sender, receiver), separate_receives=True)


class Slot(NamedTuple):
    """A computation on the timeline."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The timeline of a simulated schedule.

    Attributes:
        slots: The computations of each rank, in order.
        in_flight: For each rank, the maximum number of forwards whose backward is still to come.
    """

    slots: tuple[tuple[Slot, ...], ...]
    in_flight: tuple[int, ...]

    @property
    def end(self) -> float:
        """The time at which the last rank finishes."""
        return max(slots[-1].end for slots in self.slots)

    @property
    def bubble_share(self) -> float:
        """The pipeline bubble: the fraction of all ranks' time in which nothing is computed."""
        busy = sum(slot.end - slot.start for slots in self.slots for slot in slots)
        return 1 - busy / (self.end * len(self.slots))


def check(schedule: Schedule) -> None:
    """Prove that a schedule cannot hang, even if every send blocks until its receiver is ready.

    Raises DeadlockError naming the action at which each rank waits; also if a computation precedes its input, a message
    is not the next one that its receiver expects, or work is missing or done twice.
    """
    programs = [list(program) for program in schedule.programs]
    done: set[Action] = set()
    progress = True
    while progress:
        progress = False
        for program in programs:
            while program and program[0].kind in schedules.COMPUTE and done.issuperset(_needs(schedule, program[0])):
                done.add(_once(program.pop(0), done))
                progress = True
            if program and program[0].kind in (schedules.SEND_F, schedules.SEND_B):
                expected = matching_receive(program[0])
                peer = programs[schedule.rank_of(expected.chunk)]
                if peer and peer[0] == expected and _sendable(program[0], done):
                    done.update((_once(program.pop(0), done), _once(peer.pop(0), done)))
                    progress = True
    if any(programs):
        waiting = ", ".join(f"rank {rank} before {program[0]}" for rank, program in enumerate(programs) if program)
        raise DeadlockError(f"{schedule.name} over {schedule.num_ranks} ranks hangs: {waiting}")
    _check_complete(schedule, done)


def simulate(schedule: Schedule, costs: Costs | None = None, wiring: Wiring = FREE) -> Simulation:
    """Compute the start and end of every computation. Raises DeadlockError if one never runs."""
    costs = costs or Costs()
    waits_for = _dependencies(schedule, wiring)
    then: defaultdict[Action, list[Action]] = defaultdict(list)
    for action, needs in waits_for.items():
        for need in needs:
            then[need].append(action)
    factors: dict[Action, float] = {}
    for _ in range(_ROUNDS if costs.beside else 1):
        slots = _slots(schedule, costs, waits_for, then, factors)
        factors = _factors(schedule, costs, slots) if costs.beside else {}
    computed = tuple(
        tuple(slots[action] for action in program if action.kind in schedules.COMPUTE) for program in schedule.programs
    )
    return Simulation(computed, tuple(map(_most_in_flight, schedule.programs)))


def _slots(
    schedule: Schedule,
    costs: Costs,
    waits_for: Mapping[Action, Sequence[Action]],
    then: Mapping[Action, Sequence[Action]],
    factors: Mapping[Action, float],
) -> dict[Action, Slot]:
    """Return start and end of each computation and message. factors: of the durations of computations."""
    missing = {action: len(needs) for action, needs in waits_for.items()}
    ready = deque(action for action, number in missing.items() if not number)
    slots: dict[Action, Slot] = {}
    while ready:
        action = ready.popleft()
        start = max((slots[need].end for need in waits_for[action]), default=0.0)
        computes = action.kind in schedules.COMPUTE
        seconds = costs.of(action) * factors.get(action, 1.0) if computes else costs.send
        slots[action] = Slot(action, start, start + seconds)
        for following in then.get(action, ()):
            missing[following] -= 1
            if not missing[following]:
                ready.append(following)
    if len(slots) < len(waits_for):
        left = [[action for action in program if _by_receive(action) not in slots] for program in schedule.programs]
        waiting = ", ".join(f"rank {rank} before {actions[0]}" for rank, actions in enumerate(left) if actions)
        raise DeadlockError(f"{schedule.name} over {schedule.num_ranks} ranks never ends: {waiting}")
    return slots


def _factors(schedule: Schedule, costs: Costs, slots: Mapping[Action, Slot]) -> dict[Action, float]:
    """Return the factor of each computation beside the messages of its rank that are posted, waiting or moving."""
    factors: dict[Action, float] = {}
    for program in schedule.programs:
        computed, spans = 0.0, defaultdict[tuple[str, int], list[tuple[float, float]]](list)
        for action in program:
            if action.kind in schedules.COMPUTE:
                computed = slots[action].end
                continue
            event = _by_receive(action)
            early = event is action and schedule.receives_ahead is None
            queue = spans[action.kind[:4], schedule.rank_of(_source(action) if event is action else event.chunk)]
            posted = max(queue[-1][1] if queue else 0.0, 0.0 if early else computed)
            queue.append((posted, slots[event].end))
        for slot in (slots[action] for action in program if action.kind in schedules.COMPUTE):
            shared = sum(_shared(queue, slot) for queue in spans.values())
            factors[slot.action] = between(costs.beside, shared / (slot.end - slot.start))
    return factors


def _shared(spans: Sequence[tuple[float, float]], slot: Slot) -> float:
    """Return the time of a computation in which one of the spans, which follow each other, runs."""
    shared = 0.0
    for start, end in islice(spans, bisect_right(spans, slot.start, key=lambda span: span[1]), None):
        if start >= slot.end:
            break
        shared += min(end, slot.end) - max(start, slot.start)
    return shared


def between(values: Sequence[float], place: float) -> float:
    """Interpolate the values at 0, 1, 2 ..; beyond the last place, return the last value."""
    lower = min(int(place), len(values) - 1)
    upper = min(lower + 1, len(values) - 1)
    return values[lower] + (place - lower) * (values[upper] - values[lower])


def _dependencies(schedule: Schedule, wiring: Wiring) -> dict[Action, list[Action]]:
    """Map each computation and each message (represented by its receive) to what must end before it."""
    dependencies: defaultdict[Action, list[Action]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        computed: Action | None = None
        queued: dict[Hashable, Action] = {}
        unfinished: deque[Action] = deque()
        for action in program:
            event = _by_receive(action)
            needs = dependencies[event]
            if action.kind in schedules.COMPUTE:
                needs += _needs(schedule, action)
                needs += [unfinished.popleft() for _ in range(len(unfinished) - schedule.sends_kept)]
                needs += [computed] if computed is not None else []
                computed = action
                continue
            sends = action.kind in (schedules.SEND_F, schedules.SEND_B)
            aside = wiring.separate_receives and schedule.receives_ahead is None
            if computed is not None and (sends or not aside):
                needs.append(computed)
            ends = (rank, schedule.rank_of(event.chunk)) if sends else (schedule.rank_of(_source(event)), rank)
            name = wiring.queue(*ends)
            if name is not None:
                needs += [queued[name]] if name in queued else []
                queued[name] = event
            if sends:
                unfinished.append(event)
    return dict(dependencies)


def bubble_formula(name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int) -> float | None:
    """Return the published bubble share: equal stages, a backward twice as long as a forward, free messages.

    With p ranks, v chunks per rank, m micro-batches: (p - 1) / (m + p - 1) for GPipe and 1F1B, (p - 1) / (v m + p - 1)
    interleaved (arXiv 2104.04473, 2.2). Zero bubble leaves p - 1 units of a third of a micro-batch's chunk (ZB-H1 and
    ZBV of arXiv 2401.10241 for equal thirds, table 2): (p - 1) / (3 v m + p - 1). None without a formula: ZBV with
    fewer than 2 p - 1 micro-batches.
    """
    if style_of(name, chunks_per_rank) == "v" and num_micro_batches < 2 * num_ranks - 1:
        return None
    extra = num_ranks - 1
    work = num_micro_batches * chunks_per_rank * (3 if name == schedules.ZERO_BUBBLE else 1)
    return extra / (work + extra)


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return the inputs of a computation: its own forward (or I), and the message from the neighbouring chunk."""
    chunk, kind, number = action
    rank = schedule.rank_of(chunk)
    if kind == schedules.FORWARD:
        if chunk == 0:
            return []
        local = schedule.rank_of(chunk - 1) == rank
        return [Action(chunk - 1, schedules.FORWARD, number) if local else Action(chunk, schedules.RECV_F, number)]
    if kind == schedules.WEIGHT:
        return [Action(chunk, schedules.INPUT, number)]
    needs = [Action(chunk, schedules.FORWARD, number)]
    if chunk + 1 < schedule.num_chunks:
        if schedule.rank_of(chunk + 1) != rank:
            needs.append(Action(chunk, schedules.RECV_B, number))
        else:
            needs.append(Action(chunk + 1, schedules.INPUT if schedule.splits_backward else schedules.BACKWARD, number))
    return needs


def _sendable(action: Action, done: set[Action]) -> bool:
    computations = (schedules.FORWARD,) if action.kind == schedules.SEND_F else (schedules.BACKWARD, schedules.INPUT)
    return any(action._replace(kind=kind) in done for kind in computations)


def matching_receive(action: Action) -> Action:
    """Return the receive that matches a send."""
    if action.kind == schedules.SEND_F:
        return Action(action.chunk + 1, schedules.RECV_F, action.micro_batch)
    return Action(action.chunk - 1, schedules.RECV_B, action.micro_batch)


def _by_receive(action: Action) -> Action:
    """Return the matching receive of a send, and every other action unchanged."""
    return matching_receive(action) if action.kind in (schedules.SEND_F, schedules.SEND_B) else action


def _source(receive: Action) -> int:
    """Return the chunk that a message comes from."""
    return receive.chunk + (-1 if receive.kind == schedules.RECV_F else 1)


def _once(action: Action, done: set[Action]) -> Action:
    if action in done:
        raise DeadlockError(f"{action} is done twice")
    return action


def _check_complete(schedule: Schedule, done: set[Action]) -> None:
    backward = (schedules.INPUT, schedules.WEIGHT) if schedule.splits_backward else (schedules.BACKWARD,)
    for chunk in range(schedule.num_chunks):
        for number in range(schedule.num_micro_batches):
            missing = [Action(chunk, kind, number) for kind in (schedules.FORWARD, *backward)]
            missing = [action for action in missing if action not in done]
            if missing:
                raise DeadlockError(f"{schedule.name} leaves out {', '.join(map(str, missing))}")


def _most_in_flight(program: Sequence[Action]) -> int:
    """Return the maximum number of micro-batches whose activations are kept at once, from F to B or W."""
    most = now = 0
    for action in program:
        now += (action.kind == schedules.FORWARD) - (action.kind in (schedules.BACKWARD, schedules.WEIGHT))
        most = max(most, now)
    return most
