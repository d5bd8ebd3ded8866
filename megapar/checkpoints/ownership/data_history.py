"""The data that a run has read so far, by intervals of its samples, and how it continues by a plan.

    checkpoint          a, b    |  a, b, c (planned) |  c (planned)
    plan                a, b    |  a, b, c            a, c  ...
                        0       100       now         200

Everything before the checkpoint's last sample has to be equal in both; what comes after it follows the plan. What
--override-data changes is another interval, and what was planned before it is not compared any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megapar.arguments import Config
from megapar.checkpoints.ownership.data_facts import DataFacts, Difference
from megapar.data.sampling.data_phases import Phase, Phases, first_lanes
from megapar.data.sampling.skipping import Range, sample_at
from megapar.errors import Complaint
from megapar.files.data_files import blend_of

DataPlan = Sequence[tuple[int, DataFacts]]
"""The data of a configuration from each sample on."""
_OF_ORDER = ("split", "seed", "seq-length", "chat")


@dataclass(frozen=True)
class DataPhase:
    """A part of a run with the same data.

    Attributes:
        start: Its first sample.
        lanes: See ``data.sampling.data_phases.Phase``.
        planned: It began by --data-phases, and not with the run or by --override-data.
    """

    start: int
    lanes: tuple[str, ...]
    data: DataFacts
    planned: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the phase as JSON values."""
        planned = {"planned": True} if self.planned else {}
        return {"start": self.start, "lanes": list(self.lanes), **planned, **self.data.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataPhase:
        """Return the phase from the output of ``to_json``. Raises ValueError, KeyError or TypeError otherwise."""
        start, lanes, data = value["start"], tuple(map(str, value["lanes"])), DataFacts.from_json(value)
        if not isinstance(start, int) or start < 0 or len(lanes) != len(data.sources):
            raise ValueError(f"a phase from {start!r} on with {len(lanes)} lanes")
        return cls(start, lanes, data, value.get("planned") is True)


def planned_data(config: Config, skipped: Sequence[Range], *, may_read: bool = True) -> DataPlan:
    """Return the plan of a configuration, from sample 0 on; phases of the same data are one. Raises DataError.

    Args:
        skipped: Ranges of samples that the run leaves out.
        may_read: See ``DataFacts.of``.
    """
    whole, plan = DataFacts.of(config, may_read=may_read), list[tuple[int, DataFacts]]()
    for span in config.phases.spans:
        data = whole.of_phase(span)
        if not plan or plan[-1][1] != data:
            plan.append((sample_at(span.first_sample, skipped) if plan else 0, data))
    return plan


def data_at(plan: DataPlan, sample: int) -> DataFacts:
    """Return the data of a plan at a sample."""
    return plan[bisect_right(plan, sample, key=lambda part: part[0]) - 1][1]


def past_differences(before: Sequence[DataPhase], plan: DataPlan, now: int) -> list[Difference]:
    """Return the differences between the data that a run has read before sample ``now`` and that of a plan."""
    intervals = list(_past(before, plan, now))
    found: dict[Difference, list[str]] = {}
    for first, end, phase, data in intervals:
        for difference in phase.data.differences(data):
            found.setdefault(difference, []).append(f"{first:,} to {end - 1:,}")
    if len(intervals) == 1:
        return list(found)
    return [one._replace(text=f"{one.text} (samples {', '.join(places)})") for one, places in found.items()]


def is_continued(before: Sequence[DataPhase], plan: DataPlan, now: int) -> bool:
    """Return True if a plan has the data that was read before sample ``now``, with its sources in the same order."""
    return all(is_same(phase, data) for *_, phase, data in _past(before, plan, now))


def is_same(phase: DataPhase, data: DataFacts) -> bool:
    """Return True if ``data`` is that of the phase, with its sources in the same order."""
    return not phase.data.differences(data) and phase.data.matched(data) == list(range(len(phase.lanes)))


def _past(before: Sequence[DataPhase], plan: DataPlan, now: int) -> Iterator[tuple[int, int, DataPhase, DataFacts]]:
    """Yield (first sample, end, what was read, data of the plan) of each interval that is compared."""
    first = max(number for number, phase in enumerate(before) if not phase.planned)
    past = [before[first], *(phase for phase in before[first + 1 :] if phase.start < now)]
    begin = past[0].start
    end = max(now, begin + 1)
    places = {phase.start for phase in past} | {start for start, _ in plan if begin < start < end}
    for place, until in pairwise([*sorted(places), end]):
        phase = past[bisect_right([phase.start for phase in past], place) - 1]
        yield place, until, phase, data_at(plan, place)


def continued(before: Sequence[DataPhase], plan: DataPlan, now: int = 0) -> tuple[DataPhase, ...]:
    """Return the phases of a run that has read its checkpoint's ``before`` and follows a plan from sample ``now``."""
    phases = [phase for phase in before if phase.start < now or not phase.planned]
    if before and is_continued(before, plan, now):
        last = phases[-1]
        phases[-1] = replace(last, data=data_at(plan, max(now - 1, last.start)))
    else:
        data = data_at(plan, now)
        phases.append(DataPhase(now, _lanes(phases, data), data))
    for start, data in plan:
        if start > phases[-1].start and start >= now:
            phases.append(DataPhase(start, _lanes(phases, data), data, planned=True))
    return tuple(phases)


def _lanes(before: Sequence[DataPhase], data: DataFacts) -> tuple[str, ...]:
    """Return the lanes of data after other phases: a source continues on the lane that it had last, in its order."""
    lanes: list[str] = [""] * len(data.sources)
    known = set[int]()
    for phase in reversed(before):
        if {difference.field for difference in phase.data.differences(data)}.isdisjoint(_OF_ORDER):
            for number, pair in enumerate(phase.data.matched(data)):
                taken = {lanes[other] for other in known}
                if pair is not None and number not in known and phase.lanes[pair] not in taken:
                    lanes[number] = phase.lanes[pair]
                    known.add(number)
    used = {lane for phase in before for lane in phase.lanes}
    for number, source in enumerate(data.sources):
        if number in known:
            continue
        own = f"source/{source.name}/{data.seq_length}/" if source.named else f"{number}/"
        if not source.named and not before:
            own = first_lanes(data.weights)[number]
        elif own in used or not source.named:
            own = f"phase/{len(before)}/{own}"
        lanes[number] = own
    return tuple(lanes)


def sampling_phases(phases: Sequence[DataPhase], config: Config, now: int) -> tuple[Phases, int]:
    """Return phases for ``Corpus.in_phases``, and the number of the one that sample ``now`` is in."""
    running = bisect_right(phases, now, key=lambda phase: phase.start) - 1
    names = [item.name for item in blend_of(config.data.data_path)]
    made = []
    for number, phase in enumerate(phases):
        data, parts = phase.data, None
        if number >= running and data.sources[0].named:
            parts = tuple(names.index(source.name) for source in data.sources)
        length = data.seq_length if number >= running else None
        made.append(Phase(phase.start, data.weights, phase.lanes, parts, length))
    return tuple(made), running


def off_plan(config: Config, iteration: int, consumed_samples: int, where: str) -> list[Complaint]:
    """Return a complaint if a run with phases resumes between two steps of its plan. ``where`` begins the message."""
    if config.data.data_phases is None:
        return []
    planned = config.phases.after(iteration).first_sample
    if planned == consumed_samples:
        return []
    message = (
        f"{where} has consumed {consumed_samples:,} samples in {iteration:,} steps, and by --global-batch-size and "
        f"--data-phases it would be {planned:,}."
    )
    fix = "Pass the batch sizes of its steps: a phase may have another global-batch-size."
    return [Complaint("phases-position", message, fix)]


def positions(phases: Sequence[DataPhase], number: int) -> str:
    """Describe the position of each source at the beginning of phase ``number``."""
    made = [Phase(phase.start, phase.data.weights, phase.lanes) for phase in phases]
    now, texts = phases[number], []
    for source, lane in zip(now.data.sources, now.lanes, strict=True):
        taken = sum(phase.taken(lane, later.start - phase.start) for phase, later in pairwise(made[: number + 1]))
        elsewhere = any(source.name == one.name for phase in phases[:number] for one in phase.data.sources)
        begins = f"begins a new order at {now.data.seq_length:,} tokens" if source.named and elsewhere else ""
        texts.append(
            f"{source.name} {f'continues after {taken:,} samples' if taken else begins or 'begins at its start'}"
        )
    return f"{'planned' if now.planned else 'other'} data from sample {now.start:,} on: {', '.join(texts)}"
