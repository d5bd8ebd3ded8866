"""Schedules whose receives are posted a few computations before they are needed.

A kernel that waits for a message holds multiprocessors, so that products beside it take longer. Posted later, it holds
them for less time, and less of the message's own time is hidden.

All actions of all ranks are put into one order: computations by their end where each takes a unit of time, and each
message by the end of the computation that made it, or the start of the first that may run beside it, if that is later.
A rank's program is its part of this order, in which both ends of a message have one place. So no wait is for an action
that is later in the order, and ``check`` finds no deadlock, however many computations a receive is ahead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megapar.core.pipeline import schedule as schedules
from megapar.core.pipeline.schedule import Action, Schedule, make_schedule
from megapar.core.pipeline.simulate import matching_receive, simulate


@lru_cache(maxsize=64)
def schedule_ahead(
    name: str, num_ranks: int, chunks_per_rank: int, num_micro_batches: int, receives_ahead: int | None
) -> Schedule:
    """Return ``make_schedule`` with receives posted ``receives_ahead`` computations before they are needed."""
    return post_later(make_schedule(name, num_ranks, chunks_per_rank, num_micro_batches), receives_ahead)


def post_later(schedule: Schedule, ahead: int | None) -> Schedule:
    """Return the schedule with ``ahead`` computations between a receive and its use; as it is for None."""
    if ahead is None:
        return schedule
    slots = [list(slots) for slots in simulate(schedule).slots]
    timed = {slot.action: slot for own in slots for slot in own}
    numbers = {slot.action: number for own in slots for number, slot in enumerate(own)}
    placed = [[((slot.end, slot.action), slot.action) for slot in own] for own in slots]
    for rank, program in enumerate(schedule.programs):
        for send in program:
            if send.kind not in (schedules.SEND_F, schedules.SEND_B):
                continue
            receive = matching_receive(send)
            receiver, needed = schedule.rank_of(receive.chunk), _computation(schedule, receive)
            beside = slots[receiver][max(0, numbers[needed] - ahead)]
            time = max(beside.start, timed[_computation(schedule, send)].end)
            # Behind the computations that end at this time: no chunk of theirs has this number.
            place = (time, receive._replace(chunk=schedule.num_chunks + receive.chunk))
            placed[rank].append((place, send))
            placed[receiver].append((place, receive))
    programs = tuple(tuple(action for _, action in sorted(own)) for own in placed)
    return replace(schedule, programs=programs, receives_ahead=ahead)


def _computation(schedule: Schedule, message: Action) -> Action:
    """Return the computation that makes what is sent, or that needs what is received."""
    backward = schedules.INPUT if schedule.splits_backward else schedules.BACKWARD
    forward = message.kind in (schedules.SEND_F, schedules.RECV_F)
    return message._replace(kind=schedules.FORWARD if forward else backward)
