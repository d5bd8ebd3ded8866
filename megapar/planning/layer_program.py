"""Programs of layers: the drawing of ``docs/ampipe.md``, slice by slice and piece by piece.

With ``--ampipe-tp-sp-comm-overlap`` collectives of attention over mp travel under other slices, as
``model/ampipe.py`` draws it: all but a layer's first all-gather and last reduce-scatter are in flight while
another slice computes, and their conjugates likewise.

``tests/model/test_ampipe.py`` compares the same drawing with the orders that runs record. Without slices a layer
is its operators one after another, and waits for each all-to-all where it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import sqrt

from megapar.model.cost.model_cost import CommCost, OpCost, UnitCost
from megapar.planning.operator_program import WHOLE, OperatorPrograms, SliceShare
from megapar.planning.planned_run import PlannedRun
from megapar.planning.timeline import Event, ProgramPart, Send, Wait, Work

EXPERTS = ("up", "activation", "down", "combine")
LAST = ("residual", "multiplier")


@dataclass(frozen=True)
class Place:
    """Position of a layer in its recomputed unit, and between layers that pass slices on.

    Attributes:
        name: Prefix of the names of its events.
        passes_slices: Its slices are passed on in flight.
        ends_unit: The layer ends a recomputed unit, which does not send its last combines again.
    """

    name: str
    passes_slices: bool = False
    ends_unit: bool = False


@dataclass(frozen=True)
class _Parts:
    """Operators of a layer with experts.

    Attributes:
        before: From the first norm to the router.
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


@dataclass(frozen=True)
class _Overlap:
    """The overlap of communication in the layers of a run.

    Attributes:
        crosses_layers: Slices pass from layer to layer in flight.
        pieces: Pieces of a slice's rows for each local expert; 0: all experts compute a slice at once.
        chains_experts: Collectives of experts run one after another.
        hides_mp: Collectives over mp travel under other slices.
        enters_ahead: A piece enters its experts while the piece before it is computed.
        defers_counts: The host, which runs ahead of the device, waits for a slice's counts after the next attention.
    """

    slices: int
    crosses_layers: bool
    pieces: int
    chains_experts: bool
    hides_mp: bool
    enters_ahead: bool
    defers_counts: bool

    @classmethod
    def of(cls, run: PlannedRun) -> _Overlap:
        """Return the overlap of a run."""
        ampipe, grid, slices = run.config.ampipe, run.config.grid, max(1, run.view.ampipe_degree)
        over_mp, sliced = ampipe.ampipe_tp_sp_comm_overlap, slices > 1
        pieces = ampipe.pipe_experts_multi_data // slices if ampipe.use_pipe_experts else 0
        return cls(
            slices=slices,
            crosses_layers=ampipe.ampipe_cross_layer and sliced,
            pieces=pieces,
            chains_experts=ampipe.pipe_experts_multi_stream and pieces > 0,
            hides_mp=over_mp and sliced and grid.mp > 1,
            enters_ahead=grid.emp > 1 and (pieces > 0 or over_mp),
            defers_counts=sliced and run.kind.kernels != "cpu",
        )

    @property
    def splits(self) -> bool:
        """A layer runs in slices or pieces."""
        return self.slices > 1 or self.pieces > 0


