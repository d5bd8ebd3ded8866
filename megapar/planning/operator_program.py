"""Programs of single operators: their work, and the collectives that run before, under and after it.

A collective that a product hides travels in pieces, as ``core/tensor_parallel/overlapped_linear.py`` draws it; keys and
values over cp travel while tiles are computed, as ``core/context_parallel`` draws them. Everything else is waited for
where it is launched. A slice has a share of the rows, so its products are shorter, and all of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megapar.core.tensor_parallel.overlap_price import FUSED, OFF
from megapar.model.cost.model_cost import CommCost, OpCost
from megapar.planning.operator_time import HOPS, OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.timeline import BETWEEN, INSIDE, Event, Flight, ProgramPart, Send, Wait, Work
from megapar.planning.traffic import HOST

# How collectives are called in names of messages that are waited for at once.
LETTERS: Mapping[str, str] = MappingProxyType(
    {"all_gather": "g", "reduce_scatter": "r", "all_reduce": "s", "all_to_all": "a", "send": "k"}
)


class SliceShare(NamedTuple):
    """The part of a micro-batch that a slice is.

    Attributes:
        rows: Share of the positions.
        core: Share of attention's core.
    """

    rows: float = 1.0
    core: float = 1.0


WHOLE = SliceShare()


class Seconds(NamedTuple):
    """Times of an operator for one slice.

    Attributes:
        product: Products of the forward, and as long those of the input gradient.
        weight: Products of the weight gradient.
        backward: The rest of its backward: all but the two products for each of the forward.
        launches: Least time of its forward's kernels, and of its backward's.
    """

    product: float
    weight: float
    forward: float
    backward: float
    launches: tuple[float, float]


class OperatorPrograms:
    """Programs of a run's operators. ``defers``: weight gradients run apart from the backward."""

    def __init__(self, run: PlannedRun, time: OperatorTime, *, defers: bool) -> None:
        self.run, self.time, self.defers = run, time, defers
        self._seconds: dict[tuple[int, SliceShare, float], Seconds] = {}
        self._hides_mp = run.hiding != OFF
        self._chained = run.config.ampipe.pipe_experts_multi_stream

    def flight(self, message: CommCost, share: float = 1.0) -> Flight:
        """Return ``share`` of a message; the pieces of one have a share each."""
        if message.axis == HOST:
            rate = self.run.kind.host * self.time.calibration.inside
            return Flight(message.kind, ((message.kind, message.bytes * share / rate),))
        time = self.time.message(message)
        loads = [(INSIDE, time.inside * share), (BETWEEN, time.between * share)]
        stream = "experts" if self._chained and message.axis in ("ep", "emp", *HOPS) else message.axis
        return Flight(stream, tuple(load for load in loads if load[1]), time.latency)

    def together(self, name: str, messages: Iterable[CommCost], share: float = 1.0) -> list[Event]:
        """Return launches of messages, each of which is waited for at once."""
        events: list[Event] = []
        for number, message in enumerate(messages):
            label = f"{name} {LETTERS.get(message.kind, 'm')}{number}"
            events += [Send(label, self.flight(message, share)), Wait(label)]
        return events

    def seconds(self, operator: OpCost, share: SliceShare = WHOLE, parts: float = 1.0) -> Seconds:
        """Return the times of an operator for one slice, or for one of ``parts`` pieces of its rows."""
        key = id(operator), share, parts
        if key not in self._seconds:
            self._seconds[key] = self._timed(operator, share, parts)
        return self._seconds[key]

    def _timed(self, operator: OpCost, share: SliceShare, parts: float) -> Seconds:
        time, rows = self.time, share.rows / parts
        products, moved = time.products(operator.products, 1 / rows), time.rest(operator) * rows
        weight = time.products(operator.products, 1 / rows, weight=True)
        core = time.scores(operator.scores) * share.core / parts
        forward, backward = moved + core, 2 * moved + 2.5 * core
        forward += time.products([product for phase, product in operator.extra if phase == "forward"], 1 / rows)
        backward += time.products([product for phase, product in operator.extra if phase == "backward"], 1 / rows)
        if self.run.view.selective_recompute and operator.name in ("core", "activation"):
            backward += moved + core
        if operator.recomputed:
            backward += products + moved + core
        launches = time.launches(operator) if products or moved or core else (0.0, 0.0)
        return Seconds(products, weight, forward, backward, launches)

    def work(
        self, name: str, operators: Sequence[OpCost], share: SliceShare = WHOLE, parts: float = 1.0
    ) -> ProgramPart:
        """Return consecutive operators without their messages. The host launches their kernels ahead."""
        each = [self.seconds(operator, share, parts) for operator in operators]
        products, weight = sum(part.product for part in each), sum(part.weight for part in each)
        forward = products + sum(part.forward for part in each)
        backward = products + (0.0 if self.defers else weight) + sum(part.backward for part in each)
        forward = max(forward, sum(part.launches[0] for part in each))
        backward = max(backward, sum(part.launches[1] for part in each))
        return ProgramPart((Work(name, forward),), (Work(name, backward),), weight if self.defers else 0.0)

    def program(self, name: str, operators: Sequence[OpCost], share: SliceShare = WHOLE) -> list[ProgramPart]:
        """Return consecutive operators with their messages."""
        program, quiet = [], list[OpCost]()
        for number, operator in enumerate(operators):
            if not any(self.flight(message).seconds for message in operator.sent):
                quiet.append(operator)
                continue
            program += [self.work(name, quiet, share)] if quiet else []
            program.append(self.communicating(f"{name}.{number}", operator, share))
            quiet = []
        return program + ([self.work(name, quiet, share)] if quiet else [])

    def hidden(self, message: CommCost) -> bool:
        """Return True if a message travels under the work of its operator."""
        return message.hidden and (message.axis != "mp" or self._hides_mp)

    def communicating(self, name: str, operator: OpCost, share: SliceShare) -> ProgramPart:
        """Return an operator with its messages."""
        if any(message.axis == "cp" and message.hidden for message in operator.sent):
            return self._attention(name, operator, share)
        weight = self.seconds(operator, share).product if self.defers else 0.0
        return ProgramPart(
            tuple(self._forward(name, operator, share)), tuple(self._backward(f"{name}'", operator, share)), weight
        )

    def _forward(self, name: str, operator: OpCost, share: SliceShare) -> list[Event]:
        seconds = self.seconds(operator, share)
        before, after, arriving, leaving = self._sorted(operator, "forward")
        events = self.together(name, before, share.rows)
        own = max(0.0, seconds.launches[0] - seconds.product - seconds.forward) + seconds.forward
        if arriving:
            events += [*self._arriving(name, operator, arriving[0], share), Work(name, own)]
        elif leaving:
            events += [Work(name, own), *self._leaving(name, operator, leaving[0], share)]
        else:
            events.append(Work(name, seconds.product + own))
        return events + self.together(name, after, share.rows)

    def _backward(self, name: str, operator: OpCost, share: SliceShare) -> list[Event]:
        seconds = self.seconds(operator, share)
        before, after, arriving, leaving = self._sorted(operator, "backward")
        events = self.together(name, before, share.rows)
        weight = 0.0 if self.defers else seconds.product
        own = max(0.0, seconds.launches[1] - 2 * seconds.product - seconds.backward) + seconds.backward
        if arriving and not leaving:  # a row parallel layer needs the gathered gradient for both products
            events += [*self._arriving(name, operator, arriving[0], share), Work(name, weight + own)]
        elif leaving:  # the input is gathered again under one product, its gradient leaves under the other
            gather = [Send(f"{name} g", self.flight(arriving[0], share.rows))] if arriving else []
            events += [*gather, Work(name, seconds.product + own)]
            events += [Send(f"{name} r", self.flight(leaving[0], share.rows))]
            events += [*([Wait(f"{name} g")] if arriving else []), Work(name, weight), Wait(f"{name} r")]
        else:
            events.append(Work(name, seconds.product + weight + own))
        return events + self.together(name, after, share.rows)

    def _sorted(self, operator: OpCost, phase: str) -> tuple[list[CommCost], ...]:
        """Return the messages waited for before and after the work, and those hidden under it, coming and going."""
        sent = [message for message in operator.sent if message.phase == phase]
        kinds: tuple[list[CommCost], ...] = ([], [], [], [])
        for message in sent:
            leaves = message.kind in ("reduce_scatter", "all_reduce", "send")
            hidden = self.hidden(message) and not kinds[2 + leaves]
            kinds[2 * hidden + leaves].append(message)
        return kinds

    def _pieces(self, operator: OpCost, message: CommCost, share: SliceShare) -> int:
        """Return the number of pieces of a message that a product hides (``overlap_price``)."""
        device, ranks = self.run.kind.device_class, self.run.config.grid.mp
        if self.run.hiding == FUSED:
            return ranks
        rows = min((product.rows for product in operator.products), default=0.0) * share.rows
        sent = message.bytes * share.rows / max(1, ranks - 1)
        return max(1, min(device.pieces, int(sent // device.piece_bytes), int(rows // device.least_rows)))

    def _arriving(self, name: str, operator: OpCost, message: CommCost, share: SliceShare) -> list[Event]:
        """Return a product of this rank's own rows, then of each piece of the others' rows as it arrives."""
        count, ranks = self._pieces(operator, message, share), self.run.config.grid.mp
        events: list[Event] = [Send(f"{name} g{n}", self.flight(message, share.rows / count)) for n in range(count)]
        events.append(Work(name, self.seconds(operator, share, ranks).product))
        part = self.seconds(operator, share, count * ranks / (ranks - 1)).product
        for number in range(count):
            events += [Wait(f"{name} g{number}"), Work(name, part)]
        return events

    def _leaving(self, name: str, operator: OpCost, message: CommCost, share: SliceShare) -> list[Event]:
        """Return pieces of a product, each of which is sent while the next one is computed."""
        count, events = self._pieces(operator, message, share), list[Event]()
        for number in range(count):
            events += [Work(name, self.seconds(operator, share, count).product)]
            events += [Send(f"{name} r{number}", self.flight(message, share.rows / count))]
        return [*events, *(Wait(f"{name} r{number}") for number in range(count))]

    def _attention(self, name: str, operator: OpCost, share: SliceShare) -> ProgramPart:
        """Return attention's core whose keys and values travel over cp."""
        seconds = self.seconds(operator, share)
        forward = max(seconds.product + seconds.forward, seconds.launches[0])
        backward = max(2 * seconds.product + seconds.backward, seconds.launches[1])
        keys = next(message for message in operator.sent if message.phase == "forward" and message.axis == "cp")
        back = [message for message in operator.sent if message.phase == "backward" and message.axis == "cp"]
        again, gradient = (back[0] if len(back) > 1 else None), back[-1]
        others = [message for message in operator.sent if message.axis != "cp"]
        first = self.together(name, [message for message in others if message.phase == "forward"], share.rows)
        last = self.together(f"{name}'", [message for message in others if message.phase == "backward"], share.rows)
        cp = self.run.config.grid.cp
        if share is not WHOLE and share.core:
            remote = min(1.0, (cp - 1) / cp * share.rows**2 / share.core)
            coming = self._under(name, keys, share.rows, forward * (1 - remote), forward * remote)
            going = self._under(f"{name}'", gradient, share.rows, backward * (1 - remote), 0.0)
            return ProgramPart((*first, *coming), (Work(name, backward * remote), *going, *last))
        rounds = cp - 1 if self.run.view.ring else 1
        coming = self._round(name, keys, rounds, [forward / cp] + [forward * (cp - 1) / cp / rounds] * rounds)
        return ProgramPart((*first, *coming), (*self._returning(name, again, gradient, rounds, backward), *last))

    def _under(self, name: str, message: CommCost, share: float, during: float, then: float) -> list[Event]:
        """Return a message under ``during`` seconds of work, and ``then`` seconds of work that need it."""
        return [Send(name, self.flight(message, share)), Work(name, during), Wait(name), Work(name, then)]

    def _round(self, name: str, message: CommCost, rounds: int, tiles: Sequence[float]) -> list[Event]:
        """Return tiles of attention, each under the message that brings the keys of the next one."""
        flight, events = self.flight(message, 1 / rounds), list[Event]()
        for number, tile in enumerate(tiles):
            events += [Wait(f"{name} k{number - 1}")] if number else []
            events += [Send(f"{name} k{number}", flight)] if number < rounds else []
            events.append(Work(name, tile))
        return events

    def _returning(
        self, name: str, again: CommCost | None, gradient: CommCost, rounds: int, seconds: float
    ) -> list[Event]:
        """Return the backward: keys come again, and their gradients follow them and return under late own tiles."""
        cp, name = self.run.config.grid.cp, f"{name}'"
        own, tile = seconds / cp / 2, seconds * (cp - 1) / cp / rounds
        coming = self._round(name, again, rounds, [own, *[tile] * rounds]) if again is not None else [Work(name, own)]
        events, sent = list[Event](), 0
        flight = self.flight(gradient, 1 / rounds)
        for place, event in enumerate(coming):
            events.append(event)
            if isinstance(event, Work) and place > 1:
                events += [Wait(f"{name} d{sent - 1}")] if sent else []
                events.append(Send(f"{name} d{sent}", flight))
                sent += 1
        if not sent:
            events += [Work(name, seconds - 2 * own), Send(f"{name} d0", flight)]
            sent = 1
        return [*events, Work(name, own), Wait(f"{name} d{sent - 1}")]
