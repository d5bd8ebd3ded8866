"""The phases of a run's data, as ``--data-phases`` writes them, and their places in steps, samples and positions.

    0: web=3,code=1; 10B tokens: web=1,math=2 seq-length=8192 global-batch-size=512 lr=1e-6:linear

``plan_phases`` converts once, before the run; the trainer, the plan, the learning rate and the log read its result.
Tokens are positions (samples times their length), whatever part of them is padding or predicted. A phase begins with
the first step that starts at or after its place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from typing import Any

from megapar.schema.batch_size import BatchSize

ITERATIONS, SAMPLES, TOKENS = UNITS = ("iterations", "samples", "tokens")
STYLES = ("linear", "cosine", "minus_sqrt", "constant")
SEQ_LENGTH, BATCH, RATE = SETTINGS = ("seq-length", "global-batch-size", "lr")
"""Settings of a phase besides its sources, which therefore cannot have these names."""
NAME = re.compile(r"[A-Za-z0-9_.-]+")
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,2})?)([kKMBT]?)")
_WEIGHT = re.compile(r"\+?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,2})?")
_POWERS = {"": 0, "k": 3, "K": 3, "M": 6, "B": 9, "T": 12}
_KEYS = ("at", "unit", "sources", *SETTINGS)


@dataclass(frozen=True)
class RateTarget:
    """The learning rate ``to`` at the end of a phase, reached from that at its beginning in a style of ``STYLES``."""

    to: float
    style: str = STYLES[0]

    def __str__(self) -> str:
        return f"{self.to:g}:{self.style}"


@dataclass(frozen=True)
class PlannedPhase:
    """A phase as it is written.

    Attributes:
        at: Its beginning, in ``unit``.
        weights: (name of a source, weight), in the order of names.
        seq_length: Positions of its samples; None for ``--seq-length``.
        batch: Its global batch size; None for ``--global-batch-size``.
        rate: None leaves the learning rate to ``--lr-decay-style``.
    """

    at: int
    unit: str
    weights: tuple[tuple[str, Fraction], ...]
    seq_length: int | None = None
    batch: int | None = None
    rate: RateTarget | None = None

    @property
    def place(self) -> str:
        """The place of its beginning, in words."""
        return f"{self.at:,} {self.unit}" if self.at else "the start"


def amount(text: str) -> int:
    """Return the whole number that a text such as ``300``, ``1.5k`` or ``10B`` is. Raises ValueError for others."""
    match = _AMOUNT.fullmatch(text)
    number = Fraction(match[1]) * 10 ** _POWERS[match[2]] if match else Fraction(1, 2)
    if number.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number, which may end in k, M, B or T")
    return int(number)


def phases_text(value: Any) -> str:
    """Return the text of phases that are a text or, from YAML, a list of mappings. Raises ValueError with the place."""
    if isinstance(value, (list, tuple)):
        value = "; ".join(_written(phase, number) for number, phase in enumerate(value, 1))
    text = " ".join(str(value).split())
    parse_phases(text)
    return text


def _written(phase: Any, number: int) -> str:
    if not isinstance(phase, Mapping):
        raise ValueError(f"phase {number} is not a mapping with the keys {', '.join(_KEYS)}")
    given = {str(key).replace("_", "-"): value for key, value in phase.items()}
    if strange := [key for key in given if key not in _KEYS]:
        raise ValueError(f"phase {number} has the unknown key {strange[0]}; there are {', '.join(_KEYS)}")
    sources, rate = given.get("sources"), given.get(RATE)
    if not isinstance(sources, Mapping):
        raise ValueError(f"phase {number} needs sources, which map names to weights")
    if isinstance(rate, Mapping):
        if not set(rate) <= {"to", "style"}:
            raise ValueError(f"the lr of phase {number} has the keys to and style")
        rate = ":".join(str(rate[key]) for key in ("to", "style") if key in rate)
    place = f"{given.get('at', '')} {given.get('unit', '')}".strip()
    settings = {SEQ_LENGTH: given.get(SEQ_LENGTH), BATCH: given.get(BATCH), RATE: rate}
    words = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return " ".join([f"{place}:", ",".join(f"{name}={weight}" for name, weight in sources.items()), *words])


def parse_phases(text: str) -> tuple[PlannedPhase, ...]:
    """Return the phases that a text writes. Raises ValueError with the part that is not of the form."""
    phases = tuple(_phase(part.strip()) for part in text.strip().rstrip(";").split(";"))
    if phases[0].at:
        raise ValueError(f"the first phase begins at 0, not {phases[0].place}")
    for before, phase in pairwise(phases):
        if phase.at == 0 or (phase.unit == before.unit and phase.at <= before.at):
            raise ValueError(f"the phase at {phase.place} does not begin after the one before it")
    return phases


def _phase(text: str) -> PlannedPhase:
    place, colon, rest = text.partition(":")
    at, *unit = place.split() or [""]
    if not colon or (unit and unit not in ([word] for word in UNITS)) or (not unit and at != "0"):
        places = f"0: or 10B tokens: ({', '.join(UNITS)}; a step is an iteration)"
        raise ValueError(f"{text!r} does not begin with a place such as {places}")
    weights: dict[str, Fraction] = {}
    settings: dict[str, str] = {}
    for word in rest.split():
        for item in [word] if word.startswith(tuple(f"{name}=" for name in SETTINGS)) else word.split(","):
            name, _, value = item.partition("=")
            if name in weights or name in settings:
                raise ValueError(f"{text!r} has {name} twice")
            if name in SETTINGS:
                settings[name] = value
            elif NAME.fullmatch(name) and _WEIGHT.fullmatch(value) and Fraction(value) > 0:
                weights[name] = Fraction(value)
            else:
                raise ValueError(f"{item!r} is neither NAME=WEIGHT, a weight above 0, nor one of {', '.join(SETTINGS)}")
    if not weights:
        raise ValueError(f"{text!r} has no source")
    length, batch = (_size(name, settings.get(name)) for name in (SEQ_LENGTH, BATCH))
    target = _rate(settings[RATE]) if RATE in settings else None
    of_sources = tuple(sorted(weights.items()))
    return PlannedPhase(amount(at), unit[0] if unit else ITERATIONS, of_sources, length, batch, target)


def _size(name: str, text: str | None) -> int | None:
    if text is not None and not (size := amount(text)):
        raise ValueError(f"{name} must be at least 1")
    return None if text is None else size


def _rate(text: str) -> RateTarget:
    to, colon, style = text.partition(":")
    try:
        rate = RateTarget(float(to), style if colon else STYLES[0])
    except ValueError:
        rate = RateTarget(-1.0)
    if not rate.to >= 0 or not isfinite(rate.to) or rate.style not in STYLES:
        raise ValueError(f"lr={text} is not lr=RATE or lr=RATE:STYLE with a STYLE of {', '.join(STYLES)}")
    return rate


@dataclass(frozen=True)
class PhaseSpan:
    """A phase in a run.

    Attributes:
        first_step: Steps before it.
        first_sample: Samples consumed before it.
        first_position: Positions read before it.
        batch: Its global batch size.
        weights: As those of ``PlannedPhase``; () in a run without phases.
    """

    first_step: int
    first_sample: int
    first_position: int
    seq_length: int
    batch: BatchSize
    weights: tuple[tuple[str, Fraction], ...] = ()
    rate: RateTarget | None = None

    def after(self, steps: int) -> PhaseSpan:
        """Return this phase as if it began ``steps`` of its steps later."""
        sample = self.batch.after(self.first_sample, steps)
        position = self.first_position + (sample - self.first_sample) * self.seq_length
        return replace(self, first_step=self.first_step + steps, first_sample=sample, first_position=position)

    def steps_before(self, phase: PlannedPhase) -> int:
        """Return the steps of this phase until the next one begins."""
        if phase.unit == ITERATIONS:
            return max(0, phase.at - self.first_step)
        target = phase.at
        if phase.unit == TOKENS:
            target = self.first_sample - (self.first_position - phase.at) // self.seq_length
        return self.batch.steps_until(self.first_sample, target)


@dataclass(frozen=True)
class PhasePlan:
    """All phases of a run in order; a run without phases is one."""

    spans: tuple[PhaseSpan, ...]

    def at(self, consumed_samples: int) -> PhaseSpan:
        """Return the phase of the step that starts after ``consumed_samples``."""
        return self.spans[bisect_right([span.first_sample for span in self.spans], consumed_samples) - 1]

    def of_step(self, steps: int) -> PhaseSpan:
        """Return the phase of the step after ``steps`` steps."""
        return self.spans[bisect_right([span.first_step for span in self.spans], steps) - 1]

    def after(self, steps: int) -> PhaseSpan:
        """Return the phase of the step after ``steps`` steps, as if it began there."""
        span = self.of_step(steps)
        return span.after(steps - span.first_step)

    def until(self, steps: int) -> Iterator[tuple[PhaseSpan, PhaseSpan]]:
        """Yield each phase of the first ``steps`` steps, and its end."""
        for number, span in enumerate(self.spans):
            if span.first_step < steps or not number:
                later = self.spans[number + 1].first_step if number + 1 < len(self.spans) else steps
                yield span, span.after(max(0, min(steps, later) - span.first_step))


def plan_phases(phases: Sequence[PlannedPhase], seq_length: int, batch: BatchSize) -> PhasePlan:
    """Return the places of phases; with none, those of a run that is one phase.

    Raises ValueError for a phase without a step, and for a ramp of the batch that continues beyond the first phase.

    Args:
        seq_length: Positions of the samples of phases that do not say so.
        batch: Global batch size of phases that do not say so; its ramp is that of the first phase.
    """
    first = phases[0] if phases else PlannedPhase(0, ITERATIONS, ())
    if batch.ramp_samples and first.batch not in (None, batch.final):
        raise ValueError(
            "the ramp of the batch size ends at --global-batch-size, so the first phase cannot have another"
        )
    own_batch = batch if first.batch is None else replace(batch, final=first.batch)
    spans = [PhaseSpan(0, 0, 0, first.seq_length or seq_length, own_batch, first.weights, first.rate)]
    for phase in phases[1:]:
        last = spans[-1]
        steps = last.steps_before(phase)
        if not steps:
            raise ValueError(f"no step is left before the phase at {phase.place}")
        end = last.after(steps)
        if end.first_sample < batch.ramp_samples:
            raise ValueError(f"the phase at {phase.place} begins inside the ramp of the batch size")
        length, own = phase.seq_length or seq_length, BatchSize(phase.batch or batch.final)
        spans.append(replace(end, weights=phase.weights, rate=phase.rate, seq_length=length, batch=own))
    return PhasePlan(tuple(spans))
