"""Time of one micro-batch on a pipeline stage: its layers' programs, run forward and backward on a timeline.

Layers that do not pass slices on are run one by one, equal ones once. In a chain of layers that do, equal units take
equally long from the third on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapar.core.pipeline.schedule import ZERO_BUBBLE
from megapar.core.pipeline.stages import Chunk
from megapar.model.cost.model_cost import CommCost, UnitCost
from megapar.planning.layer_program import LayerPrograms, Place
from megapar.planning.operator_program import OperatorPrograms
from megapar.planning.operator_time import HOPS, OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.timeline import ProgramPart, Send, Span, Timeline, Wait, backward_of, forward_of
from megapar.planning.traffic import recompute_messages

SIMULATED = 3  # equal units of a chain that are run; further ones take as long as the last
IDLE = Span()


@dataclass(frozen=True)
class StageTime:
    """One micro-batch on a stage.

    Attributes:
        weight: Seconds of weight gradients that the schedule runs apart from the backward.
    """

    forward: Span = IDLE
    backward: Span = IDLE
    weight: float = 0.0

    @property
    def both(self) -> float:
        """Seconds of forward and backward."""
        return self.forward.seconds + self.backward.seconds + self.weight

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return self.forward.exposed + self.backward.exposed

    def plus(self, other: StageTime, times: float = 1.0) -> StageTime:
        """Return the sums with ``times`` of another part of the stage."""
        return StageTime(
            self.forward.plus(other.forward, times),
            self.backward.plus(other.backward, times),
            self.weight + times * other.weight,
        )


class Unit(NamedTuple):
    """Consecutive layers that are recomputed together, or one layer. ``inputs``: messages of an offloaded input."""

    layers: tuple[UnitCost, ...]
    recomputed: bool
    inputs: tuple[CommCost, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Units with the same key take the same time."""
        return tuple(map(id, self.layers)), self.recomputed, self.inputs


