"""Program of sliced attention whose collectives over mp travel under other slices (``--ampipe-tp-sp-comm-overlap``).

The drawing is that of ``model/layers/ampipe.py``: all but a layer's first all-gather and last reduce-scatter are in
flight while another slice computes, and their conjugates likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from megapar.model.cost.model_cost import CommCost, OpCost
from megapar.planning.operator_program import OperatorPrograms, SliceShare
from megapar.planning.timeline import Event, ProgramPart, Send, Wait, Work


class SlicesOverMp:
    """One layer's slices up to the launch of their dispatch.

    Args:
        operators: Programs of single operators.
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
        weight = 0.0 if self._of.defers else self._of.seconds(self._column, share).product
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
            Send(f"{name}|{self._name}/{n}", self._of.flight(one, share.rows)) for n, one in enumerate(messages)
        )

    def _waits(self, name: str, messages: Sequence[CommCost]) -> tuple[Event, ...]:
        return tuple(Wait(f"{name}|{self._name}/{n}") for n in range(len(messages)))


def _sent(operator: OpCost, phase: str, leaves: bool) -> list[CommCost]:
    """Return an operator's collectives over mp before its work, or after it if ``leaves``."""
    sent = [one for one in operator.sent if one.phase == phase and one.axis == "mp"]
    return [one for one in sent if (one.kind != "all_gather") == leaves]