class LayerPrograms:
    """Programs of the layers of one run."""

    def __init__(self, operators: OperatorPrograms) -> None:
        self._of = operators
        self._run = operators.run
        self._overlap = _Overlap.of(operators.run)
        self._parts: dict[int, tuple[UnitCost, _Parts]] = {}

    @property
    def passes_slices(self) -> bool:
        """Slices pass from layer to layer in flight (``--ampipe-cross-layer``)."""
        return self._overlap.crosses_layers

    @cached_property
    def shares(self) -> tuple[SliceShare, ...]:
        """The slices of a sequence, equal in length or, if ``balanced``, in causal attention."""
        degree = self._overlap.slices
        if degree == 1:
            return (WHOLE,)
        balanced = self._run.config.ampipe.ampipe_slicing == "balanced"
        edges = [sqrt(n / degree) if balanced else n / degree for n in range(degree + 1)]
        return tuple(SliceShare(b - a, b * b - a * a) for a, b in pairwise(edges))

    def layer(
        self, unit: UnitCost, place: Place, arriving: Sequence[Sequence[ProgramPart]]
    ) -> tuple[list[list[ProgramPart]], list[ProgramPart]]:
        """Return (arrivals of the slices in the next layer, program) of a layer.

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
        if place.passes_slices:
            return arrivals, program
        if not self._overlap.splits:
            return [], [*program, *self._joined(parts, place)]
        waits = [part for arrival in arrivals for part in arrival[:1]]
        join = self._of.work(f"join|{place.name}", parts.last)
        kept: tuple[Event, ...] | None = () if place.ends_unit else None
        return [], [*program, *waits, replace(join, again=kept, leads=True)]

    def _dense(
        self, unit: UnitCost, place: Place, arriving: Sequence[Sequence[ProgramPart]]
    ) -> tuple[list[list[ProgramPart]], list[ProgramPart]]:
        """Return a layer without experts; slices that are in flight pass through it, as they do under cp."""
        shares = self.shares if arriving or (self._overlap.slices > 1 and self._run.config.grid.cp > 1) else (WHOLE,)
        program: list[ProgramPart] = []
        for c, share in enumerate(shares):
            program += arriving[c] if arriving else ()
            program += self._of.program(f"dense {c}|{place.name}", unit.operators, share)
        return ([[] for _ in shares] if place.passes_slices and len(shares) > 1 else []), program

    def _attention(
        self, parts: _Parts, place: Place, arriving: Sequence[Sequence[ProgramPart]]
    ) -> Iterator[ProgramPart]:
        """Yield all slices from attention to the launch of their dispatch."""
        ends = [n for n, part in enumerate(parts.before) if any(message.axis == "mp" for message in part.sent)]
        if self._overlap.hides_mp and len(ends) > 1:
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
        sums = [
            message for message in parts.dispatch.sent if message.axis in ("mp", "emp") and message.phase == "forward"
        ]
        yield from self._counts(place, c, counts)
        if c == 0:
            yield ProgramPart(tuple(self._of.together(f"sums {name}", sums)))
        pieces = range(1 if self._overlap.chains_experts else self._count(parts))
        yield from (self._dispatch(parts, place, c, p) for p in pieces)
        if self._overlap.defers_counts and c == len(self.shares) - 1:
            yield ProgramPart(_wait(f"counts {name}", counts), again=())

    def _counts(self, place: Place, c: int, counts: Sequence[CommCost]) -> Iterator[ProgramPart]:
        """Yield the exchange of a slice's counts, which a host that runs ahead waits for after the next attention."""
        name = f"counts {c}|{place.name}"
        if not self._overlap.defers_counts:
            yield ProgramPart(tuple(self._of.together(name, counts)), again=())
            return
        yield ProgramPart(_wait(f"counts {c - 1}|{place.name}", counts) if c else (), again=())
        yield ProgramPart(self._launches(name, counts, 1.0), again=())

    def _count(self, parts: _Parts) -> int:
        """Return the number of messages of a slice: one, or those of each local expert."""
        local = max((product.groups for part in parts.experts for product in part.products), default=1)
        return self._overlap.pieces * local if self._overlap.pieces else 1

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
            Send(f"{name}/{n}", self._of.flight(message, share), f"{name}/{n - 1}" if n else "")
            for n, message in enumerate(messages)
        )

    def _experts(self, parts: _Parts, place: Place) -> Iterator[ProgramPart]:
        """Yield the pieces of all slices through the experts, one ahead of the other if their messages are hidden."""
        count = self._count(parts)
        jobs = [(c, p) for c in range(len(self.shares)) for p in range(count)]
        ahead, entered = int(self._overlap.enters_ahead), 0
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
        if self._overlap.chains_experts and p + 1 < count:  # the next piece is sent after this collective
            following = self._dispatch(parts, place, c, p + 1)
            forward, backward = (*forward, *following.forward), (*following.backward, *backward)
        return ProgramPart(forward, backward)

    def _compute(self, parts: _Parts, place: Place, c: int, p: int, count: int) -> ProgramPart:
        """Return the experts' products for a piece, and the launch of the sum over emp."""
        name, share = f"{c}.{p}|{place.name}", self.shares[c]
        experts, pieces = (*parts.experts, parts.combine), self._overlap.pieces
        if pieces:
            experts = tuple(_one_expert(part, count // pieces) for part in experts)
        work = self._of.work(f"experts {name}", experts, share, pieces or 1)
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
        yield ProgramPart(forward, backward, again=summed if place.ends_unit else None)
        if self._overlap.splits and p == count - 1:
            yield from self._of.program(f"shared {c}|{place.name}", parts.shared, self.shares[c])

    def _arrival(self, parts: _Parts, place: Place, c: int) -> Iterator[ProgramPart]:
        """Yield the wait for a slice's combines, and its residual sum."""
        kept: tuple[Event, ...] | None = () if place.ends_unit else None
        yield self._arrived(parts, place, c, kept)
        yield replace(self._of.work(f"sum {c}|{place.name}", parts.last, self.shares[c]), again=kept)

    def _arrived(self, parts: _Parts, place: Place, c: int, kept: tuple[Event, ...] | None) -> ProgramPart:
        forward, backward, count = list[Event](), list[Event](), self._count(parts)
        there, back = _over_ep(parts.combine, "forward"), _over_ep(parts.combine, "backward")
        for p in range(count):
            name = f"{c}.{p}|{place.name}"
            forward += _wait(f"C{name}", there)
            backward += self._launches(f"C'{name}", back, self.shares[c].rows / count)
        return ProgramPart(tuple(forward), tuple(backward), again=kept, leads=self._overlap.splits)

    def _joined(self, parts: _Parts, place: Place) -> Iterator[ProgramPart]:
        """Yield the end of a layer without slices: the combine is waited for, then the shared experts."""
        yield self._arrived(parts, place, 0, () if place.ends_unit else None)
        yield from self._of.program(f"shared|{place.name}", (*parts.shared, *parts.last))


def _wait(name: str, messages: Sequence[CommCost]) -> tuple[Event, ...]:
    """Return the wait for the last of the messages with this name."""
    return (Wait(f"{name}/{len(messages) - 1}"),) if messages else ()


def _over_ep(operator: OpCost, phase: str) -> list[CommCost]:
    """Return the operator's messages to and from experts: the hops of rows, then counts of a forward."""
    return [message for message in operator.sent if message.phase == phase and message.axis not in ("mp", "emp")]


def _over_emp(parts: _Parts, phase: str, leaves: bool) -> list[CommCost]:
    """Return the experts' collectives over emp before their products, or after them if ``leaves``."""
    sent = [message for part in parts.experts for message in part.sent if message.phase == phase]
    return [message for message in sent if (message.kind != "all_gather") == leaves]


@cache
def _one_expert(operator: OpCost, experts: int) -> OpCost:
    """Return the operator of one of several experts."""
    products = tuple(replace(product, rows=product.rows / experts, groups=1) for product in operator.products)
    return replace(operator, products=products, moved=operator.moved / experts, sent=())


class SlicesOverMp:
    """One layer's slices up to the launch of their dispatch.

    Args:
        before: The layer's operators, from the first norm to the router.
        ends: Indices of the column parallel and of the row parallel product.
        name: Prefix of the names of events.
    """

    def __init__(self, operators: OperatorPrograms, before: Sequence[OpCost], ends: tuple[int, int], name: str) -> None:
        self._of, self._name = operators, name
        first, last = ends
        self._norm, self._column, self._row = before[:first], before[first], before[last]
        self._core, self._router = before[first + 1 : last], before[last + 1 :]

    def program(
        self,
        shares: Sequence[SliceShare],
        arriving: Sequence[Sequence[ProgramPart]],
        send: Callable[[int], Iterable[ProgramPart]],
    ) -> Iterator[ProgramPart]:
        """Yield the program of all slices.

        Args:
            arriving: Arrivals of the slices; empty if the input is whole.
            send: Returns the parts that send a slice to the experts.
        """
        last = len(shares) - 1
        yield from self._enter(0, shares[0], arriving, launch=False)
        for c, share in enumerate(shares):
            yield self._project(c, share)
            if c:
                yield from self._finish(c - 1, shares[c - 1], send, waits=True)
            if not arriving and c < last:
                yield from self._enter(c + 1, shares[c + 1], arriving, launch=True)
            yield from self._of.program(f"core {c}|{self._name}", self._core, share)
            if arriving and c < last:
                yield from self._enter(c + 1, shares[c + 1], arriving, launch=True)
            yield self._leave(c, share, last=c == last)
        yield from self._finish(last, shares[last], send, waits=False)

    def _enter(
        self, c: int, share: SliceShare, arriving: Sequence[Sequence[ProgramPart]], *, launch: bool
    ) -> Iterator[ProgramPart]:
        """Yield the arrival of a slice, and the launch of its all-gather unless pieces of its product hide it."""
        yield from arriving[c] if arriving else ()
        yield self._of.work(f"norm {c}|{self._name}", self._norm, share)
        if launch:
            yield ProgramPart(
                self._launches(f"g{c}", _sent(self._column, "forward", False), share),
                self._waits(f"r'{c}", _sent(self._column, "backward", True)),
            )

    def _project(self, c: int, share: SliceShare) -> ProgramPart:
        """Return the product that makes queries, keys and values."""
        if c == 0:
            return self._of.communicating(f"qkv {c}|{self._name}", self._column, share)
        work = self._of.work(f"qkv {c}|{self._name}", [self._column], share)
        gather = _sent(self._column, "backward", False)
        weight = 0.0 if self._of.defers else self._of.seconds(self._column, share).weight
        own = sum(event.seconds for event in work.backward if isinstance(event, Work)) - weight
        backward = (
            *self._launches(f"G'{c}", gather, share),
            Work(f"qkv' {c}|{self._name}", own),
            *self._waits(f"G'{c}", gather),
            *self._launches(f"r'{c}", _sent(self._column, "backward", True), share),
            Work(f"qkv' {c}|{self._name}", weight),
        )
        return ProgramPart(
            (*self._waits(f"g{c}", _sent(self._column, "forward", False)), *work.forward), backward, work.weight
        )

    def _leave(self, c: int, share: SliceShare, *, last: bool) -> ProgramPart:
        """Return the output projection and the launch of its sum; the last one is hidden under its own pieces."""
        if last:
            return self._of.communicating(f"proj {c}|{self._name}", self._row, share)
        work = self._of.work(f"proj {c}|{self._name}", [self._row], share)
        leaving, gather = _sent(self._row, "forward", True), _sent(self._row, "backward", False)
        forward = (*work.forward, *self._launches(f"p{c}", leaving, share))
        return ProgramPart(forward, (*self._waits(f"p'{c}", gather), *work.backward), work.weight)

    def _finish(
        self, c: int, share: SliceShare, send: Callable[[int], Iterable[ProgramPart]], *, waits: bool
    ) -> Iterator[ProgramPart]:
        """Yield the rest of a slice, to the launch of its dispatch."""
        if waits:
            gather = _sent(self._row, "backward", False)
            yield ProgramPart(
                self._waits(f"p{c}", _sent(self._row, "forward", True)), self._launches(f"p'{c}", gather, share)
            )
        yield from self._of.program(f"router {c}|{self._name}", self._router, share)
        yield from send(c)

    def _launches(self, name: str, messages: Sequence[CommCost], share: SliceShare) -> tuple[Event, ...]:
        return tuple(
            Send(f"{name}|{self._name}/{n}", self._of.flight(message, share.rows)) for n, message in enumerate(messages)
        )

    def _waits(self, name: str, messages: Sequence[CommCost]) -> tuple[Event, ...]:
        return tuple(Wait(f"{name}|{self._name}/{n}") for n in range(len(messages)))


def _sent(operator: OpCost, phase: str, leaves: bool) -> list[CommCost]:
    """Return an operator's collectives over mp before its work, or after it if ``leaves``."""
    sent = [message for message in operator.sent if message.phase == phase and message.axis == "mp"]
    return [message for message in sent if (message.kind != "all_gather") == leaves]