class StagePrograms:
    """Programs and times of the stages of one run."""

    def __init__(self, run: PlannedRun, time: OperatorTime) -> None:
        self._run = run
        self.operators = OperatorPrograms(run, time, defers=run.schedule == ZERO_BUBBLE)
        self._layers = LayerPrograms(self.operators)
        self._times: dict[object, StageTime] = run.shared.of(time.calibration, self._key(run), dict)
        self._aside = frozenset({"ep", "experts", *HOPS} if run.assumed.pairs_micro_batches else ())

    @staticmethod
    def _key(run: PlannedRun) -> tuple[object, ...]:
        """Return everything in a search that the time of a unit depends on, besides the unit and the calibration."""
        config = run.config
        layout = config.parallel, config.ampipe, config.moe, config.grid
        return "times", run.sizes, run.view, layout, run.hiding, run.dtype, run.schedule

    @property
    def passes_slices(self) -> bool:
        """Slices pass from layer to layer in flight (``--ampipe-cross-layer``)."""
        return self._layers.passes_slices

    def stage(self, stage: int) -> StageTime:
        """Return the time of one micro-batch on one stage."""
        total, costs = StageTime(), self._run.costs
        messages = recompute_messages(self._run, stage)
        for chunk in self._run.stages.on(stage):
            total = total.plus(self._ends(costs.embedding)) if chunk.first else total
            units = self.units(chunk, messages)
            if self.passes_slices:
                total = total.plus(self._chain(units))
            else:
                alike = Counter(unit.key for unit in units)
                for unit in {unit.key: unit for unit in units}.values():
                    total = total.plus(self._timed([unit]), alike[unit.key])
            total = total.plus(self._ends(costs.head)) if chunk.last else total
        return total

    def units(self, chunk: Chunk, messages: Mapping[int, tuple[CommCost, ...]]) -> list[Unit]:
        """Return the units of a chunk's layers. messages: those of ``recompute_messages``."""
        layers = [self._run.costs.layer(number) for number in chunk.layers]
        return [
            Unit(
                tuple(layers[span.start : span.stop]),
                span.recomputed,
                messages.get(chunk.layers[span.start], ()) if span.recomputed else (),
            )
            for span in self._run.recompute_spans(len(layers))
        ]

    def draw(self, units: Sequence[Unit]) -> tuple[Timeline, Timeline]:
        """Run the forward and the backward of units with bars to draw."""
        return self._run_both(units, drawn=True)[1:]

    def _chain(self, units: Sequence[Unit]) -> StageTime:
        """Return the time of units that pass slices on."""
        place, count = _longest_run([unit.key for unit in units])
        if count <= SIMULATED:
            return self._timed(units)
        shorter = [
            self._timed([*units[: place + kept], *units[place + count :]]) for kept in (SIMULATED, SIMULATED - 1)
        ]
        last = shorter[0].plus(shorter[1], -1)
        return shorter[0].plus(last, count - SIMULATED)

    def _timed(self, units: Sequence[Unit]) -> StageTime:
        key = tuple(unit.key for unit in units)
        if key not in self._times:
            self._times[key] = self._run_both(units, drawn=False)[0]
        return self._times[key]

    def _run_both(self, units: Sequence[Unit], *, drawn: bool) -> tuple[StageTime, Timeline, Timeline]:
        programs = self.programs(units)
        there, back = self._timeline(drawn), self._timeline(drawn)
        forward = there.run(event for program in programs for event in forward_of(program))
        turned = list(zip(programs, units, strict=True))[::-1]
        backward = back.run(
            event for program, unit in turned for event in backward_of(program, recomputed=unit.recomputed)
        )
        weight = sum(part.weight for program in programs for part in program)
        return StageTime(forward, backward, weight), there, back

    def _timeline(self, drawn: bool) -> Timeline:
        return Timeline(self.operators.time.calibration.shown, drawn, self._aside)

    def programs(self, units: Sequence[Unit]) -> list[list[ProgramPart]]:
        """Return the program of each unit."""
        programs: list[list[ProgramPart]] = []
        arriving: list[list[ProgramPart]] = []
        for number, unit in enumerate(units):
            program: list[ProgramPart] = []
            for inner, layer in enumerate(unit.layers):
                ends = inner == len(unit.layers) - 1
                follows = self.passes_slices and not (ends and number == len(units) - 1)
                place = Place(f"{number}.{inner}", passes_slices=follows, ends_unit=unit.recomputed and ends)
                arriving, more = self._layers.layer(layer, place, arriving)
                program += more
            programs.append(self._fetched(unit, program, number))
        return programs

    def _fetched(self, unit: Unit, program: list[ProgramPart], number: int) -> list[ProgramPart]:
        """Return the program with the messages of a unit's input: away under its forward, back under a backward.

        The input of the unit before it is fetched under this unit's backward, and takes as long as its own.
        """
        if not unit.inputs:
            return program
        away = [message for message in unit.inputs if message.phase == "forward"]
        back = [message for message in unit.inputs if message.phase == "backward"]
        out, home = f"input|{number}", f"input'|{number}"
        launches = tuple(
            Send(f"{home}/{n}", self.operators.flight(message), f"{home}/{n - 1}" if n else "")
            for n, message in enumerate(back)
        )
        first = ProgramPart(
            tuple(Send(f"{out}/{n}", self.operators.flight(message)) for n, message in enumerate(away)),
            tuple(Wait(f"{home}/{n}") for n in range(len(back))),
            again=(),
        )
        last = ProgramPart(tuple(Wait(f"{out}/{n}") for n in range(len(away))), launches, again=(), leads=True)
        return [first, *program, last]

    def _ends(self, unit: UnitCost) -> StageTime:
        """Return the time of the embedding, or of the head with the layer of multi-token prediction inside."""
        names = [operator.name for operator in unit.operators]
        if "dispatch" not in names:
            return self._alone(unit, self.operators.program(unit.name, unit.operators))
        head = names.index("join")
        inner = UnitCost("moe", unit.operators[head + 1 : len(names) - head], unit.input)
        outer = (*unit.operators[: head + 1], *unit.operators[len(names) - head :])
        _, program = self._layers.layer(inner, Place("predicted"), [])
        return self._alone(unit, [*self.operators.program(unit.name, outer), *program])

    def _alone(self, unit: UnitCost, program: list[ProgramPart]) -> StageTime:
        if id(unit) not in self._times:
            forward = self._timeline(drawn=False).run(forward_of(program))
            backward = self._timeline(drawn=False).run(backward_of(program, recomputed=False))
            self._times[id(unit)] = StageTime(forward, backward, sum(part.weight for part in program))
        return self._times[id(unit)]


def _longest_run(keys: Sequence[object]) -> tuple[int, int]:
    """Return (place, length) of the longest run of equal keys."""
    best = (0, 0)
    start = 0
    for place in range(1, len(keys) + 1):
        if place == len(keys) or keys[place] != keys[start]:
            best = max(best, (start, place - start), key=lambda place_and_length: place_and_length[1])
            start = place
    return best
