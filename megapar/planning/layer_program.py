"""Programs of layers: the drawing of ``docs/ampipe.md``, slice by slice and piece by piece.

``tests/model/layers/test_ampipe.py`` compares the same drawing with the orders that runs record. Without slices a layer
is its operators one after another, and waits for each all-to-all where it is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import sqrt

from megapar.model.cost.model_cost import CommCost, OpCost, UnitCost
from megapar.planning.operator_program import WHOLE, OperatorPrograms, SliceShare
from megapar.planning.slices_over_mp import SlicesOverMp
from megapar.planning.timeline import Event, ProgramPart, Send, Wait

EXPERTS = ("up", "activation", "down", "combine")
LAST = ("residual", "multiplier")


@dataclass(frozen=True)
class Place:
    """Position of a layer in its recomputed unit, and between layers that pass slices on.

    Attributes:
        name: Prefix of the names of its events.
        leaves: Slices are passed on in flight.
        ends: The layer ends a recomputed unit, which does not send its last combines again.
    """

    name: str
    leaves: bool = False
    ends: bool = False


@dataclass(frozen=True)
class _Parts:
    """Operators of a layer with experts.

    Attributes:
        before: From the first norm to the router.
        dispatch: The dispatch.
        experts: The experts' products.
        combine: The combine.
        shared: The shared experts.
        last: The residual sum.
    """

    before: tuple[OpCost, ...]
    dispatch: OpCost
    experts: tuple[OpCost, ...]
    combine: OpCost
    shared: tuple[OpCost, ...]
    last: tuple[OpCost, ...]

    @classmethod
    def of(cls, unit: UnitCost) -> _Parts:
        """Divide the operators of a layer."""
        names = [operator.name for operator in unit.operators]
        first, last = names.index("dispatch"), names.index("combine")
        after = unit.operators[last + 1 :]
        half = replace(unit.operators[first], moved=unit.operators[first].moved / 2, sent=())
        return cls(
            unit.operators[:first],
            replace(unit.operators[first], moved=half.moved),
            unit.operators[first + 1 : last],
            unit.operators[last],
            tuple(operator for operator in after if operator.name not in LAST),
            (half, *(operator for operator in after if operator.name in LAST)),
        )


class LayerPrograms:
    """Programs of the layers of one run."""

    def __init__(self, operators: OperatorPrograms) -> None:
        self._of = operators
        self._run = operators.run
        self._parts: dict[int, tuple[UnitCost, _Parts]] = {}
        ampipe, degree = self._run.config.ampipe, max(1, self._run.view.ampipe_degree)
        self.sliced = degree > 1
        self.cross = ampipe.ampipe_cross_layer and self.sliced
        self._pieces = ampipe.pipe_experts_multi_data // degree if ampipe.use_pipe_experts else 0
        self._chained = ampipe.pipe_experts_multi_stream
        over_mp = ampipe.ampipe_tp_sp_comm_overlap
        self._hides_mp = over_mp and self.sliced and self._run.config.grid.mp > 1
        self._ahead = self._run.config.grid.emp > 1 and (bool(self._pieces) or over_mp)
        self._late = self.sliced and self._run.kind.kernels != "cpu"  # its host runs ahead of the device
        self._active = self.sliced or bool(self._pieces)

    @cached_property
    def shares(self) -> tuple[SliceShare, ...]:
        """The slices of a sequence, equal in length or, if ``balanced``, in causal attention."""
        degree = max(1, self._run.view.ampipe_degree)
        if degree == 1:
            return (WHOLE,)
        balanced = self._run.config.ampipe.ampipe_slicing == "balanced"
        edges = [sqrt(n / degree) if balanced else n / degree for n in range(degree + 1)]
        return tuple(SliceShare(b - a, b * b - a * a) for a, b in pairwise(edges))

    def layer(
        self, unit: UnitCost, place: Place, arriving: Sequence[Sequence[ProgramPart]]
    ) -> tuple[list[list[ProgramPart]], list[ProgramPart]]:
        """Return (arrivals of the slices in the next layer, program) of a layer.

        Args:
            unit: The layer.
            place: Where it lies.
            arriving: Arrivals of the slices in this layer; empty if its input is whole.
        """
        if all(operator.name != "dispatch" for operator in unit.operators):
            return self._dense(unit, place, arriving)
        if id(unit) not in self._parts:
            self._parts[id(unit)] = unit, _Parts.of(unit)
        parts = self._parts[id(unit)][1]
        program = list(self._attention(parts, place, arriving))
        program += self._experts(parts, place)
        arrivals = [list(self._arrival(parts, place, c)) for c in range(len(self.shares))]
        if place.leaves:
            return arrivals, program
        if not self._active:
            return [], [*program, *self._joined(parts, place)]
        waits = [part for arrival in arrivals for part in arrival[:1]]
        join = self._of.work(f"join|{place.name}", parts.last)
        kept: tuple[Event, ...] | None = () if place.ends else None
        return [], [*program, *waits, replace(join, again=kept, leads=True)]

    def _dense(
        self, unit: UnitCost, place: Place, arriving: Sequence[Sequence[ProgramPart]]
    ) -> tuple[list[list[ProgramPart]], list[ProgramPart]]:
        """Return a layer without experts; slices that are in flight pass through it, as they do under cp."""
        shares = self.shares if arriving or (self.sliced and self._run.config.grid.cp > 1) else (WHOLE,)
        program: list[ProgramPart] = []
        for c, share in enumerate(shares):
            program += arriving[c] if arriving else ()
            program += self._of.program(f"dense {c}|{place.name}", unit.operators, share)
        return ([[] for _ in shares] if place.leaves and len(shares) > 1 else []), program

    def _attention(
        self, parts: _Parts, place: Place, arriving: Sequence[Sequence[ProgramPart]]
    ) -> Iterator[ProgramPart]:
        """Yield all slices from attention to the launch of their dispatch."""
        ends = [n for n, part in enumerate(parts.before) if any(one.axis == "mp" for one in part.sent)]
        if self._hides_mp and len(ends) > 1:
            yield from SlicesOverMp(self._of, parts.before, (ends[0], ends[-1]), place.name).program(
                self.shares, arriving, lambda c: self._send(parts, place, c)
            )
            return
        for c, share in enumerate(self.shares):
            yield from arriving[c] if arriving else ()
            yield from self._of.program(f"attention {c}|{place.name}", parts.before, share)
            yield from self._send(parts, place, c)

    def _send(self, parts: _Parts, place: Place, c: int) -> Iterator[ProgramPart]:
        """Yield the copies of a slice's rows, the counts, and the launches of its messages."""
        name, share = f"{c}|{place.name}", self.shares[c]
        yield self._of.work(f"permute {name}", [parts.dispatch], share)
        hops = len(_over_ep(parts.dispatch, "backward"))
        counts = _over_ep(parts.dispatch, "forward")[hops:]
        sums = [one for one in parts.dispatch.sent if one.axis in ("mp", "emp") and one.phase == "forward"]
        yield from self._counts(place, c, counts)
        if c == 0:
            yield ProgramPart(tuple(self._of.together(f"sums {name}", sums)))
        pieces = range(1 if self._chained and self._pieces else self._count(parts))
        yield from (self._dispatch(parts, place, c, p) for p in pieces)
        if self._late and c == len(self.shares) - 1:
            yield ProgramPart(_wait(f"counts {name}", counts), again=())

    def _counts(self, place: Place, c: int, counts: Sequence[CommCost]) -> Iterator[ProgramPart]:
        """Yield the exchange of a slice's counts, which a host that runs ahead waits for after the next attention."""
        name = f"counts {c}|{place.name}"
        if not self._late:
            yield ProgramPart(tuple(self._of.together(name, counts)), again=())
            return
        yield ProgramPart(_wait(f"counts {c - 1}|{place.name}", counts) if c else (), again=())
        yield ProgramPart(self._launches(name, counts, 1.0), again=())

    def _count(self, parts: _Parts) -> int:
        """Return the number of messages of a slice: one, or those of each local expert."""
        local = max((one.groups for part in parts.experts for one in part.products), default=1)
        return self._pieces * local if self._pieces else 1

    def _dispatch(self, parts: _Parts, place: Place, c: int, p: int) -> ProgramPart:
        """Return the launch of a dispatch, whose conjugate is waited for."""
        there = _over_ep(parts.dispatch, "forward")[: len(_over_ep(parts.dispatch, "backward"))]
        back = _over_ep(parts.dispatch, "backward")
        share = self.shares[c].rows / self._count(parts)
        name = f"{c}.{p}|{place.name}"
        return ProgramPart(self._launches(f"D{name}", there, share), _wait(f"D'{name}", back))

    def _launches(self, name: str, messages: Sequence[CommCost], share: float) -> tuple[Event, ...]:
        """Return the launches of messages, each of which needs the one before it: one per hop."""
        return tuple(
            Send(f"{name}/{n}", self._of.flight(one, share), f"{name}/{n - 1}" if n else "")
            for n, one in enumerate(messages)
        )

    def _experts(self, parts: _Parts, place: Place) -> Iterator[ProgramPart]:
        """Yield the pieces of all slices through the experts, one ahead of the other if their messages are hidden."""
        count = self._count(parts)
        jobs = [(c, p) for c in range(len(self.shares)) for p in range(count)]
        ahead, entered = int(self._ahead), 0
        for number, (c, p) in enumerate(jobs):
            while entered <= min(number + ahead, len(jobs) - 1):
                yield self._enter(parts, place, *jobs[entered], count)
                entered += 1
            yield self._compute(parts, place, c, p, count)
            if number >= ahead:
                yield from self._combine(parts, place, *jobs[number - ahead], count)
        for c, p in jobs[len(jobs) - ahead :]:
            yield from self._combine(parts, place, c, p, count)

    def _enter(self, parts: _Parts, place: Place, c: int, p: int, count: int) -> ProgramPart:
        """Return the wait for a piece, and the launch of its all-gather over emp."""
        name, share = f"{c}.{p}|{place.name}", self.shares[c].rows / count
        gather, leaving = _over_emp(parts, "forward", False), _over_emp(parts, "backward", True)
        there, back = _over_ep(parts.dispatch, "forward"), _over_ep(parts.dispatch, "backward")
        forward = (*_wait(f"D{name}", there[: len(back)]), *self._launches(f"g{name}", gather, share))
        backward = (*_wait(f"r'{name}", leaving), *self._launches(f"D'{name}", back, share))
        if self._chained and self._pieces and p + 1 < count:  # the next piece is sent after this collective
            following = self._dispatch(parts, place, c, p + 1)
            forward, backward = (*forward, *following.forward), (*following.backward, *backward)
        return ProgramPart(forward, backward)

    def _compute(self, parts: _Parts, place: Place, c: int, p: int, count: int) -> ProgramPart:
        """Return the experts' products for a piece, and the launch of the sum over emp."""
        name, share = f"{c}.{p}|{place.name}", self.shares[c]
        experts, pieces = (*parts.experts, parts.combine), 1.0
        if self._pieces:
            experts, pieces = tuple(_one_expert(part, count // self._pieces) for part in experts), self._pieces
        work = self._of.work(f"experts {name}", experts, share, pieces)
        sums, gather = _over_emp(parts, "forward", True), _over_emp(parts, "backward", False)
        gathered, leaving = _over_emp(parts, "forward", False), _over_emp(parts, "backward", True)
        part = share.rows / count
        forward = (*_wait(f"g{name}", gathered), *work.forward, *self._launches(f"r{name}", sums, part))
        backward = (*_wait(f"g'{name}", gather), *work.backward, *self._launches(f"r'{name}", leaving, part))
        return ProgramPart(forward, backward, work.weight)

    def _combine(self, parts: _Parts, place: Place, c: int, p: int, count: int) -> Iterator[ProgramPart]:
        """Yield the launch of a piece's combine, and the slice's shared experts after its last piece."""
        name, share = f"{c}.{p}|{place.name}", self.shares[c].rows / count
        sums, gather = _over_emp(parts, "forward", True), _over_emp(parts, "backward", False)
        there, back = _over_ep(parts.combine, "forward"), _over_ep(parts.combine, "backward")
        summed = _wait(f"r{name}", sums)
        forward = (*summed, *self._launches(f"C{name}", there, share))
        backward = (*_wait(f"C'{name}", back), *self._launches(f"g'{name}", gather, share))
        yield ProgramPart(forward, backward, again=summed if place.ends else None)
        if self._active and p == count - 1:
            yield from self._of.program(f"shared {c}|{place.name}", parts.shared, self.shares[c])

    def _arrival(self, parts: _Parts, place: Place, c: int) -> Iterator[ProgramPart]:
        """Yield the wait for a slice's combines, and its residual sum."""
        kept: tuple[Event, ...] | None = () if place.ends else None
        yield self._arrived(parts, place, c, kept)
        yield replace(self._of.work(f"sum {c}|{place.name}", parts.last, self.shares[c]), again=kept)

    def _arrived(self, parts: _Parts, place: Place, c: int, kept: tuple[Event, ...] | None) -> ProgramPart:
        forward, backward, count = list[Event](), list[Event](), self._count(parts)
        there, back = _over_ep(parts.combine, "forward"), _over_ep(parts.combine, "backward")
        for p in range(count):
            name = f"{c}.{p}|{place.name}"
            forward += _wait(f"C{name}", there)
            backward += self._launches(f"C'{name}", back, self.shares[c].rows / count)
        return ProgramPart(tuple(forward), tuple(backward), again=kept, leads=self._active)

    def _joined(self, parts: _Parts, place: Place) -> Iterator[ProgramPart]:
        """Yield the end of a layer without slices: the combine is waited for, then the shared experts."""
        yield self._arrived(parts, place, 0, () if place.ends else None)
        yield from self._of.program(f"shared|{place.name}", (*parts.shared, *parts.last))


def _wait(name: str, messages: Sequence[CommCost]) -> tuple[Event, ...]:
    """Return the wait for the last of the messages with this name."""
    return (Wait(f"{name}/{len(messages) - 1}"),) if messages else ()


def _over_ep(operator: OpCost, phase: str) -> list[CommCost]:
    """Return the operator's messages to and from experts: the hops of rows, then counts of a forward."""
    return [one for one in operator.sent if one.phase == phase and one.axis not in ("mp", "emp")]


def _over_emp(parts: _Parts, phase: str, leaves: bool) -> list[CommCost]:
    """Return the experts' collectives over emp before their products, or after them if ``leaves``."""
    sent = [one for part in parts.experts for one in part.sent if one.phase == phase]
    return [one for one in sent if (one.kind != "all_gather") == leaves]


@cache
def _one_expert(operator: OpCost, experts: int) -> OpCost:
    """Return the operator of one of several experts."""
    products = tuple(replace(one, rows=one.rows / experts, groups=1) for one in operator.products)
    return replace(operator, products=products, moved=operator.moved / experts, sent=())
